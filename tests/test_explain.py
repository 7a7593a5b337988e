"""`jax_gg.explain`: the kernel of each call. It needs a build with CUDA, and no GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from platforms import Gpu

import jax_gg
from jax_gg import _jax_gg

HOPPER = {"compute_capability": (9, 0), "processors": 132}
AMPERE = {"compute_capability": (8, 0), "processors": 108}

needs_cuda = pytest.mark.skipif(not _jax_gg.cuda_built_for(), reason="a build of jax_gg with CUDA")
needs_sm90 = pytest.mark.skipif("sm_90" not in _jax_gg.cuda_built_for(), reason="a build of jax_gg with sm_90")


def shapes(m=4096, k=2048, n=768, g=8, dtype=jnp.bfloat16):
    return (
        jax.ShapeDtypeStruct((m, k), dtype),
        jax.ShapeDtypeStruct((g, k, n), dtype),
        jax.ShapeDtypeStruct((g,), np.int32),
    )


def loss(lhs, rhs, sizes):
    return jax_gg.gmm(lhs, rhs, sizes, preferred_element_type=jnp.float32).sum()


@pytest.mark.skipif(bool(_jax_gg.cuda_built_for()), reason="a build of jax_gg without CUDA")
def test_without_cuda():
    with pytest.raises(RuntimeError, match=r"^jax_gg\.explain: this build has no CUDA kernels, expected .*$"):
        jax_gg.explain(jax_gg.gmm)


@needs_cuda
class TestExplain:
    @needs_sm90
    @pytest.mark.parametrize(("device", "family"), [(HOPPER, "sm90_"), (AMPERE, "sm80_")], ids=["hopper", "ampere"])
    def test_device(self, device, family):
        (choice,) = jax_gg.explain(jax_gg.gmm, **device)(*shapes())
        assert choice.kernel.startswith(family)
        first, *others = str(choice).splitlines()
        assert first.startswith("gmm(m=4096, k=2048, n=768, g=8, group_sizes=8, batch=1, bf16 -> bf16) on compute cap")
        assert first.endswith(choice.kernel)
        assert sum(line.endswith(" chosen") for line in others) == 1
        assert any(line.split()[0] == choice.kernel and line.endswith(" chosen") for line in others)
        names = [line.split()[0] for line in others]
        here = {line.split(": ")[1] for line in _jax_gg.cuda_kernels() if line.startswith("gmm bf16 -> bf16:")}
        assert set(names) == here
        if device is AMPERE:
            assert all("needs a newer GPU" in line for line in others if "sm90_" in line)

    def test_gradients(self):
        choices = jax_gg.explain(jax.value_and_grad(loss, argnums=(0, 1)), **AMPERE)(*shapes())
        calls = [str(c).split("(")[0] + ("^T" if "transpose_rhs" in str(c).splitlines()[0] else "") for c in choices]
        assert sorted(calls) == ["gmm", "gmm^T", "tgmm"]

    def test_in_a_loop(self):
        def twice(lhs, rhs, sizes):
            step = lambda x, _: (jax_gg.gmm(x, rhs, sizes), None)  # noqa: E731
            return jax_gg.gmm(jax.lax.scan(step, lhs, length=3)[0], rhs, sizes)

        assert len(jax_gg.explain(twice, **AMPERE)(*shapes(k=64, n=64))) == 1, "the same call"

    def test_vmap(self):
        lhs, rhs, sizes = shapes()
        lhs, sizes = (jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in (lhs, sizes))
        (choice,) = jax_gg.explain(jax.vmap(jax_gg.gmm, (0, None, 0)), **HOPPER)(lhs, rhs, sizes)
        assert "batch=3" in str(choice)

    def test_padded(self):
        """As the kernels see it."""
        (choice,) = jax_gg.explain(jax_gg.gmm, **HOPPER)(*shapes(k=33, n=7))
        assert "k=40, n=8" in str(choice)

    @needs_sm90
    @pytest.mark.parametrize(
        ("k", "n", "dtype", "reason"),
        [(2050, 768, jnp.bfloat16, "needs other multiples"), (2048, 766, jnp.float16, "needs other multiples")],
    )
    def test_why_not_hopper(self, k, n, dtype, reason):
        (choice,) = jax_gg.explain(jax_gg.gmm, **HOPPER)(*shapes(k=k, n=n, dtype=dtype))
        assert choice.kernel.startswith("sm80_")
        assert any("sm90_" in line and reason in line for line in str(choice).splitlines())

    @needs_sm90
    @pytest.mark.parametrize(("m", "n", "reason"), [(2**30 + 8, 8, "too many rows"), (2**20, 2**31 - 8192, "too many")])
    def test_beyond_descriptors(self, m, n, reason):
        (choice,) = jax_gg.explain(jax_gg.gmm, **HOPPER)(*shapes(m=m, k=8, n=n))
        assert choice.kernel.startswith("sm80_")
        assert any("sm90_" in line and reason in line for line in str(choice).splitlines())

    def test_forced(self):
        f = functools.partial(jax_gg.gmm, kernel="sm80_32x128")
        (choice,) = jax_gg.explain(f, **AMPERE)(*shapes())
        assert choice.kernel.startswith("sm80_32x128")
        assert "excluded by the argument `kernel`" in str(choice)

    def test_none(self):
        f = functools.partial(jax_gg.gmm, kernel="sm1_")
        (choice,) = jax_gg.explain(f, **AMPERE)(*shapes())
        assert choice.kernel == ""
        assert str(choice).startswith("no kernel named sm1_ for gmm(m=4096")
        (choice,) = jax_gg.explain(jax_gg.gmm, compute_capability=(7, 5))(*shapes())
        assert str(choice).endswith("on compute capability 7.5, expected 8.0 or newer")
        assert jax_gg.explain(jnp.sin)(jnp.ones(3)) == ()

    @pytest.mark.parametrize("major", [7, 8, 9, 10, 12])
    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, np.float32], ids=lambda d: jnp.dtype(d).name)
    @pytest.mark.parametrize("problem", [(1, 8, 8, 1), (64, 4096, 14336, 8), (65536, 2048, 768, 128)], ids=str)
    def test_every_shape_has_a_kernel(self, major, dtype, problem):
        choices = jax_gg.explain(jax.value_and_grad(loss, (0, 1)), compute_capability=(major, 0))(
            *shapes(*problem, dtype)
        )
        assert len(choices) == 3
        assert all(bool(c.kernel) == (major >= 8) for c in choices)

    @pytest.mark.parametrize(
        ("more", "error", "message"),
        [
            (
                {"compute_capability": 9.0},
                TypeError,
                r"compute_capability: got 9\.0, expected two ints, such as \(9, 0\)",
            ),
            ({"compute_capability": (9, 0, 0)}, ValueError, r"compute_capability: got \(9, 0, 0\), expected two ints"),
            ({"compute_capability": (0, 9)}, ValueError, r"compute_capability: got \(0, 9\), expected two ints"),
            ({"processors": "all"}, TypeError, r"processors: got str, expected an int"),
            ({"processors": 0}, ValueError, r"processors: got 0, expected 1 or more"),
        ],
    )
    def test_errors(self, more, error, message):
        with pytest.raises(error, match=f"^{message}.*$"):
            jax_gg.explain(jax_gg.gmm, **more)


@needs_cuda
class TestOnGpu(Gpu):
    def test_device_at_hand(self, device):
        lhs, rhs, sizes = shapes(m=512)
        (choice,) = jax_gg.explain(jax_gg.gmm)(lhs, rhs, sizes)
        major, minor = device.compute_capability.split(".")
        assert f"on compute capability {major}.{minor} with {device.core_count} processors" in str(choice)
