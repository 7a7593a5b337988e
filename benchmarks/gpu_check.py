"""The whole check of a build on a machine with a GPU: tests, benchmarks and, if asked for, compute-sanitizer.

    python benchmarks/gpu_check.py --out results/
    python benchmarks/gpu_check.py --out results/ --only sanitizer

Writes the log of each part and, from the benchmarks, JSON lines and figures. Exits with 1 if any part failed.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent
PYTEST = ["-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "-m", "gpu"]
SANITIZED = ["tests/test_gpu.py", "-k", "test_forced or test_widths"]


def test_ids() -> list[str]:
    """Of the tests that run under the sanitizer."""
    command = [sys.executable, *PYTEST, "--collect-only", *SANITIZED]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if line.startswith("tests/")]


def sanitizers(jobs: int) -> dict[str, list[str]]:
    sanitize = ["compute-sanitizer", "--error-exitcode", "9", "--kernel-name", "kns=jax_gg", "--tool"]
    pytest = [sys.executable, *PYTEST]
    commands = {tool: [*sanitize, tool, *pytest, *SANITIZED] for tool in ("memcheck", "racecheck", "synccheck")}
    # Ten times as slow as the others, and so divided. It does not see what kernels other than ours write, and would
    # report their results where they are copied.
    ids = test_ids()
    for i in range(jobs):
        initcheck = ["initcheck", "--check-api-memory-access", "no"]
        commands[f"initcheck{i}"] = [*sanitize, *initcheck, *pytest, *ids[i::jobs]]
    return commands


def outputs(stem: pathlib.Path) -> list[str]:
    return ["--out", f"{stem}.jsonl", "--plot", f"{stem}.png"]


def parts(out: pathlib.Path, jobs: int) -> dict[str, Callable[[], dict[str, list[str]]]]:
    """Part -> name -> command; the commands of one part run at the same time."""
    python = sys.executable
    return {
        "tests": lambda: {"tests": [python, *PYTEST, "-n", str(jobs), "tests"]},
        "gmm": lambda: {"gmm": [python, "benchmarks/gmm.py", *outputs(out / "gmm")]},
        "curves": lambda: {"curves": [python, "benchmarks/curves.py", *outputs(out / "curves")]},
        "fill": lambda: {"fill": [python, "benchmarks/fill.py", "--out", str(out / "fill.jsonl")]},
        "host_sync": lambda: {"host_sync": [python, "benchmarks/host_sync.py", "--out", str(out)]},
        "sanitizer": lambda: sanitizers(jobs),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(parts(pathlib.Path(), 1))
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--only", nargs="+", choices=names, default=[n for n in names if n != "sanitizer"])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    failed = []
    for part, commands in parts(out, args.jobs).items():
        if part not in args.only:
            continue
        # Tests compile hundreds of small programs and time none. Under the sanitizer every buffer is an allocation of
        # its own, so that what lies past its end belongs to nobody.
        more = {
            "tests": {"XLA_FLAGS": "--xla_gpu_autotune_level=0"},
            "sanitizer": {"XLA_FLAGS": "--xla_gpu_autotune_level=0", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
        }.get(part, {})
        begin = time.monotonic()
        running = {}
        for name, command in commands().items():
            with (out / f"{name}.log").open("w") as log:
                running[name] = subprocess.Popen(
                    command, cwd=ROOT, env={**environment, **more}, stdout=log, stderr=subprocess.STDOUT
                )
        for name, process in running.items():
            code = process.wait()
            last = (out / f"{name}.log").read_text(errors="replace").strip().splitlines()[-1:]
            print(f"{name}: exit {code} after {time.monotonic() - begin:.0f} s: {''.join(last)[:150]}", flush=True)
            if code:
                failed.append(name)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
