"""`python -m jax_gg.plan`: what expert parallelism costs for your numbers, on paper.

The formulas are derived in docs/experts.md. All of them are of one mixture-of-experts layer and of one device, in rows,
bytes and seconds; `R = tokens * top_k` is the number of rows that a device sends.
"""

import argparse
import dataclasses
import math
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer, what a device has of its tokens, and how they are exchanged."""

    tokens: int = 4096
    d: int = 7168
    d_ff: int = 2048
    experts: int = 256
    top_k: int = 8
    matrices: int = 3
    dtype_bytes: int = 2
    skew: float = 1.0
    method: str = "ragged"
    buffer_rows: int | None = None
    block_rows: int | None = None
    training: bool = False
    chunks: int = 2


@dataclasses.dataclass(frozen=True)
class Machine:
    """A device and its links, each rate in one direction."""

    node: int = 8
    link: float = 450e9
    network: float = 50e9
    flops: float = 765e12
    memory: float = 4.27e12


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a layer costs on each of `devices` devices."""

    layer: Layer
    machine: Machine
    devices: int

    @property
    def group(self) -> int:
        """The devices that exchange rows with each other: the expert axis of the mesh."""
        return math.gcd(self.devices, self.layer.experts)

    @property
    def replicas(self) -> int:
        """How many such groups there are, each with all experts: the data axis."""
        return self.devices // self.group

    @property
    def experts(self) -> int:
        """Experts a device."""
        return self.layer.experts // self.group

    @property
    def rows(self) -> int:
        """Rows that a device sends."""
        return self.layer.tokens * self.layer.top_k

    @property
    def busiest_rows(self) -> int:
        """Rows that the busiest device receives: no more than its experts can be asked for."""
        most = self.group * self.layer.tokens * min(self.layer.top_k, self.experts)
        return min(math.ceil(self.layer.skew * self.rows), most)

    @property
    def buffer_rows(self) -> int:
        """By default, room for what the busiest device receives."""
        return self.layer.buffer_rows or max(1, self.busiest_rows)

    @property
    def received_rows(self) -> int:
        """Rows of the busiest device that fit."""
        return min(self.busiest_rows, self.buffer_rows)

    @property
    def block_rows(self) -> int:
        """As `jax_gg.moe.dispatch` has it."""
        most = min(self.rows, self.buffer_rows)
        return min(self.layer.block_rows or most, most)

    @property
    def exchanges(self) -> int:
        """Forth and back; and again for the gradients."""
        return 4 if self.layer.training else 2

    def _shares(self) -> tuple[float, float]:
        """The share of its rows that a device exchanges within its node, and with other nodes, when all get as many."""
        near = min(self.machine.node, self.group)
        return (near - 1) / self.group, (self.group - near) / self.group

    def bytes_over(self) -> tuple[float, float]:
        """What the busiest device moves in one exchange, in one direction: within its node, and to others."""
        rows = self.received_rows if self.layer.method == "ragged" else self.block_rows * self.group
        near, far = self._shares()
        row = self.layer.d * self.layer.dtype_bytes
        return near * rows * row, far * rows * row

    @property
    def collective_bytes(self) -> int:
        """What the collectives of all exchanges take on one device, its own share included."""
        rows = self.rows if self.layer.method == "ragged" else self.block_rows * self.group
        return self.exchanges * rows * self.layer.d * self.layer.dtype_bytes

    @property
    def bytes_a_token(self) -> float:
        """What leaves a device in all exchanges for each of its tokens, when all devices get as many rows."""
        out = self.collective_bytes * sum(self._shares())
        return out / self.layer.tokens

    @property
    def weight_bytes(self) -> int:
        """The experts' matrices on a device."""
        one = self.layer.matrices * self.layer.d * self.layer.d_ff * self.layer.dtype_bytes
        return self.experts * one

    @property
    def row_bytes(self) -> int:
        """Rows that were sent and that came back, the buffer in and out and what is between, the blocks of "padded"."""
        hidden = self.layer.d_ff * self.layer.matrices  # what each but the last matrix gives, and their activation
        elements = 2 * self.rows * self.layer.d + self.buffer_rows * (2 * self.layer.d + hidden)
        if self.layer.method == "padded":
            elements += 2 * self.block_rows * self.group * self.layer.d
        return elements * self.layer.dtype_bytes

    @property
    def exchange_time(self) -> float:
        """Both kinds of links at once."""
        near, far = self.bytes_over()
        return self.exchanges * max(near / self.machine.link, far / self.machine.network)

    @property
    def matmul_time(self) -> float:
        """Of the busiest device; at least as long as it takes to read and write what is multiplied."""
        return self._matmul_time(1)

    def _matmul_time(self, chunks: int) -> float:
        products = chunks * self.layer.matrices * (3 if self.layer.training else 1)
        return products * gmm_time(self.machine, self.layer, math.ceil(self.received_rows / chunks), self.experts)

    @property
    def overlapped_time(self) -> float:
        """With the rows cut in chunks, the exchange of one beside the matmul of another; each reads the matrices."""
        chunks = self.layer.chunks
        shorter, longer = sorted((self.exchange_time, self._matmul_time(chunks)))
        return longer + shorter / chunks

    @property
    def hidden(self) -> float:
        """The share of the exchange that takes no time of its own then."""
        if not self.exchange_time:
            return 1.0
        return max(0.0, (self.exchange_time + self.matmul_time - self.overlapped_time) / self.exchange_time)

    @property
    def limit(self) -> str:
        """What takes longer."""
        return "exchange" if self.exchange_time > self.matmul_time else "matmul"

    @property
    def equal_at_d_ff(self) -> float:
        """The d_ff at which both take as long, where reading the matrices is not what limits the matmul."""
        machine = dataclasses.replace(self.machine, memory=math.inf)
        one = Plan(dataclasses.replace(self.layer, d_ff=1), machine, self.devices)
        return one.exchange_time / one.matmul_time


def gmm_time(machine: Machine, layer: Layer, rows: int, experts: int) -> float:
    """Seconds of one `gmm` of `[rows, d]` with `[experts, d, d_ff]`, or of one of its derivatives."""
    elements = rows * (layer.d + layer.d_ff) + min(experts, rows) * layer.d * layer.d_ff
    flops = 2 * rows * layer.d * layer.d_ff
    return max(flops / machine.flops, elements * layer.dtype_bytes / machine.memory)


_COLUMNS: dict[str, Callable[[Plan], str]] = {
    "devices": lambda p: f"{p.devices}",
    "groups": lambda p: f"{p.replicas} of {p.group}",
    "experts a device": lambda p: f"{p.experts}",
    "rows a device": lambda p: f"{p.busiest_rows}",
    "KiB sent a token": lambda p: f"{p.bytes_a_token / 2**10:.0f}",
    "weights, GiB": lambda p: f"{p.weight_bytes / 2**30:.2f}",
    "rows, GiB": lambda p: f"{p.row_bytes / 2**30:.2f}",
    "exchange, ms": lambda p: f"{1e3 * p.exchange_time:.2f}",
    "matmul, ms": lambda p: f"{1e3 * p.matmul_time:.2f}",
    "limit": lambda p: p.limit,
    "equal at d_ff": lambda p: f"{p.equal_at_d_ff:.0f}",
    "overlapped, ms": lambda p: f"{1e3 * p.overlapped_time:.2f}",
    "exchange hidden": lambda p: f"{p.hidden:.0%}",
}


def table(plans: Sequence[Plan]) -> str:
    """A table in Markdown, one line for each plan."""
    cells = [list(_COLUMNS), *([column(p) for column in _COLUMNS.values()] for p in plans)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return "\n".join("| " + " | ".join(map(str.rjust, line, widths)) + " |" for line in cells)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table of what the arguments ask for."""
    parser = _parser()
    args = vars(parser.parse_args(argv))
    devices = args.pop("devices")
    rates = {name: args.pop(name) * unit for name, unit in (("link", 1e9), ("network", 1e9), ("memory", 1e12))}
    machine = Machine(node=args.pop("node"), flops=args.pop("tflops") * 1e12, **rates)
    layer = Layer(matrices=2 if args.pop("plain") else 3, **args)
    if layer.top_k > layer.experts:
        parser.error(f"--top-k: got {layer.top_k}, expected at most the {layer.experts} experts")
    if layer.block_rows and layer.method != "padded":
        parser.error(f"--block-rows: got {layer.block_rows}, expected none with --method {layer.method}")
    print(table([Plan(layer, machine, n) for n in devices]))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: error: {message}\n")


def _number(kind: type, least: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (value > 0 and least <= value < math.inf):
            what = "an integer" if kind is int else "a number"
            above = f"of {least} or more" if least else "above 0"
            raise argparse.ArgumentTypeError(f"got {text}, expected {what} {above}")
        return value

    return parse


def _parser() -> _Parser:
    layer, machine = Layer(), Machine()
    count, rate = _number(int, 1), _number(float, 0)
    p = _Parser("python -m jax_gg.plan", description="What expert parallelism costs. The formulas: docs/experts.md.")

    def add(name: str, kind: Callable[[str], float], default: float | None, what: str) -> None:
        p.add_argument(name, type=kind, default=default, help=what + (" (%(default)s)" if default is not None else ""))

    p.add_argument("--devices", type=count, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024], help="of the mesh")
    add("--tokens", count, layer.tokens, "tokens a device")
    add("--d", count, layer.d, "features of a token")
    add("--d-ff", count, layer.d_ff, "hidden features of an expert")
    add("--experts", count, layer.experts, "experts of the layer")
    add("--top-k", count, layer.top_k, "experts of each token")
    p.add_argument("--plain", action="store_true", help="two matrices an expert, not the three of a gated one")
    add("--dtype-bytes", count, layer.dtype_bytes, "bytes of each number, weights and rows alike")
    add("--skew", _number(float, 1), layer.skew, "rows of the busiest device over the mean")
    p.add_argument("--method", choices=("ragged", "padded"), default=layer.method, help="of the exchange (%(default)s)")
    add("--buffer-rows", count, None, "room for received rows; by default for the busiest device's")
    add("--block-rows", count, None, 'of "padded": rows from one device to one other; by default what drops none')
    p.add_argument("--training", action="store_true", help="forward and backward")
    add("--chunks", count, layer.chunks, "that the rows are cut into to overlap exchange and matmul")
    add("--node", count, machine.node, "devices of a node")
    add("--link", rate, machine.link / 1e9, "GB/s from a device to all others of its node")
    add("--network", rate, machine.network / 1e9, "GB/s from a device to other nodes")
    add("--tflops", rate, machine.flops / 1e12, "TFLOP/s of the matmul")
    add("--memory", rate, machine.memory / 1e12, "TB/s of a device's memory")
    return p


if __name__ == "__main__":
    main()
