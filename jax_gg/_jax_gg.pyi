from typing import Any

def registrations() -> dict[str, dict[str, Any]]: ...
def cuda_built_for() -> str: ...
def cuda_kernels() -> list[str]: ...
def cuda_device() -> tuple[int, int, int] | None: ...
def cuda_choice(
    device: tuple[int, int, int],
    tgmm: bool,
    in_dtype: str,
    out_dtype: str,
    transpose_rhs: bool,
    precision: int,
    batch: int,
    m: int,
    k: int,
    n: int,
    groups: int,
    weights: int,
    prefix: str,
) -> tuple[str, str]: ...
def workspace_bytes(batch: int, groups: int, weights: int) -> int: ...
