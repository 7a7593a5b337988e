"""Mixture-of-experts models as others write them, on `jax.lax.ragged_dot`: shared by the tests and the benchmarks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Config:
    tokens: int = 48
    dim: int = 16
    hidden: int = 24
    experts: int = 4
    top_k: int = 2
    layers: int = 2
    dtype: Any = jnp.float32


def moe(x: jax.Array, router: jax.Array, w_in: jax.Array, w_out: jax.Array, top_k: int) -> jax.Array:
    """`[m, d]` through the `top_k` experts of each row by `router[m, e]`; w_in is `[e, d, h]`, w_out `[e, h, d]`."""
    weights, chosen = jax.lax.top_k(jax.nn.softmax(router), top_k)
    order = jnp.argsort(chosen.ravel(), stable=True)
    sizes = jnp.bincount(chosen.ravel(), length=w_in.shape[0])
    rows = jax.nn.gelu(jax.lax.ragged_dot(x[order // top_k], w_in, sizes))
    rows = jax.lax.ragged_dot(rows, w_out, sizes)
    rows = rows[jnp.argsort(order)].reshape(*chosen.shape, x.shape[-1])
    return jnp.einsum("mk,mkd->md", weights.astype(x.dtype), rows)


class LinenBlock(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        c = self.config
        init = nn.initializers.lecun_normal(batch_axis=0)
        router = nn.Dense(c.experts, use_bias=False)(x.astype(jnp.float32))
        w_in = self.param("w_in", init, (c.experts, c.dim, c.hidden), c.dtype)
        w_out = self.param("w_out", init, (c.experts, c.hidden, c.dim), c.dtype)
        return x + moe(x, router, w_in, w_out, c.top_k), None


class LinenModel(nn.Module):
    """Layers in a scan, computed again in the backward pass."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = nn.remat(LinenBlock, prevent_cse=False)
        layers = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.config.layers)
        return layers(self.config)(x, None)[0]


class NnxBlock(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = config
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.top_k = c.top_k
        self.router = nnx.Linear(c.dim, c.experts, use_bias=False, rngs=rngs)
        self.w_in = nnx.Param(init(rngs.params(), (c.experts, c.dim, c.hidden), c.dtype))
        self.w_out = nnx.Param(init(rngs.params(), (c.experts, c.hidden, c.dim), c.dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        router = self.router(x.astype(jnp.float32))
        return x + moe(x, router, self.w_in[...], self.w_out[...], self.top_k)


class NnxModel(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.blocks = nnx.List(NnxBlock(config, rngs) for _ in range(config.layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


Loss = Callable[[Any, jax.Array], jax.Array]


def linen(config: Config, seed: int = 0) -> tuple[Loss, Any]:
    """`loss(params, x)` and the parameters."""
    model = LinenModel(config)
    params = model.init(jax.random.key(seed), jnp.zeros((config.tokens, config.dim), config.dtype))
    return lambda params, x: _loss(model.apply(params, x)), params


def nnx_(config: Config, seed: int = 0) -> tuple[Loss, Any]:
    """`loss(params, x)` and the parameters."""
    graph, params = nnx.split(NnxModel(config, nnx.Rngs(seed)))
    return lambda params, x: _loss(nnx.merge(graph, params)(x)), params


def _loss(out: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(out.astype(jnp.float32)))


PROGRAMS: dict[str, Callable[..., tuple[Loss, Any]]] = {"Flax Linen": linen, "Flax NNX": nnx_}
