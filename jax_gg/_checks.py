"""Everything a caller can get wrong, found before any C++ is reached.

Each error is one line that names the argument, what came and what was expected.
"""

import inspect
from collections.abc import Iterable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

_INT32 = np.iinfo(np.int32)
_OPERANDS = ("float16", "bfloat16", "float32", "float64")
_RESULTS = {
    "float16": ("float16", "bfloat16", "float32"),
    "bfloat16": ("float16", "bfloat16", "float32"),
    "float32": ("float16", "bfloat16", "float32"),
    "float64": ("float64",),
}


def _say(what: str, got: Any, expected: str) -> str:
    return f"{what}: got {got}, expected {expected}"


def _one_of(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + " or " + names[-1] if len(names) > 1 else names[0]


def _array(name: str, x: Any, rank: int, dims: str) -> jax.Array:
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(_say(name, type(x).__name__, f"an array of shape {dims}"))
    if x.ndim != rank:
        raise ValueError(_say(name, f"shape {tuple(x.shape)}", f"{rank} dimensions, {dims}"))
    # Before JAX sees it, whose own message for a dtype that it does not know (big-endian, objects) names no argument.
    if str(x.dtype) not in _OPERANDS:
        raise TypeError(_say(name, f"dtype {x.dtype}", f"{_one_of(_OPERANDS)}"))
    return jnp.asarray(x)


def _same_dtype(lhs: jax.Array, rhs: jax.Array) -> None:
    if lhs.dtype != rhs.dtype:
        raise TypeError(_say("rhs", f"dtype {rhs.dtype}", f"the dtype of lhs, {lhs.dtype}"))


def gmm_operands(lhs: Any, rhs: Any, transpose_rhs: Any) -> tuple[jax.Array, jax.Array]:
    """Returns `lhs[m, k]` and `rhs[g, k, n]` (`[g, n, k]` with `transpose_rhs`) as JAX arrays."""
    if not isinstance(transpose_rhs, (bool, np.bool_)):
        raise TypeError(_say("transpose_rhs", type(transpose_rhs).__name__, "True or False"))
    dims = "[g, n, k]" if transpose_rhs else "[g, k, n]"
    lhs = _array("lhs", lhs, 2, "[m, k]")
    rhs = _array("rhs", rhs, 3, dims)
    _same_dtype(lhs, rhs)
    if rhs.shape[2 if transpose_rhs else 1] != lhs.shape[1]:
        raise ValueError(_say("rhs", f"shape {rhs.shape}", f"{dims} with k = {lhs.shape[1]}, that of lhs {lhs.shape}"))
    _few_rows(lhs)
    return lhs, rhs


def tgmm_operands(lhs: Any, rhs: Any) -> tuple[jax.Array, jax.Array]:
    """Returns `lhs[m, k]` and `rhs[m, n]` as JAX arrays."""
    lhs = _array("lhs", lhs, 2, "[m, k]")
    rhs = _array("rhs", rhs, 2, "[m, n]")
    _same_dtype(lhs, rhs)
    if rhs.shape[0] != lhs.shape[0]:
        raise ValueError(_say("rhs", f"shape {rhs.shape}", f"[m, n] with m = {lhs.shape[0]}, that of lhs {lhs.shape}"))
    _few_rows(lhs)
    return lhs, rhs


def _few_rows(lhs: jax.Array) -> None:
    # A symbolic number of rows, of an export, cannot be compared.
    if isinstance(lhs.shape[0], int) and lhs.shape[0] > _INT32.max:
        raise ValueError(_say("lhs", f"m = {lhs.shape[0]} rows", f"at most {_INT32.max}"))


def as_int32(x: jax.Array) -> jax.Array:
    """`x` as int32, what does not fit at the nearest end: no size or offset beyond int32 differs from its end."""
    info = jnp.iinfo(x.dtype)
    if info.min < _INT32.min or info.max > _INT32.max:
        x = jnp.clip(x, max(int(info.min), _INT32.min), min(int(info.max), _INT32.max))
    return x.astype(jnp.int32)


def _integers(name: str, x: Any, expected: str) -> jax.Array:
    if isinstance(x, (list, tuple, int)) and not isinstance(x, bool):
        try:
            array = np.asarray(x, dtype=np.int64 if np.size(x) == 0 else None)
        except (TypeError, ValueError) as e:  # ragged, or a list of traced values
            raise TypeError(_say(name, type(x).__name__, expected)) from e
        # NumPy makes objects or float64 of integers beyond 64 bits. Too large is too large: as any other such size.
        if array.dtype.kind in "Of" and all(isinstance(i, int) for i in np.asarray(x, dtype=object).flat):
            array = np.clip(np.asarray(x, dtype=object), _INT32.min, _INT32.max).astype(np.int32)
        x = array
    if not isinstance(x, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(_say(name, type(x).__name__, expected))
    # NumPy counts time differences among the integers.
    if not jnp.issubdtype(x.dtype, jnp.integer) or jnp.issubdtype(x.dtype, np.timedelta64):
        raise TypeError(_say(name, f"dtype {x.dtype}", expected))
    if not isinstance(x, jax.Array):
        x = x.astype(x.dtype.newbyteorder("="))
        # Clip here: without x64, JAX would keep the low 32 bits of a 64-bit integer.
        if x.dtype.itemsize >= 4:
            x = np.clip(x, _INT32.min, _INT32.max).astype(np.int32)
        x = jnp.asarray(x)
    return as_int32(x)


def group_sizes(x: Any) -> jax.Array:
    """Returns `group_sizes[G]` as int32."""
    x = _integers("group_sizes", x, "an integer array of shape [g]")
    if x.ndim != 1:
        raise ValueError(_say("group_sizes", f"shape {x.shape}", "1 dimension, [g]"))
    return x


def group_offset(x: Any) -> jax.Array:
    """Returns `group_offset` as int32 of shape `[1]`; None means 0."""
    if x is None:
        return jnp.zeros(1, jnp.int32)
    x = _integers("group_offset", x, "an integer scalar")
    if x.shape not in ((), (1,)):
        raise ValueError(_say("group_offset", f"shape {x.shape}", "an integer scalar, shape () or (1,)"))
    return x.reshape(1)


def as_many_groups(name: str, have: int, sizes: jax.Array) -> None:
    """Without group_offset, group_sizes and the matrices agree on the number of groups."""
    if have != sizes.shape[0]:
        raise ValueError(
            _say("group_sizes", f"shape {sizes.shape}", f"[g] with g = {have}, that of {name} (or give group_offset)")
        )


def num_groups(x: Any, sizes: jax.Array) -> int:
    """Returns g of tgmm's result; None means as many as `sizes` has."""
    if x is None:
        return sizes.shape[0]
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)):
        raise TypeError(_say("num_groups", type(x).__name__, "an int"))
    if not 0 <= x <= _INT32.max:
        raise ValueError(_say("num_groups", x, f"0 to {_INT32.max}"))
    return int(x)


def result_dtype(preferred_element_type: Any, operand: np.dtype) -> np.dtype:
    """Returns the dtype of the result; None means that of the operands."""
    if preferred_element_type is None:
        return np.dtype(operand)
    expected = f"{_one_of(_RESULTS[str(operand)])} for {operand} operands"
    try:
        dtype = jnp.dtype(preferred_element_type)
    except TypeError as e:
        raise TypeError(_say("preferred_element_type", repr(preferred_element_type), expected)) from e
    if str(dtype) not in _RESULTS[str(operand)]:
        raise TypeError(_say("preferred_element_type", dtype, expected))
    return dtype


def out_sharding(x: Any, rank: int, dims: str) -> NamedSharding | None:
    """Returns the sharding of a result `dims`, all of whose axes are Explicit, or all Auto."""
    if x is None:
        return None
    if isinstance(x, PartitionSpec):
        mesh: Any = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(_say("out_sharding", f"{x} without a mesh", "a NamedSharding, or a mesh of jax.set_mesh"))
        spec = x
    elif isinstance(x, NamedSharding):
        mesh, spec = x.mesh, x.spec
    else:
        raise TypeError(_say("out_sharding", type(x).__name__, "None, a PartitionSpec or a NamedSharding"))
    if len(spec) > rank:
        raise ValueError(_say("out_sharding", spec, f"at most {rank} dimensions, {dims}"))
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = [axis for part in spec if part is not None for axis in (part if isinstance(part, tuple) else (part,))]
    if unknown := [axis for axis in axes if axis not in kinds]:
        raise ValueError(_say("out_sharding", f"{spec}, with {unknown[0]!r}", f"axes of the mesh, {mesh.axis_names}"))
    expected = AxisType.Explicit if AxisType.Explicit in kinds.values() else AxisType.Auto
    if wrong := [axis for axis in axes if kinds[axis] != expected]:
        raise ValueError(
            _say("out_sharding", f"{wrong[0]!r}, an {kinds[wrong[0]].name} axis", f"{expected.name} axes only")
        )
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise ValueError(_say("out_sharding", spec, "a sharding that leaves no sum to be done"))
    return NamedSharding(mesh, spec)


def are_gmm_dtypes(lhs: Any, rhs: Any, preferred_element_type: Any) -> bool:
    """Whether `gmm` serves these operands, as far as dtypes go; anything without a dtype is left for it to refuse."""
    arrays = [x for x in (lhs, rhs) if isinstance(x, (jax.Array, np.ndarray))]
    if any(str(x.dtype) not in _OPERANDS for x in arrays):
        return False
    names = [str(jnp.asarray(x).dtype) for x in arrays]
    if len(set(names)) > 1:
        return False
    if not names or preferred_element_type is None:
        return True
    try:
        return str(jnp.dtype(preferred_element_type)) in _RESULTS[names[0]]
    except TypeError:  # not a dtype at all
        return True


def is_served(lhs: np.dtype, rhs: np.dtype, result: np.dtype) -> bool:
    """Whether the kernels multiply operands of these dtypes to such a result, on some platform."""
    return lhs == rhs and str(result) in _RESULTS.get(str(lhs), ())


def not_served(name: str, got: Any, expected: str) -> NotImplementedError:
    """What to raise for a call that is right, and that something else may serve."""
    return NotImplementedError(_say(name, got, expected))


def served_arrays(lhs: Any, rhs: Any, preferred_element_type: Any) -> None:
    """Raises what `not_served` returns, unless `gmm` takes these operands, as far as their kinds and dtypes go."""
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise not_served(name, type(x).__name__, "an array")
    if not are_gmm_dtypes(lhs, rhs, preferred_element_type):
        result = "" if preferred_element_type is None else f" to {jnp.dtype(preferred_element_type)}"
        raise not_served("lhs and rhs", f"{lhs.dtype} and {rhs.dtype}{result}", "dtypes that gmm takes")


def reduction_order(x: Any, group_offset: Any) -> None:
    """`ragged_dot` leaves an order of sums to JAX, which takes it since 0.12.1, and no group_offset with it."""
    if x is None:
        return
    if "reduction_order" not in inspect.signature(jax.lax.ragged_dot).parameters:
        raise TypeError(_say("reduction_order", repr(x), f"None with JAX {jax.__version__}"))
    if group_offset is not None:
        raise ValueError(_say("reduction_order", repr(x), "None with group_offset"))


def rows(name: str, x: Any, dims: str, count: int | None = None) -> jax.Array:
    """Returns rows to be sent, as many as `count` if that is given."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(_say(name, type(x).__name__, f"an array of shape {dims}"))
    if x.ndim != 2 or (count is not None and x.shape[0] != count):
        expected = f"{dims} of {count} rows" if count is not None else f"2 dimensions, {dims}"
        raise ValueError(_say(name, f"shape {tuple(x.shape)}", expected))
    return jnp.asarray(x)


def few_rows_in_all(rows: int, devices: int) -> None:
    """Rows of all devices are counted in int32."""
    if rows * devices > _INT32.max:
        raise ValueError(_say("x", f"{rows} rows on each of {devices} devices", f"at most {_INT32.max} in all"))


def counts(x: Any, devices: int) -> jax.Array:
    """Returns `counts[E]` as int32, E a multiple of the devices."""
    x = _integers("counts", x, "an integer array of shape [experts]")
    if x.ndim != 1 or x.shape[0] == 0 or x.shape[0] % devices:
        expected = f"[experts], a multiple of the {devices} devices of the axis"
        raise ValueError(_say("counts", f"shape {x.shape}", expected))
    return x


def exchange_method(x: Any) -> str:
    """Returns how rows are exchanged."""
    if x not in ("ragged", "padded"):
        raise ValueError(_say("method", repr(x), '"ragged" or "padded"'))
    return x


def block_rows(x: Any, method: str, default: int) -> int:
    """Returns the rows of a block of "padded", at most `default`, which suffices."""
    if x is None:
        return default
    if method != "padded":
        raise ValueError(_say("block_rows", x, f'None with method="{method}"'))
    return min(positive("block_rows", x), default)


def no_ragged(platform: str) -> NoReturn:
    """Raises: there is no ragged all-to-all."""
    raise NotImplementedError(_say("method", f'"ragged" on {platform}, which lacks it', '"padded"'))


def not_an_exchange(x: Any) -> TypeError:
    """What to raise for anything but the result of a dispatch."""
    return TypeError(_say("exchange", type(x).__name__, "the Exchange that dispatch returned"))


_ALGORITHMS = {
    "DEFAULT": jax.lax.Precision.DEFAULT,
    "F16_F16_F16": jax.lax.Precision.DEFAULT,
    "BF16_BF16_BF16": jax.lax.Precision.DEFAULT,
    "F32_F32_F32": jax.lax.Precision.HIGHEST,
    "F64_F64_F64": jax.lax.Precision.HIGHEST,
    "BF16_BF16_F32": jax.lax.Precision.DEFAULT,
    "F16_F16_F32": jax.lax.Precision.DEFAULT,
    "TF32_TF32_F32": jax.lax.Precision.DEFAULT,
    "TF32_TF32_F32_X3": jax.lax.Precision.HIGHEST,
    "BF16_BF16_F32_X3": jax.lax.Precision.HIGHEST,
    "BF16_BF16_F32_X6": jax.lax.Precision.HIGHEST,
    "BF16_BF16_F32_X9": jax.lax.Precision.HIGHEST,
}
"""No algorithm is served by one less accurate than itself."""


def precision(x: Any) -> jax.lax.Precision:
    """Returns the precision that serves `x`, which is anything `jax.lax.dot` takes; None means JAX's configured one."""
    if x is None:
        x = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        if x is None:
            return jax.lax.Precision.DEFAULT
    expected = "None, a jax.lax.Precision, its name, a pair of these, or a jax.lax.DotAlgorithmPreset of these dtypes"
    if isinstance(x, (tuple, list)) and not hasattr(x, "_fields"):
        if len(x) != 2:
            raise ValueError(_say("precision", repr(x), expected))
        return max((precision(p) for p in x), key=lambda p: p.value)
    if isinstance(x, jax.lax.DotAlgorithmPreset):
        x = x.name
    if isinstance(x, str) and x in _ALGORITHMS:
        return _ALGORITHMS[x]
    try:
        return jax.lax.Precision(x)
    except (TypeError, ValueError) as e:
        got = type(x).__name__ if isinstance(e, TypeError) else repr(x)
        raise type(e)(_say("precision", got, expected)) from e


def precision_or_none(x: Any) -> jax.lax.Precision | None:
    """Returns the precision that serves `x`, which JAX takes; None if there is none."""
    try:
        return precision(x)
    except (TypeError, ValueError):
        return None


def platforms(x: Any, known: tuple[str, ...]) -> frozenset[str]:
    """Returns names of platforms."""
    expected = f"a sequence of {_one_of(tuple(map(repr, known)))}"
    if isinstance(x, str) or not isinstance(x, Iterable):
        raise TypeError(_say("platforms", repr(x), expected))
    if unknown := [name for name in x if name not in known]:
        raise ValueError(_say("platforms", repr(unknown[0]), expected))
    return frozenset(x)


def positive(name: str, x: Any) -> int:
    """Returns an int of 1 or more."""
    if isinstance(x, bool) or not isinstance(x, (int, np.integer)):
        raise TypeError(_say(name, type(x).__name__, "an int"))
    if x < 1:
        raise ValueError(_say(name, x, "1 or more"))
    return int(x)


def compute_capability(x: Any) -> int:
    """Returns 10 * major + minor."""
    expected = "two ints, such as (9, 0)"
    if not isinstance(x, tuple) or not all(isinstance(part, int) for part in x):
        raise TypeError(_say("compute_capability", repr(x), expected))
    if len(x) != 2 or x[0] < 1 or not 0 <= x[1] <= 9:
        raise ValueError(_say("compute_capability", x, expected))
    return 10 * x[0] + x[1]


def kernel(x: Any) -> str:
    """Returns the prefix of kernel names; None means any."""
    expected = "None or the beginning of a kernel's name"
    if x is not None and not isinstance(x, str):
        raise TypeError(_say("kernel", type(x).__name__, expected))
    if x is not None and not x.isascii():
        raise ValueError(_say("kernel", ascii(x), expected))
    return x or ""
