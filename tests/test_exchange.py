"""The exchange of rows between devices that hold the experts, on eight CPU devices.

The CPU has no ragged all-to-all. For the method "ragged" these tests put one in its place that does what JAX documents,
so that what jax_gg computes for it, offsets and sizes and the derivative, is what is tested; what a GPU is asked to do
is read in the lowered program.
"""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import operands
import pytest
import reference
from compare import assert_exact
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from platforms import Gpu

import jax_gg
from jax_gg import moe

DEVICES, ROWS, D, N = 8, 12, 4, 6


def make_mesh(shape=(DEVICES,), names=("expert",)):
    devices = jax.devices("cpu")[: np.prod(shape)]
    return jax.make_mesh(shape, names, (AxisType.Auto,) * len(shape), devices=devices)


def ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What `jax.lax.ragged_all_to_all` documents; NaN where sender and receiver do not agree on a size."""

    def received(x):
        """From each sender what it says of the slices for this device, one after the other."""
        return jax.lax.all_to_all(x, axis_name, 0, 0, tiled=True)

    begins, sizes, targets = map(received, (input_offsets, send_sizes, output_offsets))
    data = jax.lax.all_gather(operand, axis_name)
    within = jnp.arange(len(output), dtype=jnp.int32)[:, None] - targets[None]
    hit = (within >= 0) & (within < sizes[None])
    slot = hit.argmax(axis=1)  # slices do not overlap
    sender = slot // (len(sizes) // len(data))
    sent = data[sender, begins[slot] + jnp.take_along_axis(within, slot[:, None], axis=1)[:, 0]]
    sent = jnp.where((sizes == recv_sizes)[slot][:, None], sent, jnp.asarray(np.nan, sent.dtype))
    return jnp.where(hit.any(axis=1)[:, None], sent, output)


@pytest.fixture(params=["padded", "ragged"])
def method(request, monkeypatch):
    if request.param == "ragged":
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
        monkeypatch.setattr(moe._ragged_p, "bind", lambda x: x)
    return request.param


def served(counts, rows):
    """The expert of each row of each sender, -1 for none, `[P, rows]`."""
    experts = np.full((len(counts), rows), -1)
    for of_sender, sizes in zip(experts, counts, strict=True):
        for expert, r in enumerate(reference.rows(sizes, rows)):
            of_sender[r] = expert
    return experts


def delivery(counts, rows, per_device, buffer_rows, block_rows):
    """For each device the (sender, row) that it gets, in order, and how many did not fit."""
    experts = served(counts, rows)
    buffers, overflows = [], []
    for device in range(len(counts)):
        wanted = []
        for sender, of_sender in enumerate(experts):
            here = np.flatnonzero(of_sender // per_device == device)
            wanted += [(of_sender[row], sender, row) for row in here[:block_rows]]
        fitting = sorted(wanted)[:buffer_rows]
        buffers.append(fitting)
        overflows.append(int((experts // per_device == device).sum()) - len(fitting))
    return buffers, overflows


def cases(rng, experts, devices=DEVICES, rows=ROWS, nothing_for=3):
    """Counts of all senders `[devices, experts]`, by what is special about them."""
    even = np.ones(experts) / experts
    zipf = 1 / np.arange(1, experts + 1) ** 1.5
    per_device = experts // devices
    nothing = even * (np.arange(experts) // per_device != nothing_for)
    yield "random", rng.multinomial(rows, even, devices)
    yield "skewed", rng.multinomial(rows, zipf / zipf.sum(), devices)
    yield "one device gets nothing", rng.multinomial(rows, nothing / nothing.sum(), devices)
    everything = np.zeros((devices, experts), int)
    everything[:, nothing_for * per_device] = rows
    yield "one device gets everything", everything
    yield "rows past the sum", rng.multinomial(rows // 2, even, devices)
    yield "some send nothing", rng.multinomial(rows, even, devices) * rng.integers(0, 2, (devices, 1))
    yield "nothing", np.zeros((devices, experts), int)
    yield "no counts at all", rng.choice([-5, 3, np.iinfo(np.int32).max], (devices, experts))


def with_nan(x, counts):
    """`x` with NaN where nothing may be read."""
    x = x.copy()
    x[served(counts, len(x) // len(counts)).ravel() < 0] = np.nan
    return x


@pytest.mark.parametrize(
    ("per_device", "buffer_rows", "block_rows", "check_vma"),
    [
        (1, 96, None, False),
        (2, 96, None, True),
        (4, 13, None, True),
        (2, 1, None, False),
        (1, 200, 5, True),
        (3, 13, 2, False),
    ],
)
def test_rows(rng, method, per_device, buffer_rows, block_rows, check_vma):
    """Every row goes where it should, and back, or is counted; the same ones always are."""
    if method == "ragged" and block_rows:
        pytest.skip("it has no blocks")
    mesh = make_mesh()

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=check_vma)
    def f(x, counts, past):
        options = {"axis_name": "expert", "buffer_rows": buffer_rows, "block_rows": block_rows}
        exchange = moe.dispatch(x, counts.ravel(), method=method, **options)
        filled = jnp.arange(buffer_rows)[:, None] < exchange.group_sizes.sum()
        back = moe.combine(jnp.where(filled, 2 * exchange.rows, past), exchange)
        return exchange.rows[None], exchange.group_sizes[None], exchange.overflow[None], back

    x = np.arange(1, DEVICES * ROWS * D + 1, dtype=np.float32).reshape(DEVICES, ROWS, D)
    past = np.full((DEVICES, 1), np.nan, np.float32)
    for name, counts in cases(rng, per_device * DEVICES):
        counts = counts.astype(np.int32)
        buffers, overflows = delivery(counts, ROWS, per_device, buffer_rows, block_rows)
        rows, sizes, overflow, back = f(with_nan(x.reshape(-1, D), counts), counts, past)
        np.testing.assert_array_equal(overflow, overflows, name)
        want_back = np.zeros_like(x)
        for device, buffer in enumerate(buffers):
            want = np.zeros((buffer_rows, D), np.float32)
            for place, (_, sender, row) in enumerate(buffer):
                want[place] = x[sender, row]
                want_back[sender, row] = 2 * x[sender, row]
            np.testing.assert_array_equal(rows[device], want, name)
            experts = [int(expert) % per_device for expert, _, _ in buffer]
            np.testing.assert_array_equal(sizes[device], np.bincount(experts, minlength=per_device), name)
        np.testing.assert_array_equal(back, want_back.reshape(-1, D), name)


def experts(x, weights, counts, *, axis="expert", **options):
    """Each row multiplied by the matrix of its expert, wherever that is; counts are `[1, E]` on each device."""
    exchange = moe.dispatch(x, counts.ravel(), axis_name=axis, **options)
    y = jax_gg.gmm(exchange.rows, weights, exchange.group_sizes)
    return moe.combine(y, exchange), exchange.overflow


def on_one_device(x, weights, counts, dout, per_device, buffer_rows, devices=DEVICES):
    """Output, gradients of rows and of matrices, and overflow, with all experts at hand, in float64."""
    rows = len(x) // devices
    buffers, overflows = delivery(counts, rows, per_device, buffer_rows, None)
    out = np.zeros((len(x), weights.shape[2]))
    dx, dweights = np.zeros(x.shape), np.zeros(weights.shape)
    for expert, sender, row in sorted(entry for buffer in buffers for entry in buffer):
        i, w = sender * rows + row, reference.f64(weights[expert])
        out[i] = reference.f64(x[i]) @ w
        dx[i] = w @ reference.f64(dout[i])
        dweights[expert] += np.outer(reference.f64(x[i]), reference.f64(dout[i]))
    return (out, dx, dweights), overflows


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
@pytest.mark.parametrize(
    ("per_device", "buffer_rows", "dtype"), [(2, 96, np.float32), (1, 14, jnp.bfloat16)], ids=["all fit", "overflow"]
)
def test_gradients(rng, method, per_device, buffer_rows, dtype, check_vma):
    """Output and gradients are one device's; rows that did not fit have none."""
    mesh, count = make_mesh(), per_device * DEVICES
    f = functools.partial(experts, buffer_rows=buffer_rows, method=method)
    spec = P("expert")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=(spec, spec), check_vma=check_vma)
    def layer(x, weights, counts):
        out, overflow = f(x, weights, counts)
        return out, overflow[None]

    @jax.jit
    def three(x, weights, counts, dout):
        out, vjp, overflow = jax.vjp(lambda *args: layer(*args, counts), x, weights, has_aux=True)
        return (out, *vjp(dout)), overflow

    x = operands.integers(rng, (DEVICES * ROWS, D), dtype)
    weights, dout = operands.integers(rng, (count, D, N), dtype), operands.integers(rng, (DEVICES * ROWS, N), dtype)
    for name, counts in cases(rng, count):
        args = with_nan(x, counts), weights, counts.astype(np.int32), dout
        want, overflows = on_one_device(x, weights, counts, dout, per_device, buffer_rows)
        got, overflow = three(*args)
        assert overflow.tolist() == overflows, name
        for a, b in zip(got, want, strict=True):
            assert a.dtype == dtype
            assert_exact(a, b.astype(dtype).astype(np.float64))


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no-vma"])
def test_gradients_taken_inside(rng, method, check_vma):
    spec, (per_device, buffer_rows) = P("expert"), (2, 20)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=make_mesh(), in_specs=spec, out_specs=spec, check_vma=check_vma)
    def inside(x, weights, counts, dout):
        def loss(x, weights):
            out, _ = experts(x, weights, counts, buffer_rows=buffer_rows, method=method)
            return jnp.sum(out * dout)

        return jax.grad(loss, (0, 1))(x, weights)

    x, weights = operands.integers(rng, (DEVICES * ROWS, D)), operands.integers(rng, (16, D, N))
    dout = operands.integers(rng, (DEVICES * ROWS, N))
    for _, counts in cases(rng, 16):
        (_, *want), _ = on_one_device(x, weights, counts, dout, per_device, buffer_rows)
        for got, exact in zip(inside(x, weights, counts.astype(np.int32), dout), want, strict=True):
            assert_exact(got, exact)


@pytest.mark.parametrize("axis", ["expert", ("data", "expert"), ["expert", "data"]], ids=str)
def test_two_axes(rng, method, axis):
    """Experts over one axis, each row of devices exchanging among itself, or over both, in either order."""
    mesh = make_mesh((2, 4), ("data", "expert"))
    devices = 4 if axis == "expert" else 8
    count, buffer_rows = 2 * devices, 3 * ROWS
    rows_over = ("data", "expert") if axis == "expert" else tuple(axis)
    weights_over = "expert" if axis == "expert" else tuple(axis)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(rows_over), P(weights_over), P(rows_over)),
        out_specs=(P(rows_over), P(rows_over)),
    )
    def layer(x, weights, counts):
        out, overflow = experts(x, weights, counts, axis=axis, buffer_rows=buffer_rows, method=method)
        return out, overflow[None]

    @jax.jit
    def three(x, weights, counts, dout):
        out, vjp, overflow = jax.vjp(lambda *args: layer(*args, counts), x, weights, has_aux=True)
        return (out, *vjp(dout)), overflow

    x, dout = operands.integers(rng, (8 * ROWS, D)), operands.integers(rng, (8 * ROWS, N))
    weights = operands.integers(rng, (count, D, N))
    for first, second in zip(cases(rng, count, 4), list(cases(rng, count, 4))[::-1], strict=True):
        counts = np.concatenate([first[1], second[1]]).astype(np.int32)
        (out, dx, dweights), overflow = three(x, weights, counts, dout)
        parts = [slice(None)] if devices == 8 else [slice(0, 4), slice(4, 8)]
        want_dweights, want_overflow = 0, []
        for part in parts:
            rows = slice(*(ROWS * i for i in part.indices(8)[:2]))
            want, overflows = on_one_device(x[rows], weights, counts[part], dout[rows], 2, buffer_rows, devices)
            assert_exact(out[rows], want[0])
            assert_exact(dx[rows], want[1])
            want_dweights += want[2]
            want_overflow += overflows
        assert_exact(dweights, want_dweights)
        assert overflow.tolist() == want_overflow


def test_more_axes_in_what_comes_back(rng, method):
    """The columns of the experts are split over a second axis; the rows that they share are not, and get a sum."""
    mesh = make_mesh((4, 2), ("expert", "tensor"))
    count, buffer_rows = 8, 20

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("expert"), P("expert", None, "tensor"), P("expert")),
        out_specs=P("expert", "tensor"),
    )
    def layer(x, weights, counts):
        return experts(x, weights, counts, buffer_rows=buffer_rows, method=method)[0]

    x, dout = operands.integers(rng, (4 * ROWS, D)), operands.integers(rng, (4 * ROWS, N))
    weights = operands.integers(rng, (count, D, N))

    @jax.jit
    def three(counts):
        out, vjp = jax.vjp(lambda *args: layer(*args, counts), x, weights)
        return out, *vjp(jnp.asarray(dout))

    for _, counts in cases(rng, count, 4):
        want, _ = on_one_device(x, weights, counts, dout, 2, buffer_rows, 4)
        for got, exact in zip(three(counts.astype(np.int32)), want, strict=True):
            assert_exact(got, exact)


def test_same_rows_on_all_devices(rng, method):
    """Without a device's own rows and counts, check_vma included; their gradient is the sum of all devices'."""
    mesh, counts = make_mesh(), rng.multinomial(ROWS, np.ones(16) / 16).astype(np.int32)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("expert"), P()), out_specs=P("expert"))
    def layer(x, weights, counts):
        return experts(x, weights, counts, buffer_rows=96, method=method)[0]

    x, weights = operands.integers(rng, (ROWS, D)), operands.integers(rng, (16, D, N))
    dout = operands.integers(rng, (DEVICES * ROWS, N))
    got = jax.grad(lambda x: jnp.sum(layer(x, weights, counts) * dout))(x)
    want, _ = on_one_device(np.tile(x, (DEVICES, 1)), weights, np.tile(counts, (DEVICES, 1)), dout, 2, 96)
    assert_exact(got, want[1].reshape(DEVICES, ROWS, D).sum(0))


def test_second_derivative(rng, method):
    mesh, counts = make_mesh(), next(cases(rng, 16))[1].astype(np.int32)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    def f(x, counts):
        exchange = moe.dispatch(x, counts.ravel(), axis_name="expert", buffer_rows=96, method=method)
        return moe.combine(exchange.rows**3, exchange)

    x = operands.integers(rng, (DEVICES * ROWS, D))
    first = jax.grad(lambda x: f(x, counts).sum())
    assert_exact(jax.jit(jax.grad(lambda x: first(x).sum()))(x), 6.0 * x)


@pytest.mark.parametrize("transform", ["scan of remat", "vmap"])
def test_transforms(rng, method, transform):
    mesh = make_mesh()
    counts = np.stack([c for _, c in cases(rng, 16)][:3], axis=1).astype(np.int32)  # [P, 3, E]
    x = operands.integers(rng, (DEVICES, 3, ROWS, D))
    weights, dout = operands.integers(rng, (16, D, N)), operands.integers(rng, (DEVICES, 3, ROWS, N))

    def f(x, weights, counts):
        return experts(x, weights, counts, buffer_rows=20, method=method)[0]

    def mapped(x, weights, counts):
        x, counts = x[0], counts[0]
        if transform == "vmap":
            return jax.vmap(f, (0, None, 0))(x, weights, counts)[None]
        g = jax.checkpoint(f)
        return jax.lax.scan(lambda _, args: (None, g(args[0], weights, args[1])), None, (x, counts))[1][None]

    if (transform, method) == ("vmap", "ragged"):
        pytest.skip("what stands in for the collective here has no batching rule of its own")
    layer = jax.shard_map(mapped, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))

    @jax.jit
    def three(x, weights):
        out, vjp = jax.vjp(lambda *args: layer(*args, counts), x, weights)
        return out, *vjp(jnp.asarray(dout))

    out, dx, dweights = three(x, weights)
    want_dweights = 0
    for i in range(3):
        a, b = x[:, i].reshape(-1, D), dout[:, i].reshape(-1, N)
        want, _ = on_one_device(a, weights, counts[:, i], b, 2, 20)
        assert_exact(out[:, i].reshape(-1, N), want[0])
        assert_exact(dx[:, i].reshape(-1, D), want[1])
        want_dweights += want[2]
    assert_exact(dweights, want_dweights)


@pytest.mark.parametrize("shape", [(0, D), (ROWS, 0)], ids=["no rows", "no columns"])
@pytest.mark.parametrize("method", ["padded", "ragged"])  # Nothing to send is not sent, on the CPU either.
def test_nothing_to_send(shape, method):
    mesh = make_mesh()

    def f(x):
        exchange = moe.dispatch(x, jnp.ones(8, jnp.int32), axis_name="expert", buffer_rows=9, method=method)
        return exchange.rows, moe.combine(exchange.rows, exchange), exchange.overflow[None]

    f = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")))
    rows, back, overflow = f(jnp.ones((DEVICES * shape[0], shape[1])))
    assert rows.shape == (DEVICES * 9, shape[1])
    assert not rows.any()
    assert back.shape == (DEVICES * shape[0], shape[1])
    assert not overflow.any()


def layer_of(method, buffer_rows=40):
    """A jitted layer on eight devices, with its derivative, and what to lower it for."""
    f = functools.partial(experts, buffer_rows=buffer_rows, method=method)
    layer = jax.shard_map(
        lambda *args: f(*args)[0], mesh=make_mesh(), in_specs=P("expert"), out_specs=P("expert"), check_vma=False
    )

    @jax.jit
    def three(x, weights, counts, dout):
        out, vjp = jax.vjp(lambda *args: layer(*args, counts), x, weights)
        return out, *vjp(dout)

    shapes = (DEVICES * ROWS, D), (16, D, N), (DEVICES, 16), (DEVICES * ROWS, N)
    dtypes = np.float32, np.float32, np.int32, np.float32
    return three, [jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True)]


class TestSeveral(Gpu):
    @pytest.mark.skipif(jax.device_count() < 2, reason="JAX sees one GPU")
    @pytest.mark.parametrize("method", ["ragged", "padded"])
    def test_experts(self, rng, method):
        """As on the CPU, with the collectives of a GPU."""
        devices, rows = jax.device_count(), 256
        mesh = jax.make_mesh((devices,), ("expert",), (AxisType.Auto,), devices=jax.devices("gpu"))
        count, buffer_rows = 2 * devices, 300
        layer = functools.partial(experts, buffer_rows=buffer_rows, method=method)

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False)
        def sharded(x, weights, counts):
            out, overflow = layer(x, weights, counts)
            return out, overflow[None]

        @jax.jit
        def three(x, weights, counts, dout):
            out, vjp, overflow = jax.vjp(lambda *args: sharded(*args, counts), x, weights, has_aux=True)
            return (out, *vjp(dout)), overflow

        x, dout = operands.integers(rng, (devices * rows, 16)), operands.integers(rng, (devices * rows, 24))
        weights = operands.integers(rng, (count, 16, 24))
        for name, counts in cases(rng, count, devices, rows, nothing_for=0):
            want, overflows = on_one_device(x, weights, counts, dout, 2, buffer_rows, devices)
            got, overflow = three(with_nan(x, counts), weights, counts.astype(np.int32), dout)
            assert overflow.tolist() == overflows, name
            for a, b in zip(got, want, strict=True):
                assert_exact(a, b)


def test_ragged_on_a_gpu():
    """Forth and back and forth and back, rows and buffers and nothing else; the counts are gathered once."""
    f, args = layer_of("ragged")
    text = f.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"@ragged_all_to_all\(.*?: \((.*?)\) ->", text)
    slices = ", ".join(["tensor<16xi32>"] * 4)
    there, back = "tensor<12x{0}xf32>, tensor<40x{0}xf32>, ", "tensor<40x{0}xf32>, tensor<12x{0}xf32>, "
    # Columns: D forth, N back; of the cotangents N forth and D back.
    want = [there.format(D), back.format(N), there.format(N), back.format(D)]
    assert sorted(calls) == sorted(x + slices for x in want)
    assert len(re.findall(r'"stablehlo.all_gather"', text)) == 1
    assert "all_to_all" not in text.replace("ragged_all_to_all", "")


def test_padded_on_a_cpu():
    f, args = layer_of("padded")
    text = f.lower(*args).compile().as_text()
    assert len(re.findall(r" all-to-all(?:-start)?\(", text)) == 4
    assert len(re.findall(r" all-gather(?:-start)?\(", text)) == 1
    assert not re.search(r" (all-reduce|reduce-scatter|collective-permute)(?:-start)?\(", text)


def test_scatters_nothing():
    """Rows are gathered in both directions of both derivatives, so that sums have one order."""
    f, args = layer_of("padded")
    assert "scatter" not in str(f.trace(*args).jaxpr)


def test_ragged_on_a_cpu():
    f, args = layer_of("ragged")
    with pytest.raises(NotImplementedError) as e:
        f.lower(*args)
    assert first_line(e) == 'method: got "ragged" on cpu, which lacks it, expected "padded"'


def first_line(e):
    """The message, without what JAX adds to all errors when it is the first."""
    return str(e.value).split("\n-----", 1)[0]


X, COUNTS = np.ones((ROWS, D), np.float32), np.ones(16, np.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": [1, 2]}, TypeError, "x: got list, expected an array of shape [rows, d]"),
        ({"x": X[0]}, ValueError, "x: got shape (4,), expected 2 dimensions, [rows, d]"),
        (
            {"counts": COUNTS[:12]},
            ValueError,
            "counts: got shape (12,), expected [experts], a multiple of the 8 devices of the axis",
        ),
        (
            {"counts": COUNTS[:0]},
            ValueError,
            "counts: got shape (0,), expected [experts], a multiple of the 8 devices of the axis",
        ),
        (
            {"counts": COUNTS[None]},
            ValueError,
            "counts: got shape (1, 16), expected [experts], a multiple of the 8 devices of the axis",
        ),
        ({"counts": X[0]}, TypeError, "counts: got dtype float32, expected an integer array of shape [experts]"),
        ({"buffer_rows": 0}, ValueError, "buffer_rows: got 0, expected 1 or more"),
        ({"buffer_rows": 8.0}, TypeError, "buffer_rows: got float, expected an int"),
        ({"method": "dense"}, ValueError, 'method: got \'dense\', expected "ragged" or "padded"'),
        ({"block_rows": 0}, ValueError, "block_rows: got 0, expected 1 or more"),
        ({"method": "ragged", "block_rows": 4}, ValueError, 'block_rows: got 4, expected None with method="ragged"'),
        (
            {"x": jax.ShapeDtypeStruct((2**28, 0), np.float32)},
            ValueError,
            "x: got 268435456 rows on each of 8 devices, expected at most 2147483647 in all",
        ),
    ],
)
def test_errors(changes, error, message):
    args = {"x": X, "counts": COUNTS, "axis_name": "expert", "buffer_rows": 8, "method": "padded"} | changes

    def f():
        x = args["x"]
        x = jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x
        return moe.dispatch(**(args | {"x": x})).rows

    with pytest.raises(error) as e:
        jax.eval_shape(jax.shard_map(f, mesh=make_mesh(), in_specs=(), out_specs=P("expert")))
    assert first_line(e) == message


@pytest.mark.parametrize(
    ("y", "exchange", "error", "message"),
    [
        (X[:9], None, ValueError, "y: got shape (9, 4), expected [buffer_rows, n] of 8 rows"),
        (X[0], None, ValueError, "y: got shape (4,), expected [buffer_rows, n] of 8 rows"),
        (None, None, TypeError, "y: got NoneType, expected an array of shape [buffer_rows, n]"),
        (X[:8], X, TypeError, "exchange: got ndarray, expected the Exchange that dispatch returned"),
    ],
)
def test_errors_of_combine(y, exchange, error, message):
    def f():
        sent = moe.dispatch(X, COUNTS, axis_name="expert", buffer_rows=8, method="padded")
        return moe.combine(y, sent if exchange is None else exchange)

    with pytest.raises(error) as e:
        jax.eval_shape(jax.shard_map(f, mesh=make_mesh(), in_specs=(), out_specs=P("expert")))
    assert first_line(e) == message


def test_docs():
    """The examples of docs/experts.md, one after the other."""
    text = (pathlib.Path(__file__).parents[1] / "docs" / "experts.md").read_text()
    examples = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(examples) == 2
    names = {}
    with jax.numpy_dtype_promotion("standard"):
        for example in examples:
            exec(compile(example, "docs/experts.md", "exec"), names)
