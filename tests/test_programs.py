"""Models that call jax.lax.ragged_dot, unchanged, before and after accelerate_ragged_dot."""

import jax
import jax.numpy as jnp
import numpy as np
import operands
import pytest
from compare import assert_near
from platforms import Cpu, Gpu

import jax_gg

pytest.importorskip("flax", reason="The models are written with it.")

import programs


class Programs:
    @pytest.fixture(params=programs.PROGRAMS)
    def program(self, request, rng):
        config = programs.Config()
        loss, params = programs.PROGRAMS[request.param](config)
        return loss, params, jnp.asarray(operands.normal(rng, (config.tokens, config.dim), np.float32))

    def check_near(self, got, want):
        """In f32, or where the default is TF32, in that."""
        relative = 1e-5 if self.platform == "cpu" else 1e-2
        got, want = (jax.tree.leaves_with_path(x) for x in (got, want))
        for (path, x), (want_path, y) in zip(got, want, strict=True):
            assert path == want_path
            assert np.linalg.norm(y) > 0
            assert_near(x, y, relative)

    def test_loss_and_gradients(self, program):
        """Of the function itself, which finds the program of each side again."""
        loss, *args = program
        step = jax.jit(jax.value_and_grad(loss))
        want = step(*args)
        assert "jax_gg" not in step.lower(*args).compile().as_text()
        with jax_gg.accelerate_ragged_dot():
            text = step.lower(*args).compile().as_text()
            assert "jax_gg_gmm" in text
            assert "jax_gg_tgmm" in text
            self.check_near(step(*args), want)
        for x, y in zip(jax.tree.leaves(step(*args)), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(x, y)
        assert step._cache_size() == 2

    def test_forward_mode(self, program):
        """Along the gradient, the derivative is its square; and a Hessian-vector product."""
        loss, params, x = program
        grad = jax.grad(loss)(params, x)
        derivative = jax.jit(lambda p, t: jax.jvp(lambda p: loss(p, x), (p,), (t,))[1])
        product = jax.jit(lambda p, t: jax.jvp(lambda p: jax.grad(loss)(p, x), (p,), (t,))[1])
        want = derivative(params, grad), product(params, grad)
        with jax_gg.accelerate_ragged_dot():
            assert "jax_gg_gmm" in derivative.lower(params, grad).compile().as_text()
            got = derivative(params, grad), product(params, grad)
        self.check_near(got, want)
        self.check_near(got[0], sum((g**2).sum() for g in jax.tree.leaves(grad)))


class TestProgramsCpu(Cpu, Programs):
    pass


class TestProgramsGpu(Gpu, Programs):
    pass
