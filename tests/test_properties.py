"""Any shapes, sizes, dtypes and offsets."""

import jax.numpy as jnp
import numpy as np
import operands
import problems
from compare import check_tgmm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from platforms import Cpu, Gpu

import jax_gg

# A compilation takes longer than any deadline that says something; and the fixtures set up nothing that an example
# could spoil for the next.
hundred = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)
dims = st.sampled_from([0, 1, 2, 3, 5, 8, 16, 17, 33, 64, 65, 130])
size = st.one_of(
    st.integers(0, 40),
    st.just(0),
    st.integers(-5, 5),
    st.sampled_from([problems.INT32_MAX, problems.INT32_MIN, problems.INT32_MAX - 1, -1, 2**30]),
)
seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from([jnp.float16, jnp.bfloat16, jnp.float32])


@st.composite
def any_problem(draw):
    m, k, n = draw(st.tuples(dims, dims, dims))
    sizes = tuple(draw(st.lists(size, max_size=12)))
    return problems.Problem(f"{m}x{k}x{n}", m, k, n, sizes)


@st.composite
def any_slice(draw, problem):
    """Either all groups, or `group_offset` and how many there are from it on, in or outside the problem's."""
    if draw(st.booleans()):
        return {}
    return {"group_offset": draw(st.integers(-3, problem.g + 2)), "num_groups": draw(st.integers(0, 6))}


class Properties:
    @hundred
    @given(data=st.data(), seed=seeds, problem=any_problem(), dtype=dtypes, out_dtype=dtypes, transpose=st.booleans())
    def test_gmm_and_gradients(self, data, seed, problem, dtype, out_dtype, transpose):
        some = data.draw(any_slice(problem))
        rng = np.random.default_rng(seed)
        operands.check_all(operands.make(rng, problem, dtype, transpose_rhs=transpose, out_dtype=out_dtype, **some))

    @hundred
    @given(data=st.data(), seed=seeds, problem=any_problem(), dtype=dtypes, out_dtype=dtypes)
    def test_tgmm(self, data, seed, problem, dtype, out_dtype):
        some = data.draw(any_slice(problem))
        o = operands.make(np.random.default_rng(seed), problem, dtype, **some)
        dout = o.dout.astype(dtype)
        operands.poison(((len(o.rhs), problem.k, problem.n), out_dtype))
        out = jax_gg.tgmm(o.lhs, dout, o.sizes, preferred_element_type=out_dtype, **some)
        assert out.dtype == out_dtype
        check_tgmm(out, o.lhs, dout, o.sizes, **some)


class TestPropertiesCpu(Cpu, Properties):
    pass


class TestPropertiesGpu(Gpu, Properties):
    pass
