"""gmm under jit, scan, remat and export."""

import jax
import jax.numpy as jnp
import numpy as np
import operands
import pytest
import reference
from compare import assert_exact
from jaxprs import primitives
from platforms import Cpu, Gpu

import jax_gg

M, K, N, G = 40, 8, 6, 5


def random_sizes(rng, count):
    """Sizes of every kind: sums below, at and past m, empty groups, negative ones."""
    sizes = rng.integers(-4, 20, (count, G)).astype(np.int32)
    sizes[::5] = 0
    sizes[1::5, rng.integers(G)] = M
    return sizes


def three(lhs, rhs, sizes, dout):
    out, vjp = jax.vjp(lambda *x: jax_gg.gmm(*x, sizes), lhs, rhs)
    return out, *vjp(dout)


def check_three(got, lhs, rhs, sizes, dout):
    assert_exact(got[0], reference.gmm(lhs, rhs, sizes))
    for x, want in zip(got[1:], reference.gmm_gradients(lhs, rhs, sizes, dout), strict=True):
        assert_exact(x, want)


class Transforms:
    @pytest.fixture
    def arrays(self, rng):
        return operands.integers(rng, (M, K)), operands.integers(rng, (G, K, N)), operands.integers(rng, (M, N))

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_one_program_for_fifty_sizes(self, rng, arrays, dtype):
        lhs, rhs, dout = (x.astype(dtype) for x in arrays)
        f32 = jnp.float32  # the result; that in bf16 would be rounded

        def f(lhs, rhs, sizes, dout):
            out = jax_gg.gmm(lhs, rhs, sizes, preferred_element_type=f32)
            dlhs = jax_gg.gmm(dout, rhs, sizes, transpose_rhs=True, preferred_element_type=f32)
            return out, dlhs, jax_gg.tgmm(lhs, dout, sizes, preferred_element_type=f32)

        sizes = random_sizes(rng, 50)
        compiled = jax.jit(f).lower(lhs, rhs, sizes[0], dout).compile()
        for s in sizes:
            check_three(compiled(lhs, rhs, s, dout), lhs, rhs, s, dout)

    def test_sizes_are_traced_once(self, rng, arrays):
        lhs, rhs, dout = arrays
        traces = []

        @jax.jit
        def f(lhs, rhs, sizes, dout):
            traces.append(sizes)
            return three(lhs, rhs, sizes, dout)

        for s in random_sizes(rng, 10):
            check_three(f(lhs, rhs, jnp.asarray(s), dout), lhs, rhs, s, dout)
        assert len(traces) == 1

    def test_sizes_from_a_router(self, rng):
        """Sizes and rows computed in the program that multiplies them."""
        tokens, logits = operands.integers(rng, (M, K)), rng.standard_normal((M, G), np.float32)
        rhs = operands.integers(rng, (G, K, N))

        @jax.jit
        def layer(tokens, logits, rhs):
            expert = logits.argmax(axis=1)
            order = expert.argsort(stable=True)
            out = jax_gg.gmm(tokens[order], rhs, jnp.bincount(expert, length=G))
            return jnp.zeros_like(out).at[order].set(out)

        want = np.stack([t.astype(float) @ rhs[e] for t, e in zip(tokens, logits.argmax(axis=1), strict=True)])
        assert_exact(layer(tokens, logits, rhs), want)

    def test_scan_over_sizes(self, rng, arrays):
        """Fifty steps of one loop that runs on the device."""
        lhs, rhs, dout = arrays
        sizes = random_sizes(rng, 50)

        def f(lhs, rhs, sizes, dout):
            return jax.lax.scan(lambda carry, s: (carry, three(lhs, rhs, s, dout)), None, sizes)[1]

        got = jax.jit(f)(lhs, rhs, sizes, dout)
        for i, s in enumerate(sizes):
            check_three([x[i] for x in got], lhs, rhs, s, dout)

    @pytest.mark.parametrize("remat", [False, True])
    def test_scan_over_layers(self, rng, remat):
        """The gradient is that of the same layers in a row, without scan and without remat."""
        layers, width = 3, 6
        x = operands.integers(rng, (M, width))
        weights = operands.integers(rng, (layers, G, width, width))
        sizes = rng.integers(-1, 12, (layers, G)).astype(np.int32)

        def layer(x, w, s):
            y = jax_gg.gmm(x, w, s, precision="highest")
            return jnp.clip(y, -2, 2) * (y % 2)  # not linear, and still integers

        def scanned(x, weights):
            body = jax.checkpoint(layer) if remat else layer
            return (jax.lax.scan(lambda x, ws: (body(x, *ws), None), x, (weights, sizes))[0] ** 2).sum()

        def unrolled(x, weights):
            for w, s in zip(weights, sizes, strict=True):
                x = layer(x, w, s)
            return (x**2).sum()

        got = jax.jit(jax.value_and_grad(scanned, (0, 1)))(x, weights)
        want = jax.value_and_grad(unrolled, (0, 1))(x, weights)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_exact(a, reference.f64(b))
        assert np.abs(want[1][1]).max() > 0

    def test_checkpoint(self, rng, arrays):
        lhs, rhs, _ = arrays
        sizes = random_sizes(rng, 1)[0]
        square = operands.integers(rng, (G, N, K))

        def loss(lhs, rhs, square):
            hidden = jax_gg.gmm(lhs, rhs, sizes) % 4
            return (jax_gg.gmm(hidden, square, sizes) * jnp.arange(K, dtype=lhs.dtype)[None]).sum()

        want = jax.grad(loss, (0, 1, 2))(lhs, rhs, square)
        remat = jax.grad(jax.checkpoint(loss), (0, 1, 2))
        for got in (remat(lhs, rhs, square), jax.jit(remat)(lhs, rhs, square)):
            for x, y in zip(got, want, strict=True):
                assert_exact(x, reference.f64(y))
        calls = primitives(remat, lhs, rhs, square)
        # Forward, and again the first one only: on its result, not on the second's, a gradient depends; and backward.
        assert calls["jax_gg_gmm"] == 2 + 1 + 2
        assert calls["jax_gg_tgmm"] == 2

    def test_cond(self, arrays):
        lhs, rhs, _ = arrays
        sizes = np.full(G, 3, np.int32)

        @jax.jit
        def f(flag, lhs, rhs):
            return jax.lax.cond(
                flag, lambda *x: jax_gg.gmm(*x, sizes), lambda *x: jax_gg.gmm(*x, sizes[::-1] - 1), *(lhs, rhs)
            )

        assert_exact(f(True, lhs, rhs), reference.gmm(lhs, rhs, sizes))
        assert_exact(f(False, lhs, rhs), reference.gmm(lhs, rhs, sizes - 1))

    def test_donated_operand(self, rng, arrays):
        """The result may take the memory of nothing that is still read."""
        lhs, rhs = operands.integers(rng, (M, K)), operands.integers(rng, (G, K, K))
        sizes = random_sizes(rng, 1)[0]
        donate = jax.jit(lambda *x: jax_gg.gmm(*x) + x[0], donate_argnums=0)
        assert_exact(donate(jnp.array(lhs), rhs, sizes), reference.gmm(lhs, rhs, sizes) + lhs)

    def test_export(self, rng, arrays, device):
        """Serialised with its gradient, read back, called."""
        pytest.importorskip("flatbuffers", reason="jax.export serialises with it")
        lhs, rhs, _ = arrays
        checks = [jax.export.DisabledSafetyCheck.custom_call(f"jax_gg_{op}") for op in ("gmm", "tgmm")]
        platform = {"gpu": "cuda"}.get(device.platform, device.platform)
        exported = jax.export.export(jax.jit(jax_gg.gmm), platforms=[platform], disabled_checks=checks)(
            *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (lhs, rhs)), jax.ShapeDtypeStruct((G,), np.int32)
        )
        call = jax.export.deserialize(exported.serialize(vjp_order=1)).call
        for sizes in random_sizes(rng, 5):
            out, vjp = jax.vjp(lambda *x, s=sizes: call(*x, s), jnp.asarray(lhs), jnp.asarray(rhs))
            check_three((out, *vjp(out)), lhs, rhs, sizes, np.asarray(out))

    def test_eval_shape(self, arrays):
        lhs, rhs, dout = arrays
        sizes = np.zeros(G, np.int32)
        assert jax.eval_shape(jax_gg.gmm, lhs, rhs, sizes).shape == (M, N)
        assert jax.eval_shape(jax_gg.tgmm, lhs, dout, sizes).shape == (G, K, N)


class TestTransformsCpu(Cpu, Transforms):
    def test_export_to_cuda(self, arrays):
        """Needs neither a GPU nor a build with CUDA: the kernel's name is all that is exported."""
        lhs, rhs, _ = arrays
        checks = [jax.export.DisabledSafetyCheck.custom_call("jax_gg_gmm")]
        exported = jax.export.export(jax.jit(jax_gg.gmm), platforms=["cuda"], disabled_checks=checks)(
            lhs, rhs, np.zeros(G, np.int32)
        )
        assert exported.platforms == ("cuda",)
        assert "jax_gg_gmm" in exported.mlir_module()


class TestTransformsGpu(Gpu, Transforms):
    pass


def test_export_for_any_number_of_rows():
    (m,) = jax.export.symbolic_shape("m")
    checks = [jax.export.DisabledSafetyCheck.custom_call("jax_gg_gmm")]
    shapes = (jax.ShapeDtypeStruct(s, np.float32) for s in ((m, 4), (2, 4, 3)))
    exported = jax.export.export(jax.jit(jax_gg.gmm), disabled_checks=checks)(
        *shapes, jax.ShapeDtypeStruct((2,), np.int32)
    )
    for rows in (1, 5):
        out = exported.call(np.ones((rows, 4), np.float32), np.ones((2, 4, 3), np.float32), np.array([2, 1], np.int32))
        np.testing.assert_array_equal(out[:, 0], ([4] * 3 + [0] * 2)[:rows])
