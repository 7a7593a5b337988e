"""gmm and tgmm by a mask and an einsum: slow, and differentiable and mappable in every way that JAX knows."""

import jax.numpy as jnp


def _mask(sizes, m, num_groups):
    """`[m, g]`: which rows belong to which group; for sizes that are not negative."""
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(m), side="right")
    return jnp.expand_dims(group, 1) == jnp.expand_dims(jnp.arange(num_groups), 0)


def gmm(lhs, rhs, sizes):
    mask = _mask(sizes, lhs.shape[0], rhs.shape[0])
    return jnp.einsum("mg,mk,gkn->mn", mask.astype(lhs.dtype), lhs, rhs, precision="highest")


def tgmm(lhs, rhs, sizes):
    mask = _mask(sizes, lhs.shape[0], sizes.shape[0])
    return jnp.einsum("mg,mk,mn->gkn", mask.astype(lhs.dtype), lhs, rhs, precision="highest")
