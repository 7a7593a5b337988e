"""The static half of a grouped matmul: all that is known when tracing and is not an array."""

import dataclasses

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Spec:
    """Static description of one call; hashable, so that everything built from it can be cached.

    Attributes:
      mode: `"gmm"`, `[m, k] x [g, k, n] -> [m, n]`, or `"tgmm"`, `[m, k]^T x [m, n] -> [g, k, n]`.
      out_dtype: dtype of the result.
      transpose_rhs: `gmm` only: `rhs` is `[g, n, k]`.
      num_groups: `tgmm` only: g of the result.
      precision: how f32 operands are multiplied where hardware offers a choice.
      out_sharding: of the result, without the dimensions of vmap, over Explicit mesh axes; None for as the operands'.
      kernel: only kernels whose name starts so may serve a call on a GPU; empty for all.
    """

    mode: str
    out_dtype: np.dtype
    transpose_rhs: bool = False
    num_groups: int = 0
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT
    out_sharding: jax.sharding.NamedSharding | None = None
    kernel: str = ""
