"""What the types of values say about mesh axes, under the names that JAX gives it from 0.8 on.

Inside `shard_map` with `check_vma`, over which manual axes a value varies from device to device; with Explicit axes,
over which of them its dimensions are split.
"""

from typing import Any

import jax
import numpy as np

Axes = frozenset[Any]


def varying_axes(x: jax.Array) -> Axes:
    """The manual mesh axes over which `x` varies; empty outside `shard_map` and without `check_vma`."""
    aval: Any = jax.typeof(x)
    # JAX 0.12 moved `vma` into `manual_axis_type`.
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset(manual.varying if manual is not None else getattr(aval, "vma", None) or ())


def vary(x: jax.Array, axes: Axes) -> jax.Array:
    """`x`, typed as varying over `axes` too."""
    missing = tuple(axes - varying_axes(x))
    if not missing:
        return x
    lax: Any = jax.lax
    return lax.pcast(x, missing, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, missing)


def result_type(shape: tuple[int, ...], dtype: np.dtype, varying: Axes) -> jax.ShapeDtypeStruct:
    """The type of a result that varies over `varying`."""
    if not varying:
        return jax.ShapeDtypeStruct(shape, dtype)
    make: Any = jax.ShapeDtypeStruct
    # From 0.10 on, a type that varies over axes must also name the mesh that has them.
    sharding = jax.NamedSharding(jax.sharding.get_abstract_mesh(), jax.P())
    try:
        return make(shape, dtype, sharding=sharding, vma=varying)
    except TypeError:  # JAX 0.12 and later
        manual_axis_type = type(jax.typeof(np.zeros(())).manual_axis_type)  # type: ignore[attr-defined]
        return make(shape, dtype, sharding=sharding, manual_axis_type=manual_axis_type(varying=varying))


def psum_to_type_of(cotangent: jax.Array, primal_varying: Axes) -> jax.Array:
    """Sums `cotangent` over the axes it varies over and its primal does not.

    A primal that is the same on every device of an axis is used by all of them: its cotangent is the sum of theirs.
    """
    extra = tuple(varying_axes(cotangent) - primal_varying)
    return jax.lax.psum(cotangent, extra) if extra else cotangent


def explicit_mesh(*arrays: jax.Array) -> Any:
    """The mesh of the context or else of `arrays`; None if it has no Explicit axes."""
    # That of the context first: inside a vmap over a split dimension, it lacks the axes of this dimension.
    for mesh in (jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in arrays)):
        if not mesh.empty:
            return mesh if explicit_axes(mesh) else None
    return None


def explicit_axes(mesh: Any) -> tuple[Any, ...]:
    """The names of the Explicit axes of `mesh`."""
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in pairs if kind == jax.sharding.AxisType.Explicit)


def spec(x: jax.Array) -> jax.sharding.PartitionSpec:
    """How the dimensions of `x` are split over Explicit axes."""
    return jax.typeof(x).sharding.spec


def is_explicit(sharding: jax.sharding.NamedSharding | None) -> bool:
    """Whether a sharding belongs into a type."""
    return sharding is not None and bool(explicit_axes(sharding.mesh))
