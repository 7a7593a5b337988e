"""The oracle: one float64 NumPy product a group of rows.

It reads only the rows that the contract says are read, so that NaN anywhere else shows in what is compared with it.
"""

from collections.abc import Iterator

import numpy as np


def rows(sizes, m: int) -> Iterator[slice]:
    """The rows of each group: negative sizes count as 0, what overruns m is cut."""
    begin = 0
    for size in np.asarray(sizes).tolist():  # Python integers do not overflow
        end = min(begin + max(size, 0), m)
        yield slice(begin, end)
        begin = end


def served(sizes, m: int, num_groups: int, group_offset: int = 0) -> Iterator[tuple[int, slice]]:
    """(i, rows) of each non-empty group that has a matrix i, when matrix 0 belongs to group `group_offset`."""
    for group, r in enumerate(rows(sizes, m)):
        if r.stop > r.start and 0 <= group - group_offset < num_groups:
            yield group - group_offset, r


def f64(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def gmm(lhs, rhs, sizes, *, transpose_rhs: bool = False, group_offset: int = 0) -> np.ndarray:
    """`[m, k] x [g, k, n] -> [m, n]`; rhs is `[g, n, k]` with transpose_rhs."""
    lhs, rhs = np.asarray(lhs), np.asarray(rhs)
    if transpose_rhs:
        rhs = rhs.swapaxes(1, 2)
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for i, r in served(sizes, lhs.shape[0], rhs.shape[0], group_offset):
        out[r] = f64(lhs[r]) @ f64(rhs[i])
    return out


def tgmm(lhs, rhs, sizes, *, group_offset: int = 0, num_groups: int | None = None) -> np.ndarray:
    """`[m, k]^T x [m, n] -> [g, k, n]`."""
    lhs, rhs = np.asarray(lhs), np.asarray(rhs)
    num_groups = len(sizes) if num_groups is None else num_groups
    out = np.zeros((num_groups, lhs.shape[1], rhs.shape[1]))
    for i, r in served(sizes, lhs.shape[0], num_groups, group_offset):
        out[i] = f64(lhs[r]).T @ f64(rhs[r])
    return out


def gmm_gradients(lhs, rhs, sizes, dout, *, transpose_rhs: bool = False, group_offset: int = 0):
    """(dlhs, drhs) for the cotangent `dout[m, n]`."""
    offset = {"group_offset": group_offset}
    a, b = (dout, lhs) if transpose_rhs else (lhs, dout)
    return (
        gmm(dout, rhs, sizes, transpose_rhs=not transpose_rhs, **offset),
        tgmm(a, b, sizes, num_groups=np.shape(rhs)[0], **offset),
    )


def tgmm_gradients(lhs, rhs, sizes, dout, *, group_offset: int = 0):
    """(dlhs, drhs) for the cotangent `dout[g, k, n]`."""
    offset = {"group_offset": group_offset}
    return gmm(rhs, dout, sizes, transpose_rhs=True, **offset), gmm(lhs, dout, sizes, **offset)
