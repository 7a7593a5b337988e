"""Every mistake that is caught before any kernel runs: its exception, and its one line of text."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_gg
from jax_gg import _jax_gg

LHS, RHS, SIZES = np.zeros((6, 4), np.float32), np.zeros((3, 4, 5), np.float32), np.array([1, 2, 3])
DTYPES = "float16, bfloat16, float32 or float64"


def gmm(lhs=LHS, rhs=RHS, sizes=SIZES, **kwargs):
    return jax_gg.gmm(lhs, rhs, sizes, **kwargs)


def tgmm(lhs=LHS, rhs=LHS, sizes=SIZES, **kwargs):
    return jax_gg.tgmm(lhs, rhs, sizes, **kwargs)


def raises(error, f, message):
    """Asserts that the message is exactly this, whatever stands where it says `...`."""
    with pytest.raises(error) as caught:
        f()
    assert "\n" not in str(caught.value)
    assert re.fullmatch(re.escape(message).replace(r"\.\.\.", ".+"), str(caught.value)), str(caught.value)


CASES = {
    "lhs-list": (TypeError, lambda: gmm([[1.0]]), "lhs: got list, expected an array of shape [m, k]"),
    "lhs-none": (TypeError, lambda: gmm(None), "lhs: got NoneType, expected an array of shape [m, k]"),
    "rhs-list": (TypeError, lambda: gmm(rhs=[1]), "rhs: got list, expected an array of shape [g, k, n]"),
    "rhs-list-transposed": (
        TypeError,
        lambda: gmm(rhs=[1], transpose_rhs=True),
        "rhs: got list, expected an array of shape [g, n, k]",
    ),
    "lhs-rank": (ValueError, lambda: gmm(LHS[0]), "lhs: got shape (4,), expected 2 dimensions, [m, k]"),
    "lhs-rank-3": (ValueError, lambda: gmm(RHS), "lhs: got shape (3, 4, 5), expected 2 dimensions, [m, k]"),
    "rhs-rank": (ValueError, lambda: gmm(rhs=LHS), "rhs: got shape (6, 4), expected 3 dimensions, [g, k, n]"),
    "lhs-dtype": (TypeError, lambda: gmm(LHS.astype(int)), f"lhs: got dtype int64, expected {DTYPES}"),
    "rhs-dtype": (TypeError, lambda: gmm(rhs=RHS.astype(np.complex64)), f"rhs: got dtype complex64, expected {DTYPES}"),
    "lhs-f8": (
        TypeError,
        lambda: gmm(jnp.zeros((6, 4), jnp.float8_e4m3fn)),
        f"lhs: got dtype float8_e4m3fn, expected {DTYPES}",
    ),
    "two-dtypes": (
        TypeError,
        lambda: gmm(rhs=RHS.astype(np.float16)),
        "rhs: got dtype float16, expected the dtype of lhs, float32",
    ),
    "k": (
        ValueError,
        lambda: gmm(rhs=RHS[:, :3]),
        "rhs: got shape (3, 3, 5), expected [g, k, n] with k = 4, that of lhs (6, 4)",
    ),
    "k-transposed": (
        ValueError,
        lambda: gmm(transpose_rhs=True),
        "rhs: got shape (3, 4, 5), expected [g, n, k] with k = 4, that of lhs (6, 4)",
    ),
    "transpose-type": (
        TypeError,
        lambda: gmm(transpose_rhs="yes"),
        "transpose_rhs: got str, expected True or False",
    ),
    "transpose-int": (TypeError, lambda: gmm(transpose_rhs=1), "transpose_rhs: got int, expected True or False"),
    "g": (
        ValueError,
        lambda: gmm(sizes=SIZES[:2]),
        "group_sizes: got shape (2,), expected [g] with g = 3, that of rhs (or give group_offset)",
    ),
    "sizes-rank": (
        ValueError,
        lambda: gmm(sizes=SIZES[None]),
        "group_sizes: got shape (1, 3), expected 1 dimension, [g]",
    ),
    "sizes-scalar": (ValueError, lambda: gmm(sizes=3), "group_sizes: got shape (), expected 1 dimension, [g]"),
    "sizes-float": (
        TypeError,
        lambda: gmm(sizes=SIZES.astype(np.float32)),
        "group_sizes: got dtype float32, expected an integer array of shape [g]",
    ),
    "sizes-bool": (
        TypeError,
        lambda: gmm(sizes=SIZES > 1),
        "group_sizes: got dtype bool, expected an integer array of shape [g]",
    ),
    "sizes-float-list": (
        TypeError,
        lambda: gmm(sizes=[1.0, 2.0, 3.0]),
        "group_sizes: got dtype float64, expected an integer array of shape [g]",
    ),
    "sizes-none": (
        TypeError,
        lambda: gmm(sizes=None),
        "group_sizes: got NoneType, expected an integer array of shape [g]",
    ),
    "sizes-true": (TypeError, lambda: gmm(sizes=True), "group_sizes: got bool, expected an integer array of shape [g]"),
    "sizes-string": (
        TypeError,
        lambda: gmm(sizes="123"),
        "group_sizes: got str, expected an integer array of shape [g]",
    ),
    "sizes-ragged": (
        TypeError,
        lambda: gmm(sizes=[[1], [2, 3]]),
        "group_sizes: got list, expected an integer array of shape [g]",
    ),
    "sizes-of-tracers": (
        TypeError,
        lambda: jax.jit(lambda x: gmm(sizes=[x, x, x]))(1),
        "group_sizes: got list, expected an integer array of shape [g]",
    ),
    "offset-float": (
        TypeError,
        lambda: gmm(group_offset=1.0),
        "group_offset: got float, expected an integer scalar",
    ),
    "offset-bool": (TypeError, lambda: gmm(group_offset=True), "group_offset: got bool, expected an integer scalar"),
    "offset-dtype": (
        TypeError,
        lambda: gmm(group_offset=np.float32(1)),
        "group_offset: got dtype float32, expected an integer scalar",
    ),
    "offset-shape": (
        ValueError,
        lambda: gmm(group_offset=SIZES),
        "group_offset: got shape (3,), expected an integer scalar, shape () or (1,)",
    ),
    "offset-shape-2": (
        ValueError,
        lambda: gmm(group_offset=np.array([[1]])),
        "group_offset: got shape (1, 1), expected an integer scalar, shape () or (1,)",
    ),
    "out-f64": (
        TypeError,
        lambda: gmm(preferred_element_type=np.float64),
        "preferred_element_type: got float64, expected float16, bfloat16 or float32 for float32 operands",
    ),
    "out-int": (
        TypeError,
        lambda: gmm(preferred_element_type=np.int32),
        "preferred_element_type: got int32, expected float16, bfloat16 or float32 for float32 operands",
    ),
    "out-no-dtype": (
        TypeError,
        lambda: gmm(preferred_element_type="half-ish"),
        "preferred_element_type: got 'half-ish', expected float16, bfloat16 or float32 for float32 operands",
    ),
    "precision-name": (
        ValueError,
        lambda: gmm(precision="exact"),
        "precision: got 'exact', expected None, a jax.lax.Precision, its name, a pair of these, or a ...",
    ),
    "precision-triple": (
        ValueError,
        lambda: gmm(precision=("highest",) * 3),
        "precision: got ('highest', 'highest', 'highest'), expected None, a jax.lax.Precision, its name, a pair of ...",
    ),
    "precision-pair": (
        ValueError,
        lambda: gmm(precision=("highest", "exact")),
        "precision: got 'exact', expected None, a jax.lax.Precision, its name, a pair of these, or a ...",
    ),
    "tgmm-lhs-rank": (ValueError, lambda: tgmm(RHS), "lhs: got shape (3, 4, 5), expected 2 dimensions, [m, k]"),
    "tgmm-rhs-rank": (ValueError, lambda: tgmm(rhs=RHS), "rhs: got shape (3, 4, 5), expected 2 dimensions, [m, n]"),
    "tgmm-rhs-type": (TypeError, lambda: tgmm(rhs=3.0), "rhs: got float, expected an array of shape [m, n]"),
    "tgmm-m": (
        ValueError,
        lambda: tgmm(rhs=LHS[:5]),
        "rhs: got shape (5, 4), expected [m, n] with m = 6, that of lhs (6, 4)",
    ),
    "tgmm-two-dtypes": (
        TypeError,
        lambda: tgmm(rhs=jnp.zeros((6, 4), jnp.bfloat16)),
        "rhs: got dtype bfloat16, expected the dtype of lhs, float32",
    ),
    "tgmm-num-groups-negative": (
        ValueError,
        lambda: tgmm(num_groups=-1),
        "num_groups: got -1, expected 0 to 2147483647",
    ),
    "tgmm-num-groups-float": (TypeError, lambda: tgmm(num_groups=2.0), "num_groups: got float, expected an int"),
    "tgmm-num-groups-bool": (TypeError, lambda: tgmm(num_groups=True), "num_groups: got bool, expected an int"),
    "tgmm-sizes-float": (
        TypeError,
        lambda: tgmm(sizes=[0.5]),
        "group_sizes: got dtype float64, expected an integer array of shape [g]",
    ),
    "tgmm-offset-float": (
        TypeError,
        lambda: tgmm(group_offset=0.5),
        "group_offset: got float, expected an integer scalar",
    ),
    "tgmm-out-f64": (
        TypeError,
        lambda: tgmm(preferred_element_type="float64"),
        "preferred_element_type: got float64, expected float16, bfloat16 or float32 for float32 operands",
    ),
    "big-endian": (
        TypeError,
        lambda: gmm(LHS.astype(">f4")),
        "lhs: got dtype >f4, expected float16, bfloat16, float32 or float64",
    ),
    "sizes-time": (
        TypeError,
        lambda: gmm(sizes=SIZES.astype("m8[s]")),
        "group_sizes: got dtype timedelta64[s], expected an integer array of shape [g]",
    ),
    "sizes-none-in-list": (
        TypeError,
        lambda: gmm(sizes=[None, 1, 2]),
        "group_sizes: got dtype object, expected an integer array of shape [g]",
    ),
    "num-groups-huge": (
        ValueError,
        lambda: tgmm(num_groups=2**63),
        "num_groups: got 9223372036854775808, expected 0 to 2147483647",
    ),
    "precision-type": (
        TypeError,
        lambda: gmm(precision={}),
        "precision: got dict, expected None, a jax.lax.Precision, ...",
    ),
    "ragged-dot-lists": (
        TypeError,
        lambda: jax_gg.ragged_dot([[1.0]], [[[1.0]]], [1], preferred_element_type=np.float32),
        "lhs: got list, expected an array of shape [m, k]",
    ),
    "ragged-dot-dtype": (
        TypeError,
        lambda: jax_gg.ragged_dot(LHS, RHS, SIZES, preferred_element_type="foo"),
        "preferred_element_type: got 'foo', expected float16, bfloat16 or float32 for float32 operands",
    ),
    "kernel": (
        TypeError,
        lambda: gmm(kernel=3),
        "kernel: got int, expected None or the beginning of a kernel's name",
    ),
    "kernel-surrogate": (
        ValueError,
        lambda: gmm(kernel="sm90\ud800"),
        r"kernel: got 'sm90\ud800', expected None or the beginning of a kernel's name",
    ),
    "tgmm-precision": (ValueError, lambda: tgmm(precision="exact"), "precision: got 'exact', expected None, ..."),
    "ragged-dot-sharding": (
        ValueError,
        lambda: jax_gg.ragged_dot(LHS, RHS, SIZES, out_sharding=jax.P("x")),
        "out_sharding: got ... without a mesh, expected a NamedSharding, or a mesh of jax.set_mesh",
    ),
    "ragged-dot-rank": (
        ValueError,
        lambda: jax_gg.ragged_dot(LHS, LHS, SIZES),
        "rhs: got shape (6, 4), expected 3 dimensions, [g, k, n]",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case):
    raises(*CASES[case])


@pytest.mark.parametrize("case", [c for c in CASES if not c.startswith(("lhs-list", "lhs-none"))])
def test_message_when_tracing(case):
    """The same while tracing, where a program would be compiled next."""
    error, f, message = CASES[case]
    raises(error, lambda: jax.eval_shape(f), message)


def test_out_dtype_of_f64():
    with jax.enable_x64(True):
        raises(
            TypeError,
            lambda: gmm(LHS.astype(float), RHS.astype(float), preferred_element_type=np.float32),
            "preferred_element_type: got float32, expected float64 for float64 operands",
        )


def test_too_many_rows():
    rows = jax.ShapeDtypeStruct((2**31, 1), np.float16)
    matrices = jax.ShapeDtypeStruct((3, 1, 1), np.float16)
    message = "lhs: got m = 2147483648 rows, expected at most 2147483647"
    raises(ValueError, lambda: jax.eval_shape(gmm, rows, matrices), message)
    raises(ValueError, lambda: jax.eval_shape(tgmm, rows, rows), message)


@pytest.mark.parametrize("argument", ["transpose_rhs", "preferred_element_type", "group_offset", "precision", "kernel"])
def test_options_are_keywords(argument):
    with pytest.raises(TypeError, match="positional"):
        jax_gg.gmm(LHS, RHS, SIZES, None)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        jax_gg.gmm(LHS, RHS, SIZES, **{argument + "s": None})


def test_forward_mode():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: gmm(x), (LHS,), (LHS,))


class TestSeam:
    """What a program can pass to the kernels without the checks above, such as an exported module edited by hand."""

    GOOD = types.MappingProxyType(
        dict(
            lhs=((1, 6, 4), np.float32),
            rhs=((1, 3, 4, 5), np.float32),
            sizes=((1, 3), np.int32),
            offset=((1,), np.int32),
            out=((1, 6, 5), np.float32),
            workspace=((_jax_gg.workspace_bytes(1, 3, 3),), np.uint8),
        )
    )

    def call(self, target="jax_gg_gmm", transpose_rhs=False, **changes):
        operands = {**self.GOOD, **changes}
        results = [jax.ShapeDtypeStruct(*operands.pop(name)) for name in ("out", "workspace")]
        args = [jnp.zeros(*x) for x in operands.values()]
        attributes = {"transpose_rhs": np.bool_(transpose_rhs), "precision": np.int32(0), "kernel": ""}
        out, _ = jax.block_until_ready(jax.ffi.ffi_call(target, results)(*args, **attributes))
        return out

    def test_good(self):
        assert not self.call().any()

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"lhs": ((6, 4), np.float32)}, "operand of the wrong rank"),
            ({"rhs": ((3, 4, 5), np.float32)}, "operand of the wrong rank"),
            ({"sizes": ((3,), np.int32)}, "operand of the wrong rank"),
            ({"offset": ((1, 1), np.int32)}, "operand of the wrong rank"),
            ({"out": ((6, 5), np.float32)}, "operand of the wrong rank"),
            ({"lhs": ((1, 6, 4), np.int32)}, "unsupported dtype"),
            ({"rhs": ((1, 3, 4, 5), np.float16)}, "of two dtypes"),
            ({"out": ((1, 6, 5), np.int8)}, "unsupported dtype"),
            ({"lhs": ((1, 6, 3), np.float32)}, "shapes do not agree in gmm(m=6, k=3, n=5, g=3"),
            ({"rhs": ((1, 3, 4, 6), np.float32)}, "shapes do not agree"),
            ({"transpose_rhs": True}, "shapes do not agree"),
            ({"out": ((1, 7, 5), np.float32)}, "shapes do not agree"),
            ({"out": ((2, 6, 5), np.float32), "lhs": ((3, 6, 4), np.float32)}, "shapes do not agree"),
            ({"out": ((2, 6, 5), np.float32), "sizes": ((3, 3), np.int32)}, "shapes do not agree"),
            ({"out": ((2, 6, 5), np.float32), "offset": ((3,), np.int32)}, "shapes do not agree"),
            ({"target": "jax_gg_tgmm"}, "operand of the wrong rank"),
            ({"workspace": ((100,), np.uint8)}, "workspace of 100 bytes is too small for gmm(m=6, k=4"),
            ({"sizes": ((1, 3), np.float32)}, "dtype"),
        ],
    )
    def test_bad(self, changes, message):
        with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)) as caught:
            self.call(**changes)
        assert "INVALID_ARGUMENT" in str(caught.value)

    def test_f64_gives_only_f64(self):
        with jax.enable_x64(True), pytest.raises(jax.errors.JaxRuntimeError, match="f64 operands give f64 results"):
            self.call(out=((1, 6, 5), np.float64))

    def test_tgmm_has_no_transpose(self):
        with pytest.raises(jax.errors.JaxRuntimeError, match="tgmm has no transpose_rhs"):
            self.call("jax_gg_tgmm", True, rhs=((1, 6, 5), np.float32), out=((1, 3, 4, 5), np.float32))
