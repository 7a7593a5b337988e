"""The same inputs give the same bits: call after call, at other addresses, and from several threads at once."""

import threading

import jax
import numpy as np
import operands
import problems
import pytest
from platforms import Cpu, Gpu

import jax_gg

PROBLEMS = (
    problems.Problem("small-groups", 300, 64, 48, (3,) * 60),
    problems.Problem("large-groups", 600, 300, 260, (250, 0, 180, 150)),
    problems.Problem("both", 500, 200, 130, (1, 400, 2, 3, 50)),
)


@jax.jit
def three(lhs, rhs, sizes, dout):
    out, vjp = jax.vjp(lambda *x: jax_gg.gmm(*x, sizes), lhs, rhs)
    return out, *vjp(dout)


def bits(arrays) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in arrays]


class Determinism:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("problem", PROBLEMS, ids=str)
    def test_same_bits(self, rng, problem, dtype):
        o = operands.make(rng, problem, dtype)
        args = o.lhs, o.rhs, o.sizes, o.dout
        want = bits(three(*args))
        kept = []
        for _ in range(10):
            kept.append(three(*map(jax.numpy.array, args)))
            assert bits(kept[-1]) == want

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_threads(self, rng, device, dtype):
        """More callers than cores, all of whose calls ask one thread pool for help."""
        args = []
        for problem in PROBLEMS:
            o = operands.make(rng, problem, dtype)
            args.append(jax.device_put((o.lhs, o.rhs, o.sizes, o.dout), device))
        want = [bits(three(*x)) for x in args]
        failures = []

        def work(first):
            for i in range(first, first + 9):
                try:
                    if bits(three(*args[i % 3])) != want[i % 3]:
                        failures.append(f"problem {i % 3} differs")
                except Exception as e:
                    failures.append(repr(e))

        threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(120)
        assert not any(t.is_alive() for t in threads), "deadlock"
        assert not failures


class TestDeterminismCpu(Cpu, Determinism):
    def test_devices_at_once(self, rng):
        """One program for eight devices: eight calls that share a pool."""
        o = operands.make(rng, PROBLEMS[0], "float32")
        want = bits(three(o.lhs, o.rhs, o.sizes, o.dout))
        devices = jax.devices("cpu")
        assert len(devices) == 8
        args = [jax.device_put((o.lhs, o.rhs, o.sizes, o.dout), d) for d in devices]
        for _ in range(5):
            for got in [three(*x) for x in args]:  # all started before the first is read
                assert bits(got) == want


class TestDeterminismGpu(Gpu, Determinism):
    pass
