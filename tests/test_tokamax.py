"""jax_gg.tokamax.ragged_dot as tokamax.ragged_dot calls it, beside tokamax's own reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import operands
import pytest
import reference
from compare import assert_exact
from jaxprs import primitives
from platforms import Cpu, Gpu

import jax_gg.tokamax

M, K, N, G = 40, 16, 24, 4
SIZES = np.array([7, 0, 20, 9], np.int32)
NUMBERS = {
    "gmm": jax.lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0]),
    "transposed": jax.lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0]),
    "tgmm": jax.lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], []),
}
SHAPES = {"gmm": ((M, K), (G, K, N)), "transposed": ((M, K), (G, N, K)), "tgmm": ((M, K), (M, N))}


def relu(x):
    return jnp.maximum(x, 0)


class Tokamax:
    @pytest.fixture
    def tokamax(self):
        return pytest.importorskip("tokamax", reason="tokamax is not installed")

    @pytest.fixture
    def ours(self, tokamax):
        return functools.partial(tokamax.ragged_dot, implementation=[jax_gg.tokamax.ragged_dot])

    @pytest.fixture
    def theirs(self, tokamax):
        """Which promotes dtypes, so that its tests must allow it."""
        with jax.numpy_dtype_promotion("standard"):
            yield functools.partial(tokamax.ragged_dot, implementation="xla")

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
    @pytest.mark.parametrize("preferred", [None, np.float32, jnp.bfloat16])
    @pytest.mark.parametrize("activation", [None, relu])
    def test_as_reference(self, rng, ours, theirs, dtype, preferred, activation):
        """Value and gradients."""
        args = [jnp.asarray(operands.integers(rng, shape, dtype)) for shape in SHAPES["gmm"]]
        more = {"preferred_element_type": preferred, "activation": activation}
        dout = jnp.asarray(operands.integers(rng, (M, N), preferred or dtype))
        (out, vjp), (want, want_vjp) = (jax.vjp(lambda *x, f=f: f(*x, SIZES, **more), *args) for f in (ours, theirs))
        assert out.dtype == want.dtype
        assert_exact(out, reference.f64(want))
        for x, y in zip(vjp(dout), want_vjp(dout), strict=True):
            assert x.dtype == y.dtype
            assert_exact(x, reference.f64(y))

    @pytest.mark.parametrize("name", NUMBERS)
    def test_general(self, rng, tokamax, name):
        args = *(jnp.asarray(operands.integers(rng, shape)) for shape in SHAPES[name]), jnp.asarray(SIZES)
        general = functools.partial(tokamax.ragged_dot_general, ragged_dot_dimension_numbers=NUMBERS[name])
        out = general(*args, implementation=[jax_gg.tokamax.ragged_dot])
        assert_exact(out, reference.f64(general(*args, implementation="xla")))

    def test_kernel_is_called(self, rng, ours):
        args = *(operands.integers(rng, shape) for shape in SHAPES["gmm"]), SIZES
        count = primitives(ours, *args)
        assert count["jax_gg_gmm"] == 1
        assert not any("dot" in name for name in count)

    def test_group_sizes(self, rng, tokamax, ours):
        args = [operands.integers(rng, shape) for shape in SHAPES["gmm"]]
        group_sizes = tokamax.RaggedDotGroupSizes(jnp.asarray(SIZES), (M // G,) * G)
        want = reference.gmm(*args, SIZES)
        assert_exact(ours(*args, group_sizes), want)
        assert_exact(jax.jit(ours)(*args, group_sizes), want)

    def test_activation_before_rounding(self, rng, ours):
        args = [operands.normal(rng, shape, jnp.bfloat16) for shape in SHAPES["gmm"]]
        wide = ours(*args, SIZES, preferred_element_type=np.float32)
        out = ours(*args, SIZES, activation=jnp.tanh)
        assert_exact(out, reference.f64(jnp.tanh(wide).astype(jnp.bfloat16)))

    def test_group_offset(self, rng, ours):
        lhs, rhs = (operands.integers(rng, shape) for shape in SHAPES["gmm"])
        out = ours(lhs, rhs[2:], SIZES, group_offset=jnp.array([2]), zero_initialize=True)
        assert_exact(out, reference.gmm(lhs, rhs[2:], SIZES, group_offset=2))

    def test_others_serve_the_rest(self, rng, tokamax):
        """Each of which jax_gg refuses."""
        lhs, rhs = (operands.integers(rng, shape) for shape in SHAPES["gmm"])
        wide = operands.integers(rng, (G, K, N), np.int8)
        for x, y, more in (
            (lhs.astype(np.int8), wide, {"preferred_element_type": np.int32}),
            (lhs, rhs, {"fuse_gateup_activation": "silu"}),
        ):
            call = functools.partial(tokamax.ragged_dot, x, y, SIZES, **more)
            with pytest.raises(NotImplementedError):
                call(implementation=[jax_gg.tokamax.ragged_dot])
            out = call(implementation=[jax_gg.tokamax.ragged_dot, "xla"])
            np.testing.assert_array_equal(out, call(implementation="xla"))


class TestTokamaxCpu(Cpu, Tokamax):
    pass


class TestTokamaxGpu(Gpu, Tokamax):
    pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"manual_axis_type": "varying"}, "manual_axis_type: got varying, expected None"),
        ({"fuse_gateup_activation": "silu"}, "fuse_gateup_activation: got silu, expected None"),
        ({"precision": "ANY_F8_ANY_F8_F32"}, "precision: got ANY_F8_ANY_F8_F32, expected one that gmm takes"),
        ({"lhs": "quantized"}, "lhs: got str, expected an array"),
        ({"lhs": np.ones((M, K), np.int8)}, "lhs and rhs: got int8 and float32, expected dtypes that gmm takes"),
        (
            {"preferred_element_type": "int8"},
            "lhs and rhs: got float32 and float32 to int8, expected dtypes that gmm takes",
        ),
    ],
)
def test_not_served(changes, message):
    """Says so, so that tokamax goes on to the next implementation."""
    args = {"lhs": np.ones((M, K), np.float32), "rhs": np.ones((G, K, N), np.float32), "group_sizes": SIZES}
    with pytest.raises(NotImplementedError) as e:
        jax_gg.tokamax.ragged_dot(**args | changes)
    assert str(e.value) == message


def test_dimensions_not_served():
    numbers = jax.lax.RaggedDotDimensionNumbers((([2], [2]), ([0], [1])), [1], [0])
    with pytest.raises(NotImplementedError, match=r"^ragged_dot_dimension_numbers: got .*, expected those of gmm"):
        jax_gg.tokamax.ragged_dot(
            np.ones((2, M, K), np.float32),
            np.ones((G, 2, K, N), np.float32),
            group_sizes=SIZES,
            ragged_dot_dimension_numbers=numbers,
        )
