"""The seam to C++: target registration and the one `ffi_call`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
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
    operands: tuple[jax.Array, ...] = (lhs, rhs, group_sizes, group_offset)
    # Manual axes (inside shard_map): the result varies over every axis that any operand varies over, and the call, like
    # any other operation, wants its operands to agree on that.
    varying = functools.reduce(frozenset.union, map(_types.varying_axes, operands))
    operands = tuple(_types.vary(x, varying) for x in operands)
    if _gpu_kernels_fit(spec, lhs, rhs):
        return _call(spec, varying, *operands)
    return jax.lax.platform_dependent(
        *operands,
        cpu=functools.partial(_call, spec, varying),
        default=functools.partial(_fitted_call, spec, varying),
    )


def _call(spec: Spec, varying: _types.Axes, *operands: jax.Array) -> jax.Array:
    lhs, rhs, group_sizes, _ = operands
    (batch,) = np.broadcast_shapes(*[(x.shape[0],) for x in operands])
    m, k = lhs.shape[1:]
    n = rhs.shape[-2] if spec.transpose_rhs else rhs.shape[-1]
    shape, weights = ((batch, m, n), rhs.shape[1]) if spec.mode == "gmm" else ((batch, spec.num_groups, k, n), None)
    workspace = _jax_gg.workspace_bytes(batch, group_sizes.shape[1], spec.num_groups if weights is None else weights)
    call = jax.ffi.ffi_call(
        f"jax_gg_{spec.mode}",
        (
            _types.result_type(shape, spec.out_dtype, varying),
            _types.result_type((workspace,), np.dtype(np.uint8), varying),
        ),
    )
    out, _ = call(
        *operands,
        transpose_rhs=np.bool_(spec.transpose_rhs),
        precision=np.int32(spec.precision.value),
        kernel=spec.kernel,
    )
    return out


# GPU kernels load at least 4 bytes at a time, and best 16.
_LEAST_BYTES, _BEST_BYTES = 4, 16


def _gpu_kernels_fit(spec: Spec, lhs: jax.Array, rhs: jax.Array) -> bool:
    """Whether the GPU kernels take these operands and write this dtype as they are."""
    rows = (lhs.shape[-1], rhs.shape[-1], rhs.shape[-2] if spec.transpose_rhs else 0)
    aligned = all(x * lhs.dtype.itemsize % _LEAST_BYTES == 0 for x in rows)
    return aligned and spec.out_dtype in (lhs.dtype, np.float32)


def _fitted_call(spec: Spec, varying: _types.Axes, *operands: jax.Array) -> jax.Array:
    """The call with k and n padded as GPU kernels need them, and the f32 of dtypes that they do not write rounded."""
    lhs, rhs, *sizes = operands
    n = rhs.shape[-2] if spec.transpose_rhs else rhs.shape[-1]
    k = lhs.shape[-1]
    unit = _BEST_BYTES // lhs.dtype.itemsize
    pad_k, pad_n = (-k % unit, -n % unit) if (k | n) * lhs.dtype.itemsize % _LEAST_BYTES else (0, 0)

    def pad(x, *last_two):
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, by) for by in last_two]) if any(last_two) else x

    if spec.mode == "gmm":
        rhs = pad(rhs, *((pad_n, pad_k) if spec.transpose_rhs else (pad_k, pad_n)))
    else:
        rhs = pad(rhs, 0, pad_n)
    written = spec.out_dtype if spec.out_dtype == lhs.dtype else np.dtype(np.float32)
    out = _call(dataclasses.replace(spec, out_dtype=written), varying, pad(lhs, 0, pad_k), rhs, *sizes)
    if spec.mode == "tgmm":
        out = out[..., :k, :]
    return out[..., :n].astype(spec.out_dtype)
