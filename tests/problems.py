"""Named problems, shared by the tests and the benchmarks: shapes and sizes, no framework.

`BENCHMARKS` are shapes of published models; `AWKWARD` are small ones that broke other implementations.
"""

import dataclasses
import itertools

import numpy as np

INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)


@dataclasses.dataclass(frozen=True)
class Problem:
    """`[m, k] x [g, k, n]` with these group sizes."""

    name: str
    m: int
    k: int
    n: int
    sizes: tuple[int, ...]

    @property
    def g(self) -> int:
        return len(self.sizes)

    @property
    def flops(self) -> int:
        """Of one direction."""
        return 2 * self.rows * self.k * self.n

    @property
    def rows(self) -> int:
        """Rows that are multiplied at all."""
        return min(sum(max(size, 0) for size in self.sizes), self.m)

    def __str__(self) -> str:
        return self.name


def equal_sizes(m: int, g: int) -> tuple[int, ...]:
    return tuple(m // g + (i < m % g) for i in range(g))


def zipf_sizes(m: int, g: int) -> tuple[int, ...]:
    """Rows as 1 / rank, ranks shuffled; group 1 empty; the remainder in the last group."""
    p = 1 / np.arange(1, g + 1)
    p = np.random.RandomState(0).permutation(p / p.sum())
    sizes = np.floor(p * m).astype(int)
    sizes[1] = 0
    sizes[-1] += m - sizes.sum()
    return tuple(sizes.tolist())


def _benchmark(name: str, m: int, k: int, n: int, g: int) -> Problem:
    return Problem(name, m, k, n, (zipf_sizes if name.endswith("-zipf") else equal_sizes)(m, g))


BENCHMARKS = (
    _benchmark("grin-8x1k", 1024, 4096, 6400, 8),
    _benchmark("mixtral-16k", 16384, 4096, 14336, 8),
    _benchmark("mixtral-16k-zipf", 16384, 4096, 14336, 8),
    _benchmark("dsv3-ep32-32k", 32768, 7168, 2048, 32),
    _benchmark("qwen3-128-64k", 65536, 2048, 768, 128),
    _benchmark("qwen3-128-64k-zipf", 65536, 2048, 768, 128),
    _benchmark("olmoe-64-32k", 32768, 2048, 1024, 64),
    _benchmark("gptoss-128-16k", 16384, 2880, 5760, 128),
    _benchmark("mixtral-dec-64", 64, 4096, 14336, 8),
    _benchmark("qwen3-dec-256", 256, 2048, 768, 128),
)


def scaled(problem: Problem, divisor: int) -> Problem:
    """The problem with m, k and n divided, and its sizes in proportion."""
    m = problem.m // divisor
    sizes = zipf_sizes if problem.name.endswith("-zipf") else equal_sizes
    return Problem(
        f"{problem.name}/{divisor}", m, problem.k // divisor, problem.n // divisor, sizes(m, len(problem.sizes))
    )


def _empty_groups():
    for full in itertools.product((False, True), repeat=4):
        sizes = tuple(size * f for size, f in zip((3, 5, 2, 7), full, strict=True))
        pattern = "".join("x" if f else "-" for f in full)
        yield Problem(f"empty-{pattern}", sum(sizes), 12, 20, sizes)
        yield Problem(f"empty-{pattern}-and-rows-past", sum(sizes) + 4, 12, 20, sizes)


def _many_groups():
    for g in (1000, 1024, 1025, 4096):
        sizes = np.random.default_rng(g).integers(0, 4, g)
        yield Problem(f"groups-{g}", int(sizes.sum()) + 5, 8, 16, tuple(sizes.tolist()))


AWKWARD = (
    *_empty_groups(),
    Problem("rows-past-the-sum", 64, 24, 40, (7, 0, 20)),
    Problem("tile-boundaries", 385, 72, 96, (1, 127, 129, 63, 65)),
    Problem("tile-boundaries-and-rows-past", 450, 64, 200, (1, 127, 129, 63, 65)),
    Problem("one-row-each", 33, 40, 24, (1,) * 33),
    Problem("one-group", 70, 33, 43, (70,)),
    Problem("one-group-and-rows-past", 70, 33, 43, (50,)),
    Problem("one-row", 1, 48, 24, (0, 1, 0)),
    Problem("one-element", 1, 1, 1, (1,)),
    *_many_groups(),
    Problem("negative", 20, 16, 24, (-3, 5, -1, 4, -100)),
    Problem("overrun", 20, 16, 24, (5, 100, 3)),
    Problem("overrun-by-one", 20, 16, 24, (5, 16, 1)),
    Problem("int32-max", 20, 16, 24, (INT32_MAX, INT32_MAX, INT32_MAX, 1)),
    Problem("int32-extremes", 20, 16, 24, (3, INT32_MIN, 4, INT32_MAX, INT32_MIN, INT32_MAX, 2)),
    Problem("skew", 1000, 32, 48, (4, 990, 6)),
    Problem("skew-of-many", 1100, 32, 48, (1,) * 60 + (980,) + (1,) * 60),
    Problem("m-0", 0, 16, 24, (0, 0, 0)),
    Problem("m-0-with-sizes", 0, 16, 24, (3, 0, 2)),
    Problem("k-0", 12, 0, 24, (3, 0, 9)),
    Problem("n-0", 12, 16, 0, (3, 0, 9)),
    Problem("g-0", 12, 16, 24, ()),
    Problem("all-0", 0, 0, 0, ()),
)

# n and k that no tile divides, or not evenly; every pair.
ODD_SHAPES = tuple(
    Problem(f"k-{k}-n-{n}", 20, k, n, (5, 0, 9, 3))
    for k in (1, 8, 33, 64, 72, 96)
    for n in (1, 2, 3, 7, 8, 24, 43, 96, 160, 192, 200)
)
