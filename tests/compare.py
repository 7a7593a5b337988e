"""Comparing a result with the oracle.

How far it may be off is measured, not guessed: plain JAX multiplies the same groups one by one, accumulates in f32 and
rounds once, and the result may have a small multiple of the error that this has.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import reference

MULTIPLE = 4
# Enough to know the size of an error; a product a group would be slow for thousands of groups.
_MOST_GROUPS = 24


@functools.partial(jax.jit, static_argnums=(2, 3))
def _matmul(a, b, dtype, precision):
    # To bf16 and f16, JAX on the CPU rounds the result of the respective other one twice.
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    return jnp.matmul(a, b, preferred_element_type=wide, precision=precision).astype(dtype)


def _padded(x: np.ndarray) -> np.ndarray:
    """With zeros up to the next power of two, 16 at least, in each dimension."""
    padded = np.zeros([max(16, 1 << max(d - 1, 0).bit_length()) for d in x.shape], x.dtype)
    padded[: x.shape[0], : x.shape[1]] = x
    return padded


def _norm(x) -> float:
    return float(np.linalg.norm(np.ravel(x)))


def check_gmm(got, lhs, rhs, sizes, *, transpose_rhs=False, group_offset=0, precision=None):
    """Asserts that `got[m, n]` is the product of these operands, and exactly zero where it must be."""
    lhs, rhs = np.asarray(lhs), np.asarray(rhs)
    if transpose_rhs:
        rhs = rhs.swapaxes(1, 2)
    products = [(r, lhs[r], rhs[i]) for i, r in reference.served(sizes, lhs.shape[0], rhs.shape[0], group_offset)]
    _check(got, (lhs.shape[0], rhs.shape[2]), products, precision)


def check_tgmm(got, lhs, rhs, sizes, *, group_offset=0, num_groups=None, precision=None):
    """Asserts that `got[g, k, n]` is the sums of these operands, and exactly zero where it must be."""
    lhs, rhs = np.asarray(lhs), np.asarray(rhs)
    num_groups = len(sizes) if num_groups is None else num_groups
    products = [(i, lhs[r].T, rhs[r]) for i, r in reference.served(sizes, lhs.shape[0], num_groups, group_offset)]
    _check(got, (num_groups, lhs.shape[1], rhs.shape[1]), products, precision)


def _check(got, shape, products, precision):
    """`products` are (index into the result, a, b): there it is `a @ b`, elsewhere zero."""
    assert got.shape == shape
    dtype = got.dtype
    got = reference.f64(got)
    zero = np.ones(shape, bool)
    error = want_norm = scale = 0.0
    for index, a, b in products:
        zero[index] = False
        a, b = reference.f64(a), reference.f64(b)
        want = a @ b
        error = np.hypot(error, _norm(got[index] - want))
        want_norm = np.hypot(want_norm, _norm(want))
        scale = np.hypot(scale, _norm(np.sqrt(a**2 @ b**2)))
    np.testing.assert_array_equal(got[zero], 0, "outside the groups")
    # Rounding errors of the accumulation grow with what is summed, also where the sum happens to come out small.
    floor = 4 * np.finfo(np.float64 if dtype == np.float64 else np.float32).eps * scale
    allowed = MULTIPLE * _plain_error(products, dtype, precision) * want_norm + floor
    assert error <= allowed, f"relative error {error / want_norm:.3g}, allowed {allowed / want_norm:.3g}"


def _plain_error(products, dtype, precision) -> float:
    """The relative error of plain JAX on (a sample of) these products."""
    error = norm = 0.0
    for _, a, b in itertools.islice(products, 0, None, -(-len(products) // _MOST_GROUPS) or 1):
        want = reference.f64(a) @ reference.f64(b)
        # Zeros change no product, and spare a compilation for every shape.
        plain = _matmul(_padded(a), _padded(b), dtype, precision)
        plain = np.asarray(plain)[: want.shape[0], : want.shape[1]]
        error = np.hypot(error, _norm(reference.f64(plain) - want))
        norm = np.hypot(norm, _norm(want))
    return error / norm if norm else 0.0


def assert_exact(got, want):
    """For operands of small integers, whose sums every backend computes exactly in f32."""
    np.testing.assert_array_equal(reference.f64(got), want)


def assert_near(got, want, relative=1e-5):
    """For two computations in f32 that round differently; relative to the norm."""
    got, want = reference.f64(got), reference.f64(want)
    assert got.shape == want.shape
    assert _norm(got - want) <= relative * _norm(want)
