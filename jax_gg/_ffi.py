"""The seam to C++: target registration and the one `ffi_call`."""

import functools

import jax
import numpy as np

from jax_gg import _jax_gg, _types
from jax_gg._spec import Spec


def _register() -> None:
    for platform, targets in _jax_gg.registrations().items():
        for name, handler in targets.items():
            jax.ffi.register_ffi_target(name, handler, platform=platform)


_register()


def grouped(spec: Spec, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, group_offset: jax.Array) -> jax.Array:
    """Calls the kernel.

    Every operand has a leading batch dimension of b, or of 1 where all b problems share it.

    Args:
      spec: the static half of the call.
      lhs: `[b, m, k]`.
      rhs: gmm: `[b, g, k, n]`, or `[b, g, n, k]` with `spec.transpose_rhs`; tgmm: `[b, m, n]`. Of lhs's dtype.
      group_sizes: `[b, G]` int32.
      group_offset: `[b]` int32.

    Returns:
      gmm: `[b, m, n]`; tgmm: `[b, g, k, n]`; of `spec.out_dtype`.
    """
    operands = (lhs, rhs, group_sizes, group_offset)
    (batch,) = np.broadcast_shapes(*[(x.shape[0],) for x in operands])
    m, k = lhs.shape[1:]
    n = rhs.shape[-2] if spec.transpose_rhs else rhs.shape[-1]
    shape = (batch, m, n) if spec.mode == "gmm" else (batch, spec.num_groups, k, n)
    # Manual axes (inside shard_map): the result varies over every axis that any operand varies over, and the call, like
    # any other operation, wants its operands to agree on that.
    varying = functools.reduce(frozenset.union, map(_types.varying_axes, operands))
    call = jax.ffi.ffi_call(f"jax_gg_{spec.mode}", _types.result_type(shape, spec.out_dtype, varying))
    return call(
        *(_types.vary(x, varying) for x in operands),
        transpose_rhs=np.bool_(spec.transpose_rhs),
        precision=np.int32(spec.precision.value),
    )
