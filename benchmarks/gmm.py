"""Times grouped matmuls on a GPU beside their peers and their limits.

    python benchmarks/gmm.py --out results.jsonl --plot results.png
    python benchmarks/gmm.py --shapes grin-8x1k --impls jax_gg jax_gg:sm80_128x128

Shapes are those of published models (`BENCHMARKS` in tests/problems.py), operands bf16 and random. Directions: `fwd`,
`[m, k] x [g, k, n]`; `dlhs`, `[m, n] x [g, k, n]^T`; `drhs`, `[m, k]^T x [m, n] -> [g, k, n]`.

Everything runs in one process, all shapes, directions and implementations round after round in a shuffled order,
because a GPU under load lowers its clock: so all meet the same clock, as in a program that multiplies all day. Two
states: `hot`, some milliseconds of each after the other without a pause, after seconds of the same; `cool`, three
calls of each after 60 ms without work. Kernel time only: everything that a call puts on the device, added up, from one
profile of the whole run; the median over calls and rounds. `dense` is one matmul of the same flops. `copy` moves as
many bytes as operands and result have together, half of them read and half of them written; `write` (of drhs, where
the result is most of it) writes as many as the result has.
"""

import argparse
import datetime
import functools
import gzip
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory beside jax

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

import problems  # noqa: E402

import jax_gg  # noqa: E402
from jax_gg import _jax_gg  # noqa: E402

DIRECTIONS = ("fwd", "dlhs", "drhs")
IMPLS = ("jax_gg", "jax_gg:sm80", "torch", "ragged_dot", "dense", "copy", "write")
RAGGED_DOT_BYTES = 16e9  # of its dense temporary, [g, m, max(k, n)]: beyond, it is left out
STATES = ("hot", "cool")
COOL_CALLS = 3  # in a row, for each sample
HOT_US, HOT_CALLS = 5e3, (3, 30)  # calls in a row for about as long, between these numbers of calls
HEAT_SECONDS, PAUSE_SECONDS = 4, 0.06


def problem_bytes(problem, direction):
    """Read and written, each once; of rhs only the matrices of groups that have rows."""
    m, k, n = problem.m, problem.k, problem.n
    weights = sum(size > 0 for size in problem.sizes) if direction != "drhs" else problem.g
    parts = {"fwd": (m * k + weights * k * n, m * n), "dlhs": (m * n + weights * k * n, m * k)}
    parts["drhs"] = (m * k + m * n, weights * k * n)
    return tuple(2 * elements for elements in parts[direction])


def make_arrays(problem, key):
    """lhs, rhs, dout and sizes: what the three directions read."""
    m, k, n = problem.m, problem.k, problem.n
    shapes = ((m, k), (problem.g, k, n), (m, n))
    arrays = [
        jax.jit(lambda key, shape=shape: jax.random.normal(key, shape, jnp.bfloat16))(key)
        for key, shape in zip(jax.random.split(key, 3), shapes, strict=True)
    ]
    return (*arrays, jnp.array(problem.sizes, jnp.int32))


def operands_of(direction, arrays):
    """lhs, rhs and sizes as jax_gg takes them."""
    lhs, rhs, dout, sizes = arrays
    return {"fwd": (lhs, rhs, sizes), "dlhs": (dout, rhs, sizes), "drhs": (lhs, dout, sizes)}[direction]


def jax_call(direction, kernel=None):
    if direction == "drhs":
        return jax.jit(lambda lhs, rhs, sizes: jax_gg.tgmm(lhs, rhs, sizes, kernel=kernel))
    return jax.jit(
        lambda lhs, rhs, sizes: jax_gg.gmm(lhs, rhs, sizes, transpose_rhs=direction == "dlhs", kernel=kernel)
    )


def ragged_dot_call(direction):
    rows, contracted = {"fwd": ([0], ([1], [1])), "dlhs": ([0], ([1], [2])), "drhs": ([0], ([0], [0]))}[direction]
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contracted, ([], [])),
        lhs_ragged_dimensions=rows,
        rhs_group_dimensions=[] if direction == "drhs" else [0],
    )
    return jax.jit(lambda lhs, rhs, sizes: jax.lax.ragged_dot_general(lhs, rhs, sizes, numbers))


class Jax:
    """Calls of a jitted function. Enqueued one after the other, they end when the last does."""

    def __init__(self, call, args):
        self.call = functools.partial(call, *args)

    def run(self, calls):
        jax.block_until_ready([self.call() for _ in range(calls)])


class Torch:
    """Calls of `torch._grouped_mm` on the same operands."""

    def __init__(self, direction, args):
        import torch

        lhs, rhs, sizes = (torch.from_dlpack(x) for x in args)
        ends = torch.cumsum(sizes, 0, dtype=torch.int32)
        if direction == "dlhs":
            rhs = rhs.transpose(1, 2)
        if direction == "drhs":
            lhs = lhs.t()
        self.call = functools.partial(torch._grouped_mm, lhs, rhs, offs=ends, out_dtype=torch.bfloat16)
        self.synchronize = torch.cuda.synchronize

    def run(self, calls):
        results = [self.call() for _ in range(calls)]
        self.synchronize()
        del results


def runner_of(impl, problem, direction, args, key):
    name, _, kernel = impl.partition(":")
    if name == "jax_gg":
        return Jax(jax_call(direction, kernel), args)
    if name == "torch":
        return Torch(direction, args)
    if name == "ragged_dot":
        if 2 * problem.g * problem.m * max(problem.k, problem.n) > RAGGED_DOT_BYTES:
            return None
        return Jax(ragged_dot_call(direction), args)
    if name == "dense":
        m, k, n = {"fwd": (0, 1, 2), "dlhs": (0, 2, 1), "drhs": (1, 0, 2)}[direction]
        dims = (problem.m, problem.k, problem.n)
        shapes = (dims[m], dims[k]), (dims[k], dims[n])
        ab = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(jax.random.split(key), shapes, strict=True)]
        return Jax(jax.jit(jnp.matmul), ab)
    if name == "copy":
        read, written = problem_bytes(problem, direction)
        x = jax.random.bits(key, ((read + written) // 8,), jnp.uint32)
        return Jax(jax.jit(lambda x: x + jnp.uint32(1)), (x,))
    if name == "write":
        if direction != "drhs":
            return None
        _, written = problem_bytes(problem, direction)
        return Jax(jax.jit(lambda x: jnp.full(written // 4, x)), (jnp.uint32(1),))
    raise ValueError(f"impls: got {impl}, expected one of {', '.join(IMPLS)}, or jax_gg:KERNEL")


def profile(run):
    """What `run()` puts on the device, in order of its start: `[(name, us)]`."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    gpus = {e["pid"] for e in events if e.get("name") == "process_name" and "/device:GPU" in e["args"]["name"]}
    events = [e for e in events if e.get("ph") == "X" and e.get("pid") in gpus and "Memcpy" not in e["name"]]
    return [(e["name"], e["dur"]) for e in sorted(events, key=lambda e: e["ts"])]


class Meter:
    """Samples the clock and the power of the GPU while it is open."""

    def __enter__(self):
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "200"]
        try:
            self.process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        except OSError:
            self.process = None
        return self

    def __exit__(self, *_):
        self.medians = {}
        if self.process is None:
            return
        self.process.terminate()
        lines = [line.split(",") for line in self.process.communicate()[0].splitlines()]
        samples = [(float(line[0]), float(line[1])) for line in lines if len(line) == 2 and "[" not in line[1]]
        if samples:
            clock, power = map(statistics.median, zip(*samples, strict=True))
            self.medians = {"clock_mhz": round(clock), "power_w": round(power)}


def run_rounds(runners, calls, rounds, rng, pause=0.0, seconds=0.0):
    """Runs everything, round after round, so many and at least so long; gives the order."""
    order = []
    begin = time.perf_counter()
    while len(order) < rounds * len(runners) or time.perf_counter() - begin < seconds:
        for i in rng.permutation(len(runners)):
            key = list(runners)[i]
            time.sleep(pause)
            runners[key].run(calls[key])
            order.append(key)
    return order


def times_of(runners, single, state, rounds, rng):
    """Runner -> for each call, the list of the names and times of what it put on the device."""
    if state == "hot":
        us = {key: sum(t for _, t in events) for key, events in single.items()}
        calls = {key: int(np.clip(HOT_US / us[key], *HOT_CALLS)) for key in runners}
        run_rounds(runners, calls, 1, rng, seconds=HEAT_SECONDS)
        pause = 0.0
    else:
        calls, pause = dict.fromkeys(runners, COOL_CALLS), PAUSE_SECONDS
    order = []
    events = profile(lambda: order.extend(run_rounds(runners, calls, rounds, rng, pause)))
    times = {key: [] for key in runners}
    begin = 0
    for key in order:
        for _ in range(calls[key]):
            own = events[begin : begin + len(single[key])]
            begin += len(single[key])
            if [name for name, _ in own] != [name for name, _ in single[key]]:
                raise RuntimeError(f"{key}: the profile shows {own}, expected {single[key]}, as by itself")
            times[key].append(own)
    if begin != len(events):
        raise RuntimeError(f"the profile shows {len(events) - begin} kernels that no call put there")
    return times


def row_of(key, state, calls):
    """`{impl, shape, direction, state, us, tflops, ...}`."""
    problem, direction, impl = key
    us = statistics.median(sum(t for _, t in call) for call in calls)
    row = {"impl": impl, "shape": problem.name, "direction": direction, "state": state, "us": round(us, 2)}
    read, written = problem_bytes(problem, direction)
    if impl in ("copy", "write"):
        row["tbytes_per_s"] = round((written + read * (impl == "copy")) / us / 1e6, 3)
    else:
        row["tflops"] = round(problem.flops / us / 1e6, 1)
    fills = [sum(t for name, t in call if "FillKernel" in name) for call in calls]
    if any(fills):
        row["fill_us"] = round(statistics.median(fills), 2)
    return row


def make_runners(shapes, directions, impls, rng):
    """`(problem, direction, impl) -> runner`, of all that can run; each has run once."""
    runners = {}
    for problem in shapes:
        key, dense_key = jax.random.split(jax.random.key(int(rng.integers(2**31))))
        arrays = make_arrays(problem, key)
        for direction in directions:
            for impl in impls:
                try:
                    runner = runner_of(impl, problem, direction, operands_of(direction, arrays), dense_key)
                    if runner is not None:
                        runner.run(1)
                        runners[problem, direction, impl] = runner
                except Exception as error:
                    print(f"{impl} {problem} {direction}: {str(error).splitlines()[0][:150]}", file=sys.stderr)
    return runners


def measure(shapes, directions, impls, states, rounds, rng):
    """Yields, for each state, its rows, and the clock and power of the GPU."""
    runners = make_runners(shapes, directions, impls, rng)
    single = {key: profile(functools.partial(runner.run, 1)) for key, runner in runners.items()}
    # Tens of milliseconds a call: once, by itself.
    slow = {key: runners.pop(key) for key in list(runners) if key[2] == "ragged_dot"}
    rows = [row_of(key, "hot", [single[key]]) for key in slow]
    del slow
    for state in states:
        with Meter() as meter:
            times = times_of(runners, single, state, rounds, rng)
        rows += [row_of(key, state, calls) for key, calls in times.items()]
        yield state, rows, meter.medians
        rows = []


def metadata():
    def output(*command):
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return result.stdout.strip().splitlines()[0] if result.returncode == 0 and result.stdout.strip() else None

    gpu = output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or "unknown, unknown"
    name, _, driver = gpu.partition(", ")
    meta = {
        "gpu": name,
        "driver": driver,
        "cuda": _jax_gg.cuda_built_for(),
        "jax": jax.__version__,
        "jax_gg": jax_gg.__version__,
        "commit": os.environ.get("JAX_GG_COMMIT") or output("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    try:
        import torch

        meta["torch"] = torch.__version__
    except ImportError:
        pass
    return meta


def table(rows, impls):
    """Lines of text: us and TFLOP/s (of copy, TB/s) of each impl, for each shape, direction and state."""
    lines = [f"{'shape':20} {'':10}" + "".join(f"{impl[-17:]:>18}" for impl in impls)]
    by_key = {(r["shape"], r["direction"], r["state"], r["impl"]): r for r in rows}
    for shape, direction, state in dict.fromkeys((r["shape"], r["direction"], r["state"]) for r in rows):
        line = f"{shape:20} {direction:5}{state:5}"
        for impl in impls:
            row = by_key.get((shape, direction, state, impl))
            text = "" if row is None else f"{row['us']:.0f} us, {row.get('tflops', row.get('tbytes_per_s', 0)):.4g}"
            line += f"{text:>18}"
        lines.append(line)
    return "\n".join(lines)


def readme_table(rows):
    """The rows as README.md shows them: us."""
    us = {(r["shape"], r["direction"], r["impl"], r["state"]): r["us"] for r in rows}
    columns = [(i, "hot") for i in ("jax_gg", "torch", "copy", "dense")] + [(i, "cool") for i in ("jax_gg", "torch")]
    lines = ["| m, k, n, g | | " + " | ".join(i if s == "hot" else f"{i}, cool" for i, s in columns) + " |"]
    lines.append("|---" * (2 + len(columns)) + "|")
    for p in problems.BENCHMARKS:
        for direction in DIRECTIONS:
            shape = f"{p.m}, {p.k}, {p.n}, {p.g}{' zipf' * p.name.endswith('zipf')}" if direction == "fwd" else ""
            cells = " | ".join(f"{us[p.name, direction, *column]:.0f}" for column in columns)
            lines.append(f"| {shape} | {direction} | {cells} |")
    return "\n".join(lines)


def summary(rows):
    """torch's time over ours: the geometric mean and the least, in each state."""
    us = {(r["state"], r["shape"], r["direction"], r["impl"]): r["us"] for r in rows}
    lines = []
    for state in STATES:
        ratios = {
            (shape, direction): us[s, shape, direction, "torch"] / ours
            for (s, shape, direction, impl), ours in us.items()
            if s == state and impl == "jax_gg" and (s, shape, direction, "torch") in us
        }
        if ratios:
            least = min(ratios, key=ratios.__getitem__)
            lines.append(
                f"torch / jax_gg, {state}: {statistics.geometric_mean(ratios.values()):.3f} (geometric mean of "
                f"{len(ratios)}), least {ratios[least]:.3f} at {' '.join(least)}"
            )
    return "\n".join(lines)


def plot(rows, meta, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    us = {(r["shape"], r["direction"], r["impl"]): r["us"] for r in rows if r["state"] == "hot"}
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    measured = dict.fromkeys(r["impl"] for r in rows)
    impls = [i for i in dict.fromkeys((*IMPLS, *measured)) if i in measured and i not in ("copy", "dense", "write")]
    fig, axes = plt.subplots(len(DIRECTIONS), 1, figsize=(12, 9), sharex=True, layout="constrained")
    for ax, direction in zip(axes, DIRECTIONS, strict=True):
        for i, impl in enumerate(impls):
            share = [
                max(us[s, direction, "copy"], us[s, direction, "dense"]) / us.get((s, direction, impl), np.inf)
                for s in shapes
            ]
            x = np.arange(len(shapes)) + (i - (len(impls) - 1) / 2) * 0.8 / len(impls)
            ax.bar(x, share, 0.8 / len(impls), label=impl)
        ax.axhline(1, color="k", ls="--", lw=1)
        ax.set(ylabel=direction, ylim=(0, 1.15))
        ax.set_xticks(np.arange(len(shapes)), shapes, rotation=20, ha="right")
    axes[0].legend(ncols=6, fontsize="small", loc="lower right")
    fig.suptitle(
        f"Grouped matmul in bf16 on {meta['gpu']}: the share of the speed of its limit (higher is better)\n"
        "limit: the longer of a dense matmul of the same operations and a copy of the same bytes"
    )
    fig.savefig(path, dpi=90)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [p.name for p in problems.BENCHMARKS]
    parser.add_argument("--shapes", nargs="+", choices=names, default=names, metavar="SHAPE")
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=DIRECTIONS)
    parser.add_argument("--impls", nargs="+", default=IMPLS, help="jax_gg:PREFIX forces kernels whose name starts so")
    parser.add_argument("--states", nargs="+", choices=STATES, default=STATES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines: meta, then one object a measurement")
    parser.add_argument("--plot", type=pathlib.Path, help="PNG")
    parser.add_argument("--plot-only", type=pathlib.Path, metavar="JSONL", help="draw these results, measure nothing")
    parser.add_argument("--readme", type=pathlib.Path, metavar="JSONL", help="only print the table of these results")
    args = parser.parse_args()
    if args.readme:
        print(readme_table([json.loads(line) for line in args.readme.read_text().splitlines()][1:]))
        return
    if args.plot_only:
        meta, *rows = map(json.loads, args.plot_only.read_text().splitlines())
        plot(rows, meta["meta"], args.plot or args.plot_only.with_suffix(".png"))
        return
    if jax.default_backend() != "gpu":
        raise SystemExit("benchmarks/gmm.py: found no GPU, expected one that JAX sees")
    if not _jax_gg.cuda_built_for():
        raise SystemExit("benchmarks/gmm.py: this build of jax_gg has no CUDA kernels")
    rng = np.random.default_rng(args.seed)
    meta, rows = metadata(), []
    shapes = [p for p in problems.BENCHMARKS if p.name in args.shapes]
    for state, new, power in measure(shapes, args.directions, args.impls, args.states, args.rounds, rng):
        meta[state] = power
        rows += new
        if args.out:
            args.out.write_text("".join(json.dumps(x) + "\n" for x in [{"meta": meta}, *rows]))
    print(table(rows, args.impls))
    print(summary(rows))
    if args.plot:
        plot(rows, meta, args.plot)


if __name__ == "__main__":
    main()
