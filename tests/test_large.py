"""Operands and results of more than 2^31 elements, where 32-bit offsets wrap.

In float16 one is more than 4 GiB. Memory that is never touched costs nothing, so that on the CPU the operands are views
of fresh pages, of which only the rows and matrices used are written; only a large result is written in full.
"""

import mmap
import os

import jax
import jax.numpy as jnp
import numpy as np
import operands
import pytest
import reference
from compare import assert_exact
from platforms import Cpu, Gpu

import jax_gg

pytestmark = pytest.mark.xdist_group("large")  # one at a time

K = N = 1024
G = 2**11 + 2  # matrices of 2^20 elements: the last two begin at and past element 2^31
M = 2**21 + 8  # rows of 2^10 elements: the last eight begin at and past element 2^31


def available_memory() -> int:
    try:
        with open("/proc/meminfo") as f:
            return next(int(line.split()[1]) << 10 for line in f if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def need(gib: float) -> None:
    if available_memory() < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of memory, {available_memory() / 2**30:.1f} are available")


def untouched(*shape) -> np.ndarray:
    """Zeros in float16, whose pages come into being when they are written."""
    count = int(np.prod(shape))
    assert count > 2**31
    return np.frombuffer(mmap.mmap(-1, 2 * count), np.float16).reshape(shape)


def on_device(x: np.ndarray, device) -> jax.Array:
    """Without a copy where the device is the CPU, which reads the same pages."""
    x = jnp.from_dlpack(x)
    return jax.device_put(x, device)


class Large:
    @pytest.mark.parametrize("transpose_rhs", [False, True])
    def test_rhs(self, rng, device, transpose_rhs):
        need(2)
        rhs = untouched(G, K, N)
        sizes = np.zeros(G, np.int32)
        sizes[[0, -2, -1]] = 2, 1, 3
        rhs[[0, -2, -1]] = operands.integers(rng, (3, K, N), np.float16)
        lhs = operands.integers(rng, (7, K), np.float16)
        gmm = jax.jit(jax_gg.gmm, static_argnames=("transpose_rhs", "preferred_element_type"))
        got = gmm(lhs, on_device(rhs, device), sizes, transpose_rhs=transpose_rhs, preferred_element_type=np.float32)
        assert_exact(got, reference.gmm(lhs, rhs[[0, -2, -1]], [2, 1, 3], transpose_rhs=transpose_rhs))

    def test_lhs(self, rng, device):
        """The first group, of 2^21 rows, is another device's."""
        need(2)
        lhs = untouched(M, K)
        lhs[-8:] = operands.integers(rng, (8, K), np.float16)
        rhs = operands.integers(rng, (2, K, 8), np.float16)
        dout = np.full((M, 8), np.nan, np.float16)
        dout[-8:] = operands.integers(rng, (8, 8), np.float16)
        sizes = np.array([M - 8, 5, 2], np.int32)

        @jax.jit
        def f(lhs, rhs, sizes, dout):
            out = jax_gg.gmm(lhs, rhs, sizes, group_offset=1, preferred_element_type=np.float32)
            tall = jax_gg.tgmm(lhs, dout, sizes, group_offset=1, num_groups=2, preferred_element_type=np.float32)
            return out[-8:], jnp.abs(out[:-8]).max(), tall

        out, others, tall = f(on_device(lhs, device), rhs, sizes, dout)
        assert_exact(out, reference.gmm(lhs[-8:], rhs, [5, 2]))
        assert others == 0
        assert_exact(tall, reference.tgmm(lhs[-8:], dout[-8:], [5, 2]))

    def test_result_of_tgmm(self, rng):
        need(7)
        lhs, rhs = operands.integers(rng, (7, K), np.float16), operands.integers(rng, (7, N), np.float16)
        sizes = np.zeros(G, np.int32)
        sizes[[0, -2, -1]] = 2, 1, 3
        out = jax.jit(jax_gg.tgmm)(lhs, rhs, sizes)
        some = np.array([0, 1, G - 3, G - 2, G - 1])
        assert_exact(out[some], reference.tgmm(lhs, rhs, sizes[some]))

    def test_result_of_gmm(self, rng):
        """Of which only the last rows are not zero."""
        need(7)
        lhs, rhs = np.full((M, 4), np.nan, np.float16), operands.integers(rng, (1, 4, N), np.float16)
        lhs[-8:] = operands.integers(rng, (8, 4), np.float16)
        out = jax.jit(jax_gg.gmm)(lhs, rhs, np.array([M - 8, 7], np.int32), group_offset=1)
        assert_exact(out[-8:], reference.gmm(lhs[-8:], rhs, [7]))
        assert not out[2**21 - 8 : -8].any()


class TestLargeCpu(Cpu, Large):
    pass


class TestLargeGpu(Gpu, Large):
    pass
