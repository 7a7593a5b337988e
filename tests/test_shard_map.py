"""gmm inside shard_map on eight CPU devices: values and gradients are those of one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import operands
import pytest
import reference
from compare import assert_exact
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_gg

M, K, N, G = 48, 16, 24, 16
check_vma = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])


def make_mesh(shape, names, axis_type=AxisType.Auto):
    return jax.make_mesh(shape, names, (axis_type,) * len(names), devices=jax.devices("cpu")[: np.prod(shape)])


@pytest.fixture
def mesh():
    return make_mesh((8,), ("x",))


@pytest.fixture
def arrays(rng):
    lhs, rhs = operands.integers(rng, (M, K)), operands.integers(rng, (G, K, N))
    dout = operands.integers(rng, (M, N))
    sizes = rng.integers(0, 6, G).astype(np.int32)
    sizes[rng.integers(G)] = -2
    return lhs, rhs, sizes, dout


def check(f, lhs, rhs, sizes, dout, want=None, jit=True):
    """Value and gradients of a function of the global arrays against one device's."""
    f = jax.jit(f) if jit else f
    out, vjp = jax.vjp(lambda lhs, rhs: f(lhs, rhs, sizes), lhs, rhs)
    dlhs, drhs = vjp(jnp.asarray(dout))
    sizes = np.asarray(sizes)
    want = want or (reference.gmm(lhs, rhs, sizes), *reference.gmm_gradients(lhs, rhs, sizes, dout))
    for got, expected in zip((out, dlhs, drhs), want, strict=True):
        assert_exact(got, expected)


def experts(lhs, rhs, sizes, axis="x"):
    """Each device holds some of the matrices, and adds what its groups give."""
    local = jax_gg.gmm(lhs, rhs, sizes, group_offset=jax.lax.axis_index(axis) * rhs.shape[0])
    return jax.lax.psum(local, axis)


@check_vma
class TestShardMap:
    def test_groups(self, mesh, arrays, check_vma):
        specs = P(), P("x"), P()
        check(jax.shard_map(experts, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma), *arrays)

    def test_groups_without_jit(self, mesh, arrays, check_vma):
        specs = P(), P("x"), P()
        f = jax.shard_map(experts, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
        check(f, *arrays, jit=False)

    def test_columns(self, mesh, arrays, check_vma):
        specs = P(), P(None, None, "x"), P()
        f = jax.shard_map(jax_gg.gmm, mesh=mesh, in_specs=specs, out_specs=P(None, "x"), check_vma=check_vma)
        check(f, *arrays)

    def test_contraction(self, mesh, arrays, check_vma):
        def f(*args):
            return jax.lax.psum(jax_gg.gmm(*args), "x")

        specs = P(None, "x"), P(None, "x"), P()
        check(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma), *arrays)

    def test_rows(self, rng, mesh, arrays, check_vma):
        """Each device has its own rows and sizes; all have the same matrices, whose gradient is a sum."""
        lhs, rhs, _, dout = arrays
        sizes = rng.integers(0, 2, 8 * G).astype(np.int32)
        f = jax.shard_map(jax_gg.gmm, mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=P("x"), check_vma=check_vma)
        shards = zip(np.split(lhs, 8), np.split(sizes, 8), np.split(dout, 8), strict=True)
        want = [(reference.gmm(x, rhs, s), *reference.gmm_gradients(x, rhs, s, d)) for x, s, d in shards]
        out, dlhs, drhs = zip(*want, strict=True)
        check(f, lhs, rhs, sizes, dout, want=(np.concatenate(out), np.concatenate(dlhs), sum(drhs)))

    @pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
    def test_two_axes(self, arrays, check_vma, axis_type):
        """Columns over one axis, groups over the other, lhs replicated over both."""
        mesh = make_mesh((2, 4), ("n", "g"), axis_type)
        f = functools.partial(experts, axis="g")
        specs = P(), P("g", None, "n"), P()
        f = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(None, "n"), check_vma=check_vma)
        if axis_type == AxisType.Explicit:
            with jax.set_mesh(mesh):
                *args, _ = arrays
                out = jax.jit(f)(*map(jax.device_put, args, (jax.NamedSharding(mesh, s) for s in specs)))
                assert_exact(out, reference.gmm(*args))
        else:
            check(f, *arrays)

    def test_second_derivatives(self, mesh, arrays, check_vma):
        lhs, rhs, sizes, _ = arrays
        specs = P(), P("x"), P()
        sharded = jax.shard_map(experts, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)

        def second(dot):
            def loss(lhs, rhs):
                return (dot(lhs, rhs, sizes) % 2).sum() + (dot(lhs, rhs, sizes)[:2] ** 2).sum() / 2

            return jax.grad(lambda *x: sum(g[..., :2].sum() for g in jax.grad(loss, (0, 1))(*x)), (0, 1))(lhs, rhs)

        for got, want in zip(jax.jit(second, static_argnums=0)(sharded), second(jax_gg.gmm), strict=True):
            assert_exact(got, reference.f64(want))

    @pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="JAX 0.8 cannot vmap the psum of a replicated gradient")
    def test_vmap_inside(self, rng, mesh, arrays, check_vma):
        """The batch is folded, then split again: types must survive that."""
        _, rhs, sizes, _ = arrays
        lhs, dout = operands.integers(rng, (3, M, K)), operands.integers(rng, (3, M, N))

        def f(lhs, rhs, sizes):
            offset = jax.lax.axis_index("x") * rhs.shape[0]
            local = jax.vmap(lambda x: jax_gg.gmm(x, rhs, sizes, group_offset=offset))(lhs)
            return jax.lax.psum(local, "x")

        specs = P(), P("x"), P()
        f = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
        grads = [reference.gmm_gradients(x, rhs, sizes, d) for x, d in zip(lhs, dout, strict=True)]
        want = (
            np.stack([reference.gmm(x, rhs, sizes) for x in lhs]),
            np.stack([g[0] for g in grads]),
            sum(g[1] for g in grads),
        )
        check(f, lhs, rhs, sizes, dout, want=want)

    def test_scan_inside(self, rng, mesh, arrays, check_vma):
        """A loop's carry must keep its type."""
        lhs, _, sizes, _ = arrays
        weights = operands.integers(rng, (3, G, K, K)) % 2

        def f(lhs, weights, sizes):
            return jax.lax.scan(lambda x, w: (experts(x, w, sizes) % 3, None), lhs, weights)[0]

        specs = P(), P(None, "x"), P()
        got = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)(lhs, weights, sizes)
        want = lhs
        for w in weights:
            want = reference.gmm(want, w, sizes) % 3
        assert_exact(got, want)

    def test_tgmm_of_rows(self, rng, mesh, arrays, check_vma):
        """The gradient of a data-parallel layer: rows and sizes split, the sums added over the devices."""
        lhs, _, _, rhs = arrays
        sizes = rng.integers(0, 2, 8 * G).astype(np.int32)
        dout = operands.integers(rng, (G, K, N))

        def f(lhs, rhs, sizes):
            return jax.lax.psum(jax_gg.tgmm(lhs, rhs, sizes), "x")

        f = jax.shard_map(f, mesh=mesh, in_specs=(P("x"), P("x"), P("x")), out_specs=P(), check_vma=check_vma)
        shards = list(zip(np.split(lhs, 8), np.split(rhs, 8), np.split(sizes, 8), strict=True))
        grads = [reference.tgmm_gradients(*shard, dout) for shard in shards]
        want = (
            sum(reference.tgmm(*shard) for shard in shards),
            *(np.concatenate(g) for g in zip(*grads, strict=True)),
        )
        check(f, lhs, rhs, sizes, dout, want=want)

    def test_tgmm_of_columns(self, rng, mesh, arrays, check_vma):
        """lhs is replicated, and so must be its gradient."""
        lhs, _, sizes, rhs = arrays
        dout = operands.integers(rng, (G, K, N))
        f = jax.shard_map(
            jax_gg.tgmm,
            mesh=mesh,
            in_specs=(P(), P(None, "x"), P()),
            out_specs=P(None, None, "x"),
            check_vma=check_vma,
        )
        want = reference.tgmm(lhs, rhs, sizes), *reference.tgmm_gradients(lhs, rhs, sizes, dout)
        check(f, lhs, rhs, sizes, dout, want=want)

    def test_one_manual_axis_of_two(self, arrays, check_vma):
        """The other axis stays with the compiler."""
        mesh = make_mesh((2, 4), ("n", "g"))
        specs = P(), P("g"), P()
        f = functools.partial(experts, axis="g")
        f = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma, axis_names={"g"})
        check(f, *arrays)


def test_gradient_taken_inside(mesh, arrays):
    """With check_vma, the cotangent of a replicated operand is summed over the devices, as JAX does for its own."""
    lhs, rhs, sizes, dout = arrays

    def f(lhs, rhs, sizes, dout):
        dlhs, drhs = jax.grad(lambda lhs, rhs: (jax_gg.gmm(lhs, rhs, sizes) * dout).sum(), (0, 1))(lhs, rhs)
        assert jax.typeof(dlhs) == jax.typeof(lhs)
        assert jax.typeof(drhs) == jax.typeof(rhs)
        return dlhs, drhs

    columns = P(None, None, "x")
    f = jax.shard_map(f, mesh=mesh, in_specs=(P(), columns, P(), P(None, "x")), out_specs=(P(), columns))
    for got, want in zip(f(*arrays), reference.gmm_gradients(lhs, rhs, sizes, dout), strict=True):
        assert_exact(got, want)


def test_gradient_taken_inside_without_vma(mesh, arrays):
    """Then a gradient is that of the device's own operands, and adding up is left to the caller."""
    lhs, rhs, sizes, dout = arrays

    def f(lhs, rhs, sizes, dout):
        dlhs, drhs = jax.grad(lambda lhs, rhs: (jax_gg.gmm(lhs, rhs, sizes) * dout).sum(), (0, 1))(lhs, rhs)
        return jax.lax.psum(dlhs, "x"), drhs

    columns = P(None, None, "x")
    f = jax.shard_map(
        f, mesh=mesh, in_specs=(P(), columns, P(), P(None, "x")), out_specs=(P(), columns), check_vma=False
    )
    for got, want in zip(f(*arrays), reference.gmm_gradients(lhs, rhs, sizes, dout), strict=True):
        assert_exact(got, want)
