"""jax.export to bytes, read back by another process."""

import os
import pathlib
import subprocess
import sys

import numpy as np
import operands
import pytest
import reference
from compare import assert_exact
from platforms import Cpu, Gpu

import jax_gg
from jax_gg import _jax_gg

pytest.importorskip("flatbuffers", reason="jax.export serialises with it")

M, K, N, G = 20, 8, 16, 3
SIZES = np.array([5, 0, 9], np.int32)

EXPORT = """
import sys, jax, jax.numpy as jnp, jax_gg

platform, function, path, m, k, n, g = *sys.argv[1:4], *map(int, sys.argv[4:])
shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((m, k), (g, k, n))]
if function == "gmm":
    f = jax_gg.gmm
else:
    jax_gg.accelerate_ragged_dot([platform])
    f = jax.lax.ragged_dot
assert jax.default_backend() == "cpu"
exported = jax.export.export(jax.jit(f), platforms=[platform], disabled_checks=jax_gg.export_checks)(
    *shapes, jax.ShapeDtypeStruct((g,), jnp.int32)
)
with open(path, "wb") as file:
    file.write(exported.serialize(vjp_order=1))
"""

CALL = """
import sys, jax, numpy as np
if "import" in sys.argv[2:]:
    import jax_gg

with open(sys.argv[1] + "/exported", "rb") as file:
    exported = jax.export.deserialize(file.read())
given = np.load(sys.argv[1] + "/operands.npz")
out, vjp = jax.vjp(lambda *x: exported.call(*x, given["sizes"]), given["lhs"], given["rhs"])
np.savez(sys.argv[1] + "/results.npz", *(out, *vjp(given["dout"])))
"""

READ = """
import sys, jax

with open(sys.argv[1], "rb") as file:
    exported = jax.export.deserialize(file.read())
print(*exported.platforms, exported.mlir_module().count("@jax_gg_gmm("), exported.vjp().mlir_module().count("@jax_gg_"))
"""


def run(program: str, *args, platform: str = "cpu") -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": platform, "XLA_FLAGS": ""}
    command = [sys.executable, "-P", "-c", program, *map(str, args)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def export(platform: str, function: str, path: pathlib.Path) -> None:
    """In a process that has no GPU, to a file."""
    done = run(EXPORT, platform, function, path, M, K, N, G)
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=["gmm", "ragged_dot"])
def function(request):
    return request.param


class Export:
    def test_called_by_another_process(self, rng, tmp_path, function):
        lhs, rhs, dout = (operands.integers(rng, s) for s in ((M, K), (G, K, N), (M, N)))
        np.savez(tmp_path / "operands.npz", lhs=lhs, rhs=rhs, dout=dout, sizes=SIZES)
        platform = "cuda" if self.platform == "gpu" else "cpu"
        export(platform, function, tmp_path / "exported")
        done = run(CALL, tmp_path, "import", platform=platform)
        assert done.returncode == 0, done.stderr
        out, dlhs, drhs = np.load(tmp_path / "results.npz").values()
        assert_exact(out, reference.gmm(lhs, rhs, SIZES))
        for got, want in zip((dlhs, drhs), reference.gmm_gradients(lhs, rhs, SIZES, dout), strict=True):
            assert_exact(got, want)


class TestExportCpu(Cpu, Export):
    def test_to_cuda(self, tmp_path, function):
        """From a machine without a GPU, and read by one that has not even jax_gg: nothing is lost."""
        export("cuda", function, tmp_path / "exported")
        done = run(READ, tmp_path / "exported")
        assert done.stdout.split() == ["cuda", "1", "2"], done.stdout + done.stderr

    def test_needs_jax_gg_where_it_is_called(self, rng, tmp_path):
        lhs, rhs, dout = (operands.integers(rng, s) for s in ((M, K), (G, K, N), (M, N)))
        np.savez(tmp_path / "operands.npz", lhs=lhs, rhs=rhs, dout=dout, sizes=SIZES)
        export("cpu", "gmm", tmp_path / "exported")
        done = run(CALL, tmp_path)
        assert done.returncode != 0
        assert "jax_gg_gmm" in done.stderr


class TestExportGpu(Gpu, Export):
    pass


def test_checks_name_every_kernel():
    names = {name for targets in _jax_gg.registrations().values() for name in targets}
    assert {"jax_gg_gmm", "jax_gg_tgmm"} <= names
    assert {check.is_custom_call() for check in jax_gg.export_checks} == names
