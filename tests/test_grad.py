"""Derivatives: their values, dtypes and cost, and the derivatives of derivatives."""

import functools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import operands
import problems
import pytest
import reference
from compare import assert_exact, assert_near, check_gmm, check_tgmm
from jaxprs import kernel_calls
from platforms import Cpu, Gpu

import jax_gg

SIZES = np.array([4, 0, 7, 3], np.int32)
M, K, N, G = 17, 6, 5, 4
HIGHEST = jax.lax.Precision.HIGHEST


def gmm(lhs, rhs, **kwargs):
    return jax_gg.gmm(lhs, rhs, SIZES, **kwargs)


def tgmm(lhs, rhs, **kwargs):
    return jax_gg.tgmm(lhs, rhs, SIZES, **kwargs)


@pytest.fixture
def lhs(rng):
    return operands.integers(rng, (M, K))


@pytest.fixture
def rhs(rng):
    return operands.integers(rng, (G, K, N))


class Grad:
    @pytest.mark.parametrize("offset", [None, 0, 2, -1])
    @pytest.mark.parametrize("transpose_rhs", [False, True])
    def test_gmm(self, rng, lhs, rhs, transpose_rhs, offset):
        if offset is not None:
            rhs = rhs[:3]
        if transpose_rhs:
            rhs = rhs.swapaxes(1, 2)
        dout = operands.integers(rng, (M, N))
        keywords = {"transpose_rhs": transpose_rhs, "group_offset": offset}
        out, vjp = jax.vjp(lambda lhs, rhs: gmm(lhs, rhs, **keywords), lhs, rhs)
        dlhs, drhs = vjp(jnp.asarray(dout))
        keywords["group_offset"] = offset or 0
        want_dlhs, want_drhs = reference.gmm_gradients(lhs, rhs, SIZES, dout, **keywords)
        assert_exact(out, reference.gmm(lhs, rhs, SIZES, **keywords))
        assert_exact(dlhs, want_dlhs)
        assert_exact(drhs, want_drhs)

    @pytest.mark.parametrize(
        ("offset", "num_groups"), [(None, None), (0, 3), (2, 3), (-1, 3), (1, None), (None, 6), (None, 0)]
    )
    def test_tgmm(self, rng, lhs, offset, num_groups):
        rhs = operands.integers(rng, (M, N))
        dout = operands.integers(rng, (G if num_groups is None else num_groups, K, N))
        out, vjp = jax.vjp(lambda *x: tgmm(*x, group_offset=offset, num_groups=num_groups), lhs, rhs)
        dlhs, drhs = vjp(jnp.asarray(dout))
        want_dlhs, want_drhs = reference.tgmm_gradients(lhs, rhs, SIZES, dout, group_offset=offset or 0)
        assert_exact(out, reference.tgmm(lhs, rhs, SIZES, group_offset=offset or 0, num_groups=num_groups))
        assert_exact(dlhs, want_dlhs)
        assert_exact(drhs, want_drhs)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    @pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32"])
    def test_dtypes(self, rng, dtype, out_dtype):
        """A gradient has the dtype of its operand, whatever that of the result, and is one product in it."""
        o = operands.make(rng, problems.Problem("", M, K, N, tuple(SIZES.tolist())), dtype, out_dtype=out_dtype)
        lhs, rhs, dout = o.lhs, o.rhs, o.dout
        out, vjp = jax.vjp(lambda *x: gmm(*x, preferred_element_type=out_dtype), lhs, rhs)
        dlhs, drhs = vjp(jnp.asarray(dout))
        assert (out.dtype, dlhs.dtype, drhs.dtype) == (out_dtype, dtype, dtype)
        check_gmm(dlhs, dout.astype(dtype), rhs, SIZES, transpose_rhs=True)
        check_tgmm(drhs, lhs, dout.astype(dtype), SIZES)

        cotangent = np.ones((G, K, N), out_dtype)
        out, vjp = jax.vjp(lambda *x: tgmm(*x, preferred_element_type=out_dtype), lhs, dout.astype(dtype))
        dlhs, drhs = vjp(jnp.asarray(cotangent))
        assert (out.dtype, dlhs.dtype, drhs.dtype) == (out_dtype, dtype, dtype)
        check_gmm(dlhs, dout.astype(dtype), cotangent.astype(dtype), SIZES, transpose_rhs=True)
        check_gmm(drhs, lhs, cotangent.astype(dtype), SIZES)

    @pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
    @pytest.mark.parametrize("op", ["gmm", "tgmm"])
    def test_second_derivatives(self, rng, lhs, rhs, op, argnums):
        if op == "tgmm":
            rhs = operands.integers(rng, (M, N))

        def second(op):
            def first(lhs, rhs):
                # Not linear in anything, so that there is a second derivative for every pair of operands.
                grads = jax.grad(lambda *x: (op(*x, SIZES) ** 3).sum(), (0, 1))(lhs, rhs)
                return sum((g**2).sum() for g in grads) * 1e-6

            return jax.tree.leaves(jax.grad(first, argnums)(lhs, rhs))

        got = second(functools.partial(getattr(jax_gg, op), precision="highest"))
        for x, y in zip(got, second(getattr(dense, op)), strict=True):
            assert_near(x, y)

    def test_derivatives_of_ragged_dot(self, lhs, rhs):
        """The first three with respect to lhs; for rhs, jax.lax.ragged_dot has only one."""

        def derivative(dot, order):
            f = lambda x: (dot(x, rhs, SIZES, precision="highest") ** 4).sum()  # noqa: E731
            for _ in range(order - 1):
                f = lambda x, f=f: (jax.grad(f)(x) ** 2).sum() * 1e-6  # noqa: E731
            return jax.grad(f)(lhs)

        for order in (1, 2, 3):
            assert_near(derivative(jax_gg.gmm, order), derivative(jax.lax.ragged_dot, order))

    @pytest.mark.parametrize("op", ["gmm", "tgmm"])
    def test_nothing_unasked_is_computed(self, rng, lhs, rhs, op):
        op, rhs = (gmm, rhs) if op == "gmm" else (tgmm, operands.integers(rng, (M, N)))

        def loss(lhs, rhs):
            return op(lhs, rhs).sum()

        assert kernel_calls(loss, lhs, rhs) == 1
        assert kernel_calls(jax.grad(loss, 0), lhs, rhs) == 2
        assert kernel_calls(jax.grad(loss, 1), lhs, rhs) == 2
        assert kernel_calls(jax.grad(loss, (0, 1)), lhs, rhs) == 3
        assert kernel_calls(jax.grad(lambda lhs, rhs, x: loss(lhs, rhs) * x, 2), lhs, rhs, 1.0) == 1
        # The second derivative with respect to lhs alone: the first gradient is a gmm of a constant and rhs.
        assert kernel_calls(jax.grad(lambda x: (jax.grad(lambda y: (op(y, rhs) ** 2).sum())(x) ** 2).sum()), lhs) == 4

    @pytest.mark.parametrize("op", ["gmm", "tgmm"])
    def test_nothing_unasked_is_kept(self, rng, lhs, rhs, op):
        """Between forward and backward lives one operand for each gradient asked for, and no other."""
        op, rhs = (gmm, rhs) if op == "gmm" else (tgmm, operands.integers(rng, (M, N)))
        lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)

        def kept(f, *args):
            _, vjp = jax.vjp(f, *args)
            return sorted(x.shape for x in jax.tree.leaves(vjp) if getattr(x, "ndim", 0) > 1)

        assert kept(lambda x: jax.jit(op)(x, rhs), lhs) == [rhs.shape]
        assert kept(lambda x: jax.jit(op)(lhs, x), rhs) == [lhs.shape]
        assert kept(op, lhs, rhs) == sorted([lhs.shape, rhs.shape])

    def test_no_gradient_of_sizes(self, lhs, rhs):
        """An integer argument has a gradient of float0."""
        grad = jax.grad(lambda s: jax_gg.gmm(lhs, rhs, s).sum(), allow_int=True)(jnp.asarray(SIZES))
        assert grad.dtype == jax.dtypes.float0
        assert grad.shape == SIZES.shape

    def test_unused_result(self, lhs, rhs):
        """The cotangent is a symbolic zero."""
        value, grads = jax.value_and_grad(lambda x: (gmm(*x), x[0].sum())[1])((lhs, rhs))
        assert value == lhs.sum()
        assert_exact(grads[0], np.ones_like(lhs))
        assert_exact(grads[1], np.zeros_like(rhs))

    def test_same_operand_twice(self, lhs):
        grad = jax.grad(lambda x: (tgmm(x, x) * jnp.eye(K)[None]).sum())(lhs)
        used = np.arange(M)[:, None] < SIZES.sum()
        assert_exact(grad, np.where(used, 2 * lhs, 0))

    def test_finite_differences(self, rng):
        """One check that shares nothing with the other tests."""
        lhs, rhs, dout = operands.normal(rng, (M, K), "f4"), operands.normal(rng, (G, K, N), "f4"), None
        dout = operands.normal(rng, (M, N), "f4")
        direction = operands.normal(rng, (M, K), "f4"), operands.normal(rng, (G, K, N), "f4")
        value = lambda *x: (gmm(*x, precision=HIGHEST) * dout).sum()  # noqa: E731
        grads = jax.grad(value, (0, 1))(lhs, rhs)
        slope = sum(float((g * d).sum()) for g, d in zip(grads, direction, strict=True))
        # Quadratic along a line, so that the symmetric difference is exact for any step.
        plus, minus = (value(lhs + s * direction[0], rhs + s * direction[1]) for s in (0.5, -0.5))
        np.testing.assert_allclose(float(plus - minus), slope, rtol=1e-4, atol=1e-3)


class TestGradCpu(Cpu, Grad):
    def test_f64(self, rng):
        with jax.enable_x64(True):
            o = operands.make(rng, problems.Problem("", M, K, N, tuple(SIZES.tolist())), np.float64)
            got = jax.vjp(gmm, o.lhs, o.rhs)[1](jnp.asarray(o.dout))
            for x, want in zip(got, reference.gmm_gradients(o.lhs, o.rhs, SIZES, o.dout), strict=True):
                assert x.dtype == np.float64
                np.testing.assert_allclose(np.asarray(x), want, rtol=1e-13, atol=1e-13)


class TestGradGpu(Gpu, Grad):
    pass
