"""What each kernel is worth: the time of the calls that it serves, and that of the kernel that would without it.

    python benchmarks/ablation.py --out results/ablation.jsonl

For every shape and direction of `gmm.py`, and for shapes that other kernels serve: the kernel that `jax_gg.explain`
names, and the one that it expects to come next, both forced, hot, in turns with all others in one run.
"""

import argparse
import json
import pathlib
import re
import statistics
import sys

sys.path.append(str(pathlib.Path(__file__).parent))

import jax
import numpy as np
from gmm import (
    DIRECTIONS,
    Jax,
    jax_call,
    make_arrays,
    metadata,
    operands_of,
    problems,
    profile,
    row_of,
    times_of,
)

import jax_gg

SHAPES = (
    *problems.BENCHMARKS,
    problems.Problem("narrow", 65536, 2048, 128, problems.equal_sizes(65536, 64)),
    problems.Problem("rows-32", 4096, 2048, 768, problems.equal_sizes(4096, 128)),
)


def first_two(direction, args):
    """Names of the kernel that serves the call, and of the one that would without it."""
    (choice,) = jax_gg.explain(jax_call(direction))(*args)
    others = re.findall(r"^ +(\S+) +expected to take ([\d.]+) times as long$", choice.text, re.MULTILINE)
    return choice.kernel, min(others, key=lambda other: float(other[1]))[0]


def runners_of_two(rng):
    """`(problem, direction, kernel) -> runner`, the kernel that serves each problem before the one that comes next."""
    runners = {}
    for problem in SHAPES:
        arrays = make_arrays(problem, jax.random.key(int(rng.integers(2**31))))
        for direction in DIRECTIONS:
            args = operands_of(direction, arrays)
            for kernel in first_two(direction, args):
                runners[problem, direction, kernel] = Jax(jax_call(direction, kernel), args)
                runners[problem, direction, kernel].run(1)
    return runners


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines: meta, then one object a shape and direction")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("benchmarks/ablation.py: found no GPU, expected one that JAX sees")
    rng = np.random.default_rng(args.seed)
    runners = runners_of_two(rng)
    single = {key: profile(lambda runner=runner: runner.run(1)) for key, runner in runners.items()}
    times = times_of(runners, single, "hot", args.rounds, rng)
    us = {key: row_of(key, "hot", calls)["us"] for key, calls in times.items()}
    keys = list(us)
    rows = []
    for (problem, direction, kernel), (*_, other) in zip(keys[::2], keys[1::2], strict=True):
        with_it, without = us[problem, direction, kernel], us[problem, direction, other]
        row = {"kernel": kernel, "shape": problem.name, "direction": direction, "us": with_it}
        rows.append(row | {"next": other, "us_without": without, "loss": round(without / with_it - 1, 3)})
    rows.sort(key=lambda row: row["kernel"])
    for row in rows:
        print("{kernel:24}{shape:20}{direction:6}{us:9.1f} us, without {us_without:9.1f} ({next})".format(**row))
    for kernel in dict.fromkeys(row["kernel"] for row in rows):
        ratios = [1 + row["loss"] for row in rows if row["kernel"] == kernel]
        print(f"{kernel}: without it {len(ratios)} calls take {statistics.geometric_mean(ratios):.3f} times as long")
    if args.out:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in [{"meta": metadata()}, *rows]))


if __name__ == "__main__":
    main()
