"""The vmap rule: many problems are one call.

The kernels take a batch of problems with the operands either batched or shared, so mapping over any subset of the
operands only folds the mapped axis into the batch dimension. Nothing is copied, except where nested vmaps map one
operand over some of the axes and not over others.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from jax_gg import _ffi
from jax_gg._spec import Spec


def grouped(spec: Spec, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, group_offset: jax.Array) -> jax.Array:
    """`_ffi.grouped` with a batching rule."""
    return _batchable(spec)(lhs, rhs, group_sizes, group_offset)


@functools.cache
def _batchable(spec: Spec):
    @custom_vmap
    def call(lhs, rhs, group_sizes, group_offset):
        return _ffi.grouped(spec, lhs, rhs, group_sizes, group_offset)

    @call.def_vmap
    def _rule(axis_size, mapped, *operands):
        (batch,) = np.broadcast_shapes(*[(x.shape[m],) for x, m in zip(operands, mapped, strict=True)])
        folded = [_fold(x, m, axis_size, batch) for x, m in zip(operands, mapped, strict=True)]
        out = call(*folded)
        return out.reshape(axis_size, batch, *out.shape[1:]), True

    return call


def _fold(x: jax.Array, mapped: bool, axis_size: int, batch: int) -> jax.Array:
    """`[axis_size, b, ...]` (mapped) or `[b, ...]` to `[axis_size * batch, ...]`, or `[1, ...]` if x stays shared."""
    inner = x.shape[mapped:]
    if not mapped:
        if inner[0] == 1:
            return x
        x = x[None]
    full = (axis_size, batch, *inner[1:])
    return jnp.broadcast_to(x, full).reshape(axis_size * batch, *inner[1:])
