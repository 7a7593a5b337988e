"""The example: what it prints and draws, an interrupted run, its errors, and its expert layer by itself."""

import importlib.util
import pathlib
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from compare import assert_near
from flax import nnx

PATH = pathlib.Path(__file__).parents[1] / "examples" / "train_moe.py"
STEPS = 12
ARGUMENTS = ("--steps", str(STEPS), "--experts", "4", "--seed", "3")
DEADLINE = 300


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts the example in a folder of its own."""
    folder = tmp_path_factory.mktemp("example")
    environment = {
        "HOME": str(folder),
        "JAX_PLATFORMS": "cpu",
        # But what its libraries use of JAX that it has deprecated is theirs to change.
        "PYTHONWARNINGS": "error,ignore::DeprecationWarning,error::DeprecationWarning:__main__",
        # The runs compile the same programs.
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # Where others use the cores, BLAS's threads mostly wait for each other.
        "OPENBLAS_NUM_THREADS": "1",
    }

    def start(*args) -> subprocess.Popen:
        pipe = subprocess.PIPE
        command = [sys.executable, PATH, *args]
        return subprocess.Popen(command, cwd=folder, env=environment, text=True, stdout=pipe, stderr=pipe)

    start.folder = folder
    return start


def finish(process) -> tuple[str, str]:
    out, err = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, err
    return out, err


@pytest.fixture(scope="module")
def example():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("train_moe", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def error_of(example, capsys, *args) -> str:
    """The one line that a run which cannot start prints."""
    with pytest.raises(SystemExit, match="2"):
        example.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    assert not out
    (line,) = err.splitlines()
    assert line.startswith("train_moe: error: ")
    return line


def results(out: str) -> str:
    """What depends on the training: the table of losses, and the sample."""
    return out[out.index("held-out loss") : out.index("curves:")]


@pytest.fixture(scope="module")
def whole(start):
    """The outputs of an uninterrupted run."""
    return finish(start(*ARGUMENTS, "--out", "whole"))


def test_whole_run(start, whole):
    out, err = whole
    table = re.findall(r"^  (\w+(?: \w+)?) +(\d\.\d+)$", out, re.MULTILINE)
    losses = {name: float(bits) for name, bits in table}
    assert list(losses) == ["unigram", "bigram", "this model"]
    assert 2 < losses["bigram"] < losses["unigram"] < 6
    assert losses["this model"] < 6  # 8 before the first step
    shown = [float(bits) for bits in re.findall(r"loss ([\d.]+) bits/byte", err)]
    assert shown[-1] < shown[0] - 2
    assert re.search(rf"{STEPS}/{STEPS} \[.*, [\d,]+ tokens/s\]", err)
    assert "\ndef " in out
    assert (start.folder / "whole" / "train_moe.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.fixture(scope="module")
def stopped(start):
    """The errors of a run that was interrupted once it had a checkpoint, and the steps of its checkpoints."""
    process = start(*ARGUMENTS, "--out", "stopped")
    checkpoints = start.folder / "stopped" / "checkpoints"

    def steps():
        return sorted(int(p.name) for p in checkpoints.glob("*") if p.name.isdecimal())

    deadline = time.monotonic() + DEADLINE
    while not steps():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE)
    assert process.returncode
    assert max(steps()) < STEPS, "it ended before the signal came"
    return err, steps()


def test_interrupt_says_how_to_resume(stopped):
    err, steps = stopped
    assert "Traceback" not in err
    assert f"to continue from step {steps[-1]}: python {PATH} --resume --out stopped --matmul gmm" in err


def test_stopped_run_is_not_overwritten(start, stopped, example, capsys):
    got = error_of(example, capsys, "--out", start.folder / "stopped")
    assert "holds a run stopped at step" in got
    assert "--resume" in got


# After the tests of the interrupted run, which ends here.
def test_resume(start, whole, stopped):
    """The same as without the interruption, to the last digit."""
    out, err = finish(start("--resume", "--out", "stopped"))
    assert results(out) == results(whole[0])
    assert not re.search(rf" 0/{STEPS}", err), "it started anew"


@pytest.mark.parametrize(("name", "ours", "other"), [("experts", 4, 8), ("seed", 3, 0), ("steps", STEPS, STEPS + 1)])
def test_resume_with_other(start, whole, example, capsys, name, ours, other):
    folder = start.folder / "whole"
    got = error_of(example, capsys, "--resume", "--out", folder, f"--{name}", other)
    assert got == f"train_moe: error: --resume: got --{name} {other}, but the run in {folder} has --{name} {ours}"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--steps", "0"), "--steps: got 0, expected"),
        (("--experts", "0"), "--experts: got 0, expected"),
        (("--seed", "-1"), "--seed: got -1, expected"),
        (("--steps", "many"), "--steps: got many, expected"),
        (("--matmul", "dense"), "--matmul: invalid choice: 'dense'"),
        (("--out", PATH), f"--out: [Errno 17] File exists: '{PATH}'"),
        (("--resume",), "--resume: no checkpoint in"),
    ],
    ids=lambda x: "-".join(map(str, x[:2])).strip("-") if isinstance(x, tuple) else "",
)
def test_errors(example, capsys, tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    assert message in error_of(example, capsys, *args)


def dense_experts(layer, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Every expert applied to every row, in float64."""
    router, w_in, w_out = (reference.f64(p[...]) for p in (layer.router.kernel, layer.w_in, layer.w_out))
    probabilities = np.exp(x @ router)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    ranks = np.argsort(np.argsort(-probabilities, axis=1), axis=1)
    chosen = ranks < layer.top_k
    weights = np.where(chosen, probabilities, 0)
    weights /= weights.sum(axis=1, keepdims=True)
    out = np.zeros_like(x)
    for e in range(len(w_in)):
        gate, up = np.split(x @ w_in[e], 2, axis=1)
        out += weights[:, e : e + 1] * ((gate / (1 + np.exp(-gate)) * up) @ w_out[e])
    load = chosen.mean(axis=0) / layer.top_k
    return out, load, len(w_in) * np.sum(load * probabilities.mean(axis=0))


@pytest.mark.parametrize("matmul", ["gmm", "ragged_dot"])
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (5, 3), (1, 2), (64, 1)])
def test_experts(example, rng, experts, top_k, matmul):
    config = example.Config(experts=experts, top_k=top_k, dim=16, hidden=24)
    layer = example.Experts(config, example.MATMULS[matmul], nnx.Rngs(0))
    # Far from even, so that with 64 experts some have no rows.
    layer.router.kernel[...] = jnp.asarray(rng.normal(size=(16, experts)), jnp.float32)
    x = rng.normal(size=(50, 16)).astype(np.float32)
    got = nnx.jit(lambda layer, x: layer(x))(layer, x)
    for a, b in zip(got, dense_experts(layer, reference.f64(x)), strict=True):
        assert_near(a, b)


def test_future_is_hidden(example, rng):
    """Otherwise the losses mean nothing."""
    config = example.Config(layers=2, dim=16, heads=2, hidden=8, context=12)
    model = example.Transformer(config, example.MATMULS["gmm"])
    logits = nnx.jit(lambda model, text: model(text)[0])
    text = rng.integers(0, 256, (1, 12), np.int32)
    other = text.copy()
    other[0, 7:] ^= 1
    a, b = (np.asarray(logits(model, x)) for x in (text, other))
    assert_near(a[:, :7], b[:, :7])
    assert np.abs(a[:, 7] - b[:, 7]).max() > 1e-3


def test_text_is_split_by_file(example):
    train, held_out = (x.tobytes() for x in example.read_text())
    assert train != held_out
    lines = [line for line in held_out.split(b"\n") if len(line) > 60]
    shared = [line for line in lines if line in train]
    assert len(shared) < len(lines) / 10


def test_ngram_bits(example, rng):
    """A text of two bytes that alternate: one bit a byte without the byte before, nothing with it."""
    text = np.tile(np.array([97, 98], np.uint8), 50_000)
    unigram, bigram = example.ngram_bits(text, text[:1001])
    np.testing.assert_allclose([unigram, bigram], [1, 0], atol=0.01)


def test_default_matmul_is_gmm(example):
    """Forward and backward, in a program that JAX's own grouped matmul appears nowhere in."""
    config = example.Config(experts=4, layers=1, dim=16, heads=2, hidden=8, context=8, batch=2)
    run = example.Run(config, example.MATMULS[example.make_parser().parse_args([]).matmul])
    graph, params = nnx.split(run.model)
    windows = jnp.zeros((2, 9), jnp.uint8)
    text = str(jax.make_jaxpr(jax.grad(lambda p: example._bits(nnx.merge(graph, p), windows)[0]))(params))
    assert "ragged_dot" not in text
    assert "jax_gg" in text
