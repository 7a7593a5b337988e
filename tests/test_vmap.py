"""vmap over any subset of the arguments is one call of the kernel, in every direction."""

import functools
import itertools

import dense
import jax
import jax.numpy as jnp
import numpy as np
import operands
import pytest
import reference
from compare import assert_exact, assert_near
from jaxprs import kernel_calls
from platforms import Cpu, Gpu

import jax_gg

M, K, N, G, SIZES = 11, 4, 3, 3, 5
INNER, OUTER = 2, 3
ARGUMENTS = ("lhs", "rhs", "sizes", "offset")
SUBSETS = [s for size in range(1, 5) for s in itertools.combinations(ARGUMENTS, size)]
subsets = pytest.mark.parametrize("outer", SUBSETS, ids="-".join)


def axes(subset, axis=0):
    return tuple(axis if name in subset else None for name in ARGUMENTS)


def random(rng, name, inner, outer, transpose_rhs=False):
    """An argument mapped (outermost first) by the vmaps whose subsets hold its name."""
    batch = (OUTER,) * (name in outer) + (INNER,) * (name in inner)
    match name:
        case "lhs":
            return operands.integers(rng, (*batch, M, K))
        case "rhs":
            return operands.integers(rng, (*batch, G, *((N, K) if transpose_rhs else (K, N))))
        case "sizes":
            return rng.integers(-1, 5, (*batch, SIZES)).astype(np.int32)
        case "offset":
            return rng.integers(-1, 3, batch).astype(np.int32)


def unbatched(x, name, inner, outer, i, j):
    """The argument of problem (i, j)."""
    if name in outer:
        x = x[i]
    return x[j] if name in inner else x


def expected(f, args, inner, outer):
    """`f` of each of the problems, one after the other: [OUTER, INNER, ...] of each of its results."""
    results = [
        [
            f(*(unbatched(x, name, inner, outer, i, j) for name, x in zip(ARGUMENTS, args, strict=True)))
            for j in range(INNER)
        ]
        for i in range(OUTER)
    ]
    return [np.array([[r[part] for r in row] for row in results]) for part in range(len(results[0][0]))]


class Vmap:
    @subsets
    @pytest.mark.parametrize("inner", [(), *SUBSETS], ids=lambda s: "-".join(s) or "none")
    def test_gmm(self, rng, outer, inner):
        """One subset, or two nested, with grad around vmap and vmap around grad."""
        transpose_rhs = bool(rng.integers(2))
        args = [random(rng, name, inner, outer, transpose_rhs) for name in ARGUMENTS]
        dout = operands.integers(rng, (M, N))

        def one(lhs, rhs, sizes, offset):
            return jax_gg.gmm(lhs, rhs, sizes, group_offset=offset, transpose_rhs=transpose_rhs)

        def mapped(f):
            if inner:
                f = jax.vmap(f, axes(inner))
            return jax.vmap(f, axes(outer))

        def grad_outside(*args):
            return jax.grad(lambda lhs, rhs: (mapped(one)(lhs, rhs, *args[2:]) * dout).sum(), (0, 1))(*args[:2])

        def grad_inside(*args):
            def grads(*x):
                out, vjp = jax.vjp(lambda lhs, rhs: one(lhs, rhs, *x[2:]), *x[:2])
                return out, *vjp(jnp.asarray(dout))

            return mapped(grads)(*args)

        def both(*args):
            with jax.numpy_rank_promotion("allow"):  # of dout, in grad_outside
                return *grad_inside(*args), *grad_outside(*args)

        # 3 directions inside; and outside, where the result is linear in what is summed.
        assert kernel_calls(both, *args) == 6
        out, *inside, dlhs, drhs = jax.jit(both)(*args)

        def problem(lhs, rhs, sizes, offset):
            kwargs = {"transpose_rhs": transpose_rhs, "group_offset": int(offset)}
            return (
                reference.gmm(lhs, rhs, sizes, **kwargs),
                *reference.gmm_gradients(lhs, rhs, sizes, dout, **kwargs),
            )

        want, *want_inside = expected(problem, args, inner, outer)
        if not inner:
            want, want_inside = want[:, 0], [x[:, 0] for x in want_inside]
        assert_exact(out, want)
        for x, y in zip(inside, want_inside, strict=True):
            assert_exact(x, y)
        # An operand that problems share has the sum of their gradients.
        for name, x, y in zip(ARGUMENTS, (dlhs, drhs), want_inside, strict=False):
            shared = (0,) * (name not in outer) + ((1,) if inner and name not in inner else ())
            assert_exact(x, y.sum(axis=shared))

    @pytest.mark.parametrize("outer", [s for s in SUBSETS if s != ("offset",)], ids="-".join)
    def test_tgmm(self, rng, outer):
        """Its rhs is dout; the offset is mapped or not, as for gmm."""
        for inner in SUBSETS:
            args = [random(rng, name, inner, outer) for name in ARGUMENTS]
            args[1] = operands.integers(rng, (OUTER,) * ("rhs" in outer) + (INNER,) * ("rhs" in inner) + (M, N))

            def one(lhs, rhs, sizes, offset):
                op = lambda *x: jax_gg.tgmm(*x, sizes, group_offset=offset, num_groups=G)  # noqa: E731
                out, vjp = jax.vjp(op, lhs, rhs)
                return out, *vjp(out)

            def problem(lhs, rhs, sizes, offset):
                out = reference.tgmm(lhs, rhs, sizes, num_groups=G, group_offset=int(offset))
                return out, *reference.tgmm_gradients(lhs, rhs, sizes, out, group_offset=int(offset))

            f = jax.vmap(jax.vmap(one, axes(inner)), axes(outer))
            assert kernel_calls(f, *args) == 3
            for got, want in zip(jax.jit(f)(*args), expected(problem, args, inner, outer), strict=True):
                assert_exact(got, want)

    @pytest.mark.parametrize("axis", [1, -1])
    def test_other_axes(self, rng, axis):
        """In and out, of each argument."""
        lhs, rhs = operands.integers(rng, (INNER, M, K)), operands.integers(rng, (INNER, G, K, N))
        sizes = rng.integers(0, 5, (INNER, G)).astype(np.int32)
        want = np.stack([reference.gmm(*x) for x in zip(lhs, rhs, sizes, strict=True)], axis)
        f = jax.vmap(jax_gg.gmm, axis, axis)
        args = [np.moveaxis(x, 0, axis) for x in (lhs, rhs, sizes)]
        assert kernel_calls(f, *args) == 1
        assert_exact(f(*args), want)

    def test_problem_without_rows_between_others(self, rng):
        """NaN past the sum of one problem reaches neither it nor its neighbours."""
        lhs, rhs = operands.integers(rng, (3, M, K)), operands.integers(rng, (G, K, N))
        sizes = np.array([[2, 3, 1], [0, 0, 0], [0, 4, 50]], np.int32)
        lhs[0, 6:] = lhs[1] = np.nan
        want = [reference.gmm(lhs[i], rhs, sizes[i]) for i in range(3)]
        assert_exact(jax.vmap(jax_gg.gmm, (0, None, 0))(lhs, rhs, sizes), want)

    @pytest.mark.parametrize("batch", [0, 1, 1000])
    def test_batch_sizes(self, rng, batch):
        lhs, sizes = operands.integers(rng, (batch, M, K)), rng.integers(0, 5, (batch, G)).astype(np.int32)
        rhs = operands.integers(rng, (G, K, N))
        want = np.array([reference.gmm(x, rhs, s) for x, s in zip(lhs, sizes, strict=True)]).reshape(batch, M, N)
        assert_exact(jax.vmap(jax_gg.gmm, (0, None, 0))(lhs, rhs, sizes), want)

    @pytest.mark.parametrize("empty", "mkng")
    def test_nothing(self, empty):
        """A dimension of 0 in problems of which there are several."""
        m, k, n, g = (0 if name == empty else size for name, size in zip("mkng", (M, K, N, G), strict=True))
        lhs, rhs, dout = np.ones((INNER, m, k)), np.ones((INNER, g, k, n)), np.ones((INNER, m, n))
        lhs, rhs, dout, sizes = *(x.astype(np.float32) for x in (lhs, rhs, dout)), np.full((INNER, g), 2, np.int32)
        for axes in ((0, 0, 0), (0, None, 0), (0, 0, None)):
            args = [x if axis == 0 else x[0] for x, axis in zip((lhs, rhs, sizes), axes, strict=True)]
            want = np.stack([reference.gmm(x, rhs[0], sizes[0]) for x in lhs])
            assert_exact(jax.vmap(jax_gg.gmm, axes)(*args), want)
        want = np.stack([reference.tgmm(x, y, s) for x, y, s in zip(lhs, dout, sizes, strict=True)])
        assert_exact(jax.vmap(jax_gg.tgmm)(lhs, dout, sizes), want)

    def test_three_deep(self, rng):
        lhs = operands.integers(rng, (2, 3, M, K))
        rhs = operands.integers(rng, (2, 2, G, K, N))
        sizes = rng.integers(0, 5, (3, 2, G)).astype(np.int32)
        f = jax.vmap(jax_gg.gmm, (None, 0, 0))  # c
        f = jax.vmap(f, (0, None, 0))  # b
        f = jax.vmap(f, (0, 0, None))  # a
        assert kernel_calls(f, lhs, rhs, sizes) == 1
        want = [
            [[reference.gmm(lhs[a, b], rhs[a, c], sizes[b, c]) for c in range(2)] for b in range(3)] for a in range(2)
        ]
        assert_exact(f(lhs, rhs, sizes), want)

    def test_nothing_shared_is_copied(self, rng):
        """The call takes an unmapped operand as it is."""
        f = jax.vmap(jax_gg.gmm, (0, None, None))
        lhs, rhs = operands.integers(rng, (64, M, K)), operands.integers(rng, (G, K, N))
        text = jax.jit(f).lower(lhs, rhs, np.array([2, 3, 4], np.int32)).as_text()
        (call,) = (line for line in text.splitlines() if "custom_call @jax_gg_gmm" in line)
        assert f"tensor<1x{G}x{K}x{N}xf32>" in call
        assert f"tensor<1x{G}xi32>" in call

    def test_second_derivative_of_a_mapped_gmm(self, rng):
        lhs, rhs = operands.integers(rng, (INNER, M, K)), operands.integers(rng, (G, K, N))
        sizes = np.array([[2, 3, 4], [0, 9, 1]], np.int32)

        def second(dot):
            def loss(lhs, rhs):
                return (jax.vmap(dot, (0, None, 0))(lhs, rhs, sizes) ** 2).sum()

            return jax.grad(lambda *x: sum((g**2).sum() for g in jax.grad(loss, (0, 1))(*x)) * 1e-4, (0, 1))(lhs, rhs)

        got = second(functools.partial(jax_gg.gmm, precision="highest"))
        for x, y in zip(got, second(dense.gmm), strict=True):
            assert_near(x, y)


class TestVmapCpu(Cpu, Vmap):
    pass


class TestVmapGpu(Gpu, Vmap):
    pass
