"""`jax.lax.ragged_dot` of programs that exist, lowered to the kernels.

JAX's operation stays what it is when it is traced, differentiated and mapped. Only its lowering to a platform changes,
for what the kernels serve. With the dimensions of `jax.lax.ragged_dot_general`, of which any may be several or none
except m and g:

    m of lhs only     lhs[b, x, m, y, k]  rhs[g, b, k, n]  sizes[b, x, g] or [g]  ->  [b, x, m, y, n]     gmm
    m contracted      lhs[b, m, k]        rhs[b, m, n]     sizes[b, g] or [g]     ->  [g, b, k, n]        tgmm

in any order in memory. b, x and y become the batch dimensions of the kernel, which may share an operand.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import dispatch
from jax._src.lax.lax import ragged_dot_general_p
from jax.interpreters import mlir

from jax_gg import _checks, _jax_gg, _sharding, _types
from jax_gg._spec import Spec

PLATFORMS = ("cpu", "cuda")


class Acceleration:
    """What `accelerate_ragged_dot` has switched on."""

    def __init__(self, platforms: frozenset[str]):
        self._platforms = platforms
        _active.append(self)
        _switch()

    def off(self) -> None:
        """Ends it, and restores JAX's own lowering if no other call still asks for this one."""
        if self in _active:
            _active.remove(self)
            _switch()

    def __enter__(self) -> "Acceleration":
        return self

    def __exit__(self, *_: Any) -> None:
        self.off()


def accelerate_ragged_dot(platforms: Sequence[str] | None = None) -> Acceleration:
    """From this call on, `jax.lax.ragged_dot` and `jax.lax.ragged_dot_general` are computed by jax_gg's kernels.

        jax_gg.accelerate_ragged_dot()  # for the rest of the process
        with jax_gg.accelerate_ragged_dot():  # or for a while
            loss, grads = jax.value_and_grad(model)(params)

    Programs that call them stay as they are, those of libraries too. JAX still differentiates, in forward mode too, and
    maps them: what it refuses there, it still refuses. What changes is how they are lowered, and with it how fast they
    are and how much memory they take, for

    - a ragged dimension that is not contracted (as in `gmm`), and one that is the only contracted dimension (as in
      `tgmm`), with any batch dimensions;
    - operands of one dtype, float16, bfloat16, float32 or, on the CPU, float64, and a result as `gmm` has it;
    - platforms in `platforms`.

    Everything else is lowered as before: a ragged batch dimension, other dtypes, a `reduction_order`, an algorithm of
    `precision` that `gmm` has not, and batch dimensions over Explicit mesh axes.

    Group sizes mean what they mean to JAX. Where it leaves them without a meaning, they have that of `gmm`: a negative
    size counts as 0. NaN in rows of `lhs` past the sum of the sizes reaches nothing, nor does NaN of the matrix of an
    empty group.

    The setting is one of the whole process, and a part of the key of JAX's caches: a function that was jitted and
    called before is compiled again when it is called inside, and what was compiled before serves again outside. What
    `jax.jit(f).lower(...)` or `.compile()` has returned stays as it is. The setting should not change while another
    thread is compiling, and not in a function that is being traced: what counts is the setting when it is compiled.

    Args:
      platforms: of `"cpu"` and `"cuda"`, those on which the lowering changes. By default, `"cpu"` and, in a build with
        CUDA kernels, `"cuda"`. A build without them can lower to `"cuda"` too, to export a program, if that is named.

    Returns:
      A context manager, entered already; leaving it, or its method `off()`, restores JAX's own lowering.

    Raises:
      TypeError, ValueError: `platforms` is of the wrong kind.
    """
    if platforms is None:
        platforms = PLATFORMS if _jax_gg.cuda_built_for() else PLATFORMS[:1]
    return Acceleration(_checks.platforms(platforms, PLATFORMS))


_active: list[Acceleration] = []
_setting: Any = jax.make_user_context(frozenset())
"""The platforms accelerated, in the key of JAX's caches; made on import, as what was compiled before it is made is
compiled again."""


def _switch() -> None:
    _register()
    # Which devices a program is for, which the partitioning rule needs, JAX tells to lowerings of these only.
    needs_devices = dispatch.prim_requires_devices_during_lowering
    (needs_devices.add if _active else needs_devices.discard)(ragged_dot_general_p)
    # JAX 0.8 has it on the inner object only.
    set_global = getattr(_setting, "set_global", None) or _setting._obj.set_global
    set_global(frozenset[str]().union(*(a._platforms for a in _active)))


@functools.cache
def _register() -> None:
    """Puts `_lower` before the lowerings that there are. They are called from there, so this need not be undone."""
    for platform in PLATFORMS:
        table = mlir._platform_specific_lowerings[platform]
        before = table.get(ragged_dot_general_p) or mlir._lowerings[ragged_dot_general_p]
        lower = functools.partial(_lower, platform, before.rule)
        mlir.register_lowering(ragged_dot_general_p, lower, platform=platform)


def _lower(platform: str, before: Callable, ctx: Any, *operands: Any, **params: Any) -> Any:
    """The lowering on one platform; `before` is the one that was registered before."""
    call = _served(platform, *ctx.avals_in, *ctx.avals_out, **params) if platform in _setting.value else None
    if call is None:
        return before(ctx, *operands, **params)
    return mlir.lower_fun(call, multiple_results=False)(ctx, *operands)


def _served(
    platform: str,
    lhs: Any,
    rhs: Any,
    sizes: Any,
    out: Any,
    *,
    ragged_dot_dimension_numbers: jax.lax.RaggedDotDimensionNumbers,
    precision: Any,
    preferred_element_type: Any,
    out_sharding: Any = None,
    **others: Any,
) -> Callable | None:
    """What computes a call of these types; None if the kernels do not."""
    del preferred_element_type, out_sharding  # in the type of the result
    # group_offset, which JAX does not lower, reduction_order, and what newer versions may add.
    if any(x is not None for x in others.values()):
        return None
    precision = _checks.precision_or_none("default" if precision is None else precision)
    if precision is None or not _checks.is_served(lhs.dtype, rhs.dtype, out.dtype):
        return None
    if lhs.dtype == np.float64 and platform != "cpu":
        return None
    dims = _Dims.of(ragged_dot_dimension_numbers, lhs.ndim, rhs.ndim)
    if dims is None:
        return None
    # Of a program exported for any number of rows, only that is symbolic.
    m = lhs.shape[dims.ragged]
    static = [*rhs.shape, *sizes.shape, *(size for d, size in enumerate(lhs.shape) if d != dims.ragged)]
    if dims.mode == "tgmm":
        static.remove(m)
    if not all(isinstance(size, int) for size in static) or (isinstance(m, int) and m > np.iinfo(np.int32).max):
        return None
    mesh = out.sharding.mesh
    is_explicit = not mesh.empty and bool(_types.explicit_axes(mesh))
    if is_explicit and (lhs.ndim, rhs.ndim, out.ndim) not in ((2, 3, 2), (2, 2, 3)):
        return None
    spec = Spec(
        mode=dims.mode,
        out_dtype=out.dtype,
        transpose_rhs=dims.transpose_rhs,
        num_groups=sizes.shape[-1],
        precision=precision,
        out_sharding=out.sharding if is_explicit else None,
    )
    return functools.partial(dims.gmm if dims.mode == "gmm" else dims.tgmm, spec)


@dataclasses.dataclass(frozen=True)
class _Dims:
    """The dimensions of the operands by what they are, in the order of the first operand that has them.

    Attributes:
      mode: of the kernel.
      ragged: m of lhs.
      lhs_batch, rhs_batch: b.
      lhs_contracted, rhs_contracted: k of a gmm, m of a tgmm.
      outer, inner: x and y of lhs, of a gmm.
      lhs_kept: k of a tgmm.
      group: g of rhs, of a gmm.
      rhs_kept: n.
    """

    mode: str
    ragged: int
    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]
    lhs_contracted: tuple[int, ...]
    rhs_contracted: tuple[int, ...]
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    lhs_kept: tuple[int, ...]
    group: tuple[int, ...]
    rhs_kept: tuple[int, ...]

    @classmethod
    def of(cls, numbers: jax.lax.RaggedDotDimensionNumbers, lhs_rank: int, rhs_rank: int) -> "_Dims | None":
        """None if no kernel has such dimensions."""
        (lhs_contracted, rhs_contracted), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
        (ragged,) = numbers.lhs_ragged_dimensions
        group = tuple(numbers.rhs_group_dimensions)
        kept = tuple(d for d in range(lhs_rank) if d not in (*lhs_batch, *lhs_contracted))
        rhs_kept = tuple(d for d in range(rhs_rank) if d not in (*rhs_batch, *rhs_contracted, *group))
        if ragged not in kept and tuple(lhs_contracted) != (ragged,):
            return None
        mode, i = ("gmm", kept.index(ragged)) if ragged in kept else ("tgmm", 0)
        return cls(
            mode=mode,
            ragged=ragged,
            lhs_batch=tuple(lhs_batch),
            rhs_batch=tuple(rhs_batch),
            lhs_contracted=tuple(lhs_contracted),
            rhs_contracted=tuple(rhs_contracted),
            outer=kept[:i] if mode == "gmm" else (),
            inner=kept[i + 1 :] if mode == "gmm" else (),
            lhs_kept=kept if mode == "tgmm" else (),
            group=group,
            rhs_kept=rhs_kept,
        )

    @property
    def transpose_rhs(self) -> bool:
        """Whether rhs is `[g, n, k]` in memory."""
        return self.mode == "gmm" and self.rhs_contracted > self.rhs_kept and bool(self.rhs_kept)

    def gmm(self, spec: Spec, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        b, x, y = (len(dims) for dims in (self.lhs_batch, self.outer, self.inner))
        many = (*self.lhs_batch, *self.outer, *self.inner)
        n = [rhs.shape[d] for d in self.rhs_kept]
        k_n = self.rhs_contracted, self.rhs_kept
        lhs = _folded(lhs, many, (self.ragged,), self.lhs_contracted)
        rhs = _folded(rhs, self.rhs_batch, self.group, *(k_n[::-1] if spec.transpose_rhs else k_n))
        sizes = _shared(sizes, 0, b + x + y) if sizes.ndim == 1 else _shared(sizes, b + x, y)
        out = _grouped(spec, lhs, _shared(rhs, b, x + y), sizes)
        out = jnp.moveaxis(out, b + x + y, b + x)
        return out.reshape(*out.shape[:-1], *n)

    def tgmm(self, spec: Spec, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        b = len(self.lhs_batch)
        k_n = (*(lhs.shape[d] for d in self.lhs_kept), *(rhs.shape[d] for d in self.rhs_kept))
        lhs = _folded(lhs, self.lhs_batch, (self.ragged,), self.lhs_kept)
        rhs = _folded(rhs, self.rhs_batch, self.rhs_contracted, self.rhs_kept)
        out = jnp.moveaxis(_grouped(spec, lhs, rhs, _shared(sizes, 0, b) if sizes.ndim == 1 else sizes), b, 0)
        return out.reshape(*out.shape[: b + 1], *k_n)


def _folded(x: jax.Array, first: Sequence[int], *others: Sequence[int]) -> jax.Array:
    """`x` with the dimensions `first`, and then one of the elements of each of `others`."""
    sizes = [math.prod(x.shape[d] for d in dims) for dims in others]
    x = jax.lax.transpose(x, [*first, *(d for dims in others for d in dims)])
    return x.reshape(*x.shape[: len(first)], *sizes)


def _shared(x: jax.Array, begin: int, dims: int) -> jax.Array:
    """`x` with dimensions of 1 from `begin` on."""
    return x.reshape(*x.shape[:begin], *(1,) * dims, *x.shape[begin:])


def _grouped(spec: Spec, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    offset = jnp.zeros((*(1,) * (sizes.ndim - 1), 1), jnp.int32)
    return _sharding.grouped(spec, lhs, rhs, _checks.as_int32(sizes), offset)
