"""What only a GPU shows: every kernel, CUDA graphs, no word to the host, no copies."""

import functools
import glob
import gzip
import json
import re

import fuzz
import jax
import jax.numpy as jnp
import numpy as np
import operands
import problems
import pytest
import reference
from compare import check_gmm, check_tgmm
from platforms import Gpu

import jax_gg
from jax_gg import _jax_gg

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
KERNELS = _jax_gg.cuda_kernels() or ["gmm bf16 -> bf16: sm80 (this build has none)"]
FAMILIES = sorted({line.split(": ")[1].split("_")[0] for line in KERNELS})
MIXED = problems.Problem("mixed", 700, 152, 200, (7, 0, 133, -2, 1, 128, 12, 300, 64))
HIGHEST = jax.lax.Precision.HIGHEST


class TestKernels(Gpu):
    @pytest.mark.parametrize("offset", [0, 3])
    @pytest.mark.parametrize("line", KERNELS)
    def test_forced(self, rng, line, offset):
        """Each kernel of the table, on boundaries inside its tiles, empty groups, rows past the sum, foreign groups."""
        what, name = line.split(": ")
        operation, in_dtype, out_dtype, tf32 = re.fullmatch(r"(.*) (\w+) -> (\w+)( \(TF32\))?", what).groups()
        alignment = int(re.search(r"_a(\d+)$", name)[1]) if "_a" in name else 1
        # k and n are multiples of this alignment and of no higher one, so that it serves them.
        problem = problems.Problem("forced", MIXED.m, 152 + alignment, 200 + 3 * alignment, MIXED.sizes)
        precision = HIGHEST if in_dtype == "f32" and not tf32 else None
        more = {"group_offset": offset, "precision": precision}
        options = {"preferred_element_type": DTYPES[out_dtype], "kernel": name, **more}
        num_groups = problem.g - 2 * (offset > 0)
        transpose_rhs = "transpose_rhs" in operation
        o = operands.make(
            rng, problem, DTYPES[in_dtype], transpose_rhs=transpose_rhs, group_offset=offset, num_groups=num_groups
        )
        if operation.startswith("gmm"):
            operands.poison(((problem.m, problem.n), DTYPES[out_dtype]))
            call = functools.partial(jax_gg.gmm, transpose_rhs=transpose_rhs, **options)
            out = jax.jit(call)(o.lhs, o.rhs, o.sizes)
            check_gmm(out, o.lhs, o.rhs, o.sizes, transpose_rhs=transpose_rhs, **more)
        else:
            operands.poison(((num_groups, problem.k, problem.n), DTYPES[out_dtype]))
            out = jax.jit(functools.partial(jax_gg.tgmm, num_groups=num_groups, **options))(o.lhs, o.dout, o.sizes)
            check_tgmm(out, o.lhs, o.dout, o.sizes, num_groups=num_groups, **more)

    @pytest.mark.parametrize("line", [line for line in KERNELS if ": sm90" in line])
    def test_forced_vmap(self, rng, line):
        """Mapped over every argument and over each alone: problem i must not reach the rows or matrices of another."""
        what, name = line.split(": ")
        operation, in_dtype, out_dtype = re.fullmatch(r"(.*) (\w+) -> (\w+)", what).groups()
        batch, m, k, n, g = 3, 200, 72, 264, 4
        shapes = {"gmm": ((m, k), (g, k, n)), "gmm transpose_rhs": ((m, k), (g, n, k)), "tgmm": ((m, k), (m, n))}
        options = {"preferred_element_type": DTYPES[out_dtype], "kernel": name}
        if operation == "tgmm":
            f, want_of = functools.partial(jax_gg.tgmm, num_groups=g, **options), reference.tgmm
            want_of = functools.partial(want_of, num_groups=g)
        else:
            f = functools.partial(jax_gg.gmm, transpose_rhs=operation != "gmm", **options)
            want_of = functools.partial(reference.gmm, transpose_rhs=operation != "gmm")
        for mapped in (
            (0, 0, 0, 0),
            (0, None, None, None),
            (None, 0, None, None),
            (None, None, 0, None),
            (0, 0, 0, None),
        ):
            lhs, rhs = (
                operands.integers(rng, shape if axis is None else (batch, *shape), DTYPES[in_dtype])
                for shape, axis in zip(shapes[operation], mapped[:2], strict=True)
            )
            sizes = np.array([[0, 70, -1, 65, 3, 40], [200, 0, 0, 0, 0, 0], [1, 64, 64, 64, 64, 64]], np.int32)
            offset = np.array([1, 0, 2], np.int32)
            args = [lhs, rhs, sizes if mapped[2] == 0 else sizes[0], offset if mapped[3] == 0 else offset[0]]
            call = jax.vmap(lambda a, b, s, o: f(a, b, s, group_offset=o), mapped)
            out = np.asarray(jax.jit(call)(*args))
            for i in range(batch):
                a, b, s, o = (x if axis is None else x[i] for x, axis in zip(args, mapped, strict=True))
                want = want_of(a, b, s, group_offset=int(o)).astype(DTYPES[out_dtype])
                np.testing.assert_array_equal(out[i], want, err_msg=f"problem {i}, mapped {mapped}")

    def test_unknown_kernel(self):
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"no kernel named sm1_ for gmm\(m=4, k=8, n=16, g=1"):
            jax.block_until_ready(jax_gg.gmm(jnp.ones((4, 8)), jnp.ones((1, 8, 16)), [4], kernel="sm1_"))

    def test_float64(self):
        with (
            jax.enable_x64(True),
            pytest.raises(jax.errors.JaxRuntimeError, match="expected float16, bfloat16 or float32"),
        ):
            jax.block_until_ready(jax_gg.gmm(jnp.ones((4, 8), float), jnp.ones((1, 8, 16), float), [4]))


@pytest.mark.skipif(not any(": sm90" in line for line in KERNELS), reason="this build has no sm90 kernels")
class TestFamilies(Gpu):
    @pytest.mark.parametrize("kernel", sorted({x.split(": ")[1] for x in KERNELS if ": sm90" in x}))
    @pytest.mark.parametrize("rows", [256, 320, 512])
    def test_as_many_steps_as_stages(self, rng, kernel, rows):
        """Tiles whose steps fill the ring of stages once, once and a bit, and twice: one bit tells its phases."""
        directions = {"fwd": "gmm", "dlhs": "gmm transpose_rhs", "drhs": "tgmm"}
        for direction in (d for d, operation in directions.items() if f"{operation} bf16 -> bf16: {kernel}" in KERNELS):
            m, k = (rows * 4, 512) if direction == "drhs" else (600, rows)
            d = fuzz.Draw(direction, m, k, 768, 4, 4, 0, jnp.dtype("bfloat16"), jnp.dtype("bfloat16"), kernel)
            assert fuzz.disagreements(d, rows, calls=20) == 0, d

    @pytest.mark.parametrize("seed", range(24))
    def test_agree(self, rng, seed):
        """The Hopper kernels give what the general ones give, whatever the sizes (tests/fuzz.py runs many more)."""
        d = fuzz.draw(rng)
        assert fuzz.disagreements(d, seed, calls=50) == 0, d


class TestPrecision(Gpu):
    @pytest.mark.parametrize(("precision", "at_most"), [(None, 1e-3), ("high", 2e-6), (HIGHEST, 2e-6)])
    def test_error(self, rng, precision, at_most):
        """Against float64: 2^-11 for each operand rounded to TF32; f32 otherwise, however long the sums."""
        problem = problems.Problem("long-sums", 256, 4096, 128, (100, 156))
        o = operands.make(rng, problem, np.float32)
        out = jax.jit(functools.partial(jax_gg.gmm, precision=precision))(o.lhs, o.rhs, o.sizes)
        tall = jax.jit(functools.partial(jax_gg.tgmm, precision=precision))(o.lhs, o.dout, o.sizes)
        for got, want in (
            (out, reference.gmm(o.lhs, o.rhs, o.sizes)),
            (tall, reference.tgmm(o.lhs, o.dout, o.sizes)),
        ):
            error = np.linalg.norm(got - want) / np.linalg.norm(want)
            assert error <= at_most
            assert precision is not None or error > 1e-5, "TF32 is asked for, and is the faster one"


@jax.jit
def _step(lhs, rhs, scores):
    """Both directions of a layer whose sizes are computed on the device."""
    sizes = jnp.bincount(jnp.argmax(scores, -1), length=rhs.shape[0])

    def loss(lhs, rhs):
        return jnp.sum(jax_gg.gmm(lhs, rhs, sizes).astype(jnp.float32) ** 2)

    value, grads = jax.value_and_grad(loss, (0, 1))(lhs, rhs)
    return value, grads, sizes


def _scores(rng, m, g):
    """Of a router that is as likely to starve an expert as to flood it."""
    return rng.standard_normal((m, g), np.float32) + 2 * rng.standard_normal(g).astype(np.float32)


def _trace_names(folder) -> list[str]:
    """Of all events in the profile: kernels, copies, and calls of the driver."""
    (path,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
    with gzip.open(path) as f:
        return [event.get("name", "") for event in json.load(f)["traceEvents"]]


class TestGraphs(Gpu):
    def test_in_command_buffer(self, rng, tmp_path):
        """After the calls that record it, each step is one launch of a CUDA graph, and every kernel is in it."""
        m, k, n, g = 256, 64, 128, 8
        args = rng.standard_normal((m, k), np.float32), rng.standard_normal((g, k, n), np.float32), _scores(rng, m, g)
        args = jax.device_put(args)
        for _ in range(3):
            jax.block_until_ready(_step(*args))
        with jax.profiler.trace(str(tmp_path)):
            for _ in range(5):
                jax.block_until_ready(_step(*args))
        names = _trace_names(tmp_path)
        assert sum(name.startswith("cuGraphLaunch") for name in names) == 5
        assert sum("jax_gg" in name for name in names) >= 15
        assert not [name for name in names if re.match("(cu|cuda)LaunchKernel", name)]

    @pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["f32", "bf16"])
    def test_replayed_with_other_sizes(self, rng, dtype):
        m, k, n, g = 300, 64, 96, 7
        rhs = operands.normal(rng, (g, k, n), dtype)
        seen = set()
        for _ in range(50):
            lhs, scores = operands.normal(rng, (m, k), dtype), _scores(rng, m, g)
            _, (dlhs, drhs), sizes = _step(lhs, rhs, scores)
            sizes = np.asarray(sizes)
            seen.add(tuple(sizes))
            out = jax_gg.gmm(lhs, rhs, sizes)
            dout = np.asarray((2 * out.astype(jnp.float32)).astype(dtype))
            check_gmm(out, lhs, rhs, sizes)
            check_gmm(dlhs, dout, rhs, sizes, transpose_rhs=True)
            check_tgmm(drhs, lhs, dout, sizes)
        assert len(seen) > 40

    def test_nothing_comes_to_the_host(self, rng, tmp_path):
        m, k, n, g = 512, 64, 128, 8
        lhs, rhs = rng.standard_normal((m, k), np.float32), rng.standard_normal((g, k, n), np.float32)
        scores = jax.device_put(_scores(rng, m, g))

        @jax.jit
        def train(rhs, scores):
            _, (_, drhs), _ = _step(lhs, rhs, scores)
            return rhs - 1e-6 * drhs, scores + 0.1

        jax.block_until_ready(train(rhs, scores))
        rhs = jax.device_put(rhs)
        with jax.profiler.trace(str(tmp_path)):
            for _ in range(30):
                rhs, scores = train(rhs, scores)
            jax.block_until_ready(rhs)
        names = _trace_names(tmp_path)
        assert sum("jax_gg" in name for name in names) >= 30, "the trace shows the kernels"
        assert not [name for name in names if re.search("MemcpyD2H|DtoH", name)]


class TestCopies(Gpu):
    """What XLA does around the kernels."""

    @staticmethod
    def text(k, n, dtype, transpose_rhs=False, **options):
        lhs = jax.ShapeDtypeStruct((64, k), dtype)
        rhs = jax.ShapeDtypeStruct((4, n, k) if transpose_rhs else (4, k, n), dtype)
        sizes = jax.ShapeDtypeStruct((4,), np.int32)
        f = functools.partial(jax_gg.gmm, transpose_rhs=transpose_rhs, **options)
        return jax.jit(f).lower(lhs, rhs, sizes).compile().as_text()

    @pytest.mark.parametrize("transpose_rhs", [False, True])
    @pytest.mark.parametrize(
        ("k", "n", "dtype"), [(64, 96, jnp.bfloat16), (36, 50, jnp.float16), (33, 7, np.float32)], ids=str
    )
    def test_none(self, k, n, dtype, transpose_rhs):
        text = self.text(k, n, dtype, transpose_rhs)
        assert text.count('custom_call_target="jax_gg_gmm"') == 1
        assert not re.search(r"= \S+ (pad|copy|transpose|convert|fusion)\(", text)

    @pytest.mark.parametrize(("k", "n"), [(33, 96), (64, 7)])
    def test_padded_in_the_same_program(self, k, n):
        text = self.text(k, n, jnp.bfloat16)
        assert "pad(" in text
        assert text.count('custom_call_target="jax_gg_gmm"') == 1


class TestManySizes(Gpu):
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("batch", [1, 3])
    @pytest.mark.parametrize("g", [31, 32, 33, 127, 128, 129, 511, 512, 513, 1023, 1025, 4096])
    def test_widths(self, rng, g, batch, family):
        """sm80: one block of up to 1024 threads scans and sorts them all, in several goes if need be; sm90: windows."""
        sizes = rng.integers(-1, 5, (batch, g)).astype(np.int32)
        m, k, n = 2 * g, 8, 16
        shapes = ((batch, m, k), (batch, g, k, n), (batch, m, n))
        lhs, rhs, dout = (operands.integers(rng, shape, jnp.bfloat16) for shape in shapes)
        out = jax.jit(jax.vmap(functools.partial(jax_gg.gmm, kernel=family)))(lhs, rhs, sizes)
        tall = jax.jit(jax.vmap(functools.partial(jax_gg.tgmm, kernel=family)))(lhs, dout, sizes)
        for i in range(batch):
            np.testing.assert_array_equal(np.asarray(out[i], np.float64), reference.gmm(lhs[i], rhs[i], sizes[i]))
            np.testing.assert_array_equal(np.asarray(tall[i], np.float64), reference.tgmm(lhs[i], dout[i], sizes[i]))

    def test_static_sizes(self, rng):
        """A tuple or a NumPy array, known when tracing, gives the bits that an argument gives."""
        o = operands.make(rng, MIXED, jnp.bfloat16)
        want = np.asarray(jax.jit(jax_gg.gmm)(o.lhs, o.rhs, o.sizes))
        for sizes in (tuple(MIXED.sizes), np.array(MIXED.sizes)):
            got = np.asarray(jax.jit(lambda lhs, rhs, s=sizes: jax_gg.gmm(lhs, rhs, s))(o.lhs, o.rhs))
            assert got.tobytes() == want.tobytes()
