"""The partitioning rule: a split operand stays where it is, and each device multiplies what it has.

Where a dimension is split over the devices of some mesh axes, each of them

    m   cuts the sizes to its rows                 gmm: no communication    tgmm: the results are summed
    k   multiplies its part of the contraction     gmm: summed              tgmm: no communication
    n   multiplies its columns                     no communication
    g   moves group_offset to its matrices         gmm: summed              tgmm: no communication

and so in any mixture, as no axis splits two dimensions. A sum is one all-reduce, or one reduce-scatter where the result
is wanted split over the same axes. It is a sum in f32, rounded once, unless only groups are split: then a row is not
zero on one device at most, and a sum in 16 bits is exact.

The mechanism depends on the axes of the mesh.

    Auto       `custom_partitioning`, as shardings are known only when XLA compiles. XLA then calls back into this
               process: a program for several devices can neither be exported nor be lowered without them.
    Explicit   `shard_map`, as shardings are in the types.
    Manual     the plain call: `shard_map` has split the operands already. Axes that it has left Auto are gathered.

The plain call is also what a program for one device has in the end.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_gg import _ffi, _types
from jax_gg._spec import Spec

Axes = tuple[Any, ...]
"""Mesh axes, the major one first, that one dimension is split over."""


def grouped(
    spec: Spec, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, *like: jax.Array
) -> jax.Array:
    """Calls the kernel, on each device for its part of the problem.

    Every operand has the same number of leading batch dimensions, each of the full size, or of 1 where all problems of
    that dimension share the operand.

    Args:
      spec: the static half of the call.
      lhs: `[..., m, k]`.
      rhs: gmm: `[..., g, k, n]`, or `[..., g, n, k]` with `spec.transpose_rhs`; tgmm: `[..., m, n]`. Of lhs's dtype.
      group_sizes: `[..., G]` int32.
      group_offset: `[..., 1]` int32.
      *like: tgmm: at most one array, `[..., g, k, n]` or `[..., g]`, that is not read: the result should be sharded as
        it is.

    Returns:
      gmm: `[..., m, n]`; tgmm: `[..., g, k, n]`; of `spec.out_dtype`.
    """
    operands = (lhs, rhs, group_sizes, group_offset, *like)
    problem = _Problem.of(spec, operands)
    mesh = spec.out_sharding.mesh if spec.out_sharding else _types.explicit_mesh(*operands)
    out_spec = problem.out_spec(spec, [_types.spec(x) for x in operands]) if mesh is not None else None
    # JAX 0.8 does not know, in the rule of a vmap, that the mapped axis of the mesh has come back.
    if out_spec is not None and AxisType.Auto not in mesh.axis_types and jax.__version_info__ >= (0, 9):
        return _explicit(spec, problem, mesh, out_spec, *operands)
    call: Callable[..., jax.Array] = functools.partial(_one_device, spec)
    if is_distributed(*operands):
        call = _partitioned(spec, problem.dims, problem.out_dims)
    if out_spec is not None:  # Its Explicit axes become Auto for this call.
        axes, sharding = _types.explicit_axes(mesh), NamedSharding(mesh, out_spec)
        call = jax.sharding.auto_axes(call, axes=axes, out_sharding=sharding)
    return call(*operands)


def _explicit(spec: Spec, problem: "_Problem", mesh: Any, out_spec: PartitionSpec, *operands: jax.Array) -> jax.Array:
    """The call where all axes are Explicit."""
    splits = [_axes(_types.spec(x), x.ndim) for x in operands]
    plan = _Plan.of(spec, mesh, problem, splits, _axes(out_spec, len(problem.out_dims)))
    in_specs = tuple(_partition_spec(parts) for parts in plan.parts)
    call = jax.shard_map(plan.compute, mesh=mesh, in_specs=in_specs, out_specs=_partition_spec(plan.out_parts))
    operands = tuple(jax.sharding.reshard(x, NamedSharding(mesh, p)) for x, p in zip(operands, in_specs, strict=True))
    return jax.sharding.reshard(call(*operands), NamedSharding(mesh, out_spec))


def is_distributed(*operands: jax.Array) -> bool:
    """Whether the call that is being traced may be for several devices, and `shard_map` has not split it."""
    meshes = [jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in operands)]
    if any(AxisType.Manual in mesh.axis_types for mesh in meshes if not mesh.empty):
        return False
    # Shardings may still come from outside, after tracing.
    return jax.device_count() > 1 or any(not mesh.empty and mesh.size > 1 for mesh in meshes)


@dataclasses.dataclass(frozen=True)
class _Problem:
    """The dimensions of the operands and of the result, by name.

    Attributes:
      dims: of each operand; a batch dimension is `b0`, `b1`, ..., or a name of its own where the operand is shared.
      out_dims: of the result.
      sizes: of every name.
    """

    dims: tuple[tuple[str, ...], ...]
    out_dims: tuple[str, ...]
    sizes: dict[str, int]

    @classmethod
    def of(cls, spec: Spec, operands: Sequence[Any]) -> "_Problem":
        if spec.mode == "gmm":
            inner, out = ["m k", "g n k" if spec.transpose_rhs else "g k n", "s", "o"], "m n"
        else:
            inner, out = ["m k", "m n", "s", "o"], "g k n"
        rank = len(operands[2].shape) - 1
        inner += [out[: 2 * (x.ndim - rank)] for x in operands[4:]]
        batch = np.broadcast_shapes(*(x.shape[:rank] for x in operands))
        dims, sizes = [], {"g": spec.num_groups}
        for i, (x, names) in enumerate(zip(operands, inner, strict=True)):
            shared = [have != full for have, full in zip(x.shape[:rank], batch, strict=True)]
            dims.append((*(f"u{i}{j}" if s else f"b{j}" for j, s in enumerate(shared)), *names.split()))
            sizes.update(zip(dims[-1], x.shape, strict=True))
        return cls(tuple(dims), (*(f"b{j}" for j in range(rank)), *out.split()), sizes)

    def out_spec(self, spec: Spec, specs: Sequence[PartitionSpec]) -> PartitionSpec:
        """How the type of the result is sharded over Explicit axes: as that of `jax.numpy.dot` would be."""
        split = [dict(zip(dims, _axes(s, len(dims)), strict=True)) for dims, s in zip(self.dims, specs, strict=True)]
        wanted = spec.out_sharding.spec if spec.out_sharding else None
        contracted = "k" if spec.mode == "gmm" else "m"
        if wanted is None and split[0][contracted] and split[1][contracted]:
            raise ValueError(
                f"out_sharding: got None, expected a sharding, as {contracted} is split in lhs ({specs[0]}) and in rhs "
                f"({specs[1]})"
            )
        names = self.out_dims
        inner: tuple[Axes, ...] = ()
        if wanted is not None:
            batch = len(names) - (2 if spec.mode == "gmm" else 3)
            names, inner = names[:batch], _axes(wanted, len(names) - batch)
        parts = [*(next((s[name] for s in split if s.get(name)), ()) for name in names), *inner]
        used = [axis for part in parts for axis in part]
        if len(used) != len(set(used)):
            raise ValueError(
                f"out_sharding: got {wanted}, expected a sharding of other axes, as lhs ({specs[0]}) and rhs "
                f"({specs[1]}) would split the result over one axis twice"
            )
        return _partition_spec(parts)


def _axes(spec: PartitionSpec, rank: int) -> tuple[Axes, ...]:
    """The axes of each dimension."""
    parts = [() if p is None else p if isinstance(p, tuple) else (p,) for p in spec]
    return (*parts, *((),) * (rank - len(parts)))


def _partition_spec(parts: Sequence[Axes]) -> PartitionSpec:
    return PartitionSpec(*(part[0] if len(part) == 1 else part or None for part in parts))


def _one_device(spec: Spec, *operands: jax.Array) -> jax.Array:
    """The call, its batch dimensions folded into one."""
    operands = operands[:4]  # Not that which is not read.
    rank = operands[2].ndim - 1
    batch = np.broadcast_shapes(*(x.shape[:rank] for x in operands))

    def fold(x):
        # Nothing is copied, except where nested vmaps map one operand over some of the axes and not over others.
        if x.shape[:rank] == (1,) * rank:
            return x.reshape(1, *x.shape[rank:])
        return jnp.broadcast_to(x, (*batch, *x.shape[rank:])).reshape(math.prod(batch), *x.shape[rank:])

    lhs, rhs, group_sizes, group_offset = map(fold, operands)
    out = _ffi.grouped(spec, lhs, rhs, group_sizes, group_offset[:, 0])
    return out.reshape(*batch, *out.shape[1:])


@functools.cache
def _partitioned(spec: Spec, dims: tuple[tuple[str, ...], ...], out_dims: tuple[str, ...]):
    """`_one_device` with a partitioning rule, for operands of these dimensions."""

    @custom_partitioning
    def call(*operands):
        return _one_device(spec, *operands)

    def plan(mesh, operands, out_sharding) -> "_Plan":
        mesh = _refined(mesh, operands[0].sharding, operands[0].ndim)
        splits = [_axes_of_tiles(mesh, x.sharding, x.ndim) for x in operands]
        wanted = _axes_of_tiles(mesh, out_sharding, len(out_dims))
        return _Plan.of(spec, mesh, _Problem.of(spec, operands), splits, wanted)

    def partition(mesh, operands, out):
        p = plan(mesh, operands, out.sharding)

        def compute(*operands):
            # Without the mesh of the context: its Explicit axes would be in the types of what is computed here.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return p.compute(*operands)

        return p.mesh, compute, p.sharding(p.out_parts), tuple(p.sharding(part) for part in p.parts)

    def infer_sharding_from_operands(mesh, operands, _):
        p = plan(mesh, operands, None)
        return p.sharding(p.out_parts)

    call.def_partition(
        partition,
        # Of the GSPMD partitioner, which JAX can still be told to use.
        infer_sharding_from_operands=infer_sharding_from_operands,
        decode_shardings=False,  # It fails for shardings over a part of an axis.
        sharding_rule=", ".join(map(" ".join, dims)) + " -> " + " ".join(out_dims),
        reduction_factors=_summed(spec),
        need_replication_factors=("s",),
    )
    return call


def _refined(mesh: jax.sharding.Mesh, sharding: jax.sharding.Sharding, rank: int) -> jax.sharding.Mesh:
    """The mesh of a program, each axis as several whose sizes are prime.

    The compiler splits dimensions over parts of an axis where an array was reshaped: 16 experts over 8 devices are 4
    experts over 4 of these devices in each of 4 arrays.
    """
    if mesh.empty:  # No array of the program has one.
        devices = np.array(list(sharding.devices_indices_map((sharding.num_devices,) * rank)))
        mesh = jax.sharding.Mesh(devices, ("devices",))
    axes = [(f"{name}_{i}", p) for name, size in mesh.shape.items() for i, p in enumerate(_primes(size))]
    return jax.sharding.Mesh(mesh.devices.reshape([p for _, p in axes]), [name for name, _ in axes])


def _primes(n: int) -> list[int]:
    for p in range(2, n + 1):
        if n % p == 0:
            return [p, *_primes(n // p)]
    return []


def _axes_of_tiles(mesh: jax.sharding.Mesh, sharding: jax.sharding.Sharding | None, rank: int) -> list[Axes]:
    """The axes of `mesh` that each dimension is split over; none, so that it is gathered, where none do it evenly."""
    if sharding is None or rank == 0:
        return [()] * rank
    # Each number of parts divides that of devices, so these do for a shape. Devices come in the order of the mesh.
    n = mesh.size
    indices = list(sharding.devices_indices_map((n,) * rank).values())
    begins = np.array([[s.indices(n)[0] for s in index] for index in indices]).reshape(*mesh.devices.shape, rank)
    return [_axes_of_begins(mesh, begins[..., d]) for d in range(rank)]


def _axes_of_begins(mesh: jax.sharding.Mesh, begins: np.ndarray) -> Axes:
    """The axes, the major one first, over which begins of a dimension of `mesh.size` elements increase evenly."""
    ones = np.eye(begins.ndim, dtype=int)
    strides = {name: int(begins[tuple(one)]) for name, one in zip(mesh.axis_names, ones, strict=True)}
    axes = tuple(sorted((name for name in strides if strides[name]), key=lambda name: -strides[name]))
    length = mesh.size
    for axis in axes:
        length //= mesh.shape[axis]
        if strides[axis] != length:
            return ()
    whole = sum(
        np.arange(size).reshape(-1, *(1,) * (begins.ndim - i - 1)) * strides[name]
        for i, (name, size) in enumerate(mesh.shape.items())
    )
    return axes if (begins == whole).all() else ()


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Who computes what.

    Attributes:
      spec: the static half of the call.
      mesh: the mesh.
      problem: the whole problem.
      axes: the mesh axes that each dimension is split over; no axis is in two of them.
      scatter: for each dimension of the result, the axes over which it is scattered when it has been summed over them.
    """

    spec: Spec
    mesh: jax.sharding.Mesh
    problem: _Problem
    axes: dict[str, Axes]
    scatter: dict[str, Axes]

    @classmethod
    def of(
        cls, spec: Spec, mesh: Any, problem: _Problem, splits: Sequence[Sequence[Axes]], out_split: Sequence[Axes]
    ) -> "_Plan":
        """The plan for operands that are split so, and a result that is wanted split so."""
        lhs, rhs, *others = (dict(zip(dims, x, strict=True)) for dims, x in zip(problem.dims, splits, strict=True))
        wanted = dict(zip(problem.out_dims, out_split, strict=True))
        axes: dict[str, Axes] = {}

        def take(x: dict[str, Axes], *names: str) -> None:
            """Splits `names` over the axes that `x` is split over, as far as these are not taken."""
            for name in names:
                is_split = name in axes
                for axis in x.get(name, ()):
                    parts = np.prod([mesh.shape[a] for a in (*axes.get(name, ()), axis)])
                    # What another operand has split already is split further only where that needs no padding.
                    if not any(axis in a for a in axes.values()) and (not is_split or not problem.sizes[name] % parts):
                        axes[name] = (*axes.get(name, ()), axis)

        batch = [name for name in problem.out_dims if name[0] == "b"]
        # The matrices are not moved: where rows are split over an axis of theirs, it is the rows that are.
        if spec.mode == "gmm":
            take(rhs, *batch, "g", "k", "n")
            take(lhs, *batch, "m", "k")
        else:
            like = others[2] if len(others) > 2 else {}
            for x in (wanted, like):
                take(x, *batch, "g")
                for operand, name in ((lhs, "k"), (rhs, "n")):
                    take({name: tuple(a for a in x.get(name, ()) if a in operand[name])}, name)
            take(lhs, *batch, "m", "k")
            take(rhs, *batch, "m", "n")
        for x in (*others, wanted):
            take(x, *batch)
        take(wanted, *problem.out_dims)

        summed = [a for name in _summed(spec) for a in axes.get(name, ())]
        scatter = {}
        for name in problem.out_dims:
            have, want = axes.get(name, ()), wanted[name]
            rest = want[len(have) :]
            even = problem.sizes[name] % np.prod([mesh.shape[a] for a in want], dtype=int) == 0
            if rest and want[: len(have)] == have and even and all(a in summed for a in rest):
                scatter[name] = rest
        return cls(spec, mesh, problem, axes, scatter)

    @property
    def parts(self) -> list[list[Axes]]:
        """How each operand must be split."""
        return [[self.axes.get(name, ()) for name in dims] for dims in self.problem.dims]

    @property
    def out_parts(self) -> list[Axes]:
        """How the result is split."""
        return [self.axes.get(name, ()) + self.scatter.get(name, ()) for name in self.problem.out_dims]

    def sharding(self, parts: Sequence[Axes]) -> NamedSharding:
        return NamedSharding(self.mesh, _partition_spec(parts))

    def compute(self, *operands: jax.Array) -> jax.Array:
        """The part of one device, from its parts of the operands."""
        spec = self.spec
        lhs, rhs, group_sizes, group_offset, *_ = operands
        m, g = self.problem.sizes["m"], self.problem.sizes["g"]
        if self._pads("k") and spec.mode == "gmm":
            lhs = self._zero_padding(lhs, "k", lhs.ndim - 1)
            rhs = self._zero_padding(rhs, "k", rhs.ndim - (1 if spec.transpose_rhs else 2))
        if self._pads("g") and spec.mode == "gmm":
            # The padding is no matrix of the groups after the last, to which no row may come.
            group = jax.lax.broadcasted_iota(jnp.int32, group_sizes.shape, group_sizes.ndim - 1)
            group_sizes = jnp.where(group < group_offset + g, group_sizes, 0)
        if self.axes.get("m"):
            group_sizes = within(group_sizes, m, self._begin("m"), lhs.shape[-2])
        if self.axes.get("g"):
            # An offset so large that this overflows is that of no group, and so is what comes out.
            group_offset = group_offset + self._begin("g")

        summed = [a for name in _summed(spec) for a in self.axes.get(name, ())]
        wide = spec.out_dtype
        if wide.itemsize < 4 and any(self.axes.get(name) for name in _summed(spec) if name != "g"):
            wide = np.dtype(np.float32)
        local = dataclasses.replace(spec, out_dtype=wide, num_groups=-(-g // self._count("g")))
        out = _one_device(local, lhs, rhs, group_sizes, group_offset)
        for name, axes in self.scatter.items():
            dim = self.problem.out_dims.index(name)
            out = jax.lax.psum_scatter(out, axes, scatter_dimension=dim, tiled=True)
            summed = [a for a in summed if a not in axes]
        if summed:
            out = jax.lax.psum(out, tuple(summed))
        return out.astype(spec.out_dtype)

    def _count(self, name: str) -> int:
        """The number of parts of a dimension."""
        return int(np.prod([self.mesh.shape[a] for a in self.axes.get(name, ())], dtype=np.int64))

    def _pads(self, name: str) -> bool:
        """Whether some parts of a dimension have undefined elements at their end."""
        return self.problem.sizes[name] % self._count(name) != 0

    def _begin(self, name: str) -> jax.Array:
        """The index of this device's first element of a split dimension."""
        return jax.lax.axis_index(self.axes[name]) * -(-self.problem.sizes[name] // self._count(name))

    def _zero_padding(self, x: jax.Array, name: str, dim: int) -> jax.Array:
        index = jax.lax.broadcasted_iota(jnp.int32, x.shape, dim) + self._begin(name)
        return jnp.where(index < self.problem.sizes[name], x, jnp.zeros((), x.dtype))


def _summed(spec: Spec) -> tuple[str, ...]:
    """The dimensions that the result does not have, in the order in which the operands do."""
    return ("k", "g") if spec.mode == "gmm" else ("m",)


def within(sizes: jax.Array, m: int, begin: jax.Array, rows: int) -> jax.Array:
    """The sizes of the parts of the groups `sizes[..., G]` of m rows that lie within `rows` rows from `begin` on."""
    if sizes.shape[-1] == 0:
        return sizes
    # A sum that stays at m cannot overflow.
    sizes = jnp.clip(sizes, 0, m)
    ends = jax.lax.associative_scan(lambda a, b: a + jnp.minimum(b, m - a), sizes, axis=sizes.ndim - 1)
    ends = jnp.clip(ends - begin, 0, rows)
    return jnp.diff(ends, prepend=0)
