"""jax.lax.ragged_dot and ragged_dot_general, lowered to the kernels."""

import functools
import inspect
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import operands
import pytest
import reference
from compare import assert_exact, check_gmm
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from platforms import Cpu, Gpu

import jax_gg

B, X, Y, M, K, N, G = 2, 3, 2, 12, 4, 6, 3
LENGTHS = {"b": B, "c": 3, "x": X, "y": Y, "m": M, "k": K, "l": 2, "n": N, "o": 2, "g": G}
SIZES = np.array([5, 0, 4], np.int32)


def numbers(lhs: str, rhs: str, batch: str = "", contracted: str = "", ragged: str = "m"):
    """Of operands with these dimensions, in this order in memory."""
    return jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=[[[x.index(d) for d in dims] for x in (lhs, rhs)] for dims in (contracted, batch)],
        lhs_ragged_dimensions=[lhs.index(ragged)],
        rhs_group_dimensions=[rhs.index("g")] if "g" in rhs else [],
    )


def arrays(rng, *dims: str, dtype=np.float32):
    return [jnp.asarray(operands.integers(rng, [LENGTHS[d] for d in x], dtype)) for x in dims]


def sizes_of(rng, dims: str) -> np.ndarray:
    """At most M rows in all."""
    return rng.integers(0, M // G + 1, [LENGTHS[d] for d in dims] + [G]).astype(np.int32)


def general(f_numbers, **more):
    return lambda *x: jax.lax.ragged_dot_general(*x, ragged_dot_dimension_numbers=f_numbers, **more)


def text(f, *args, platform=None) -> str:
    more = {} if platform is None else {"lowering_platforms": (platform,)}
    return jax.jit(lambda *x: f(*x)).trace(*args).lower(**more).as_text()


def calls(f, *args, platform=None) -> list[str]:
    """The kernels that are called, where the program holds no product of JAX's."""
    lowered = text(f, *args, platform=platform)
    assert ("jax_gg" in lowered) != ("dot_general" in lowered or "ragged_dot" in lowered), lowered
    return [name for name in ("gmm", "tgmm") for _ in range(lowered.count(f"@jax_gg_{name}("))]


# lhs, rhs, batch, contracted, dimensions of the sizes before g
NON_CONTRACTED = [
    ("mk", "gkn", "", "k", ""),
    ("mk", "gnk", "", "k", ""),
    ("km", "kng", "", "k", ""),
    ("bmk", "gbkn", "b", "k", "b"),
    ("bmk", "bgkn", "b", "k", ""),
    ("mbk", "gnbk", "b", "k", "b"),
    ("bcmk", "gcbkn", "bc", "k", "bc"),
    ("xmk", "gkn", "", "k", "x"),
    ("xmk", "gkn", "", "k", ""),
    ("mky", "gkn", "", "k", ""),
    ("kxybm", "bnkg", "b", "k", "bxy"),
    ("bxmyk", "gbkn", "b", "k", "bx"),
    ("mkl", "gkno", "", "k", ""),
    ("mlk", "glnk", "", "kl", ""),
    ("mk", "gk", "", "k", ""),
    ("m", "gno", "", "", ""),
]
CONTRACTED = [
    ("mk", "mn", "", "m", ""),
    ("km", "nm", "", "m", ""),
    ("bmk", "bmn", "b", "m", "b"),
    ("bmk", "bmn", "b", "m", ""),
    ("mkb", "bnm", "b", "m", "b"),
    ("bcmk", "cbmn", "bc", "m", "bc"),
    ("mkl", "omn", "", "m", ""),
    ("m", "mn", "", "m", ""),
    ("m", "m", "", "m", ""),
]


@pytest.fixture
def accelerated():
    with jax_gg.accelerate_ragged_dot(["cpu", "cuda"]):
        yield


class Accelerated:
    def check(self, kernels, f, *args):
        """The kernels are called inside, and only there; all are exact."""
        want = jax.jit(f)(*args)
        assert "jax_gg" not in text(f, *args)
        with jax_gg.accelerate_ragged_dot():
            assert calls(f, *args) == kernels
            got = jax.jit(f)(*args)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            assert_exact(x, reference.f64(y))

    @pytest.mark.parametrize(("lhs", "rhs", "batch", "contracted", "before"), NON_CONTRACTED)
    def test_not_contracted(self, rng, lhs, rhs, batch, contracted, before):
        f = general(numbers(lhs, rhs, batch, contracted))
        self.check(["gmm"], f, *arrays(rng, lhs, rhs), sizes_of(rng, before))

    @pytest.mark.parametrize(("lhs", "rhs", "batch", "contracted", "before"), CONTRACTED)
    def test_contracted(self, rng, lhs, rhs, batch, contracted, before):
        f = general(numbers(lhs, rhs, batch, contracted))
        self.check(["tgmm"], f, *arrays(rng, lhs, rhs), sizes_of(rng, before))

    @pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32])
    @pytest.mark.parametrize("preferred", [None, np.float32])
    def test_dtypes(self, rng, dtype, preferred):
        args = *arrays(rng, "mk", "gkn", dtype=dtype), SIZES
        self.check(["gmm"], lambda *x: jax.lax.ragged_dot(*x, preferred_element_type=preferred), *args)

    @pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32])
    def test_dtypes_of_sizes(self, rng, dtype):
        self.check(["gmm"], jax.lax.ragged_dot, *arrays(rng, "mk", "gkn"), SIZES.astype(dtype))

    def test_gradients(self, rng):
        lhs, rhs, dout = arrays(rng, "mk", "gkn", "mn")

        def f(x, y, dout):
            return jax.vjp(lambda *z: jax.lax.ragged_dot(*z, SIZES), x, y)[1](dout)

        self.check(["gmm", "tgmm"], f, lhs, rhs, dout)

    def test_forward_mode(self, rng):
        lhs, rhs, dlhs, drhs = arrays(rng, "mk", "gkn", "mk", "gkn")

        def f(*x):
            return jax.jvp(lambda *y: jax.lax.ragged_dot(*y, SIZES), x[:2], x[2:])

        self.check(["gmm"] * 3, f, lhs, rhs, dlhs, drhs)

    def test_forward_over_reverse(self, rng):
        lhs, rhs, dlhs, drhs = arrays(rng, "mk", "gkn", "mk", "gkn")

        def loss(*x):
            return (jax.lax.ragged_dot(*x, SIZES) ** 2).sum()

        def f(*x):
            return jax.jvp(jax.grad(loss, (0, 1)), x[:2], x[2:])

        with jax_gg.accelerate_ragged_dot():
            assert calls(f, lhs, rhs, dlhs, drhs).count("tgmm") == 3
            got = jax.jit(f)(lhs, rhs, dlhs, drhs)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(f)(lhs, rhs, dlhs, drhs)), strict=True):
            assert_exact(x, reference.f64(y))

    def test_vmap(self, rng):
        args = *arrays(rng, "bmk", "bgkn"), sizes_of(rng, "b")
        self.check(["gmm"], jax.vmap(jax.lax.ragged_dot), *args)

    def test_nested_vmap(self, rng):
        """Which JAX 0.12.1 cannot lower: "vmap in_axes must be an int"."""
        args = *arrays(rng, "bcmk", "bcgkn"), sizes_of(rng, "bc")
        f = jax.vmap(jax.vmap(jax.lax.ragged_dot))
        with jax_gg.accelerate_ragged_dot():
            assert calls(f, *args) == ["gmm"]
            got = jax.jit(f)(*args)
        assert_exact(got, [[reference.gmm(*y) for y in zip(*x, strict=True)] for x in zip(*args, strict=True)])

    def test_vmap_of_gradients(self, rng):
        lhs, rhs, dout = arrays(rng, "bmk", "bgkn", "bmn")

        def grads(x, y, s, dout):
            return jax.vjp(lambda *z: jax.lax.ragged_dot(*z, s), x, y)[1](dout)

        self.check(["gmm", "tgmm"], jax.vmap(grads), lhs, rhs, sizes_of(rng, "b"), dout)

    def test_gradients_of_general(self, rng):
        """Of one whose gradients have other dimensions in another order."""
        lhs, rhs = arrays(rng, "mbk", "gbnk")
        sizes = sizes_of(rng, "b")

        def f(*x):
            return jax.grad(lambda *y: general(numbers("mbk", "gbnk", "b", "k"))(*y, sizes).sum(), (0, 1))(*x)

        self.check(["gmm", "tgmm"], f, lhs, rhs)

    def test_in_scan_and_remat(self, rng):
        lhs, rhs = arrays(rng, "mk", "gkk")
        step = jax.checkpoint(lambda x, _: (jnp.sign(jax.lax.ragged_dot(x, rhs, SIZES)), None))

        def f(x):
            return jax.lax.scan(step, x, length=3)[0]

        self.check(["gmm"], f, lhs)

    def test_eager(self, rng):
        args = *arrays(rng, "mk", "gkn"), SIZES
        want = jax.lax.ragged_dot(*args)
        with jax_gg.accelerate_ragged_dot():
            assert_exact(jax.lax.ragged_dot(*args), reference.f64(want))

    @pytest.mark.parametrize("m", [0, M])
    @pytest.mark.parametrize("g", [0, G])
    def test_nothing(self, m, g):
        args = np.ones((m, K), np.float32), np.ones((g, K, N), np.float32), np.zeros(g, np.int32)
        self.check(["gmm"], jax.lax.ragged_dot, *args)
        args = np.ones((B, m, K), np.float32), np.ones((B, g, K, N), np.float32), np.zeros((B, g), np.int32)
        self.check(["gmm"], jax.vmap(jax.lax.ragged_dot), *args)

    def test_nan_past_the_sum(self, rng):
        lhs, rhs = arrays(rng, "mk", "gkn")
        lhs = lhs.at[SIZES.sum() :].set(np.nan)
        with jax_gg.accelerate_ragged_dot():
            check_gmm(jax.jit(jax.lax.ragged_dot)(lhs, rhs, SIZES), lhs, rhs, SIZES)

    @pytest.mark.parametrize("precision", [None, "highest", ("default", "high"), "F32_F32_F32"])
    def test_precision(self, rng, precision):
        if precision == "F32_F32_F32":
            precision = jax.lax.DotAlgorithmPreset[precision]
        lhs, rhs = operands.normal(rng, (M, K), np.float32), operands.normal(rng, (G, K, N), np.float32)

        def f(*x):
            return jax.lax.ragged_dot(*x, precision=precision)

        with jax_gg.accelerate_ragged_dot():
            assert calls(f, lhs, rhs, SIZES) == ["gmm"]
            exact = precision is not None and precision != ("default", "high")
            check_gmm(jax.jit(f)(lhs, rhs, SIZES), lhs, rhs, SIZES, precision="highest" if exact else None)

    def test_explain(self, rng):
        """Sees what is lowered to a GPU."""
        args = *arrays(rng, "mk", "gkn"), SIZES
        if not jax_gg._jax_gg.cuda_built_for():
            pytest.skip("this build of jax_gg has no CUDA kernels")
        with jax_gg.accelerate_ragged_dot():
            assert len(jax_gg.explain(jax.lax.ragged_dot)(*args)) == 1


class TestAcceleratedCpu(Cpu, Accelerated):
    def test_float64(self, rng):
        with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
            args = *arrays(rng, "mk", "gkn", dtype=np.float64), SIZES
            self.check(["gmm"], jax.lax.ragged_dot, *args)
            with jax_gg.accelerate_ragged_dot(["cuda"]):
                assert "jax_gg" not in text(jax.lax.ragged_dot, *args, platform="cuda")

    def test_sharded(self, rng, accelerated):
        """As gmm is: no matrix is gathered."""
        mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
        lhs, rhs = operands.integers(rng, (16, 8)), operands.integers(rng, (4, 8, 16))
        sizes = np.array([5, 0, 4, 3], np.int32)

        def put(x, *spec):
            return jax.device_put(x, NamedSharding(mesh, P(*spec)))

        for specs in ((("a",), ("b",)), ((None, "a"), (None, "a", "b")), ((), (None, None, ("a", "b")))):
            split = put(lhs, *specs[0]), put(rhs, *specs[1]), put(sizes)
            assert "all-gather" not in jax.jit(jax.lax.ragged_dot).lower(*split).compile().as_text()
            assert_exact(jax.jit(jax.lax.ragged_dot)(*split), reference.gmm(lhs, rhs, sizes))

    def test_shard_map(self, rng, accelerated):
        mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
        lhs, rhs = operands.integers(rng, (8 * M, K)), operands.integers(rng, (G, K, N))
        sizes = rng.integers(0, M // G + 1, (8, G)).astype(np.int32)

        def each(x, y, s):
            return jax.lax.ragged_dot(x, y, s[0])

        f = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=(P("a"), P(), P("a")), out_specs=P("a")))
        assert "jax_gg_gmm" in f.lower(lhs, rhs, sizes).as_text()
        want = [reference.gmm(x, rhs, s) for x, s in zip(lhs.reshape(8, M, K), sizes, strict=True)]
        assert_exact(f(lhs, rhs, sizes), np.concatenate(want))

    @pytest.mark.skipif(
        "out_sharding" not in inspect.signature(jax.lax.ragged_dot).parameters, reason="This JAX takes no out_sharding."
    )
    @pytest.mark.parametrize("specs", [(P("a"), P(), P("a")), (P(), P(None, None, "a"), P(None, "a"))])
    def test_explicit_axes(self, rng, specs):
        mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Explicit,))
        lhs, rhs = operands.integers(rng, (16, K)), operands.integers(rng, (G, K, 8))
        f = functools.partial(jax.lax.ragged_dot, out_sharding=specs[2])
        grads = jax.grad(lambda *x: (f(*x) ** 2).sum(), (0, 1))
        with jax.set_mesh(mesh):
            args = jax.device_put(lhs, specs[0]), jax.device_put(rhs, specs[1]), jnp.asarray(SIZES)
            with jax_gg.accelerate_ragged_dot():
                assert calls(f, *args) == ["gmm"]
                out = jax.jit(f)(*args)
            assert out.sharding.is_equivalent_to(NamedSharding(mesh, specs[2]), 2)
            assert_exact(out, reference.gmm(lhs, rhs, SIZES))
            try:
                jax.eval_shape(grads, *args)
            except NotImplementedError as e:
                pytest.skip(f"This JAX has no gradients of it: {str(e).splitlines()[0]}")
            with jax_gg.accelerate_ragged_dot():
                assert calls(grads, *args) == ["gmm", "gmm", "tgmm"]
                got = jax.jit(grads)(*args)
        dout = 2 * reference.gmm(lhs, rhs, SIZES)
        for x, want in zip(got, reference.gmm_gradients(lhs, rhs, SIZES, dout), strict=True):
            assert_exact(x, want)

    def test_any_number_of_rows(self, rng, accelerated):
        pytest.importorskip("flatbuffers", reason="jax.export serialises with it")
        (m,) = jax.export.symbolic_shape("m")
        shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in ((m, K), (G, K, N), (m, N))]

        def f(x, y, dout, s):
            return jax.vjp(lambda *z: jax.lax.ragged_dot(*z, s), x, y)[1](dout)

        exported = jax.export.export(jax.jit(f), disabled_checks=jax_gg.export_checks)(
            *shapes, jax.ShapeDtypeStruct((G,), np.int32)
        )
        for name in ("gmm", "tgmm"):
            assert f"@jax_gg_{name}(" in exported.mlir_module()
        lhs, rhs, dout = (np.asarray(x) for x in arrays(rng, "mk", "gkn", "mn"))
        for rows in (SIZES.sum(), M):
            grads = exported.call(lhs[:rows], rhs, dout[:rows], SIZES)
            for x, y in zip(grads, reference.gmm_gradients(lhs[:rows], rhs, SIZES, dout[:rows]), strict=True):
                assert_exact(x, y)

    def test_any_number_of_columns(self, rng, accelerated):
        (n,) = jax.export.symbolic_shape("n")
        shapes = [jax.ShapeDtypeStruct(s, np.float32) for s in ((M, K), (G, K, n))]
        exported = jax.export.export(jax.jit(jax.lax.ragged_dot))(*shapes, jax.ShapeDtypeStruct((G,), np.int32))
        lhs, rhs = arrays(rng, "mk", "gkn")
        assert_exact(exported.call(lhs, rhs, SIZES), reference.gmm(lhs, rhs, SIZES))


class TestAcceleratedGpu(Gpu, Accelerated):
    pass


class TestAsBefore:
    """What the kernels do not serve is lowered as JAX does it."""

    def check(self, f, *args):
        want = [text(f, *args, platform=p) for p in ("cpu", "cuda")]
        with jax_gg.accelerate_ragged_dot(["cpu", "cuda"]):
            assert [text(f, *args, platform=p) for p in ("cpu", "cuda")] == want

    @pytest.mark.parametrize(
        ("lhs", "rhs", "batch", "contracted", "ragged", "before"),
        [
            ("mbk", "mbkn", "bm", "k", "m", "b"),  # a ragged batch dimension
            ("mkl", "mnl", "", "ml", "m", ""),  # two contracted, the ragged one first
            ("xmk", "xmn", "", "xm", "m", "x"),  # and last
        ],
    )
    def test_dimensions(self, rng, lhs, rhs, batch, contracted, ragged, before):
        f = general(numbers(lhs, rhs, batch, contracted, ragged))
        self.check(f, *arrays(rng, lhs, rhs), sizes_of(rng, before))

    @pytest.mark.parametrize(
        ("lhs", "rhs", "preferred"),
        [
            (np.int8, np.int8, np.int32),
            (np.complex64, np.complex64, None),
            (jnp.bfloat16, np.float32, np.float32),
            (jnp.float8_e4m3fn, jnp.float8_e4m3fn, np.float32),
        ],
    )
    def test_dtypes(self, lhs, rhs, preferred):
        args = jnp.ones((M, K), lhs), jnp.ones((G, K, N), rhs), SIZES
        self.check(lambda *x: jax.lax.ragged_dot(*x, preferred_element_type=preferred), *args)

    @pytest.mark.skipif(
        "reduction_order" not in inspect.signature(jax.lax.ragged_dot).parameters, reason="This JAX takes no order."
    )
    def test_order_of_sums(self, rng):

        def f(*x):
            return jax.lax.ragged_dot(*x, reduction_order="unordered")

        self.check(f, *arrays(rng, "mk", "gkn"), SIZES)

    def test_other_platforms(self, rng):
        args = *arrays(rng, "mk", "gkn"), SIZES
        want = text(jax.lax.ragged_dot, *args, platform="tpu")
        with jax_gg.accelerate_ragged_dot(["cpu", "cuda"]):
            assert text(jax.lax.ragged_dot, *args, platform="tpu") == want


class TestSetting:
    @pytest.fixture
    def served(self, rng):
        """Of platforms, those on which a new program would be served."""
        args = *arrays(rng, "mk", "gkn"), SIZES

        def served():
            return [p for p in ("cpu", "cuda") if "jax_gg" in text(jax.lax.ragged_dot, *args, platform=p)]

        assert not served()
        yield served
        assert not served()

    def test_platforms(self, served):
        built = ["cpu", "cuda"] if jax_gg._jax_gg.cuda_built_for() else ["cpu"]
        with jax_gg.accelerate_ragged_dot():
            assert served() == built
        for platforms in itertools.product(["cpu", "cuda"], repeat=2):
            with jax_gg.accelerate_ragged_dot(platforms):
                assert served() == sorted(set(platforms))
        with jax_gg.accelerate_ragged_dot(()):
            assert not served()

    def test_plain_call(self, served):
        handle = jax_gg.accelerate_ragged_dot(["cpu"])
        assert served() == ["cpu"]
        handle.off()
        assert not served()
        handle.off()

    def test_nested(self, served):
        outer = jax_gg.accelerate_ragged_dot(["cpu"])
        with jax_gg.accelerate_ragged_dot(["cuda"]) as inner:
            assert served() == ["cpu", "cuda"]
            outer.off()
            assert served() == ["cuda"]
            outer.off()
            inner.off()
            assert not served()

    def test_error_inside(self, served):
        with pytest.raises(ZeroDivisionError), jax_gg.accelerate_ragged_dot():
            raise ZeroDivisionError

    def test_other_threads(self, served):
        with jax_gg.accelerate_ragged_dot(["cpu"]):
            found = []
            thread = threading.Thread(target=lambda: found.append(served()))
            thread.start()
            thread.join()
        assert found == [["cpu"]]

    def test_caches(self, rng):
        """Each side has programs of its own, and finds them again."""
        args = *arrays(rng, "mk", "gkn"), SIZES
        traces = []
        inner = jax.jit(lambda *x: traces.append(1) or jax.lax.ragged_dot(*x))
        f = jax.jit(lambda *x: inner(*x) + 0)
        compiled = f.lower(*args).compile()
        for times in range(2):
            f(*args)
            assert "jax_gg" not in f.lower(*args).compile().as_text()
            with jax_gg.accelerate_ragged_dot():
                assert f._cache_size() == 1 + times
                f(*args)
                assert "jax_gg_gmm" in f.lower(*args).compile().as_text()
                assert "jax_gg" not in compiled.as_text()
                inside = f.lower(*args).compile()
            assert f._cache_size() == len(traces) == 2
            assert "jax_gg_gmm" in inside.as_text()

    def test_lowered_where_it_is_lowered(self, rng):
        """Of a program traced on one side and lowered on the other."""
        args = *arrays(rng, "mk", "gkn"), SIZES
        traced = jax.jit(jax.lax.ragged_dot).trace(*args)
        for _ in range(2):
            assert "jax_gg" not in traced.lower().as_text()
            with jax_gg.accelerate_ragged_dot():
                assert "jax_gg" in traced.lower().as_text()

    @pytest.mark.parametrize(
        ("platforms", "error", "message"),
        [
            ("cpu", TypeError, "platforms: got 'cpu', expected a sequence of 'cpu' or 'cuda'"),
            (1, TypeError, "platforms: got 1, expected a sequence of 'cpu' or 'cuda'"),
            (["cpu", "gpu"], ValueError, "platforms: got 'gpu', expected a sequence of 'cpu' or 'cuda'"),
        ],
    )
    def test_errors(self, served, platforms, error, message):
        with pytest.raises(error) as e:
            jax_gg.accelerate_ragged_dot(platforms)
        assert str(e.value) == message
