"""Times `jax_gg.gmm` on the CPU beside its peers and its limits, and measures the memory of a call.

    python benchmarks/cpu.py --out results.jsonl

Directions: `fwd`, `[m, k] x [g, k, n]`; `dlhs` and `drhs`, the gradients of its operands, forward pass not included.
Groups are equal. Peers: `jax.lax.ragged_dot`; `numpy`, a loop of one matmul a group into an uninitialised result, for
bf16 through f32, as NumPy multiplies no bf16; `dense`, one NumPy matmul of the same flops and no groups, in f32.

Everything that is compared runs in one process, round after round in a shuffled order on fresh random operands.
`ragged_dot` is slow and takes part in a few rounds only. The results hold the median and the best of the rounds; tables
show, and ratios compare, the best ones: where others use the cores, BLAS's threads wait for each other, and what that
costs is several times the call and another at each. `--realtime` gives the timed calls, and nothing else, precedence
over other processes (on Linux, as root).

Memory is that of the first call in a process of its own: the high-water mark of resident memory during the call
(VmHWM, reset before it through /proc/self/clear_refs), less what was resident before and less the result. Compilation
comes before, BLAS's buffers count.
"""

import argparse
import contextlib
import ctypes
import datetime
import functools
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_gg

M, K, N = 4096, 1024, 1024
GROUPS = (16, 64)
DTYPES = ("float32", "bfloat16")
DIRECTIONS = ("fwd", "dlhs", "drhs")
IMPLS = ("jax_gg", "ragged_dot", "numpy", "dense")

# What is aimed at: in f32, times the NumPy loop at most; times faster than ragged_dot at least, by g; MiB at most.
MOST_NUMPY = 1.15
LEAST_RAGGED_DOT = {16: 5, 64: 20}
MOST_MIB = 64

Seconds = dict[tuple[str, str], dict[int, float]]
"""By direction and impl, then by round."""

# BLAS's threads spin for a while after a call, each library's its own, and would take the cores from the next one.
PAUSE_SECONDS = 0.05


def make_operands(g: int, dtype: str, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """lhs, rhs, sizes, dout."""
    lhs, rhs, dout = (
        rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype)) for shape in ((M, K), (g, K, N), (M, N))
    )
    return lhs, rhs, np.full(g, M // g, np.int32), dout


def jax_function(matmul: Callable, direction: str) -> Any:
    """`f(lhs, rhs, sizes, dout)`, jitted. What a direction does not need of the forward pass, XLA drops."""

    def f(lhs, rhs, sizes, dout):
        if direction == "fwd":
            return matmul(lhs, rhs, sizes)
        if direction == "dlhs":
            return jax.vjp(lambda x: matmul(x, rhs, sizes), lhs)[1](dout)[0]
        return jax.vjp(lambda x: matmul(lhs, x, sizes), rhs)[1](dout)[0]

    return jax.jit(f)


JAX_MATMULS: dict[str, Callable] = {"jax_gg": jax_gg.gmm, "ragged_dot": jax.lax.ragged_dot}


def numpy_function(direction: str, lhs: np.ndarray, rhs: np.ndarray, sizes: np.ndarray, dout: np.ndarray) -> np.ndarray:
    """The product of each group of rows, one by one."""
    shape = {"fwd": dout.shape, "dlhs": lhs.shape, "drhs": rhs.shape}[direction]
    out = np.empty(shape, lhs.dtype)
    begin = 0
    for i, size in enumerate(sizes.tolist()):
        r = slice(begin, begin + size)
        begin += size
        a, b = {"fwd": (lhs[r], rhs[i]), "dlhs": (dout[r], rhs[i].T), "drhs": (lhs[r].T, dout[r])}[direction]
        to = out[i] if direction == "drhs" else out[r]
        if out.dtype == np.float32:
            np.matmul(a, b, out=to)
        else:
            to[...] = a.astype(np.float32) @ b.astype(np.float32)
    return out


def dense_function(direction: str, lhs: np.ndarray, matrix: np.ndarray, dout: np.ndarray) -> np.ndarray:
    """One matmul of f32 operands."""
    a, b = {"fwd": (lhs, matrix), "dlhs": (dout, matrix.T), "drhs": (lhs.T, dout)}[direction]
    return a @ b


@contextlib.contextmanager
def realtime() -> Iterator[None]:
    """Lets all threads of this process run before those of others."""

    def schedule(policy: int, priority: int) -> None:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))

    schedule(os.SCHED_RR, 1)
    try:
        yield
    finally:
        schedule(os.SCHED_OTHER, 0)


def time_case(g: int, dtype: str, rounds: int, slow_rounds: int, timing: Callable) -> Seconds:
    """Each call within the context `timing()`."""
    rng = np.random.default_rng()
    functions = {(d, i): jax_function(JAX_MATMULS[i], d) for d in DIRECTIONS for i in JAX_MATMULS}
    seconds: Seconds = {(d, i): {} for d in DIRECTIONS for i in IMPLS}
    for round_ in range(-1, rounds):  # the first compiles and is not counted
        operands = make_operands(g, dtype, rng)
        arrays = jax.block_until_ready([jnp.asarray(x) for x in operands])
        lhs, rhs, _, dout = operands
        dense = [x.astype(np.float32) for x in (lhs, rhs[0], dout)]
        calls: dict[tuple[str, str], Callable[[], Any]] = {}
        for d in DIRECTIONS:
            calls[d, "jax_gg"] = functools.partial(functions[d, "jax_gg"], *arrays)
            if round_ < slow_rounds:
                calls[d, "ragged_dot"] = functools.partial(functions[d, "ragged_dot"], *arrays)
            calls[d, "numpy"] = functools.partial(numpy_function, d, *operands)
            calls[d, "dense"] = functools.partial(dense_function, d, *dense)
        for name in random.sample(list(calls), len(calls)):
            time.sleep(PAUSE_SECONDS)
            with timing():
                begin = time.perf_counter()
                jax.block_until_ready(calls[name]())
                took = time.perf_counter() - begin
            if round_ >= 0:
                seconds[name][round_] = took
    return seconds


def memory_status(field: str) -> int:
    """Bytes, from /proc/self/status."""
    (line,) = (x for x in pathlib.Path("/proc/self/status").read_text().splitlines() if x.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def print_memory(g: int, dtype: str, direction: str, impl: str) -> None:
    """MiB of a call beyond its operands and its result; for `peak_mib`, in a process of its own."""
    arrays = jax.block_until_ready([jnp.asarray(x) for x in make_operands(g, dtype, np.random.default_rng())])
    f = jax_function(JAX_MATMULS[impl], direction).lower(*arrays).compile()
    ctypes.CDLL(None).malloc_trim(0)  # or the result would lie in memory that is free and still resident
    before = memory_status("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    result = jax.block_until_ready(f(*arrays))
    print((memory_status("VmHWM") - before - result.nbytes) / 2**20)


def peak_mib(*case: Any) -> float:
    command = [sys.executable, os.path.abspath(__file__), "--memory", *map(str, case)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def meta() -> dict[str, Any]:
    def git(*args: str) -> str:
        command = ["git", "-C", os.path.dirname(os.path.abspath(__file__)), *args]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    cpu = "".join(x for x in pathlib.Path("/proc/cpuinfo").read_text().splitlines(True) if x.startswith("model name"))
    return {
        "cpu": cpu.split("\n")[0].partition(":")[2].strip() or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "numpy": np.__version__,
        "jax_gg": importlib.metadata.version("jax-gg"),
        "commit": git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else ""),
        "date": datetime.date.today().isoformat(),
    }


def measure(g: int, dtype: str, *how: Any) -> list[dict[str, Any]]:
    """One record for each direction and impl."""
    seconds = time_case(g, dtype, *how)
    records = []
    for direction, impl in itertools.product(DIRECTIONS, IMPLS):
        own = seconds[direction, impl]

        def ratio(over: str, to: str, direction: str = direction) -> float:
            return round(min(seconds[direction, over].values()) / min(seconds[direction, to].values()), 3)

        record = {"impl": impl, "m": M, "k": K, "n": N, "g": g, "direction": direction, "dtype": dtype}
        record |= {
            "us": round(statistics.median(own.values()) * 1e6),
            "best_us": round(min(own.values()) * 1e6),
            "rounds": len(own),
        }
        if impl in JAX_MATMULS:
            record["peak_mib"] = round(peak_mib(g, dtype, direction, impl), 1)
        if impl == "jax_gg":
            record |= {"over_numpy": ratio("jax_gg", "numpy"), "over_dense": ratio("jax_gg", "dense")}
            record["ragged_dot_over"] = ratio("ragged_dot", "jax_gg")
        records.append(record)
    return records


def table(records: list[dict[str, Any]]) -> str:
    """The records beside what is aimed at; what misses it has a `!`."""

    def beside(value: float, missed: bool, limit: str) -> str:
        return f"{value:8.2f}{'!' if missed else ' '} {limit and f'({limit})'}"

    lines = [
        f"[{M}, {K}] x [g, {K}, {N}], ms; peak: MiB beyond operands and result",
        f"{'dtype':8}  {'g':>3}  {'dir':4}  {'jax_gg':>7}  {'numpy':>7}  {'dense':>7}  {'ragged_dot':>10}"
        f"  {'jax_gg / numpy':>18}  {'ragged_dot / jax_gg':>19}  {'peak':>16}  {'peak ragged_dot':>15}",
    ]
    for (dtype, g, direction), by in by_case(records).items():
        own, f32, least = by["jax_gg"], dtype == "float32", LEAST_RAGGED_DOT[g]
        times = "  ".join(
            f"{by[i]['best_us'] / 1e3:{w}.1f}" for i, w in (("numpy", 7), ("dense", 7), ("ragged_dot", 10))
        )
        numpy, ragged_dot = own["over_numpy"], own["ragged_dot_over"]
        lines.append(
            f"{dtype:8}  {g:3}  {direction:4}  {own['best_us'] / 1e3:7.1f}  {times}"
            f"  {beside(numpy, f32 and numpy > MOST_NUMPY, f'<= {MOST_NUMPY}' if f32 else ''):18}"
            f"  {beside(ragged_dot, f32 and ragged_dot < least, f'>= {least}' if f32 else ''):19}"
            f"  {beside(own['peak_mib'], own['peak_mib'] > MOST_MIB, f'<= {MOST_MIB}'):16}"
            f"  {by['ragged_dot']['peak_mib']:15.1f}"
        )
    return "\n".join(lines)


def readme_table(records: list[dict[str, Any]]) -> str:
    """The records as README.md shows them."""
    lines = [
        "| dtype | g | direction | jax_gg | NumPy | dense | ragged_dot | faster than ragged_dot | temporary memory |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for (dtype, g, direction), by in by_case(records).items():
        times = " | ".join(f"{by[i]['best_us'] / 1e3:.0f} ms" for i in ("jax_gg", "numpy", "dense", "ragged_dot"))
        own = by["jax_gg"]
        lines.append(
            f"| {dtype} | {g} | {direction} | {times} | {own['ragged_dot_over']:.0f}x"
            f" | {own['peak_mib']:.0f} MiB, ragged_dot {by['ragged_dot']['peak_mib']:.0f} MiB |"
        )
    return "\n".join(lines)


def by_case(records: list[dict[str, Any]]) -> dict[tuple, dict[str, dict[str, Any]]]:
    """(dtype, g, direction) -> impl -> record."""
    cases: dict[tuple, dict[str, dict[str, Any]]] = {}
    for r in records:
        cases.setdefault((r["dtype"], r["g"], r["direction"]), {})[r["impl"]] = r
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines: machine and versions, then measurements")
    parser.add_argument("--groups", type=int, nargs="+", choices=GROUPS, default=GROUPS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--slow-rounds", type=int, default=3, help="of these, rounds that ragged_dot takes part in")
    parser.add_argument("--realtime", action="store_true", help="let no other process run during the timed calls")
    parser.add_argument("--memory", nargs=4, metavar=("G", "DTYPE", "DIRECTION", "IMPL"), help="only that, one call")
    parser.add_argument(
        "--readme", type=pathlib.Path, metavar="RESULTS", help="only print the table of these for README.md"
    )
    args = parser.parse_args()
    if args.readme:
        _, *measured = map(json.loads, args.readme.read_text().splitlines())
        print(readme_table(measured))
        return
    jax.config.update("jax_platforms", "cpu")
    if args.memory:
        print_memory(int(args.memory[0]), *args.memory[1:])
        return
    timing = realtime if args.realtime else contextlib.nullcontext
    records = [{"meta": meta() | {"realtime": args.realtime}}]
    print(json.dumps(records[0]), flush=True)
    for dtype, g in itertools.product(args.dtypes, args.groups):
        case = measure(g, dtype, args.rounds, args.slow_rounds, timing)
        records += case
        print(table(case), flush=True)
    if args.out:
        args.out.write_text("".join(json.dumps(r) + "\n" for r in records))


if __name__ == "__main__":
    main()
