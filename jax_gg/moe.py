"""Mixture-of-experts around `gmm`: the exchange of tokens between the devices that hold the experts.

Inside `jax.shard_map`, E experts are split over the P devices of a mesh axis, L = E / P on each, in order. Every device
sends a slice of its rows to each expert, and each device receives P slices for each of its experts, ordered by expert
and then by sender, so that they are the groups of a `gmm`. The way back is the same exchange with the two ends swapped,
and so is each derivative:

    dispatch   rows -> buffer      dx = combine(drows)
    combine    buffer -> rows      dy = dispatch(dout)

Where slices begin and end follows from the counts of all devices, `[P, E]` integers that are gathered; they stay on the
devices. A slice that would run past the end of a buffer is cut there.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax.interpreters import batching, mlir

from jax_gg import _checks, _sharding, _types


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Route:
    """The static half of an exchange."""

    axis_name: Any
    method: str
    rows: int
    buffer_rows: int
    block_rows: int  # of "padded": what one device may send to one other


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Slices:
    """What one device sends or receives: int32 `[P, L]`, one slice for each device at the other end and expert."""

    starts: jax.Array  # the first row of each slice here
    sizes: jax.Array
    remote: jax.Array  # its first row at the other end


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Exchange:
    """What `dispatch` brought to this device.

    Attributes:
      rows: `[buffer_rows, d]`, the received rows ordered by expert, and zeros.
      group_sizes: int32 `[L]`, the rows of each expert of this device: those of a `gmm`.
      overflow: int32 scalar: how many rows were sent to this device and did not fit. Summed over the devices it is the
        number of rows that come back as zeros.
    """

    rows: jax.Array
    group_sizes: jax.Array
    overflow: jax.Array
    _sent: _Slices
    _received: _Slices
    _route: _Route


def dispatch(
    x: jax.Array, counts: Any, *, axis_name: Any, buffer_rows: int, method: str, block_rows: int | None = None
) -> Exchange:
    """Sends each row of `x` to the device that has its expert.

    For use inside `jax.shard_map`, on every device of the axis at once. The rows must be sorted by expert. `counts` is
    read like the `group_sizes` of `gmm`: it is data, a negative count is 0, and rows of `x` past the sum are sent
    nowhere. Differentiable in reverse mode, any number of times, with respect to `x`.

    No row is dropped as long as no device is sent more than `buffer_rows`. Past that, rows are dropped from the end of
    the order in which they are received, by expert and then by sender: always the same ones for the same counts. They
    are counted in `overflow`, come back from `combine` as zeros, and get a gradient of zeros.

    Args:
      x: `[rows, d]` of any dtype; the same shape on all devices.
      counts: integers `[E]`, the rows of `x` for each of the E experts of all devices. E is a multiple of the number of
        devices, and device i has the experts `i * L` to `(i + 1) * L`, where L is E over the number of devices.
      axis_name: the mesh axis, or a tuple of axes, that the experts are split over.
      buffer_rows: how many rows this device has room for. `rows` times the number of devices always suffices.
      method: "ragged" sends the rows and nothing else, by `jax.lax.ragged_all_to_all`, which the CPU lacks; "padded"
        sends `block_rows` rows to every device, by `jax.lax.all_to_all`.
      block_rows: with "padded", how many rows one device may send to one other. Rows past these are dropped and counted
        too. By default as many as never drop any that the buffer has room for, which is the smaller of `rows` and
        `buffer_rows`.

    Returns:
      An `Exchange`: the received rows, their `group_sizes` and the `overflow`.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: an argument has the wrong shape or value.
      NotImplementedError: "ragged" on a platform that lacks it, when the program is lowered for it.
    """
    x = _checks.rows("x", x, "[rows, d]")
    devices = jax.lax.axis_size(axis_name)
    counts = _checks.counts(counts, devices)
    buffer_rows = _checks.positive("buffer_rows", buffer_rows)
    route = _Route(
        axis_name=tuple(axis_name) if isinstance(axis_name, list) else axis_name,
        method=_checks.exchange_method(method),
        rows=x.shape[0],
        buffer_rows=buffer_rows,
        block_rows=_checks.block_rows(block_rows, method, min(x.shape[0], buffer_rows)),
    )
    _checks.few_rows_in_all(x.shape[0], devices)
    # The derivative of a cast that is done here, outside of what has a derivative of its own, is JAX's: a sum.
    varying = frozenset().union(*map(_types.varying_axes, (x, counts, jax.lax.axis_index(axis_name))))
    x, counts = _types.vary(x, varying), _types.vary(counts, varying)
    sent, received, asked = _slices(route, counts)
    rows = _move(route, True, x, sent, received)
    return Exchange(
        rows=rows,
        group_sizes=received.sizes.sum(0),
        overflow=asked - received.sizes.sum(),
        _sent=sent,
        _received=received,
        _route=route,
    )


def combine(y: jax.Array, exchange: Exchange) -> jax.Array:
    """Sends the rows of `y` back to where `dispatch` took them from.

    For use inside the same `jax.shard_map`. Differentiable in reverse mode, any number of times, with respect to `y`.

    Args:
      y: `[buffer_rows, n]` of any dtype: what has become of `exchange.rows`. Rows past the sum of
        `exchange.group_sizes` are not read.
      exchange: what `dispatch` returned.

    Returns:
      `[rows, n]`, in the order of the `x` that was sent; exactly zero where a row was not sent or did not fit.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: `y` has the wrong shape.
    """
    if not isinstance(exchange, Exchange):
        raise _checks.not_an_exchange(exchange)
    y = _checks.rows("y", y, "[buffer_rows, n]", exchange._route.buffer_rows)
    y = _types.vary(y, _types.varying_axes(exchange._sent.sizes))
    return _move(exchange._route, False, y, exchange._sent, exchange._received)


def _slices(route: _Route, counts: jax.Array) -> tuple[_Slices, _Slices, jax.Array]:
    """What this device sends and receives, and how many rows are meant for it."""
    counts = _sharding.within(counts, route.rows, jnp.int32(0), route.rows)
    # [P, P, L]: sender, receiver, expert.
    every = jax.lax.all_gather(counts, route.axis_name)
    devices = every.shape[0]
    every = every.reshape(devices, devices, -1)
    starts = _starts(every.reshape(devices, -1)).reshape(every.shape)
    fit = every
    if route.method == "padded":
        fit = jnp.clip(route.block_rows - (starts - starts[..., :1]), 0, every)
    # In the order of the buffers, [P, L * P]: receiver, expert, sender.
    ends = jnp.minimum(jnp.cumsum(fit.transpose(1, 2, 0).reshape(devices, -1), axis=1), route.buffer_rows)
    fit = jnp.diff(ends, axis=1, prepend=0)
    buffer_starts = (ends - fit).reshape(devices, -1, devices)
    fit = fit.reshape(buffer_starts.shape)

    here = jax.lax.axis_index(route.axis_name)
    sent = _Slices(starts[here], fit[..., here], buffer_starts[..., here])
    received = _Slices(buffer_starts[here].T, fit[here].T, starts[:, here])
    return sent, received, every[:, here].sum()


def _starts(sizes: jax.Array) -> jax.Array:
    """The sums of the sizes before each."""
    return jnp.cumsum(sizes, axis=-1) - sizes


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _move(route: _Route, forth: bool, x: jax.Array, sent: _Slices, received: _Slices) -> jax.Array:
    """Sends rows forth, `[rows, d] -> [buffer_rows, d]`, or back; each is the transpose of the other."""
    here, there, out_rows = (sent, received, route.buffer_rows) if forth else (received, sent, route.rows)
    varying = _types.varying_axes(x)
    if 0 in x.shape or out_rows == 0:  # XLA's collectives divide by the elements of a row
        return _types.vary(jnp.zeros((out_rows, x.shape[1]), x.dtype), varying)
    if route.method == "ragged":
        out = _types.vary(jnp.zeros((out_rows, x.shape[1]), x.dtype), varying)
        sizes = [_types.vary(a.ravel(), varying) for a in (here.starts, here.sizes, here.remote, there.sizes)]
        sizes[0] = _ragged_p.bind(sizes[0])
        return jax.lax.ragged_all_to_all(x, out, *sizes, axis_name=route.axis_name)
    # A block for each device. Forth, it is what lies together in x, whatever there is of it; what is received from it
    # is then picked and put in order by one gather. Back, the picking comes first.
    block, blocks = route.block_rows, len(sent.sizes)
    if forth:
        first = sent.starts[:, :1] + jnp.arange(block, dtype=jnp.int32)[None]
        x = x.at[first.ravel()].get(mode="clip")
    else:
        x = _pick(x, received, _in_blocks(received.remote, block), received.starts, blocks * block)
    x = jax.lax.all_to_all(x, route.axis_name, 0, 0, tiled=True)
    if forth:
        ordered = _Slices(*(a.T for a in (received.starts, received.sizes, _in_blocks(received.remote, block))))
        return _pick(x, ordered, ordered.starts, ordered.remote, out_rows)
    return _pick(x, sent, sent.starts, _in_blocks(sent.starts, block), out_rows)


def _in_blocks(starts: jax.Array, block: int) -> jax.Array:
    """Where slices that begin at `starts[P, L]` of a sender's rows begin in its P blocks of `block` rows."""
    first = jnp.arange(len(starts), dtype=jnp.int32)[:, None] * block
    return first + jnp.minimum(starts - starts[:, :1], block)


def _pick(x: jax.Array, slices: _Slices, to: jax.Array, begin: jax.Array, rows: int) -> jax.Array:
    """`rows` rows: slices of `x` that begin at `begin`, put where `to` says, which never falls; zeros between them."""
    to, begin, sizes = to.ravel(), begin.ravel(), slices.sizes.ravel()
    row = jnp.arange(rows, dtype=jnp.int32)
    # Of slices put at the same place, all but the last are empty.
    index = jnp.searchsorted(to, row, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    within = row - to[index]
    source = jnp.where(within < sizes[index], begin[index] + within, x.shape[0])
    return x.at[source].get(mode="fill", fill_value=0)


def _move_forward(route, forth, x, sent, received):
    return _move(route, forth, x, sent, received), (sent, received)


def _move_backward(route, forth, slices, dout):
    return _move(route, not forth, dout, *slices), None, None


_move.defvjp(_move_forward, _move_backward)


# Whether there is a ragged all-to-all depends on what a program is lowered for, which may not be what it is traced on.
_ragged_p = jax.extend.core.Primitive("jax_gg_ragged")
_ragged_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_ragged_p, lambda _, x: [x])
mlir.register_lowering(_ragged_p, lambda *_: _checks.no_ragged("cpu"), platform="cpu")
batching.defvectorized(_ragged_p)
