"""An implementation for `tokamax.ragged_dot`, which tokamax need not be installed for.

tokamax.ragged_dot(lhs, rhs, group_sizes, implementation=[jax_gg.tokamax.ragged_dot])
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jax_gg import _checks
from jax_gg._gmm import gmm, tgmm

# By dimension numbers, without batch dimensions: contracted, of lhs and of rhs; ragged, of lhs; of groups, of rhs.
_GMM = (((1,), (1,)), ((), ())), (0,), (0,)
_OPERATIONS: dict[Any, Callable[..., jax.Array]] = {
    _GMM: gmm,
    ((((1,), (2,)), ((), ())), (0,), (0,)): functools.partial(gmm, transpose_rhs=True),
    ((((0,), (0,)), ((), ())), (0,), ()): tgmm,
}


def ragged_dot(
    lhs: Any,
    rhs: Any,
    *,
    group_sizes: Any,
    ragged_dot_dimension_numbers: Any = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    activation: Callable[[jax.Array], jax.Array] | None = None,
    manual_axis_type: Any = None,
    zero_initialize: bool = False,
    fuse_gateup_activation: str | None = None,
) -> jax.Array:
    """`gmm`, or with other dimension numbers `tgmm`, as `tokamax.ragged_dot` and `ragged_dot_general` call it.

    Of several implementations in the list, tokamax takes the first that does not raise NotImplementedError.

    Args:
      lhs: `[m, k]`; quantized arrays are not served.
      rhs: `[g, k, n]`, `[g, n, k]` or, where rows are contracted, `[m, n]`.
      group_sizes: `[g]`, or tokamax's `GroupSizes`, of which the representative value is not needed.
      ragged_dot_dimension_numbers: those of one of these three, without batch dimensions; None: of the first.
      precision: as in `jax.lax.dot`.
      preferred_element_type: dtype of the result, by default that of the operands.
      group_offset: as in `gmm`.
      activation: applied to the result in the dtype it is accumulated in, float32, or float64 for float64 operands.
      manual_axis_type: not served, as the type of the result follows from those of the operands.
      zero_initialize: rows of no group are zero in any case.
      fuse_gateup_activation: not served.

    Returns:
      `[m, n]` or `[g, k, n]`.

    Raises:
      NotImplementedError: the kernels do not serve it, and another implementation may.
      TypeError, ValueError: an argument has the wrong type, dtype or shape.
    """
    del zero_initialize
    for name, x in (("manual_axis_type", manual_axis_type), ("fuse_gateup_activation", fuse_gateup_activation)):
        if x is not None:
            raise _checks.not_served(name, x, "None")
    numbers = ragged_dot_dimension_numbers
    dims = numbers and (numbers.dot_dimension_numbers, numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions)
    operation = _OPERATIONS.get(dims or _GMM)
    if operation is None:
        expected = "those of gmm, with rhs transposed or not, or of tgmm"
        raise _checks.not_served("ragged_dot_dimension_numbers", numbers, expected)
    _checks.served_arrays(lhs, rhs, preferred_element_type)
    if _checks.precision_or_none(precision) is None:
        raise _checks.not_served("precision", precision, "one that gmm takes")
    # The array of a GroupSizes.
    sizes = getattr(group_sizes, "value", group_sizes)
    more = {"precision": precision, "group_offset": group_offset}
    if activation is None:
        return operation(lhs, rhs, sizes, preferred_element_type=preferred_element_type, **more)
    wide = jnp.float64 if lhs.dtype == jnp.float64 else jnp.float32
    out = activation(operation(lhs, rhs, sizes, preferred_element_type=wide, **more))
    return out.astype(lhs.dtype if preferred_element_type is None else preferred_element_type)
