"""The public operations and their derivatives.

With `[r]` for the rows of one group and `w` for its weight, `gmm` is `out[r] = lhs[r] w` and `tgmm` is
`w = lhs[r]^T rhs[r]`. Each derivative is one of the two again:

    gmm:   out  = lhs w    dlhs = dout w^T       a gmm with the other transpose_rhs
                           dw   = lhs^T dout     a tgmm (of dout and lhs, if w is stored transposed)
    tgmm:  w = lhs^T rhs   dlhs = rhs dw^T       a gmm with transpose_rhs
                           drhs = lhs dw         a gmm

Rows past the sum of the sizes, and rows of groups that `rhs` does not hold, are zero in every one of these.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_gg import _batching, _checks, _sharding, _types
from jax_gg._spec import Spec


def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: Any,
    *,
    transpose_rhs: bool = False,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    precision: Any = None,
    out_sharding: Any = None,
    kernel: str | None = None,
) -> jax.Array:
    """Multiplies each group of rows of `lhs` by its own matrix of `rhs`.

    `[m, k] x [g, k, n] -> [m, n]`. The first `group_sizes[0]` rows are multiplied by the first matrix, the next
    `group_sizes[1]` rows by the second, and so on. `group_sizes` is data: it stays on the device, and one compiled
    program serves any sizes.

    Rows at and past `sum(group_sizes)` are exactly zero in the result and in the gradient, whatever `lhs` holds there.
    A negative size counts as 0; sizes that overrun m are cut at m. The same inputs give the same bits on every run.

    Differentiable in reverse mode, any number of times, with respect to `lhs` and `rhs`; a cotangent is rounded to the
    dtype of the operands before it is multiplied. Forward mode (`jax.jvp`) raises. `vmap` over any subset of the
    arguments is one call of the kernel.

    Args:
      lhs: `[m, k]`; float16, bfloat16, float32 or (on CPU) float64.
      rhs: `[g, k, n]`, or `[g, n, k]` with `transpose_rhs`; of lhs's dtype.
      group_sizes: `[G]` of any integer dtype, in rows. `G == g` unless `group_offset` is given.
      transpose_rhs: read `rhs` as `[g, n, k]`, in place.
      preferred_element_type: dtype of the result, by default that of the operands. Sums are accumulated in float32
        (float64 for float64 operands) and rounded once.
      group_offset: integer scalar, shape `()` or `(1,)`, traced or not: `rhs` holds the groups `group_offset` to
        `group_offset + g` of the G. Rows of all other groups are exactly zero in the result.
      precision: as in `jax.lax.dot`. For float32 operands on a GPU, the default rounds them to TF32 and `HIGH` and
        `HIGHEST` keep full float32 accuracy.
      out_sharding: how the result is split over the devices, a `PartitionSpec` or a `NamedSharding`. It is the sharding
        in the type of the result over Explicit mesh axes, and a constraint over Auto ones. None: with Explicit axes,
        as the operands are split; with Auto axes, the compiler decides.
      kernel: on a GPU, choose only among kernels whose name starts so, such as `"sm80"`; for tests and benchmarks.

    Returns:
      `[m, n]`.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: an argument has the wrong shape.
    """
    lhs, rhs = _checks.gmm_operands(lhs, rhs, transpose_rhs)
    sizes = _checks.group_sizes(group_sizes)
    sharding = _checks.out_sharding(out_sharding, 2, "[m, n]")
    if group_offset is None:
        _checks.as_many_groups("rhs", rhs.shape[0], sizes)
    spec = Spec(
        mode="gmm",
        out_dtype=_checks.result_dtype(preferred_element_type, lhs.dtype),
        transpose_rhs=bool(transpose_rhs),
        num_groups=rhs.shape[0],
        precision=_checks.precision(precision),
        out_sharding=sharding if _types.is_explicit(sharding) else None,
        kernel=_checks.kernel(kernel),
    )
    return _constrained(_jitted(spec, lhs, rhs, sizes, _checks.group_offset(group_offset)), sharding)


def tgmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: Any,
    *,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    num_groups: int | None = None,
    precision: Any = None,
    out_sharding: Any = None,
    kernel: str | None = None,
) -> jax.Array:
    """Sums, for each group of rows, the outer products of the rows of `lhs` and `rhs`.

    `[m, k]^T x [m, n] -> [g, k, n]`: matrix i of the result is `lhs[r].T @ rhs[r]` for the rows r of group i. This is
    the gradient of `gmm` with respect to its `rhs`; see there for how `group_sizes` is read, and for derivatives.

    The matrix of an empty group is exactly zero. Rows at and past `sum(group_sizes)` reach nothing, NaN or not.

    Args:
      lhs: `[m, k]`; float16, bfloat16, float32 or (on CPU) float64.
      rhs: `[m, n]`; of lhs's dtype.
      group_sizes: `[G]` of any integer dtype, in rows.
      preferred_element_type: dtype of the result, by default that of the operands. Sums are accumulated in float32
        (float64 for float64 operands) and rounded once.
      group_offset: integer scalar, shape `()` or `(1,)`, traced or not: the group that the first matrix of the result
        belongs to; by default 0. A matrix of a group outside `[0, G)` is exactly zero.
      num_groups: g, the number of matrices in the result; by default G.
      precision: as in `jax.lax.dot`. For float32 operands on a GPU, the default rounds them to TF32 and `HIGH` and
        `HIGHEST` keep full float32 accuracy.
      out_sharding: how the result is split over the devices, a `PartitionSpec` or a `NamedSharding`. It is the sharding
        in the type of the result over Explicit mesh axes, and a constraint over Auto ones. None: with Explicit axes,
        as the operands are split; with Auto axes, the compiler decides.
      kernel: on a GPU, choose only among kernels whose name starts so, such as `"sm80"`; for tests and benchmarks.

    Returns:
      `[g, k, n]`.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: an argument has the wrong shape.
    """
    lhs, rhs = _checks.tgmm_operands(lhs, rhs)
    sizes = _checks.group_sizes(group_sizes)
    sharding = _checks.out_sharding(out_sharding, 3, "[g, k, n]")
    spec = Spec(
        mode="tgmm",
        out_dtype=_checks.result_dtype(preferred_element_type, lhs.dtype),
        num_groups=_checks.num_groups(num_groups, sizes),
        precision=_checks.precision(precision),
        out_sharding=sharding if _types.is_explicit(sharding) else None,
        kernel=_checks.kernel(kernel),
    )
    return _constrained(_jitted(spec, lhs, rhs, sizes, _checks.group_offset(group_offset)), sharding)


def ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    out_sharding: Any = None,
    *,
    reduction_order: Any = None,
) -> jax.Array:
    """`jax.lax.ragged_dot`, computed by `gmm`.

    Takes what `jax.lax.ragged_dot` takes, positions included, and gives what it gives. Beyond it, `group_offset` works,
    and so does everything else that `gmm` promises. Dtypes outside `gmm`'s (integers, complex numbers, operands of two
    dtypes) and sums in a given order are computed by `jax.lax.ragged_dot` itself.

    Args:
      lhs: `[m, k]`.
      rhs: `[g, k, n]`.
      group_sizes: `[g]` of any integer dtype, in rows; `[G]` with `group_offset`.
      precision: as in `jax.lax.dot`.
      preferred_element_type: dtype of the result, by default that of the operands.
      group_offset: see `gmm`.
      out_sharding: see `gmm`.
      reduction_order: as `jax.lax.ragged_dot` takes it, from JAX 0.12.1 on.

    Returns:
      `[m, n]`.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: an argument has the wrong shape.
    """
    _checks.reduction_order(reduction_order, group_offset)
    is_ours = reduction_order is None and _checks.are_gmm_dtypes(lhs, rhs, preferred_element_type)
    if group_offset is None and not is_ours:
        # It has out_sharding since JAX 0.9, and reduction_order since 0.12.1.
        given = {"out_sharding": out_sharding, "reduction_order": reduction_order}
        more = {name: value for name, value in given.items() if value is not None}
        return jax.lax.ragged_dot(lhs, rhs, _checks.group_sizes(group_sizes), precision, preferred_element_type, **more)
    return gmm(
        lhs,
        rhs,
        group_sizes,
        preferred_element_type=preferred_element_type,
        group_offset=group_offset,
        precision=precision,
        out_sharding=out_sharding,
    )


def _constrained(x: jax.Array, sharding: jax.sharding.NamedSharding | None) -> jax.Array:
    """`x` with a sharding over Auto axes; that over Explicit ones is in its type already."""
    if sharding is None or _types.is_explicit(sharding):
        return x
    return jax.lax.with_sharding_constraint(x, sharding)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(spec: Spec, lhs, rhs, group_sizes, group_offset, like=None):
    """`spec` applied; `group_offset` is `[1]`. The result should be sharded as `like` is, which is not read."""
    return _batching.grouped(spec, lhs, rhs, group_sizes, group_offset, *(() if like is None else (like,)))


# Outside jit, one program instead of an operation at a time; and shard_map outside jit refuses a custom_vjp that has
# symbolic zeros (NotImplementedError up to JAX 0.12), except in a program of its own.
_jitted = jax.jit(lambda *args: _grouped(*args), static_argnums=0)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Primal:
    """What a cotangent must match."""

    dtype: np.dtype
    varying: _types.Axes
    sharding: jax.sharding.NamedSharding | None  # None without Explicit axes

    @classmethod
    def of(cls, x: jax.Array) -> "_Primal":
        mesh = _types.explicit_mesh(x)
        sharding = None if mesh is None else jax.sharding.NamedSharding(mesh, _types.spec(x))
        return cls(x.dtype, _types.varying_axes(x), sharding)


def _forward(spec, lhs, rhs, group_sizes, group_offset, like):
    # Arrives as CustomVJPPrimal, which tells whose gradient is wanted. An operand is kept only for the gradient of the
    # other one, so that nothing is stored or computed for a gradient that nobody asked for.
    types = [_Primal.of(x.value) for x in (lhs, rhs)]
    # Not None in its place: under jit, JAX takes the tree of the residuals from one differentiation to another that
    # perturbs other operands (as those of a second derivative do).
    unused = jnp.zeros((), jnp.bool_)
    kept = (rhs.value if lhs.perturbed else unused, lhs.value if rhs.perturbed else unused)
    like_rhs = _alike(spec, rhs.value, lhs.perturbed) if rhs.perturbed else None
    # The custom_vjp function itself, not what it wraps: the second derivative differentiates this line.
    like = None if like is None else like.value
    out = _grouped(spec, lhs.value, rhs.value, group_sizes.value, group_offset.value, like)
    return out, (*kept, unused if like_rhs is None else like_rhs, group_sizes.value, group_offset.value, *types)


def _alike(spec: Spec, rhs: jax.Array, is_kept: bool) -> jax.Array | None:
    """What tells where the matrices of `rhs` are: there, their gradients belong, but are computed from nothing that is.

    Over Explicit axes, their type tells it.
    """
    if spec.mode != "gmm" or 0 in rhs.shape or not _sharding.is_distributed(rhs):
        return None
    if is_kept:
        return rhs
    return rhs[:, 0, 0] if _types.explicit_mesh(rhs) is None else None


def _backward(spec, residuals, dout):
    rhs, lhs, like, sizes, offset, lhs_type, rhs_type = residuals
    if isinstance(dout, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None, None
    dout = dout.astype(lhs_type.dtype)

    def apply(a, b, primal: _Primal, like=None, **changes):
        changed = dataclasses.replace(spec, out_dtype=primal.dtype, out_sharding=primal.sharding, **changes)
        return _types.psum_to_type_of(_grouped(changed, a, b, sizes, offset, like), primal.varying)

    dlhs = drhs = None
    if spec.mode == "gmm":
        if rhs.ndim:
            dlhs = apply(dout, rhs, lhs_type, transpose_rhs=not spec.transpose_rhs)
        if lhs.ndim:
            a, b = (dout, lhs) if spec.transpose_rhs else (lhs, dout)
            like = jax.lax.stop_gradient(like) if like.ndim else None
            drhs = apply(a, b, rhs_type, like, mode="tgmm", transpose_rhs=False)
    else:
        if rhs.ndim:
            dlhs = apply(rhs, dout, lhs_type, mode="gmm", transpose_rhs=True)
        if lhs.ndim:
            drhs = apply(lhs, dout, rhs_type, mode="gmm")
    return dlhs, drhs, None, None, None


_grouped.defvjp(_forward, _backward, symbolic_zeros=True)
