"""Random problems, each computed by two kernel families of a GPU, which must agree in every bit.

    python tests/fuzz.py --problems 100000 --jobs 8

Operands are small integers, so that every sum is exact in f32 whatever its order, and results differ only if something
is wrong. Shapes, dtypes, directions and what vmap maps over are drawn for each program, sizes for each of its calls, on
the device: sums past m, negative and huge sizes, empty groups, one group that has everything. Compiling takes most of
the time, so that several processes at once are faster.
"""

import argparse
import dataclasses
import functools
import re
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_gg
from jax_gg import _jax_gg

CALLS = 250  # of each program
DTYPES = {name: jnp.dtype(dtype) for name, dtype in (("bf16", jnp.bfloat16), ("f16", jnp.float16), ("f32", np.float32))}


@dataclasses.dataclass(frozen=True)
class Draw:
    """What is static about a program."""

    direction: str
    m: int
    k: int
    n: int
    g: int
    sizes: int
    offset: int
    dtype: np.dtype
    out_dtype: np.dtype
    kernel: str
    batch: int = 0  # 0: no vmap
    mapped: tuple[bool, bool, bool] = (False, False, False)  # lhs, rhs, sizes


def draw(rng) -> Draw:
    """A shape that the sm90 kernels take: k and n multiples of 8."""
    lines = [line for line in _jax_gg.cuda_kernels() if ": sm90" in line]
    operands, kernel = str(rng.choice(lines)).split(": ")
    operation, dtype, out_dtype = re.fullmatch(r"(.*) (\w+) -> (\w+)", operands).groups()
    groups = int(rng.choice([1, 2, 3, 8, 31, 64, 130, 520]))
    offset = int(rng.integers(-1, 2)) if rng.random() < 0.3 else 0
    batch = int(rng.choice([0, 0, 2, 5]))
    return Draw(
        {"gmm": "fwd", "gmm transpose_rhs": "dlhs", "tgmm": "drhs"}[operation],
        m=int(rng.choice([1, 63, 64, 200, 1000, 3000])),
        k=8 * int(rng.choice([1, 7, 8, 16, 24, 32, 33, 40, 64])),
        n=8 * int(rng.choice([1, 8, 15, 24, 32, 48, 65, 80])),
        g=max(1, groups - abs(offset)),
        sizes=groups,
        offset=offset,
        dtype=DTYPES[dtype],
        out_dtype=DTYPES[out_dtype],
        kernel=kernel,
        batch=batch,
        mapped=tuple(bool(x) for x in rng.permutation([1, *rng.integers(0, 2, 2)])) if batch else (False,) * 3,
    )


def random_sizes(key, m, g):
    """One of several kinds of sizes, [g]."""
    kind, a, b = jax.random.split(key, 3)
    cuts = jnp.sort(jax.random.randint(a, (g - 1,), 0, m + 1))
    spread = jnp.diff(cuts, prepend=0, append=m).astype(jnp.int32)
    few = jax.random.randint(a, (g,), -2, 9)
    one = jnp.where(jnp.arange(g) == jax.random.randint(b, (), 0, g), m, 0)
    holes = jnp.where(jax.random.bernoulli(b, 0.5, (g,)), spread, 0)
    huge = jnp.where(jax.random.bernoulli(b, 0.2, (g,)), 2**31 - 1, spread)
    even = jnp.full((g,), m // g, jnp.int32)
    kinds = jnp.stack([spread, few, one, holes, huge, even]).astype(jnp.int32)
    return kinds[jax.random.randint(kind, (), 0, len(kinds))]


def disagreements(d: Draw, seed: int, calls: int = CALLS) -> int:
    """How many of the calls differ from the general kernels in any bit."""

    def call(lhs, rhs, sizes, kernel):
        more = {"group_offset": d.offset, "preferred_element_type": d.out_dtype, "kernel": kernel}
        if d.direction == "drhs":
            return jax_gg.tgmm(lhs, rhs, sizes, num_groups=d.g, **more)
        return jax_gg.gmm(lhs, rhs, sizes, transpose_rhs=d.direction == "dlhs", **more)

    shapes = {
        "fwd": ((d.m, d.k), (d.g, d.k, d.n)),
        "dlhs": ((d.m, d.k), (d.g, d.n, d.k)),
        "drhs": ((d.m, d.k), (d.m, d.n)),
    }[d.direction]

    def calls_of(kernel):
        axes = tuple(0 if mapped else None for mapped in d.mapped)
        one = functools.partial(call, kernel=kernel)
        return jax.vmap(one, axes) if d.batch else one

    def sizes_of(key):
        draw_one = functools.partial(random_sizes, m=d.m, g=d.sizes)
        return jax.vmap(draw_one)(jax.random.split(key, d.batch)) if d.mapped[2] else draw_one(key)

    @jax.jit
    def run(key):
        keys = jax.random.split(key, 3)
        lhs, rhs = (
            jax.random.randint(k, (d.batch, *s) if mapped else s, -3, 4).astype(d.dtype)
            for k, s, mapped in zip(keys[:2], shapes, d.mapped[:2], strict=True)
        )

        def step(wrong, key):
            got, want = (calls_of(kernel)(lhs, rhs, sizes_of(key)) for kernel in (d.kernel, "sm80"))
            return wrong + jnp.any(got != want).astype(jnp.int32), None

        return jax.lax.scan(step, jnp.int32(0), jax.random.split(keys[2], calls))[0]

    return int(run(jax.random.key(seed)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=10**5)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with its part of the problems")
    args = parser.parse_args()
    seed = int(np.random.default_rng().integers(2**31)) if args.seed is None else args.seed
    if args.jobs > 1:
        options = ["--problems", str(-(-args.problems // args.jobs)), "--seconds", str(args.seconds)]
        jobs = [
            subprocess.Popen([sys.executable, __file__, *options, "--seed", str(seed + i)]) for i in range(args.jobs)
        ]
        raise SystemExit(sum(job.wait() != 0 for job in jobs) > 0)
    rng = np.random.default_rng(seed)
    begin, done, failed = time.monotonic(), 0, 0
    while done < args.problems and time.monotonic() - begin < args.seconds:
        d = draw(rng)
        wrong = disagreements(d, int(rng.integers(2**31)))
        done += CALLS
        if wrong:
            failed += wrong
            print(f"{wrong} of {CALLS} differ: {d}")
    print(f"seed {seed}: {done} problems, {failed} differ, {time.monotonic() - begin:.0f} s")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
