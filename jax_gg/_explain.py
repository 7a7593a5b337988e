"""Which GPU kernel serves each call of a function, and why."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jax_gg import _checks, _jax_gg

_TARGETS = {"jax_gg_gmm": False, "jax_gg_tgmm": True}
# Bytes of shared memory that a block may have, by compute capability, as in the CUDA programming guide.
_SHARED_BYTES = {80: 163 * 1024, 87: 163 * 1024} | dict.fromkeys((90, 100, 103, 110), 227 * 1024)
_LEAST_SHARED_BYTES = 99 * 1024  # of all that the kernels run on
_H200 = (90, 132, 227 * 1024)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The kernel of one call; `str` of it is the text.

    Attributes:
      kernel: its name, which `gmm` and `tgmm` take as the argument `kernel` to choose it; empty if no kernel serves.
      text: the call and its kernel, then a line for each other kernel for such operands: why it cannot serve, or how
        much longer it is expected to take.
    """

    kernel: str
    text: str

    def __str__(self) -> str:
        return self.text


def explain(
    fun: Callable[..., Any], *, compute_capability: tuple[int, int] | None = None, processors: int | None = None
) -> Callable[..., tuple[Explanation, ...]]:
    r"""Tells which GPU kernel serves each grouped matmul of a function, and why.

        print(*jax_gg.explain(jax.grad(loss))(params, batch), sep="\n")

    The function is traced and lowered, and nothing is run: arguments may be `jax.ShapeDtypeStruct`, and no GPU is
    needed. What is padded, transposed, differentiated or mapped by `vmap` appears as the kernels see it. Sizes of
    groups are unknown then: every choice is for rows spread evenly.

    Args:
      fun: a function of arrays, jitted or not.
      compute_capability: of the GPU, such as `(9, 0)`. By default, it and `processors` are those of the GPU at hand, or
        without one, those of an H200.
      processors: streaming multiprocessors of the GPU; by default 132 if `compute_capability` is given.

    Returns:
      A function of the same arguments that gives an `Explanation` for each distinct call, in the order of the program.
      A call whose operands `jit` splits over devices is not among them; inside `shard_map` it is, with its shapes on
      one device.

    Raises:
      RuntimeError: this build has no CUDA kernels.
      TypeError, ValueError: an argument is of the wrong kind.
    """
    device = _device(compute_capability, processors)

    def explained(*args, **kwargs):
        lowered = jax.jit(fun).trace(*args, **kwargs).lower(lowering_platforms=("cuda",))
        calls = dict.fromkeys(_calls(lowered.compiler_ir("stablehlo").operation))
        return tuple(Explanation(*_jax_gg.cuda_choice(device, *call)) for call in calls)

    return explained


def _device(compute_capability: Any, processors: Any) -> tuple[int, int, int]:
    if not _jax_gg.cuda_built_for():
        raise RuntimeError("jax_gg.explain: this build has no CUDA kernels, expected one made where nvcc is found")
    processors = None if processors is None else _checks.positive("processors", processors)
    if compute_capability is None:
        arch, there, shared_bytes = _jax_gg.cuda_device() or _H200
        return arch, processors or there, shared_bytes
    arch = _checks.compute_capability(compute_capability)
    return arch, processors or _H200[1], _SHARED_BYTES.get(arch, _LEAST_SHARED_BYTES)


def _calls(operation: Any) -> Iterator[tuple[Any, ...]]:
    """The arguments of `cuda_choice`, but for the device, for each call in a module."""
    for region in operation.regions:
        for block in region.blocks:
            for child in block.operations:
                yield from _call(child.operation)
                yield from _calls(child.operation)


def _call(operation: Any) -> Iterator[tuple[Any, ...]]:
    if operation.name != "stablehlo.custom_call":
        return
    tgmm = _TARGETS.get(operation.attributes["call_target_name"].value)
    if tgmm is None:
        return
    lhs, rhs, sizes, _ = (x.type for x in operation.operands)
    out = operation.results[0].type
    options = {a.name: a.attr.value for a in operation.attributes["mhlo.backend_config"]}
    _, m, k = lhs.shape
    shape = (out.shape[0], m, k, out.shape[-1], sizes.shape[1], out.shape[1] if tgmm else rhs.shape[1])
    dtypes = str(lhs.element_type), str(out.element_type)
    yield tgmm, *dtypes, options["transpose_rhs"], options["precision"], *shape, options["kernel"]
