"""What it costs to know group sizes on the host: the experiment that device-resident sizes come from.

    python benchmarks/host_sync.py --out results/

30 forward and backward steps of one layer, 1024 rows of 4096 to 6400 through 8 experts, the sizes computed on the
device from the scores of a router. `host`: each step's sizes are fetched to the host before its matmuls are enqueued,
as a grouped matmul that takes sizes from the host must do. `device`: they stay where they are. Wall time, the median of
several runs of 30 steps; a Perfetto trace of one run of each is written, to be opened at https://ui.perfetto.dev.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(pathlib.Path(__file__).parent))

from gmm import metadata

import jax_gg
from jax_gg import _jax_gg

ROWS, K, N, EXPERTS, STEPS = 1024, 4096, 6400, 8, 30


@jax.jit
def route(scores, step):
    """Sizes that no two steps share."""
    return jnp.bincount(jnp.argmax(jnp.roll(scores, step, 0) + 0.01 * step, -1), length=EXPERTS)


@jax.jit
def matmuls(x, weights, sizes):
    out, vjp = jax.vjp(lambda x, weights: jax_gg.gmm(x, weights, sizes), x, weights)
    return vjp(out)


def run(x, weights, scores, on_host):
    for step in range(STEPS):
        sizes = route(scores, step)
        if on_host:
            sizes = np.asarray(sizes)
        dx, dweights = matmuls(x, weights, sizes)
    jax.block_until_ready((dx, dweights))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="folder for host_sync.jsonl and the two traces")
    parser.add_argument("--runs", type=int, default=20)
    args = parser.parse_args()
    if jax.default_backend() != "gpu" or not _jax_gg.cuda_built_for():
        raise SystemExit("benchmarks/host_sync.py: found no GPU or no CUDA build of jax_gg, expected both")
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 3)
    x = jax.random.normal(keys[0], (ROWS, K), jnp.bfloat16)
    weights = jax.random.normal(keys[1], (EXPERTS, K, N), jnp.bfloat16)
    scores = jax.random.normal(keys[2], (ROWS, EXPERTS))
    times = {"host": [], "device": []}
    for side in times:
        run(x, weights, scores, side == "host")
    for _ in range(args.runs):
        for side, ms in times.items():
            begin = time.perf_counter()
            run(x, weights, scores, side == "host")
            ms.append(1e3 * (time.perf_counter() - begin))
    rows = [
        {
            "impl": "jax_gg",
            "sizes": side,
            "steps": STEPS,
            "ms": round(statistics.median(ms), 2),
        }
        for side, ms in times.items()
    ]
    for row in rows:
        print(f"sizes on the {row['sizes']}: {row['ms']} ms for {STEPS} forward and backward steps")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        lines = [{"meta": metadata()}, *rows]
        (args.out / "host_sync.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for side in times:
            with tempfile.TemporaryDirectory() as folder:
                with jax.profiler.trace(folder):
                    run(x, weights, scores, side == "host")
                (trace,) = pathlib.Path(folder).rglob("*.trace.json.gz")
                shutil.copy(trace, args.out / f"host_sync_{side}.trace.json.gz")


if __name__ == "__main__":
    main()
