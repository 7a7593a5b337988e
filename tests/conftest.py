"""Set-up shared by all tests: eight CPU devices, strict promotion, one random generator and one device a test."""

import os
import zlib

# Before jax starts its backends; test_shard_map needs several devices in this process.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import numpy as np
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def rng(request):
    """Other numbers for each test, the same in each run; the seed is shown when the test fails."""
    seed = zlib.crc32(request.node.nodeid.split("::", 1)[-1].encode())
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture(autouse=True)
def device(request):
    """Runs the test on the first device of its class's platform, by default on the CPU."""
    device = jax.devices(getattr(request.cls, "platform", "cpu"))[0]
    with jax.default_device(device):
        yield device
