"""Times a step of models that call `jax.lax.ragged_dot`, before and after `jax_gg.accelerate_ragged_dot`.

    python benchmarks/programs.py

The models are those of tests/programs.py; a step is the loss and its gradients. Both programs run in one process, turn
by turn, on the default device. Best of the rounds; the losses are printed because they must agree.
"""

import argparse
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))

import programs  # noqa: E402

import jax_gg  # noqa: E402


def measure(name: str, config: programs.Config, rounds: int) -> dict[str, float]:
    """Milliseconds of a step, and the loss, with and without."""
    loss, params = programs.PROGRAMS[name](config)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((config.tokens, config.dim), np.float32), config.dtype)
    step = jax.jit(jax.value_and_grad(loss))
    compiled = {"ragged_dot": step.lower(params, x).compile()}
    with jax_gg.accelerate_ragged_dot():
        compiled["accelerated"] = step.lower(params, x).compile()
    found = {f"{side} loss": float(f(params, x)[0]) for side, f in compiled.items()}
    for _ in range(rounds):
        for side, f in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(f(params, x))
            found[side] = min(found.get(side, float("inf")), 1e3 * (time.perf_counter() - begin))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    shape = {name: getattr(args, name) for name in ("tokens", "dim", "hidden", "layers")}
    versions = {"jax": jax.__version__, "jax_gg": jax_gg.__version__, "device": jax.devices()[0].device_kind}
    print(json.dumps(versions | shape | {"dtype": args.dtype, "rounds": args.rounds}))
    for experts in args.experts:
        for name in programs.PROGRAMS:
            config = programs.Config(**shape, experts=experts, dtype=jnp.dtype(args.dtype))
            found = measure(name, config, args.rounds)
            sides = ", ".join(
                f"{s} {found[s]:.0f} ms (loss {found[s + ' loss']:.6f})" for s in ("ragged_dot", "accelerated")
            )
            print(f"{name}, {experts} experts: {sides}, {found['ragged_dot'] / found['accelerated']:.1f}x")


if __name__ == "__main__":
    main()
