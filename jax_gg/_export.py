"""What `jax.export` must be told."""

from jax.export import DisabledSafetyCheck

from jax_gg import _jax_gg

export_checks: tuple[DisabledSafetyCheck, ...] = tuple(
    map(DisabledSafetyCheck.custom_call, sorted({name for x in _jax_gg.registrations().values() for name in x}))
)
"""The checks that refuse jax_gg's kernels: `jax.export.export(f, disabled_checks=jax_gg.export_checks)`."""
