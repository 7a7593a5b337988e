"""The vmap rule: many problems are one call.

The kernels take a batch of problems with the operands either batched or shared, so mapping over any subset of the
operands only adds a batch dimension. Batch dimensions become one only in the end, on each device: a dimension that has
been folded into another could not stay split.
"""

import functools

import jax
from jax.custom_batching import custom_vmap

from jax_gg import _sharding
from jax_gg._spec import Spec


def grouped(spec: Spec, *operands: jax.Array) -> jax.Array:
    """`_sharding.grouped` with a batching rule."""
    return _batchable(spec)(*operands)


@functools.cache
def _batchable(spec: Spec):
    @custom_vmap
    def call(*operands):
        return _sharding.grouped(spec, *operands)

    @call.def_vmap
    def _rule(axis_size, mapped, *operands):
        del axis_size  # that of the operands
        if not any(mapped[:4]):
            return call(*operands[:4]), False  # only what is not read differs
        return call(*(x if m else x[None] for x, m in zip(operands, mapped, strict=True))), True

    return call
