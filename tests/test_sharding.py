"""Sharded operands on eight CPU devices: results of one device, no operand gathered, no sum too many."""

import collections
import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import operands
import pytest
import reference
from compare import assert_exact
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import primitives

import jax_gg
from jax_gg import _sharding

M, K, N, G = 64, 16, 24, 8
kinds = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh axes that each dimension is split over, of a mesh with those and no others."""

    m: tuple[str, ...] = ()
    k: tuple[str, ...] = ()
    n: tuple[str, ...] = ()
    g: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> "Placement":
        """`m k` is m over x, k over y; `mm` is m over x and y."""
        axes, split = iter("xyz"), {}
        for name in text.split():
            split[name[0]] = tuple(next(axes) for _ in name)
        return cls(**split)

    def spec(self, dims: str) -> P:
        return P(*((getattr(self, d) or None) for d in dims))

    def mesh(self, kind):
        count = len(self.m + self.k + self.n + self.g)
        return make_mesh({1: (8,), 2: (2, 4), 3: (2, 2, 2)}[count], "xyz"[:count], kind)

    def sums(self, contracted: str) -> int:
        return int(any(getattr(self, d) for d in contracted))


SINGLE = ["m", "k", "n", "g"]
PAIRS = ["m k", "n m", "m g", "k n", "g k", "n g", "mm", "gg"]
TRIPLES = ["m k n", "g m k", "n g m", "k n g"]
PLACEMENTS = SINGLE + PAIRS + TRIPLES
placements = pytest.mark.parametrize("placement", [Placement.of(text) for text in PLACEMENTS], ids=PLACEMENTS)


def make_mesh(shape, names, kind=AxisType.Auto):
    kinds = kind if isinstance(kind, tuple) else (kind,) * len(shape)
    return jax.make_mesh(shape, tuple(names), kinds, devices=jax.devices("cpu")[: np.prod(shape)])


def put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def random_sizes(rng, groups=G):
    """Sizes of every kind; shards end within groups."""
    short = rng.integers(0, M // groups, groups)
    short[rng.integers(groups)] = -7
    short[:: groups // 2] = 0
    long = short.copy()
    long[[1, 3, -1]] = np.iinfo(np.int32).max
    full = rng.multinomial(M, np.ones(groups) / groups)
    return [np.asarray(s, np.int32) for s in (short, long, full, np.zeros(groups), np.eye(groups)[2] * M)]


def with_nan(lhs, rhs, sizes, dout, offset=0):
    """The operands with NaN wherever nothing may be read."""
    rows, groups = np.ones(len(lhs), bool), np.ones(len(rhs), bool)
    for i, r in reference.served(sizes, len(lhs), len(rhs), offset):
        rows[r] = groups[i] = False
    lhs, rhs, dout = lhs.copy(), rhs.copy(), dout.copy()
    lhs[rows] = dout[rows] = rhs[groups] = np.nan
    return lhs, rhs, dout


def collectives(compiled) -> collections.Counter:
    """How many arrays each collective of a compiled program takes."""
    count: collections.Counter = collections.Counter()
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    for arrays, name in re.findall(rf" = (.*?) ({names})(?:-start)?\(", compiled.as_text()):
        count[name] += arrays.count("[") if name == "all-reduce" else 1
    return count


def parts(spec, rank):
    """The axes of each dimension, however they are written."""
    axes = [() if p is None else p if isinstance(p, tuple) else (p,) for p in spec]
    return axes + [()] * (rank - len(axes))


def large(rng, shape, dtype):
    """Integers whose products exceed what 16 bits hold exactly, and whose sums f32 does."""
    return rng.integers(-31, 32, shape).astype(dtype)


def rounded(x, dtype):
    return np.asarray(x).astype(np.float32).astype(dtype).astype(np.float64)


def three(lhs, rhs, sizes, offset, dout, **kwargs):
    out, vjp = jax.vjp(lambda lhs, rhs: jax_gg.gmm(lhs, rhs, sizes, group_offset=offset, **kwargs), lhs, rhs)
    return out, *vjp(dout)


@kinds
@placements
@pytest.mark.parametrize(("dtype", "transpose_rhs", "offset"), [(np.float32, False, 0), (jnp.bfloat16, True, 2)])
def test_gmm(rng, placement, kind, dtype, transpose_rhs, offset):
    """Values and gradients, communication, types and memory of every placement."""
    mesh = placement.mesh(kind)
    dims = "gnk" if transpose_rhs else "gkn"
    lhs, dout = large(rng, (M, K), dtype), large(rng, (M, N), dtype)
    rhs = large(rng, [{"g": G, "k": K, "n": N}[d] for d in dims], dtype)
    specs = placement.spec("mk"), placement.spec(dims), P(), P(), placement.spec("mn")
    out_specs = placement.spec("mn"), placement.spec("mk"), placement.spec(dims)

    def f(*args):
        # Like jax.numpy.dot, it must be told what to do with a split contraction.
        more = {"out_sharding": placement.spec("mn")} if kind == AxisType.Explicit and placement.k else {}
        results = three(*args, transpose_rhs=transpose_rhs, **more)
        if kind == AxisType.Explicit:
            for x, spec in zip(results, out_specs, strict=True):
                assert parts(jax.typeof(x).sharding.spec, x.ndim) == parts(spec, x.ndim)
        return results

    compiled = None
    for sizes in random_sizes(rng, G + 3 * offset):
        lhs_, rhs_, dout_ = with_nan(lhs, rhs, sizes, dout, offset)
        args = [put(mesh, *x) for x in zip((lhs_, rhs_, sizes, np.int32(offset), dout_), specs, strict=True)]
        if compiled is None:
            with jax.set_mesh(mesh):
                compiled = jax.jit(f).lower(*args).compile()
        options = {"transpose_rhs": transpose_rhs, "group_offset": offset}
        want = reference.gmm(lhs, rhs, sizes, **options), *reference.gmm_gradients(lhs, rhs, sizes, dout, **options)
        for got, exact, spec in zip(compiled(*args), want, out_specs, strict=True):
            assert got.dtype == dtype
            # Sums over devices are rounded once, as that of one device is.
            assert_exact(got, rounded(exact, dtype))
            assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), got.ndim)

    sums = placement.sums("kg") + placement.sums("ng") + placement.sums("m")
    assert collectives(compiled) == collections.Counter({"all-reduce": sums} if sums else {})


@kinds
@placements
def test_tgmm(rng, placement, kind):
    """Where out_sharding says that the matrices belong."""
    mesh = placement.mesh(kind)
    lhs, rhs, dout = (large(rng, shape, jnp.bfloat16) for shape in ((M, K), (M, N), (G, K, N)))
    specs = placement.spec("mk"), placement.spec("mn"), P(), placement.spec("gkn")

    @jax.jit
    def f(lhs, rhs, sizes, dout):
        def op(lhs, rhs):
            sharding = NamedSharding(mesh, placement.spec("gkn"))
            return jax_gg.tgmm(lhs, rhs, sizes, num_groups=G, group_offset=1, out_sharding=sharding)

        out, vjp = jax.vjp(op, lhs, rhs)
        return out, *vjp(dout)

    with jax.set_mesh(mesh):
        for sizes in random_sizes(rng, G + 2):
            args = [put(mesh, *x) for x in zip((lhs, rhs, sizes, dout), specs, strict=True)]
            out, *grads = f(*args)
            assert_exact(out, rounded(reference.tgmm(lhs, rhs, sizes, num_groups=G, group_offset=1), jnp.bfloat16))
            want = reference.tgmm_gradients(lhs, rhs, sizes, dout, group_offset=1)
            for got, exact in zip(grads, want, strict=True):
                assert_exact(got, rounded(exact, jnp.bfloat16))
        count = collectives(f.lower(*args).compile())
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, placement.spec("gkn")), 3)
    sums = placement.sums("m") + placement.sums("ng") + placement.sums("kg")
    assert count == collections.Counter({"all-reduce": sums} if sums else {})


@kinds
@pytest.mark.parametrize("text", ["g", "n", "m", "k"])
def test_memory(text, kind):
    """Of what is split, a device holds its part; a sum of f32 is all that comes to the bf16 operands and results."""
    placement = Placement.of(text)
    mesh, sizes = placement.mesh(kind), {"m": 512, "k": 128, "n": 256, "g": 64}

    def struct(dims):
        shape = [sizes[d] for d in dims]
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, placement.spec(dims)))

    def nbytes(dims):
        return int(np.prod([sizes[d] for d in dims])) // (8 if text in dims else 1)

    more = {"out_sharding": P()} if kind == AxisType.Explicit and text == "k" else {}
    counts = jax.ShapeDtypeStruct((sizes["g"],), np.int32, sharding=NamedSharding(mesh, P()))
    zero = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, P()))
    args = struct("mk"), struct("gkn"), counts, zero, struct("mn")
    with jax.set_mesh(mesh):
        memory = jax.jit(lambda *x: three(*x, **more)).lower(*args).compile().memory_analysis()
    arrays = sum(map(nbytes, ("mk", "gkn", "mn")))
    assert 0 <= memory.argument_size_in_bytes - 2 * arrays < 1024
    assert 0 <= memory.output_size_in_bytes - 2 * arrays < 1024
    summed = {"g": 0, "n": nbytes("mk"), "m": nbytes("gkn"), "k": nbytes("mn")}[text]
    # The f32 before and after the sum, and 16 bits that the CPU backend adds up as f32.
    assert memory.temp_size_in_bytes < 2 * 4 * (summed or nbytes("mk") + nbytes("mn")) + 2**14


@pytest.mark.parametrize("text", ["g", "n", "k"])
def test_gradient_of_matrices_alone(rng, text):
    """Nothing of the matrices is kept for their gradient, but where they are."""
    placement = Placement.of(text)
    mesh = placement.mesh(AxisType.Auto)
    lhs, rhs, dout = operands.integers(rng, (M, K)), operands.integers(rng, (G, K, N)), operands.integers(rng, (M, N))
    sizes = random_sizes(rng)[0]

    @jax.jit
    def f(lhs, rhs, dout):
        return jax.vjp(lambda rhs: jax_gg.gmm(lhs, rhs, sizes), rhs)[1](dout)[0]

    args = (
        put(mesh, lhs, placement.spec("mk")),
        put(mesh, rhs, placement.spec("gkn")),
        put(mesh, dout, placement.spec("mn")),
    )
    got = f(*args)
    assert_exact(got, reference.gmm_gradients(lhs, rhs, sizes, dout)[1])
    assert got.sharding.is_equivalent_to(args[1].sharding, 3)
    assert not collectives(f.lower(*args).compile())


@kinds
@pytest.mark.parametrize("dim", ["g", "k", "n"])
def test_rows_and_matrices_over_the_same_axis(rng, dim, kind):
    """It is never the matrices that are moved, and the results are scattered by the sum."""
    mesh = make_mesh((8,), "x", kind)
    spec = P(*("x" if d == dim else None for d in "gkn"))
    lhs, rhs, dout = operands.integers(rng, (M, K)), operands.integers(rng, (G, K, N)), operands.integers(rng, (M, N))
    more = {"out_sharding": P("x")} if kind == AxisType.Explicit else {}
    with jax.set_mesh(mesh):
        f = jax.jit(lambda *args: three(*args, **more))
        for sizes in random_sizes(rng):
            args = [
                put(mesh, *x) for x in ((lhs, P("x")), (rhs, spec), (sizes, P()), (np.int32(0), P()), (dout, P("x")))
            ]
            results = f(*args)
            want = reference.gmm(lhs, rhs, sizes), *reference.gmm_gradients(lhs, rhs, sizes, dout)
            for got, exact in zip(results, want, strict=True):
                assert_exact(got, exact)
        compiled = f.lower(*args).compile()
    if kind == AxisType.Explicit:  # Over Auto axes, the compiler may as well split the columns of this gradient.
        assert results[1].sharding.is_equivalent_to(args[0].sharding, 2)
    assert results[2].sharding.is_equivalent_to(args[1].sharding, 3)
    moves = re.findall(r" = (.*?) (?:all-gather|all-to-all|collective-permute)(?:-start)?\(", compiled.as_text())
    sizes_moved = [
        sum(np.prod([int(d) for d in shape.split(",")]) for shape in re.findall(r"\[([\d,]+)\]", x)) for x in moves
    ]
    assert sizes_moved
    assert set(sizes_moved) <= {M * K, M * N, M * K // 8, M * N // 8}
    assert collectives(compiled)["reduce-scatter"] == 2
    assert not collectives(compiled)["all-reduce"]


@kinds
@pytest.mark.parametrize("text", ["k", "g", "n g"])
def test_scattered_sum(rng, text, kind):
    """A result that is wanted split over the axes of the sum is reduced and scattered at once."""
    placement = Placement.of(text)
    mesh = placement.mesh(kind)
    axes = placement.k + placement.g
    lhs, rhs = operands.integers(rng, (M, K)), operands.integers(rng, (G, K, N))
    wanted = P(axes, placement.n or None)
    with jax.set_mesh(mesh):
        f = jax.jit(lambda *args: jax_gg.gmm(*args, out_sharding=wanted))
        for sizes in random_sizes(rng):
            args = put(mesh, lhs, placement.spec("mk")), put(mesh, rhs, placement.spec("gkn")), put(mesh, sizes, P())
            out = f(*args)
            assert_exact(out, reference.gmm(lhs, rhs, sizes))
        assert collectives(f.lower(*args).compile()) == {"reduce-scatter": 1}
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, wanted), 2)


def test_result_split_and_operands_not():
    """A device computes no more than its part of the result."""
    mesh = make_mesh((4, 2), "xy", AxisType.Explicit)
    args = np.ones((M, K), np.float32), np.ones((G, K, N), np.float32), np.full(G, 8, np.int32)
    with jax.set_mesh(mesh):
        f = jax.jit(lambda *args: jax_gg.gmm(*args, out_sharding=P("x", "y")))
        compiled = f.lower(*(put(mesh, x, P()) for x in args)).compile()
    assert not collectives(compiled)
    assert re.search(rf"f32\[1,{M // 4},{N // 2}\][^\n]* custom-call\(", compiled.as_text())


@pytest.mark.parametrize("m", [5, 1000, 2**31 - 1])
def test_sizes_of_a_part(rng, m):
    """No sum of sizes overflows, however often the sizes overrun m."""
    sizes = np.where(
        rng.random((3, 40)) < 0.5, rng.integers(-5, 2**31, (3, 40)), rng.integers(-5, m // 20 + 2, (3, 40))
    )
    rows = -(-m // 4)
    within = jax.jit(_sharding.within, static_argnums=(1, 3))
    for begin in range(0, m, rows):
        got = within(sizes.astype(np.int32), m, np.int32(begin), rows)
        for part, whole in zip(got, sizes, strict=True):
            want = [
                min(max(r.stop - begin, 0), rows) - min(max(r.start - begin, 0), rows) for r in reference.rows(whole, m)
            ]
            np.testing.assert_array_equal(part, want)


@kinds
@pytest.mark.parametrize("text", ["g m", "n m", "g"])
def test_scan(rng, text, kind):
    """A loop over layers, whose matrices are split alike; forwards and backwards."""
    placement = Placement.of(text)
    mesh = placement.mesh(kind)
    layers = 3
    x, w = operands.integers(rng, (M, K)), operands.integers(rng, (layers, G, K, N))
    back = operands.integers(rng, (layers, G, N, K))
    sizes = np.stack([random_sizes(rng)[i] for i in (0, 2, 2)])

    def loss(dot, x, w, back):
        def layer(x, ws):
            w, back, s = ws
            y = dot(x, w, s)
            return dot(jnp.clip(y, -2, 2), back, s) % 3, None

        return (jax.lax.scan(layer, x, (w, back, sizes))[0] ** 2).sum()

    rows = placement.m or None
    args = (
        put(mesh, x, P(rows)),
        put(mesh, w, P(None, *placement.spec("gkn"))),
        put(mesh, back, P(None, *placement.spec("gnk"))),
    )

    def dot(x, w, s):
        # With Explicit axes, the second product contracts columns that are split.
        columns = placement.n or None if w.shape[1] == K else None
        return jax_gg.gmm(x, w, s, out_sharding=NamedSharding(mesh, P(rows, columns)))

    with jax.set_mesh(mesh):
        f = jax.jit(jax.grad(lambda *x: loss(dot, *x), (0, 1, 2)))
        got = f(*args)
        count = collectives(f.lower(*args).compile())
    for a, b, like in zip(got, jax.grad(lambda *x: loss(jax_gg.gmm, *x), (0, 1, 2))(x, w, back), args, strict=True):
        assert np.any(b)
        assert_exact(a, reference.f64(b))
        assert a.sharding.is_equivalent_to(like.sharding, a.ndim)
    assert set(count) <= {"all-reduce"}


# The spec of lhs[3, 4, m, k] and of sizes[4, g]; the matrices of the inner problems are the same.
VMAPS = {
    "inner": (P(None, "x"), P(), P("x")),
    "rows": (P(None, None, "x"), P(), P()),
    "groups": (P(), P("y"), P()),
    "inner-groups": (P(None, "x"), P("y"), P("x")),
    "inner-columns": (P(None, "x"), P(None, None, "y"), P("x")),
    "inner-rows": (P(None, "x", "y"), P(), P("x")),
}


@kinds
@pytest.mark.parametrize("specs", VMAPS.values(), ids=VMAPS)
def test_nested_vmap(rng, specs, kind):
    """Over a split dimension that is not the outer one, and over one that is not split."""
    mesh = make_mesh((4, 2), "xy", kind)
    lhs, rhs = operands.integers(rng, (3, 4, M, K)), operands.integers(rng, (G, K, N))
    sizes = np.stack(random_sizes(rng)[:4])
    lhs_spec, rhs_spec, sizes_spec = specs
    out_spec = P(*lhs_spec, *[None] * (3 - len(lhs_spec)), rhs_spec[2] if len(rhs_spec) == 3 else None)
    dout = operands.integers(rng, (3, 4, M, N))

    @jax.jit
    def f(lhs, rhs, sizes, dout):
        gmm = jax.vmap(jax.vmap(jax_gg.gmm, (0, None, 0)), (0, None, None))
        out, vjp = jax.vjp(lambda lhs, rhs: gmm(lhs, rhs, sizes), lhs, rhs)
        return out, *vjp(dout)

    args = [put(mesh, *x) for x in ((lhs, lhs_spec), (rhs, rhs_spec), (sizes, sizes_spec), (dout, out_spec))]
    with jax.set_mesh(mesh):
        out, dlhs, drhs = f(*args)
        count = collectives(f.lower(*args).compile())
    shardings = [x.sharding for x in (out, drhs)]
    out, dlhs = np.asarray(out), np.asarray(dlhs)
    for i, j in np.ndindex(3, 4):
        problem = lhs[i, j], rhs, sizes[j]
        assert_exact(out[i, j], reference.gmm(*problem))
        assert_exact(dlhs[i, j], reference.gmm_gradients(*problem, dout[i, j])[0])
    want = sum(reference.gmm_gradients(lhs[i, j], rhs, sizes[j], dout[i, j])[1] for i, j in np.ndindex(3, 4))
    assert_exact(drhs, want)
    assert shardings[0].is_equivalent_to(NamedSharding(mesh, out_spec), 4)
    assert shardings[1].is_equivalent_to(args[1].sharding, 3)
    assert set(count) == {"all-reduce"}


@pytest.mark.parametrize("layers", [2, 4])
def test_matrices_reshaped_from_split_ones(rng, layers):
    """Then the groups of a layer are split over a part of an axis, and the layers over the rest."""
    mesh = make_mesh((8,), "x")
    lhs, rhs = operands.integers(rng, (M, K)), operands.integers(rng, (2 * G, K, N))
    sizes = random_sizes(rng, 2 * G)[0]
    groups = 2 * G // layers

    @jax.jit
    def f(lhs, rhs):
        one = lambda rhs, offset: jax_gg.gmm(lhs, rhs, sizes, group_offset=offset)  # noqa: E731
        return jax.vmap(one)(rhs.reshape(layers, groups, K, N), groups * jnp.arange(layers)).sum(0)

    args = put(mesh, lhs, P()), put(mesh, rhs, P("x"))
    assert_exact(f(*args), reference.gmm(lhs, rhs, sizes))
    assert set(collectives(f.lower(*args).compile())) == {"all-reduce"}


UNEVEN = {"m": (P("x"), P()), "n": (P(), P(None, None, "x")), "k": (P(None, "x"), P(None, "x")), "g": (P(), P("x"))}


@pytest.mark.parametrize("dim", UNEVEN)
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_dimension_that_does_not_divide(rng, dim, transpose_rhs):
    """Inside a program, the last device has less, and undefined elements up to the size of the others' parts."""
    mesh = make_mesh((8,), "x")
    m, k, n, g = M - 3, K - 3, N - 3, 2 * G - 3
    lhs, rhs, dout = (operands.integers(rng, shape) for shape in ((m, k), (g, k, n), (m, n)))
    lhs_spec, rhs_spec = UNEVEN[dim]
    all_sizes = random_sizes(rng, g + 3)

    def split(lhs, rhs):
        # Padding starts as zero, and so is anything but that afterwards.
        lhs, rhs = (
            jax.lax.with_sharding_constraint(x, NamedSharding(mesh, s)) - 100
            for x, s in ((lhs, lhs_spec), (rhs, rhs_spec))
        )
        return lhs, rhs.swapaxes(1, 2) if transpose_rhs else rhs

    def forward(lhs, rhs, sizes):
        return jax_gg.gmm(*split(lhs, rhs), sizes, group_offset=1, transpose_rhs=transpose_rhs)

    @jax.jit
    def f(lhs, rhs, sizes, dout):
        return three(*split(lhs, rhs), sizes, 1, dout, transpose_rhs=transpose_rhs)

    for sizes in all_sizes:
        got = f(lhs + 100, rhs + 100, sizes, dout)
        want = (
            reference.gmm(lhs, rhs, sizes, group_offset=1),
            *reference.gmm_gradients(lhs, rhs, sizes, dout, group_offset=1),
        )
        if transpose_rhs:
            want = *want[:2], want[2].swapaxes(1, 2)
        for x, y in zip(got, want, strict=True):
            assert_exact(x, y)
    if dim in "kg":
        assert collectives(jax.jit(forward).lower(lhs, rhs, sizes).compile()) == {"all-reduce": 1}


@pytest.mark.parametrize("kind", [(AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)], ids=str)
@pytest.mark.parametrize("text", ["m g", "m n", "g m"])
def test_axes_of_both_kinds(rng, text, kind):
    placement = Placement.of(text)
    mesh = make_mesh((2, 4), "xy", kind)
    arrays = operands.integers(rng, (M, K)), operands.integers(rng, (G, K, N)), operands.integers(rng, (M, N))
    sizes = random_sizes(rng)[0]
    lhs, rhs, dout = (put(mesh, x, placement.spec(d)) for x, d in zip(arrays, ("mk", "gkn", "mn"), strict=True))
    with jax.set_mesh(mesh):
        results = jax.jit(three)(lhs, rhs, sizes, np.int32(0), dout)
        count = collectives(jax.jit(three).lower(lhs, rhs, sizes, np.int32(0), dout).compile())
    lhs, rhs, dout = arrays
    for got, want in zip(
        results, (reference.gmm(lhs, rhs, sizes), *reference.gmm_gradients(lhs, rhs, sizes, dout)), strict=True
    ):
        assert_exact(got, want)
    assert set(count) == {"all-reduce"}


def test_auto_axes_among_explicit_ones(rng):
    """The types of the context are not those inside."""
    mesh = make_mesh((2, 4), "xy", AxisType.Explicit)
    lhs, rhs, sizes = operands.integers(rng, (M, K)), operands.integers(rng, (G, K, N)), random_sizes(rng)[0]
    args = put(mesh, lhs, P("x")), put(mesh, rhs, P("y")), put(mesh, sizes, P())
    with jax.set_mesh(mesh):
        f = jax.jit(lambda *args: jax.sharding.auto_axes(jax_gg.gmm, out_sharding=P("x", None))(*args))
        assert_exact(f(*args), reference.gmm(lhs, rhs, sizes))
        assert collectives(f.lower(*args).compile()) == {"all-reduce": 1}


@pytest.mark.filterwarnings("ignore:.*GSPMD")
@pytest.mark.parametrize("placement", [Placement.of(text) for text in ("m", "k", "n", "g", "k n g")], ids=str)
def test_gspmd_partitioner(rng, placement):
    """Which JAX can still be told to use."""
    mesh = placement.mesh(AxisType.Auto)
    arrays = operands.integers(rng, (M, K)), operands.integers(rng, (G, K, N)), operands.integers(rng, (M, N))
    sizes = random_sizes(rng)[0]
    lhs, rhs, dout = (put(mesh, x, placement.spec(d)) for x, d in zip(arrays, ("mk", "gkn", "mn"), strict=True))
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        compiled = jax.jit(three).lower(lhs, rhs, put(mesh, sizes, P()), np.int32(0), dout).compile()
        results = compiled(lhs, rhs, put(mesh, sizes, P()), np.int32(0), dout)
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)
    assert results[2].sharding.is_equivalent_to(rhs.sharding, 3)
    lhs, rhs, dout = arrays
    for got, want in zip(
        results, (reference.gmm(lhs, rhs, sizes), *reference.gmm_gradients(lhs, rhs, sizes, dout)), strict=True
    ):
        assert_exact(got, want)
    assert set(collectives(compiled)) <= {"all-reduce"}


def test_second_derivatives(rng):
    mesh = make_mesh((2, 2, 2), "xyz")
    lhs, rhs, sizes = operands.integers(rng, (M, K)), operands.integers(rng, (G, K, N)), random_sizes(rng)[0]

    def second(lhs, rhs):
        def loss(lhs, rhs):
            out = jax_gg.gmm(lhs, rhs, sizes)
            return (out % 2).sum() + (out[:2] ** 2).sum() / 2

        return jax.grad(lambda *x: sum(g[..., :2].sum() for g in jax.grad(loss, (0, 1))(*x)), (0, 1))(lhs, rhs)

    got = jax.jit(second)(put(mesh, lhs, P("x")), put(mesh, rhs, P("y", None, "z")))
    for x, y in zip(got, second(lhs, rhs), strict=True):
        assert_exact(x, reference.f64(y))


class TestOutSharding:
    """Of gmm and of ragged_dot, which passes it on."""

    @pytest.fixture
    def arrays(self, rng):
        return operands.integers(rng, (M, K)), operands.integers(rng, (G, K, N)), random_sizes(rng)[0]

    @kinds
    @pytest.mark.parametrize("spec", [P(), P("x"), P(None, "y"), P(("y", "x")), P("y", "x")], ids=str)
    def test_ragged_dot(self, arrays, kind, spec):
        mesh = make_mesh((2, 4), "xy", kind)
        args = [put(mesh, *x) for x in zip(arrays, (P("x"), P("y"), P()), strict=True)]
        with jax.set_mesh(mesh):
            for sharding in (spec, NamedSharding(mesh, spec)):
                for out in (
                    jax_gg.ragged_dot(*args, out_sharding=sharding),
                    jax.jit(lambda *args, s=sharding: jax_gg.ragged_dot(*args, out_sharding=s))(*args),
                ):
                    assert_exact(out, reference.gmm(*arrays))
                    assert out.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)

    def test_type(self, arrays):
        """It is in the type of the result, also where no array has an Explicit axis yet."""
        mesh = make_mesh((8,), "x", AxisType.Explicit)
        with jax.set_mesh(mesh):
            out = jax.eval_shape(lambda *x: jax_gg.ragged_dot(*x, out_sharding=P(None, "x")), *arrays)
        assert out.sharding.spec == P(None, "x")

    def test_other_dtypes(self, arrays):
        """Those that jax.lax.ragged_dot computes."""
        if jax.__version_info__ < (0, 9):
            pytest.skip("jax.lax.ragged_dot has no out_sharding yet")
        mesh = make_mesh((8,), "x", AxisType.Explicit)
        lhs, rhs, sizes = (x.astype(np.int32) for x in arrays)
        with jax.set_mesh(mesh):
            out = jax.eval_shape(lambda *x: jax_gg.ragged_dot(*x, out_sharding=P(None, "x")), lhs, rhs, sizes)
        assert out.sharding.spec == P(None, "x")

    @pytest.mark.parametrize(
        ("sharding", "error", "message"),
        [
            ("x", TypeError, "out_sharding: got str, expected None, a PartitionSpec or a NamedSharding"),
            (P("x", "y", None), ValueError, r"out_sharding: got .*, expected at most 2 dimensions, \[m, n\]"),
            (P("z"), ValueError, r"out_sharding: got .*, with 'z', expected axes of the mesh, \('x', 'y'\)"),
            (P("y"), ValueError, r"out_sharding: got 'y', an Auto axis, expected Explicit axes only"),
        ],
    )
    def test_errors(self, arrays, sharding, error, message):
        mesh = make_mesh((2, 4), "xy", (AxisType.Explicit, AxisType.Auto))
        for f in (jax_gg.gmm, jax_gg.ragged_dot):
            with jax.set_mesh(mesh), pytest.raises(error, match=f"^{message}$"):
                f(*arrays, out_sharding=sharding)

    def test_without_a_mesh(self, arrays):
        message = r"^out_sharding: got .* without a mesh, expected a NamedSharding, or a mesh of jax.set_mesh$"
        with pytest.raises(ValueError, match=message):
            jax_gg.gmm(*arrays, out_sharding=P())

    def test_split_contraction(self, arrays):
        """As for jax.numpy.dot, there is more than one way."""
        mesh = make_mesh((8,), "x", AxisType.Explicit)
        lhs, rhs, sizes = arrays
        lhs, rhs = put(mesh, lhs, P(None, "x")), put(mesh, rhs, P(None, "x"))
        with jax.set_mesh(mesh):
            with pytest.raises(Exception, match="ambiguous"):
                jnp.dot(lhs, rhs[0])
            with pytest.raises(
                ValueError, match=r"^out_sharding: got None, expected .* k is split in lhs .* and in rhs"
            ):
                jax_gg.gmm(lhs, rhs, sizes)
            with pytest.raises(
                ValueError, match=r"^out_sharding: got None, expected .* m is split in lhs .* and in rhs"
            ):
                jax_gg.tgmm(put(mesh, arrays[0], P("x")), put(mesh, arrays[0], P("x")), sizes)

    def test_one_axis_twice(self, arrays):
        mesh = make_mesh((8,), "x", AxisType.Explicit)
        lhs, rhs, sizes = arrays
        lhs, rhs = put(mesh, lhs, P("x")), put(mesh, rhs, P(None, None, "x"))
        with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"^out_sharding: got None, .* one axis twice"):
            jax_gg.gmm(lhs, rhs, sizes)


class TestOneDevice:
    """Nothing of this is left where it has nothing to do."""

    def count(self, *shape):
        m, k, n = shape
        args = np.ones((m, k), np.float32), np.ones((G, k, n), np.float32), np.ones(G, np.int32)
        return primitives(lambda *x: jax.vjp(lambda *y: jax_gg.gmm(*y, x[2]), *x[:2])[1](jnp.ones((m, n))), *args)

    def test_jaxpr(self, monkeypatch):
        assert self.count(3, 4, 8)["custom_partitioning"]
        monkeypatch.setattr(jax, "device_count", lambda: 1)
        assert not self.count(5, 4, 8)["custom_partitioning"]

    def test_manual_axes(self):
        mesh = make_mesh((8,), "x")
        f = jax.shard_map(jax_gg.gmm, mesh=mesh, in_specs=(P(), P(None, None, "x"), P()), out_specs=P(None, "x"))
        count = primitives(f, np.ones((6, 4), np.float32), np.ones((G, 4, 8), np.float32), np.ones(G, np.int32))
        assert count["jax_gg_gmm"]
        assert not count["custom_partitioning"]

    def test_lowered(self):
        """A program for one device holds the call of the kernel and no call into Python, exported or not."""
        args = np.ones((6, 4), np.float32), np.ones((G, 4, 8), np.float32), np.ones(G, np.int32)
        checks = [jax.export.DisabledSafetyCheck.custom_call("jax_gg_gmm")]
        exported = jax.export.export(jax.jit(jax_gg.gmm), disabled_checks=checks)(*args).mlir_module()
        for text in (jax.jit(jax_gg.gmm).lower(*args).as_text(), exported):
            assert re.findall(r"custom_call @(\w+)", text) == ["jax_gg_gmm"]


@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="needs the shard_map that JAX 0.8 cannot vmap")
def test_export_with_explicit_axes(rng):
    """A program for eight devices that calls nothing in this process."""
    pytest.importorskip("flatbuffers", reason="jax.export serialises with it")
    mesh = make_mesh((2, 4), "xy", AxisType.Explicit)
    arrays = operands.integers(rng, (M, K)), operands.integers(rng, (G, K, N)), random_sizes(rng)[0]
    args = [put(mesh, *x) for x in zip(arrays, (P("x"), P("y"), P()), strict=True)]
    checks = [jax.export.DisabledSafetyCheck.custom_call("jax_gg_gmm")]
    with jax.set_mesh(mesh):
        exported = jax.export.export(jax.jit(jax_gg.gmm), disabled_checks=checks)(*args)
        out = jax.jit(jax.export.deserialize(exported.serialize()).call)(*args)
    assert_exact(out, reference.gmm(*arrays))


def test_documentation():
    """The examples of docs/sharding.md, one after the other."""
    text = (pathlib.Path(__file__).parents[1] / "docs" / "sharding.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", text, re.S)
    assert len(examples) == 2
    names: dict = {}
    for example in examples:
        exec(compile(example, "docs/sharding.md", "exec"), names)
    assert np.asarray(names["out"]).max() == 64
