"""`gmm` and its gradients beside NumPy in float64, on the default device: for `python -m jax_gg`.

The problem is small and has all that kernels get wrong: k and n that no tile divides, an empty group, and rows past the
sum of the sizes that hold NaN.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jax_gg._gmm import gmm

M, K, N = 77, 33, 43
SIZES = (5, 0, 40, 17)
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Check:
    """One result of `gmm`, compared.

    Attributes:
      dtype: of the operands and the result.
      result: `"out"`, `"dlhs"` or `"drhs"`.
      error: norm of the difference from float64, relative to the norm of the latter.
      allowed: the largest `error` that rounding explains.
      zeros: whether everything that must be exactly zero is.
    """

    dtype: str
    result: str
    error: float
    allowed: float
    zeros: bool

    @property
    def ok(self) -> bool:
        return self.zeros and self.error <= self.allowed  # false for NaN


def run() -> tuple[jax.Device, list[Check]]:
    """Returns the device that the checks ran on, and the checks."""
    checks = []
    for dtype in DTYPES:
        rng = np.random.default_rng(0)
        lhs, rhs, dout = (_normal(rng, shape, dtype) for shape in ((M, K), (len(SIZES), K, N), (M, N)))
        lhs[sum(SIZES) :] = dout[sum(SIZES) :] = np.nan
        got = _out_and_gradients(*map(jnp.asarray, (lhs, rhs, np.array(SIZES, np.int32), dout)))
        for result, x, want in zip(("out", "dlhs", "drhs"), got, _reference(lhs, rhs, dout), strict=True):
            checks.append(_compare(dtype, result, np.asarray(x).astype(np.float64), want))
    (device,) = got[0].devices()
    return device, checks


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def _out_and_gradients(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
    # In full float32 where hardware offers less: a wrong kernel shows in fewer digits than TF32 keeps, but not always.
    f = functools.partial(gmm, group_sizes=sizes, precision="highest")

    @jax.jit
    def all_three(lhs, rhs, dout):
        out, vjp = jax.vjp(f, lhs, rhs)
        return out, *vjp(dout)

    return all_three(lhs, rhs, dout)


def _reference(*operands: np.ndarray) -> tuple[np.ndarray, ...]:
    lhs, rhs, dout = (x.astype(np.float64) for x in operands)
    out, dlhs, drhs = np.zeros((M, N)), np.zeros((M, K)), np.zeros(rhs.shape)
    begin = 0
    for i, size in enumerate(SIZES):
        r = slice(begin, begin + size)
        out[r], dlhs[r], drhs[i] = lhs[r] @ rhs[i], dout[r] @ rhs[i].T, lhs[r].T @ dout[r]
        begin += size
    return out, dlhs, drhs


def _compare(dtype: str, result: str, got: np.ndarray, want: np.ndarray) -> Check:
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    # One rounding to the result's dtype, and the roundings of some dozens of additions in float32.
    allowed = float(jnp.finfo(dtype).eps) / 2 + 16 * float(np.finfo(np.float32).eps)
    return Check(dtype, result, error, allowed, bool(np.all(got[want == 0] == 0)))
