"""How the time of a grouped matmul on a GPU depends on what is not in `gmm.py`'s shapes.

    python benchmarks/curves.py --out results/curves.jsonl --plot results/curves.png

- `near_even`: sizes a few rows off even ones beside even ones, for every shape of `gmm.py` whose sizes are even. `one`:
  every other group has a row more, and its neighbour one less. `random`: rows that choose their groups at random.
- `groups`: 65536 rows in 8 to 4096 groups. The limit beside it is what the weights demand: the time with the fewest
  groups, and that of a copy of as many more bytes as there are more weights.
- `host`: what a call costs the host, outside a command buffer: calls enqueued one after the other in one program, on
  operands so small that the GPU waits for the host. An upper bound: if the GPU takes longer, it is the GPU's time.

Kernel time of `near_even` and `groups` as in `gmm.py`, hot; median of rounds in a shuffled order.
"""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
from gmm import DIRECTIONS, make_runners, metadata, problem_bytes, problems, profile, row_of, times_of

import jax_gg

GROUPS = (8, 32, 128, 512, 1024, 2048, 4096)
GROUPS_SHAPE = {"m": 65536, "k": 2048, "n": 768}
HOST_CALLS = 100  # in one program


def near_even(problem, rng):
    """The problem, and others of as many rows in almost as many groups."""
    m, g = problem.m, problem.g
    sign = np.where(np.arange(g) % 2 == 0, 1, -1)
    one = np.array(problem.sizes) + (sign if g % 2 == 0 and m >= g else 0)
    kinds = {"even": problem.sizes, "one": one, "random": rng.multinomial(m, np.full(g, 1 / g))}
    return [
        dataclasses.replace(problem, name=f"{problem.name}/{kind}", sizes=tuple(map(int, sizes)))
        for kind, sizes in kinds.items()
    ]


def hot_rows(shapes, directions, impls, rounds, rng):
    """Rows as of gmm.py."""
    runners = make_runners(shapes, directions, impls, rng)
    single = {key: profile(lambda runner=runner: runner.run(1)) for key, runner in runners.items()}
    times = times_of(runners, single, "hot", rounds, rng)
    return [row_of(key, "hot", calls) for key, calls in times.items()]


def near_even_rows(rounds, rng):
    even = [p for p in problems.BENCHMARKS if len(set(p.sizes)) == 1]
    shapes = [shape for problem in even for shape in near_even(problem, rng)]
    rows = hot_rows(shapes, DIRECTIONS, ["jax_gg"], rounds, rng)
    us = {(row["shape"], row["direction"]): row["us"] for row in rows}
    for row in rows:
        row["of_even"] = round(row["us"] / us[f"{row['shape'].split('/')[0]}/even", row["direction"]], 3)
    return [{"curve": "near_even", **row} for row in rows]


def groups_rows(rounds, rng):
    m, k, n = (GROUPS_SHAPE[x] for x in "mkn")
    shapes = [problems.Problem(f"groups-{g}", m, k, n, problems.equal_sizes(m, g)) for g in GROUPS]
    # One at a time: the operands of all would not fit.
    rows = [row for shape in shapes for row in hot_rows([shape], DIRECTIONS, ["jax_gg", "copy"], rounds, rng)]
    by_name = {shape.name: shape for shape in shapes}
    us = {(row["shape"], row["direction"], row["impl"]): row["us"] for row in rows}
    for row in rows:
        shape, direction = by_name[row["shape"]], row["direction"]
        more = sum(problem_bytes(shape, direction)) - sum(problem_bytes(shapes[0], direction))
        per_byte = us[shape.name, direction, "copy"] / sum(problem_bytes(shape, direction))
        row |= {"groups": shape.g, "limit_us": round(us[shapes[0].name, direction, "jax_gg"] + more * per_byte, 2)}
    return [{"curve": "groups", **row} for row in rows if row["impl"] == "jax_gg"]


def host_rows(rounds):
    rows = []
    for kernel in ("sm90", "sm80"):
        for direction in ("fwd", "drhs"):
            rhs = jnp.ones((2, 64, 64) if direction == "fwd" else (64, 64), jnp.bfloat16)
            sizes = jnp.array([32, 32], jnp.int32)

            @jax.jit
            def chain(lhs, rhs, sizes, direction=direction, kernel=kernel):
                for _ in range(HOST_CALLS):
                    if direction == "fwd":
                        lhs = jax_gg.gmm(lhs, rhs, sizes, kernel=kernel)
                    else:
                        lhs = jax_gg.tgmm(lhs, rhs, sizes, kernel=kernel)[0]
                return lhs

            lhs = jnp.ones((64, 64), jnp.bfloat16)
            try:
                chain(lhs, rhs, sizes).block_until_ready()
            except RuntimeError as error:
                print(f"{kernel}: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            times = []
            for _ in range(20 * rounds):
                begin = time.perf_counter()
                chain(lhs, rhs, sizes).block_until_ready()
                times.append((time.perf_counter() - begin) / HOST_CALLS * 1e6)
            rows.append(
                {"curve": "host", "impl": f"jax_gg:{kernel}", "direction": direction, "us": round(min(times), 2)}
                | {"median_us": round(statistics.median(times), 2)}
            )
    return rows


def table(rows):
    lines = []
    for row in rows:
        if row["curve"] == "near_even":
            lines.append(f"{row['shape']:28}{row['direction']:6}{row['us']:10.1f} us, {row['of_even']:.3f} of even")
        elif row["curve"] == "groups":
            share = row["us"] / row["limit_us"]
            lines.append(f"{row['shape']:28}{row['direction']:6}{row['us']:10.1f} us, {share:.3f} of the limit")
        else:
            lines.append(f"{'host ' + row['impl']:28}{row['direction']:6}{row['us']:10.2f} us")
    return "\n".join(lines)


def plot(rows, meta, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, len(DIRECTIONS), figsize=(12, 4), sharey=True, layout="constrained")
    for ax, direction in zip(axes, DIRECTIONS, strict=True):
        own = [row for row in rows if row["curve"] == "groups" and row["direction"] == direction]
        groups = [row["groups"] for row in own]
        ax.loglog(groups, [row["us"] for row in own], "o-", label="jax_gg")
        ax.loglog(groups, [row["limit_us"] for row in own], "k--", label="8 groups, and a copy of the weights added")
        ax.set(title=direction, xlabel="groups")
        ax.set_xticks(groups, groups, rotation=45)
    axes[0].set_ylabel("us")
    axes[0].legend()
    fig.suptitle(f"Time against the number of groups; {GROUPS_SHAPE}, bf16, {meta['gpu']}")
    fig.savefig(path, dpi=90)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"near_even": near_even_rows, "groups": groups_rows, "host": lambda rounds, _: host_rows(rounds)}
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines: meta, then one object a measurement")
    parser.add_argument("--plot", type=pathlib.Path, help="PNG of the time against the number of groups")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("benchmarks/curves.py: found no GPU, expected one that JAX sees")
    meta, rows = metadata(), []
    rng = np.random.default_rng(args.seed)
    for part in args.only:
        rows += parts[part](args.rounds, rng)
        if args.out:
            args.out.write_text("".join(json.dumps(x) + "\n" for x in [{"meta": meta}, *rows]))
    print(table(rows))
    if args.plot:
        plot(rows, meta, args.plot)


if __name__ == "__main__":
    main()
