"""Trains a small mixture-of-experts transformer on the source of Python's standard library.

    pip install "jax-gg[examples]"
    python examples/train_moe.py

The model reads and predicts bytes. Every layer routes each byte to two of eight experts; rows are sorted by expert, and
`jax_gg.gmm` multiplies each expert's rows by that expert's weights, however many the router gave it: no capacity, no
padding, nothing dropped. Everything from the router to the optimizer is one jitted program.

A run writes checkpoints and `train_moe.png` to `--out`; `--resume` continues an interrupted run from its last
checkpoint and ends with the same model as if it had never stopped. `--matmul ragged_dot` is plain JAX, to compare with.
"""

import argparse
import dataclasses
import functools
import os
import pathlib
import shlex
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import matplotlib
import matplotlib.figure
import numpy as np
import optax
import orbax.checkpoint as ocp
import tqdm
from flax import nnx

import jax_gg

MATMULS = {"gmm": jax_gg.gmm, "ragged_dot": jax.lax.ragged_dot}
TRAIN_BYTES = 4_000_000
HELD_OUT_BYTES = 65_536
# Tests, and tables that look like no other source.
SKIPPED = {"__pycache__", "encodings", "idle_test", "pydoc_data", "site-packages", "dist-packages", "test", "tests"}


@dataclasses.dataclass(frozen=True)
class Config:
    """All that decides the result of a run; a checkpoint continues only under the same."""

    steps: int = 400
    experts: int = 8
    seed: int = 0
    top_k: int = 2
    layers: int = 3
    dim: int = 128
    heads: int = 4
    hidden: int = 256
    context: int = 256
    batch: int = 8
    learning_rate: float = 3e-3
    balance: float = 0.01


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """The bytes to train on and those held out, from different files."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = set(subfolders) - SKIPPED
        names += [pathlib.Path(folder, f).relative_to(root).as_posix() for f in files if f.endswith(".py")]
    # By checksum: a shuffle that is the same everywhere, so that neither part is the names from a to c.
    names.sort(key=lambda name: (zlib.crc32(name.encode()), name))

    parts = []
    for size in (HELD_OUT_BYTES + 1, TRAIN_BYTES):  # each byte but the first is predicted, hence one more
        text = bytearray()
        while names and len(text) < size:
            text += (root / names.pop()).read_bytes()
        parts.append(np.frombuffer(bytes(text[:size]), np.uint8))
    if parts[0].size <= HELD_OUT_BYTES or parts[1].size < HELD_OUT_BYTES:
        raise SystemExit(f"train_moe: error: {root} holds too little Python source to train on")
    return parts[1], parts[0]


def ngram_bits(train: np.ndarray, held_out: np.ndarray) -> tuple[float, float]:
    """Bits a byte of the unigram and the bigram model of `train` on `held_out[1:]`."""
    unigram = np.bincount(train, minlength=256) + 1.0
    unigram /= unigram.sum()
    pairs = np.bincount(256 * train[:-1].astype(int) + train[1:], minlength=256 * 256).reshape(256, 256)
    # After a byte seen n times, the unigram counts as one more observation.
    bigram = (pairs + unigram) / (pairs.sum(axis=1, keepdims=True) + 1)
    before, after = held_out[:-1], held_out[1:]
    return -np.log2(unigram[after]).mean(), -np.log2(bigram[before, after]).mean()


class Experts(nnx.Module):
    """Routes each row to `top_k` of the experts, SwiGLU networks, and sums their results by the router's weights."""

    def __init__(self, config: Config, matmul: Callable, rngs: nnx.Rngs):
        self.top_k = min(config.top_k, config.experts)
        self.matmul = matmul
        init = nnx.initializers.lecun_normal(batch_axis=0)
        e, d, h = config.experts, config.dim, config.hidden
        # Small weights: at first every expert is about as likely as any other.
        self.router = nnx.Linear(d, e, use_bias=False, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)
        self.w_in = nnx.Param(init(rngs.params(), (e, d, 2 * h)))
        self.w_out = nnx.Param(init(rngs.params(), (e, h, d)))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """`[m, d]` -> `[m, d]`, each expert's share of the load `[e]`, and the load-balance loss."""
        e = self.w_in.shape[0]
        # The router decides by small differences: in float32, whatever the dtype of the rest.
        probabilities = jax.nn.softmax(self.router(x.astype(jnp.float32)))
        weights, chosen = jax.lax.top_k(probabilities, self.top_k)
        weights /= weights.sum(axis=-1, keepdims=True)

        # Row i of x becomes rows i * top_k, i * top_k + 1, ... of the unsorted copies.
        chosen = chosen.ravel()
        order = jnp.argsort(chosen, stable=True)
        sizes = jnp.bincount(chosen, length=e)
        rows = x[order // self.top_k]
        gate, up = jnp.split(self.matmul(rows, self.w_in[...], sizes), 2, axis=-1)
        rows = self.matmul(jax.nn.silu(gate) * up, self.w_out[...], sizes)
        out = rows[jnp.argsort(order)].reshape(-1, self.top_k, x.shape[-1])
        out = jnp.einsum("mk,mkd->md", weights.astype(x.dtype), out)

        # Switch Transformer, equation 4 (arXiv:2101.03961): 1 when load and probability are even.
        load = sizes.astype(jnp.float32) / chosen.size
        return out, load, e * jnp.sum(load * probabilities.mean(axis=0))


class Block(nnx.Module):
    """Causal self-attention with rotary positions, then the experts."""

    def __init__(self, config: Config, matmul: Callable, rngs: nnx.Rngs):
        self.heads = config.heads
        self.norm1 = nnx.RMSNorm(config.dim, rngs=rngs)
        self.qkv = nnx.Linear(config.dim, 3 * config.dim, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(config.dim, config.dim, use_bias=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(config.dim, rngs=rngs)
        self.experts = Experts(config, matmul, rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        b, t, d = x.shape
        q, k, v = jnp.split(self.qkv(self.norm1(x)).reshape(b, t, 3 * self.heads, -1), 3, axis=2)
        attended = jax.nn.dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
        x = x + self.out(attended.reshape(b, t, d))
        out, load, balance = self.experts(self.norm2(x).reshape(b * t, d))
        return x + out.reshape(b, t, d), load, balance


def _rotate(x: jax.Array) -> jax.Array:
    """Turns each pair of features of `[b, t, heads, features]` by an angle proportional to its position t."""
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[1])[:, None] * 10_000.0 ** (-np.arange(half) / half)
    cos, sin = (jnp.asarray(f(angles), x.dtype)[None, :, None] for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class Transformer(nnx.Module):
    def __init__(self, config: Config, matmul: Callable):
        rngs = nnx.Rngs(config.seed)
        self.embedding = nnx.Embed(256, config.dim, rngs=rngs)
        self.blocks = nnx.List(Block(config, matmul, rngs) for _ in range(config.layers))
        self.norm = nnx.RMSNorm(config.dim, rngs=rngs)
        self.head = nnx.Linear(config.dim, 256, use_bias=False, kernel_init=nnx.initializers.normal(0.02), rngs=rngs)

    def __call__(self, text: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Bytes `[b, t]` -> logits `[b, t, 256]`, loads `[layers, e]`, the mean of the load-balance losses."""
        x = self.embedding(text)
        loads, balances = [], []
        for block in self.blocks:
            x, load, balance = block(x)
            loads.append(load)
            balances.append(balance)
        return self.head(self.norm(x)), jnp.stack(loads), jnp.stack(balances).mean()


def _bits(model: Transformer, windows: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Bits a byte over `windows[b, t + 1]`, each byte but the first predicted from those before it."""
    windows = windows.astype(jnp.int32)
    logits, loads, balance = model(windows[:, :-1])
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return nats.mean() / np.log(2), (loads, balance)


@functools.partial(nnx.jit, static_argnums=0, donate_argnums=(1, 2))
def train_step(config: Config, model: Transformer, optimizer: nnx.Optimizer, text: jax.Array, step: jax.Array):
    """One step, on windows that depend on the seed and the step alone; returns bits a byte and the loads."""
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    starts = jax.random.randint(key, (config.batch, 1), 0, text.size - config.context)
    windows = text[starts + jnp.arange(config.context + 1)[None]]

    def loss(model):
        bits, (loads, balance) = _bits(model, windows)
        return bits * np.log(2) + config.balance * balance, (bits, loads)

    grads, aux = nnx.grad(loss, has_aux=True)(model)
    optimizer.update(model, grads)
    return aux


_held_out_bits = nnx.jit(lambda model, windows: _bits(model, windows)[0])


def held_out_bits(config: Config, model: Transformer, held_out: np.ndarray) -> float:
    starts = np.arange(0, held_out.size - 1, config.context).reshape(-1, config.batch, 1)
    batches = held_out[starts + np.arange(config.context + 1)]
    return float(np.mean([_held_out_bits(model, batch) for batch in batches]))


@nnx.jit
def _complete(model: Transformer, window: jax.Array, begin: jax.Array, key: jax.Array, temperature: jax.Array):
    """Replaces the bytes of `window[t]` from `begin` on; causal attention hides what is not yet replaced."""

    def next_byte(i, window):
        logits = model(window[None])[0][0, i - 1]
        byte = jax.random.categorical(jax.random.fold_in(key, i), logits / temperature)
        return window.at[i].set(byte)

    return jax.lax.fori_loop(begin, window.size, next_byte, window)


def sample(config: Config, model: Transformer, prompt: bytes, temperature: float = 0.7) -> str:
    window = jnp.asarray(np.frombuffer(prompt.ljust(config.context), np.uint8), jnp.int32)
    text = _complete(model, window, len(prompt), jax.random.key(config.seed), temperature)
    # Any byte can come out, and not every terminal can show it.
    return "".join(chr(byte) if byte == 10 or 32 <= byte < 127 else "?" for byte in np.asarray(text))


class Run:
    """A model in training and its history: what a checkpoint holds."""

    def __init__(self, config: Config, matmul: Callable):
        self.config = config
        self.step = 0
        self.model = Transformer(config, matmul)
        peak, steps = config.learning_rate, config.steps
        rate = optax.warmup_cosine_decay_schedule(0, peak, steps // 10, steps + 1, peak / 20)
        self.optimizer = nnx.Optimizer(self.model, optax.adamw(rate, b2=0.99, weight_decay=0.01), wrt=nnx.Param)
        # NaN where there is nothing yet.
        self.bits = np.full(steps, np.nan, np.float32)
        self.held_out = np.full(steps, np.nan, np.float32)
        self.loads = np.full((steps, config.layers, config.experts), np.nan, np.float32)

    def state(self) -> dict:
        arrays = {"model": nnx.state(self.model), "optimizer": nnx.state(self.optimizer)}
        return arrays | {"bits": self.bits, "held_out": self.held_out, "loads": self.loads}

    def save(self, checkpoints: ocp.CheckpointManager):
        config = ocp.args.JsonSave(dataclasses.asdict(self.config))
        checkpoints.save(self.step, args=ocp.args.Composite(config=config, state=ocp.args.StandardSave(self.state())))

    def restore(self, checkpoints: ocp.CheckpointManager):
        self.step = checkpoints.latest_step()
        args = ocp.args.Composite(state=ocp.args.StandardRestore(self.state()))
        state = checkpoints.restore(self.step, args=args)["state"]
        nnx.update(self.model, state["model"])
        nnx.update(self.optimizer, state["optimizer"])
        self.bits, self.held_out, self.loads = (np.array(state[name]) for name in ("bits", "held_out", "loads"))

    def train(self, checkpoints: ocp.CheckpointManager, train: np.ndarray, held_out: np.ndarray) -> float:
        """Takes the steps that remain; returns the tokens a second of the median step, 0 without any."""
        config, text = self.config, jnp.asarray(train)
        every = min(50, -(-config.steps // 4))
        rates = []
        with tqdm.tqdm(total=config.steps, initial=self.step, unit="step", dynamic_ncols=True) as bar:
            while self.step < config.steps:
                start = time.perf_counter()
                bits, loads = train_step(config, self.model, self.optimizer, text, jnp.int32(self.step))
                self.bits[self.step], self.loads[self.step] = jax.device_get((bits, loads))
                rates.append(config.batch * config.context / (time.perf_counter() - start))
                self.step += 1
                if self.step % every == 0 or self.step == config.steps:
                    self.held_out[self.step - 1] = held_out_bits(config, self.model, held_out)
                    self.save(checkpoints)
                bar.set_postfix_str(f"loss {float(bits):.2f} bits/byte, {np.median(rates[-9:]):,.0f} tokens/s", False)
                bar.update()
        return float(np.median(rates)) if rates else 0.0


def plot(run: Run, unigram: float, bigram: float, path: pathlib.Path):
    """The loss on the left; on the right, layer by layer, how the experts share the load."""
    steps = np.arange(1, run.config.steps + 1)
    figure = matplotlib.figure.Figure(figsize=(10, 4), layout="constrained")  # needs no display
    left, right = figure.subfigures(1, 2)
    axes = left.subplots()
    axes.plot(steps, run.bits, alpha=0.6, linewidth=1, label="training")
    measured = ~np.isnan(run.held_out)
    axes.plot(steps[measured], run.held_out[measured], "o-", color="C3", markersize=4, label="held out")
    axes.axhline(unigram, color="black", linestyle=":", linewidth=1, label="unigram model, held out")
    axes.axhline(bigram, color="black", linestyle="--", linewidth=1, label="bigram model, held out")
    axes.set(xlabel="step", ylabel="bits a byte", title="Loss", ylim=(0, 8))
    axes.legend()

    # Means over neighbouring steps: one batch is noisy.
    starts = np.arange(0, steps.size, max(1, steps.size // 50))
    ends = np.append(starts[1:], steps.size)
    loads = np.add.reduceat(run.loads, starts) / (ends - starts)[:, None, None]
    colors = matplotlib.colormaps["viridis"](np.linspace(0.1, 1, run.config.experts))
    right.suptitle("Load of the experts (numbered at the right)", fontsize=12)
    for layer, axes in enumerate(right.subplots(run.config.layers, sharex=True, squeeze=False)[:, 0]):
        axes.stackplot((starts + 1 + ends) / 2, loads[:, layer].T, colors=colors, edgecolor="white", linewidth=0.3)
        axes.set(ylim=(0, 1), ylabel=f"layer {layer + 1}", yticks=(0, 0.5, 1), yticklabels=("0", "50%", "100%"))
        axes.margins(x=0)
        for expert, (top, load) in enumerate(zip(loads[-1, layer].cumsum(), loads[-1, layer], strict=True)):
            if load > 0.05:
                axes.text(1.01, top - load / 2, expert, transform=axes.transAxes, fontsize=7, va="center")
    axes.set_xlabel("step")
    figure.savefig(path, dpi=100)


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"got {text}, expected an integer from {low} to {high}")
        return int(text)

    return parse


def make_parser() -> Parser:
    ours = Config()
    parser = Parser("train_moe", description="Trains a small mixture-of-experts transformer on Python source.")
    # Without a default here: what --resume is not given, the checkpoint says.
    parser.add_argument("--steps", type=_integer(1, 10**7), help=f"length of the training ({ours.steps})")
    parser.add_argument("--experts", type=_integer(1, 4096), help=f"experts in each layer ({ours.experts})")
    parser.add_argument("--seed", type=_integer(0, 2**31 - 1), help=f"of weights, data order, sample ({ours.seed})")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    parser.add_argument("--out", type=pathlib.Path, default="train_moe_out", help="folder of the run (%(default)s)")
    parser.add_argument("--matmul", choices=MATMULS, default="gmm", help="what multiplies the experts (%(default)s)")
    return parser


def configure(args: argparse.Namespace, checkpoints: ocp.CheckpointManager) -> Config:
    """The configuration that the arguments ask for; ValueError if the checkpoint that is there forbids it."""
    given = {name: value for name in ("steps", "experts", "seed") if (value := getattr(args, name)) is not None}
    step = checkpoints.latest_step()
    if step is None:
        if args.resume:
            raise ValueError(f"--resume: no checkpoint in {args.out}")
        return Config(**given)
    saved = checkpoints.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore()))["config"]
    if not args.resume:
        if step < saved["steps"]:
            raise ValueError(f"{args.out} holds a run stopped at step {step}: pass --resume, or another --out")
        return Config(**given)
    for name, value in given.items():
        if value != saved[name]:
            raise ValueError(f"--resume: got --{name} {value}, but the run in {args.out} has --{name} {saved[name]}")
    return Config(**saved)


def main(argv: list[str] | None = None):
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        parser.error(f"--out: {e}")
    # Not in the background: the next step reuses the memory that is being written.
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager((args.out / "checkpoints").resolve(), options=options) as checkpoints:
        try:
            config = configure(args, checkpoints)
        except ValueError as e:
            parser.error(str(e))
        train, held_out = read_text()
        run = Run(config, MATMULS[args.matmul])
        if args.resume:
            run.restore(checkpoints)
        else:
            for step in checkpoints.all_steps():
                checkpoints.delete(step)
        print(f"{train.size:,} bytes to train on, {held_out.size - 1:,} held out; {config} on {jax.default_backend()}")
        try:
            rate = run.train(checkpoints, train, held_out)
        except KeyboardInterrupt:
            saved = checkpoints.latest_step()
            command = shlex.join(["python", sys.argv[0], "--resume", "--out", str(args.out), "--matmul", args.matmul])
            how = f"to continue from step {saved}: {command}" if saved else "before the first checkpoint"
            raise SystemExit(f"\nstopped at step {run.step}; {how}") from None

    unigram, bigram = ngram_bits(train, held_out)
    if rate:
        print(f"\n{rate:,.0f} tokens/s with {args.matmul}")
    print("\nheld-out loss, bits a byte")
    for name, bits in (("unigram", unigram), ("bigram", bigram), ("this model", run.held_out[-1])):
        print(f"  {name:<10}  {bits:.3f}")
    print(f"\n{sample(config, run.model, b'def ')}\n")
    plot(run, unigram, bigram, args.out / "train_moe.png")
    print(f"curves: {args.out / 'train_moe.png'}")


if __name__ == "__main__":
    main()
