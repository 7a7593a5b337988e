"""jax_gg.ragged_dot in the place of jax.lax.ragged_dot."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import operands
import pytest
import reference
from compare import assert_exact, check_gmm
from jaxprs import primitives
from platforms import Cpu, Gpu

import jax_gg

M, K, N, G = 30, 12, 10, 4
SIZES = np.array([5, 0, 13, 8], np.int32)


def arguments(rng, dtype=np.float32, rhs_dtype=None):
    return operands.integers(rng, (M, K), dtype), operands.integers(rng, (G, K, N), rhs_dtype or dtype), SIZES


def served(f, *args):
    """Whether jax_gg's kernel, and nothing of JAX's, computes it."""
    count = primitives(f, *args)
    assert ("jax_gg_gmm" in count) != any("dot" in name for name in count), count
    return "jax_gg_gmm" in count


def test_signature():
    ours, theirs = (
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (jax_gg.ragged_dot, jax.lax.ragged_dot)
    )
    # jax.lax.ragged_dot has out_sharding since JAX 0.9, and reduction_order since 0.12.1.
    assert ours[: len(theirs)] == theirs
    assert [name for name, *_ in ours[len(theirs) :]] == ["out_sharding", "reduction_order"][len(theirs) - 6 :]


def takes_order() -> bool:
    return "reduction_order" in inspect.signature(jax.lax.ragged_dot).parameters


def test_order_of_sums_without_jax():
    given = np.zeros((M, K), np.float32), np.zeros((G, K, N), np.float32), SIZES
    more, message = {}, f"expected None with JAX {jax.__version__}"
    if takes_order():
        more, message = {"group_offset": 0}, "expected None with group_offset"
    with pytest.raises((TypeError, ValueError), match=rf"^reduction_order: got 'linear', {re.escape(message)}$"):
        jax_gg.ragged_dot(*given, **more, reduction_order="linear")


class RaggedDot:
    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
    def test_value(self, rng, dtype):
        lhs, rhs = operands.normal(rng, (M, K), dtype), operands.normal(rng, (G, K, N), dtype)
        out = jax_gg.ragged_dot(lhs, rhs, SIZES)
        assert out.dtype == dtype
        check_gmm(out, lhs, rhs, SIZES)
        assert served(jax_gg.ragged_dot, lhs, rhs, SIZES)

    def test_same_value_as_jax(self, rng):
        args = arguments(rng)
        assert_exact(jax_gg.ragged_dot(*args), reference.f64(jax.lax.ragged_dot(*args)))

    def test_positional(self, rng):
        args = arguments(rng, jnp.bfloat16)
        out = jax_gg.ragged_dot(*args, jax.lax.Precision.HIGHEST, jnp.float32)
        assert out.dtype == jnp.float32
        assert_exact(out, reference.gmm(*args))

    def test_gradients(self, rng):
        lhs, rhs, sizes = arguments(rng)
        dout = jnp.asarray(operands.integers(rng, (M, N)))
        grads = jax.vjp(lambda *x: jax_gg.ragged_dot(*x, sizes), lhs, rhs)[1](dout)
        theirs = jax.vjp(lambda *x: jax.lax.ragged_dot(*x, sizes), lhs, rhs)[1](dout)
        for got, want in zip(grads, theirs, strict=True):
            assert_exact(got, reference.f64(want))

    def test_group_offset(self, rng):
        """Which jax.lax.ragged_dot refuses."""
        lhs, rhs, sizes = arguments(rng)
        for offset in (0, 2, jnp.array([1])):
            out = jax_gg.ragged_dot(lhs, rhs[:2], sizes, group_offset=offset)
            assert_exact(out, reference.gmm(lhs, rhs[:2], sizes, group_offset=int(np.ravel(offset)[0])))

    @pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8, np.complex64])
    def test_other_dtypes(self, rng, dtype):
        if self.platform == "gpu" and dtype in (np.int8, np.complex64):
            # Seen with JAX 0.11.2 on an H200: twice the sum for int8, a crash of the compiler for complex64.
            pytest.skip("jax.lax.ragged_dot itself fails on a GPU for this dtype")
        lhs, rhs, sizes = operands.integers(rng, (M, K)), operands.integers(rng, (G, K, N)), SIZES
        lhs, rhs = abs(lhs).astype(dtype), abs(rhs).astype(dtype)
        preferred = np.int32 if np.issubdtype(dtype, np.integer) else None
        out = jax_gg.ragged_dot(lhs, rhs, sizes, preferred_element_type=preferred)
        theirs = jax.lax.ragged_dot(lhs, rhs, sizes, preferred_element_type=preferred)
        assert out.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(out), np.asarray(theirs))
        np.testing.assert_array_equal(
            np.asarray(out)[: SIZES.sum()], reference.gmm(lhs.real, rhs.real, sizes)[: SIZES.sum()]
        )
        assert not served(jax_gg.ragged_dot, lhs, rhs, sizes)

    def test_mixed_dtypes(self, rng):
        """As jax.lax.ragged_dot treats them."""
        args = arguments(rng, jnp.bfloat16, np.float32)
        out = jax_gg.ragged_dot(*args, preferred_element_type=np.float32)
        theirs = jax.lax.ragged_dot(*args, preferred_element_type=np.float32)
        assert out.dtype == theirs.dtype
        assert_exact(out, reference.f64(theirs))
        assert not served(jax_gg.ragged_dot, *args)

    @pytest.mark.skipif(not takes_order(), reason="This JAX takes no order of sums.")
    def test_order_of_sums(self, rng):
        args = arguments(rng)
        ordered = functools.partial(jax_gg.ragged_dot, reduction_order="unordered")
        assert_exact(ordered(*args), reference.gmm(*args))
        assert not served(ordered, *args)

    @pytest.mark.parametrize(
        "precision",
        [
            None,
            "highest",
            "float32",
            "default",
            jax.lax.Precision.HIGH,
            (jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST),
            jax.lax.DotAlgorithmPreset.F32_F32_F32,
            jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
            "TF32_TF32_F32_X3",
        ],
    )
    def test_precision(self, rng, precision):
        lhs, rhs = operands.normal(rng, (M, K), np.float32), operands.normal(rng, (G, K, N), np.float32)
        out = jax_gg.ragged_dot(lhs, rhs, SIZES, precision)
        expects_f32 = precision not in (None, "default", jax.lax.Precision.HIGH)
        check_gmm(out, lhs, rhs, SIZES, precision="highest" if expects_f32 else None)


def test_precision_reaches_the_kernel():
    """With the number that jax.lax.Precision gives it; None means JAX's configured one."""

    def passed(precision):
        args = np.zeros((2, 3), np.float32), np.zeros((1, 3, 4), np.float32), np.array([2])
        text = str(jax.make_jaxpr(lambda *x: jax_gg.ragged_dot(*x, precision))(*args))
        return [p for p in jax.lax.Precision if f"int32({p.value})" in text]

    assert passed(None) == [jax.lax.Precision.DEFAULT]
    for p in jax.lax.Precision:
        assert passed(p) == passed(p.name.lower()) == [p]
        assert passed((p, jax.lax.Precision.DEFAULT)) == passed((jax.lax.Precision.DEFAULT, p)) == [p]
        with jax.default_matmul_precision(p.name.lower()):
            assert passed(None) == [p]
            assert passed("default") == [jax.lax.Precision.DEFAULT]
    assert passed("float32") == [jax.lax.Precision.HIGHEST]
    assert passed("tensorfloat32") == [jax.lax.Precision.HIGH]
    for name, want in {"F32_F32_F32": "HIGHEST", "BF16_BF16_F32": "DEFAULT", "TF32_TF32_F32_X3": "HIGHEST"}.items():
        assert passed(name) == passed(jax.lax.DotAlgorithmPreset[name]) == [jax.lax.Precision[want]]


class TestRaggedDotCpu(Cpu, RaggedDot):
    pass


class TestRaggedDotGpu(Gpu, RaggedDot):
    pass
