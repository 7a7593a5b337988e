"""Grouped matrix multiplication for mixture-of-experts models in JAX."""

from jax_gg import moe as moe
from jax_gg._accelerate import accelerate_ragged_dot as accelerate_ragged_dot
from jax_gg._explain import explain as explain
from jax_gg._export import export_checks as export_checks
from jax_gg._gmm import gmm as gmm
from jax_gg._gmm import ragged_dot as ragged_dot
from jax_gg._gmm import tgmm as tgmm
from jax_gg._version import __version__ as __version__

__all__ = ["__version__", "accelerate_ragged_dot", "explain", "export_checks", "gmm", "moe", "ragged_dot", "tgmm"]
