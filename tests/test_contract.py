"""What the package promises, on every backend, for the result and both gradients, jitted and eager."""

import jax
import jax.numpy as jnp
import numpy as np
import operands
import problems
import pytest
import reference
from compare import check_gmm, check_tgmm
from platforms import Cpu, Gpu

import jax_gg

f16, bf16, f32, f64 = jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64
dtypes = pytest.mark.parametrize("dtype", [f32, bf16], ids=["f32", "bf16"])
MIXED = problems.Problem("mixed", 90, 24, 40, (7, 0, 33, -2, 1, 20, 12))


def named(cases):
    return pytest.mark.parametrize("problem", cases, ids=str)


class Contract:
    @dtypes
    @named(problems.AWKWARD)
    def test_awkward(self, rng, problem, dtype):
        operands.check_all(operands.make(rng, problem, dtype))

    @dtypes
    @named([p for p in problems.AWKWARD if not p.name.startswith("empty")])
    def test_awkward_with_transposed_weights(self, rng, problem, dtype):
        operands.check_all(operands.make(rng, problem, dtype, transpose_rhs=True))

    @dtypes
    @named(problems.ODD_SHAPES)
    def test_odd_shapes(self, rng, problem, dtype):
        for transpose_rhs in (False, True):
            operands.check_all(operands.make(rng, problem, dtype, transpose_rhs=transpose_rhs))

    @named([MIXED, *problems.ODD_SHAPES[::7]])
    def test_f16(self, rng, problem):
        for transpose_rhs in (False, True):
            operands.check_all(operands.make(rng, problem, f16, transpose_rhs=transpose_rhs))

    @pytest.mark.parametrize("out_dtype", [f16, bf16, f32])
    @pytest.mark.parametrize("dtype", [f16, bf16, f32])
    def test_preferred_element_type(self, rng, dtype, out_dtype):
        for transpose_rhs in (False, True):
            operands.check_all(operands.make(rng, MIXED, dtype, transpose_rhs=transpose_rhs, out_dtype=out_dtype))

    @pytest.mark.parametrize("precision", list(jax.lax.Precision))
    def test_precision(self, rng, precision):
        operands.check_all(operands.make(rng, MIXED, f32), precision=precision)

    def test_one_rounding(self, rng):
        """A sum that bf16 accumulation, or a second rounding, gets wrong."""
        k = 4096
        lhs, rhs = np.ones((2, k), bf16), np.ones((1, k, 3), bf16)
        out = jax_gg.gmm(lhs, rhs, [2], preferred_element_type=f32)
        np.testing.assert_array_equal(np.asarray(out), k)
        # 1 + 2^-8 + 2^-20 lies just above a tie of bf16: rounded to f16 first, it would be on it, and fall to 1.
        lhs, rhs = np.ones((1, 3), bf16), np.array([1, 2**-8, 2**-20], bf16).reshape(1, 3, 1)
        assert float(jax_gg.gmm(lhs, rhs, [1])[0, 0]) == 1 + 2**-7

    @dtypes
    @pytest.mark.parametrize("offset", [0, 1, 3, 6, 7, -1, -2, problems.INT32_MAX, problems.INT32_MIN])
    def test_group_offset(self, rng, dtype, offset):
        for transpose_rhs, num_groups in ((False, 2), (True, 2), (False, 7), (False, 9), (False, 0)):
            operands.check_all(
                operands.make(
                    rng, MIXED, dtype, transpose_rhs=transpose_rhs, group_offset=offset, num_groups=num_groups
                )
            )

    @dtypes
    def test_tgmm(self, rng, dtype):
        o = operands.make(rng, MIXED, dtype)
        for out_dtype in (dtype, f32):
            for offset, num_groups in ((None, None), (2, None), (-3, None), (1, 3), (None, 2), (None, 11), (0, 0)):
                operands.poison(((num_groups or MIXED.g, MIXED.k, MIXED.n), out_dtype))
                out = jax_gg.tgmm(
                    o.lhs,
                    o.dout,
                    o.sizes,
                    group_offset=offset,
                    num_groups=num_groups,
                    preferred_element_type=out_dtype,
                )
                assert out.dtype == out_dtype
                want = {"group_offset": offset or 0, "num_groups": num_groups}
                rows_of = reference.served(o.sizes, MIXED.m, MIXED.g if num_groups is None else num_groups, offset or 0)
                lhs, dout = (np.full_like(x, np.nan) for x in (o.lhs, o.dout))
                for _, r in rows_of:
                    lhs[r], dout[r] = o.lhs[r], o.dout[r]
                check_tgmm(out, lhs, dout, o.sizes, **want)

    @pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "uint8", "uint16", "uint32"])
    def test_size_dtypes(self, rng, dtype):
        """The sum, 300, does not fit int8, nor uint8."""
        problem = problems.Problem("", 310, 16, 24, (100, 0, 100, 100))
        o = operands.make(rng, problem, f32)
        for sizes in (np.array(problem.sizes, dtype), jnp.array(problem.sizes, dtype)):
            check_gmm(jax_gg.gmm(o.lhs, o.rhs, sizes), o.lhs, o.rhs, sizes)
            check_gmm(jax.jit(jax_gg.gmm)(o.lhs, o.rhs, sizes), o.lhs, o.rhs, sizes)
            check_tgmm(jax_gg.tgmm(o.lhs, o.dout, sizes), o.lhs, o.dout, sizes)

    @pytest.mark.parametrize("size", [2**31, 2**32 - 1, 2**32, 2**32 + 2, -(2**31) - 1, -(2**32), -(2**32) + 2])
    def test_sizes_that_int32_does_not_hold(self, rng, size):
        """Cut at m, or as good as 0; the low 32 bits alone would be small numbers, or of the other sign."""
        lhs, rhs = operands.normal(rng, (20, 16), f32), operands.normal(rng, (3, 16, 24), f32)
        sizes = [3, size, 4]
        want = jax_gg.gmm(lhs, rhs, [3, 20 if size > 0 else 0, 4])
        check_gmm(want, lhs, rhs, sizes)
        given = [sizes, np.array(sizes, np.int64)]
        if size >= 0:
            given.append(np.array(sizes, np.uint64))
        if 0 <= size < 2**32:
            given.append(jnp.array(sizes, jnp.uint32))
        for x in given:
            np.testing.assert_array_equal(np.asarray(jax_gg.gmm(lhs, rhs, x)), np.asarray(want))
        with jax.enable_x64(True):
            for x in given:
                np.testing.assert_array_equal(np.asarray(jax.jit(jax_gg.gmm)(lhs, rhs, jnp.asarray(x))), want)

    def test_sizes_as_a_list(self, rng):
        o = operands.make(rng, MIXED, f32)
        want = np.asarray(jax_gg.gmm(o.lhs, o.rhs, o.sizes))
        for sizes in (list(MIXED.sizes), MIXED.sizes):
            np.testing.assert_array_equal(np.asarray(jax_gg.gmm(o.lhs, o.rhs, sizes)), want)

    @pytest.mark.parametrize("huge", [2**63, 2**64, -(2**70)])
    def test_listed_sizes_beyond_64_bits(self, rng, huge):
        lhs, rhs = operands.normal(rng, (20, 6), f32), operands.normal(rng, (3, 6, 8), f32)
        check_gmm(jax_gg.gmm(lhs, rhs, [3, huge, 4]), lhs, rhs, [3, 20 if huge > 0 else 0, 4])

    @pytest.mark.parametrize("make", [int, np.int64, np.uint8, np.array, lambda x: np.array([x]), jnp.array, jnp.int8])
    def test_offset_types(self, rng, make):
        o = operands.make(rng, MIXED, f32, group_offset=2, num_groups=3)
        out = jax_gg.gmm(o.lhs, o.rhs, o.sizes, group_offset=make(2))
        check_gmm(out, o.lhs, o.rhs, o.sizes, group_offset=2)

    @pytest.mark.parametrize("bad", [np.nan, np.inf])
    @dtypes
    def test_a_nan_stays_in_its_group(self, rng, dtype, bad):
        """In one row of lhs and of dout, or in one matrix of rhs."""
        problem = problems.Problem("", 60, 24, 40, (10, 0, 30, 15))
        o = operands.make(rng, problem, dtype)
        lhs, dout, rhs = o.lhs.copy(), o.dout.copy(), o.rhs.copy()
        lhs[12, 3] = dout[12, 5] = bad
        rhs[3, 4, 6] = bad
        got, vjp = jax.vjp(lambda lhs, rhs: jax_gg.gmm(lhs, rhs, o.sizes), jnp.asarray(lhs), jnp.asarray(rhs))
        dlhs, drhs = (np.asarray(x) for x in vjp(jnp.asarray(dout)))
        got = np.asarray(got)
        assert not np.isfinite(reference.f64(got[12])).any()
        assert not np.isfinite(reference.f64(got[40:55, 6])).any()
        assert not np.isfinite(reference.f64(dlhs[12])).any()
        assert not np.isfinite(reference.f64(drhs[2, 3])).any()
        assert not np.isfinite(reference.f64(drhs[2, :, 5])).any()
        # Everything else is as if there were none.
        clean, clean_vjp = jax.vjp(lambda lhs, rhs: jax_gg.gmm(lhs, rhs, o.sizes), o.lhs, o.rhs)
        clean_dlhs, clean_drhs = clean_vjp(jnp.asarray(o.dout))
        other_rows = np.r_[0:12, 13:40, 55:60]
        np.testing.assert_array_equal(got[other_rows], np.asarray(clean)[other_rows])
        np.testing.assert_array_equal(dlhs[other_rows], np.asarray(clean_dlhs)[other_rows])
        np.testing.assert_array_equal(drhs[[0, 1, 3]], np.asarray(clean_drhs)[[0, 1, 3]])

    @dtypes
    def test_stale_memory(self, rng, dtype):
        """One compiled program, with all groups full and with ever more of them empty, results freed between."""
        full = problems.Problem("", 64, 32, 48, (16, 16, 16, 16))
        o = operands.make(rng, full, dtype)

        @jax.jit
        def three(lhs, rhs, sizes, dout):
            out, vjp = jax.vjp(lambda lhs, rhs: jax_gg.gmm(lhs, rhs, sizes), lhs, rhs)
            return out, *vjp(dout)

        for sizes in ((16,) * 4, (0, 16, 0, 16), (16,) * 4, (0, 0, 0, 5), (16,) * 4, (0,) * 4):
            sizes = np.array(sizes, np.int32)
            got = jax.block_until_ready(three(o.lhs, o.rhs, sizes, o.dout))
            check_gmm(got[0], o.lhs, o.rhs, sizes)
            check_gmm(got[1], o.dout, o.rhs, sizes, transpose_rhs=True)
            check_tgmm(got[2], o.lhs, o.dout, sizes)
            for x in got:
                x.delete()

    def test_zeros_are_positive(self, rng):
        """-0.0 would be a product with something."""
        lhs, rhs = np.full((8, 4), -1, np.float32), np.zeros((2, 4, 3), np.float32)
        out = np.asarray(jax_gg.gmm(lhs, rhs, [0, 3]))
        assert not np.signbit(out[3:]).any()
        assert not np.signbit(np.asarray(jax_gg.tgmm(lhs, lhs, [0, 3]))[0]).any()


class TestContractCpu(Cpu, Contract):
    @named([MIXED, *problems.ODD_SHAPES[::7], *problems.AWKWARD[-12:]])
    def test_f64(self, rng, problem):
        with jax.enable_x64(True):
            for transpose_rhs in (False, True):
                operands.check_all(operands.make(rng, problem, f64, transpose_rhs=transpose_rhs))

    @dtypes
    @named([problems.scaled(p, 16) for p in problems.BENCHMARKS])
    def test_benchmark_shapes(self, rng, problem, dtype):
        operands.check_all(operands.make(rng, problem, dtype))

    @pytest.mark.parametrize("dtype", [f16, bf16, f32, f64])
    def test_blocks(self, rng, dtype):
        """More rows, columns and contraction than one block of the CPU kernel holds, in each direction."""
        with jax.enable_x64(dtype == f64):
            for m, k, n in ((1100, 70, 40), (40, 1100, 30), (30, 40, 4200)):
                problem = problems.Problem("", m, k, n, (m // 20, m - 2 * (m // 20)))
                for transpose_rhs in (False, True):
                    operands.check_all(operands.make(rng, problem, dtype, transpose_rhs=transpose_rhs))


class TestContractGpu(Gpu, Contract):
    @named(problems.BENCHMARKS)
    def test_benchmark_shapes(self, problem):
        """At full size; of each result 40 rows and columns are compared, a smaller problem of the same kind."""
        keys = jax.random.split(jax.random.key(0), 3)
        lhs = jax.random.normal(keys[0], (problem.m, problem.k), bf16)
        rhs = jax.random.normal(keys[1], (problem.g, problem.k, problem.n), bf16)
        dout = jax.random.normal(keys[2], (problem.m, problem.n), bf16)
        sizes = np.array(problem.sizes, np.int32)

        @jax.jit
        def three(lhs, rhs, sizes, dout):
            out, vjp = jax.vjp(lambda lhs, rhs: jax_gg.gmm(lhs, rhs, sizes), lhs, rhs)
            return out, *vjp(dout)

        out, dlhs, drhs = three(lhs, rhs, sizes, dout)
        m, k, n = (np.unique(np.linspace(0, d - 1, 40).astype(int)) for d in (problem.m, problem.k, problem.n))
        ends = np.cumsum(sizes)
        sampled = np.diff(np.searchsorted(m, ends), prepend=0)  # how many of the sampled rows each group has
        check_gmm(out[m][:, n], lhs[m], rhs[:, :, n], sampled)
        check_gmm(dlhs[m][:, k], dout[m], rhs[:, k], sampled, transpose_rhs=True)
        check_tgmm(drhs[:, k][:, :, n], lhs[:, k], dout[:, n], sizes)


class TestSubnormals:
    @pytest.mark.parametrize("rows", [600, 8])
    def test_rows_alike(self, rows):
        """Equal rows give equal results, whichever thread computes them: some flush subnormals to zero, some do not."""
        lhs, rhs = np.full((rows, 300), 1e-39, f32), np.ones((1, 300, 300), f32)
        out = np.asarray(jax.jit(jax_gg.gmm)(lhs, rhs, np.array([rows])))
        np.testing.assert_allclose(out, 3e-37, rtol=1e-5)

    def test_big_endian_sizes(self):
        out = jax_gg.gmm(np.ones((5, 4), f32), np.ones((2, 4, 3), f32), np.array([2, 1], ">i2"))
        np.testing.assert_array_equal(out[:, 0], [4, 4, 4, 0, 0])
