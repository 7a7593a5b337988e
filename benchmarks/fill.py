"""Times the kernel that turns group sizes into the arguments of the sm80 kernels.

    python benchmarks/fill.py --out results/fill.jsonl

`gmm` sums the sizes and counts tiles; `tgmm` sums them and sorts the groups. Sizes are random, the matmul small.
"""

import argparse
import json
import pathlib
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(pathlib.Path(__file__).parent))

from gmm import Jax, jax_call, metadata, profile

GROUPS = (8, 32, 128, 512, 1024, 4096)
CALLS = 20


def fill_us(direction, groups, rng):
    sizes = rng.integers(0, 9, groups).astype(np.int32)
    m, k, n = int(sizes.sum()), 64, 64
    shapes = ((m, k), (groups, k, n)) if direction == "fwd" else ((m, k), (m, n))
    args = [jax.device_put(rng.standard_normal(s, np.float32).astype(jnp.bfloat16)) for s in shapes]
    runner = Jax(jax_call(direction, "sm80"), (*args, jax.device_put(sizes)))
    runner.run(1)
    return statistics.median(us for name, us in profile(lambda: runner.run(CALLS)) if "FillKernel" in name)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="JSON lines: meta, then one object a measurement")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("benchmarks/fill.py: found no GPU, expected one that JAX sees")
    rng = np.random.default_rng()
    rows = [
        {"impl": "fill", "direction": direction, "groups": groups, "us": round(fill_us(direction, groups, rng), 2)}
        for groups in GROUPS
        for direction in ("fwd", "drhs")
    ]
    print(f"{'groups':>8}{'gmm':>8}{'tgmm':>8}   (us, median of {CALLS})")
    for gmm, tgmm in zip(rows[::2], rows[1::2], strict=True):
        print(f"{gmm['groups']:8}{gmm['us']:8.2f}{tgmm['us']:8.2f}")
    if args.out:
        args.out.write_text("".join(json.dumps(line) + "\n" for line in [{"meta": metadata()}, *rows]))


if __name__ == "__main__":
    main()
