"""`python -m jax_gg`: its report, and that it tells a right kernel from a wrong one."""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gg
from jax_gg import __main__, _selfcheck


def run(**environment):
    """The finished process; in a folder without a `jax_gg`, so that the installed one runs."""
    command = [sys.executable, "-P", "-m", "jax_gg"]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)


def test_report():
    done = run(JAX_PLATFORMS="cpu", XLA_FLAGS="")
    assert done.returncode == 0, done.stdout + done.stderr
    fields = dict(line.split(maxsplit=1) for line in done.stdout.split("\n\n")[0].splitlines())
    assert fields["jax-gg"] == jax_gg.__version__
    assert fields["jax"] == jax.__version__
    assert fields["numpy"] == np.__version__
    assert {"jaxlib", "scipy", "Python", "OS"} <= set(fields)
    assert re.match(r"CPU, (no CUDA|CUDA \(.+\))$", fields["kernels"])
    assert fields["devices"] == "1 x cpu (cpu)"
    lines = re.findall(r"^  (\w+) +(\w+) +(\S+)  allowed (\S+)  ok$", done.stdout, re.MULTILINE)
    assert [line[:2] for line in lines] == [(d, r) for d in ("float32", "bfloat16") for r in ("out", "dlhs", "drhs")]
    assert all(0 < float(error) <= float(allowed) for *_, error, allowed in lines)
    assert done.stdout.endswith("self-check: passed\n")


@pytest.mark.parametrize("platform", ["nonexistent", "cuda"])
def test_no_devices(platform):
    done = run(JAX_PLATFORMS=platform, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert re.search(r"^devices +none: \w+Error", done.stdout, re.MULTILINE)
    assert "self-check: FAILED" in done.stdout


def test_importing_touches_no_device():
    """Whoever imports jax_gg may still configure JAX."""
    code = "import jax_gg, jax_gg.__main__, jax; jax.config.update('jax_platforms', 'cpu'); print(jax.devices()[0])"
    command = [sys.executable, "-P", "-c", code]
    environment = os.environ | {"JAX_PLATFORMS": "nonexistent"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def with_wrong(wrong):
    """`gmm`, its results replaced by `wrong(name, result)`."""

    def gmm(lhs, rhs, group_sizes, **kwargs):
        @jax.custom_vjp
        def f(lhs, rhs):
            return wrong("out", jax_gg.gmm(lhs, rhs, group_sizes, **kwargs))

        def forward(lhs, rhs):
            return f(lhs, rhs), (lhs, rhs)

        def backward(residuals, dout):
            vjp = jax.vjp(lambda *x: jax_gg.gmm(*x, group_sizes, **kwargs), *residuals)[1]
            return tuple(wrong(name, x) for name, x in zip(("dlhs", "drhs"), vjp(dout), strict=True))

        f.defvjp(forward, backward)
        return f(lhs, rhs)

    return gmm


def test_right_kernel(monkeypatch, capsys):
    """The wrapper that makes kernels wrong does not by itself."""
    monkeypatch.setattr(_selfcheck, "gmm", with_wrong(lambda name, x: x))
    assert __main__.main() == 0
    assert capsys.readouterr().out.count(" ok\n") == 6


@pytest.mark.parametrize("result", ["out", "dlhs", "drhs"])
@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda x: (x.astype(jnp.float32) * 1.01).astype(x.dtype), "FAILED"),
        (lambda x: x.at[1 if x.ndim == 3 else -1].set(1e-6), "FAILED: not zero past the sum or in an empty group"),
        (lambda x: x.at[1 if x.ndim == 3 else -1].set(np.nan), "FAILED: not zero past the sum or in an empty group"),
        (lambda x: x.at[0].set(np.nan), "FAILED"),
        (lambda x: x.at[..., -1].set(0), "FAILED"),
    ],
)
def test_wrong_kernel(monkeypatch, capsys, result, change, verdict):
    monkeypatch.setattr(_selfcheck, "gmm", with_wrong(lambda name, x: change(x) if name == result else x))
    assert __main__.main() == 1
    out = capsys.readouterr().out
    for dtype in ("float32", "bfloat16"):
        assert re.search(rf"^  {dtype} +{result} .* {verdict}$", out, re.MULTILINE), out
    assert out.count(" ok\n") == 4
    assert out.endswith("self-check: FAILED\n")


def test_kernel_that_raises(monkeypatch, capsys):
    def gmm(*args, **kwargs):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(_selfcheck, "gmm", gmm)
    assert __main__.main() == 1
    assert capsys.readouterr().out.endswith("self-check: FAILED with RuntimeError: no kernel for this\n")
