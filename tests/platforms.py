"""The platforms that a suite can run on: a test class is a suite plus one of these."""

import functools

import jax
import pytest

from jax_gg import _jax_gg


class Cpu:
    platform = "cpu"


@functools.cache
def _without_gpu() -> str:
    """Why nothing can run on a GPU here; empty when it can."""
    if not _jax_gg.cuda_built_for():
        return "this build of jax_gg has no CUDA kernels"
    try:
        jax.devices("gpu")
    except RuntimeError:
        return "JAX sees no GPU"
    return ""


@pytest.mark.gpu
@pytest.mark.skipif(bool(_without_gpu()), reason=_without_gpu())
class Gpu:
    platform = "gpu"
