"""Random operands of a problem, and the operation applied to them in every direction."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import reference
from compare import check_gmm, check_tgmm

import jax_gg


@dataclasses.dataclass(frozen=True)
class Operands:
    """NumPy operands of a gmm and the cotangent of its result."""

    lhs: np.ndarray
    rhs: np.ndarray
    sizes: np.ndarray
    dout: np.ndarray
    transpose_rhs: bool = False
    group_offset: int = 0


def normal(rng, shape, dtype) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def integers(rng, shape, dtype=np.float32) -> np.ndarray:
    """Integers so small that no backend rounds their products, nor the sums of hundreds of them."""
    return rng.integers(-3, 4, shape).astype(dtype)


def make(rng, problem, dtype, *, transpose_rhs=False, group_offset=0, num_groups=None, out_dtype=None) -> Operands:
    """Operands that hold NaN wherever nothing may be read: rows and matrices of no group that this call computes."""
    num_groups = problem.g if num_groups is None else num_groups
    lhs = normal(rng, (problem.m, problem.k), dtype)
    dout = normal(rng, (problem.m, problem.n), out_dtype or dtype)
    rhs = normal(rng, (num_groups, problem.k, problem.n), dtype)
    if transpose_rhs:
        rhs = np.ascontiguousarray(rhs.swapaxes(1, 2))
    unread_rows, unread_groups = np.ones(problem.m, bool), np.ones(num_groups, bool)
    for i, r in reference.served(problem.sizes, problem.m, num_groups, group_offset):
        unread_rows[r] = unread_groups[i] = False
    lhs[unread_rows] = dout[unread_rows] = rhs[unread_groups] = np.nan
    return Operands(lhs, rhs, np.array(problem.sizes, np.int32), dout, transpose_rhs, group_offset)


def poison(*shapes_and_dtypes) -> None:
    """Fills memory of these sizes with NaN and frees it, so that the next results of the same sizes start as that."""
    arrays = [jax.device_put(np.full(shape, np.nan, dtype)) for shape, dtype in shapes_and_dtypes for _ in range(3)]
    for x in jax.block_until_ready(arrays):
        x.delete()


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def _three_directions(lhs, rhs, sizes, dout, offset, transpose_rhs, out_dtype, precision):
    def f(lhs, rhs):
        return jax_gg.gmm(
            lhs,
            rhs,
            sizes,
            transpose_rhs=transpose_rhs,
            preferred_element_type=out_dtype,
            group_offset=offset,
            precision=precision,
        )

    out, vjp = jax.vjp(f, lhs, rhs)
    return out, *vjp(dout)


def check_all(operands: Operands, *, precision=None) -> None:
    """Checks the result and both gradients, jitted and eager, the outputs' memory full of NaN before."""
    o = operands
    plain = o.group_offset == 0 and len(o.sizes) == len(o.rhs)
    args = *map(jnp.asarray, (o.lhs, o.rhs, o.sizes, o.dout)), None if plain else jnp.int32(o.group_offset)
    static = o.transpose_rhs, o.dout.dtype, precision
    outputs = ((o.dout.shape, o.dout.dtype), (o.lhs.shape, o.lhs.dtype), (o.rhs.shape, o.rhs.dtype))
    poison(*outputs)
    out, dlhs, drhs = jax.block_until_ready(_three_directions(*args, *static))
    poison(*outputs)
    eager = _three_directions.__wrapped__(*args, *static)
    for x, y in zip((out, dlhs, drhs), eager, strict=True):
        np.testing.assert_array_equal(reference.f64(x), reference.f64(y), "eager and jitted")

    assert (out.dtype, dlhs.dtype, drhs.dtype) == (o.dout.dtype, o.lhs.dtype, o.rhs.dtype)
    more = {"group_offset": o.group_offset, "precision": precision}
    dout = o.dout.astype(o.lhs.dtype)
    check_gmm(out, o.lhs, o.rhs, o.sizes, transpose_rhs=o.transpose_rhs, **more)
    check_gmm(dlhs, dout, o.rhs, o.sizes, transpose_rhs=not o.transpose_rhs, **more)
    a, b = (dout, o.lhs) if o.transpose_rhs else (o.lhs, dout)
    check_tgmm(drhs, a, b, o.sizes, num_groups=len(o.rhs), **more)
