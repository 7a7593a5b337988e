"""`python -m jax_gg.plan` against the exchange itself, against measurements, and what it prints."""

import dataclasses
import functools
import json
import pathlib
import re
import shlex

import jax
import numpy as np
import operands
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from problems import BENCHMARKS

import jax_gg
from jax_gg import moe, plan

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200.jsonl"
DOCS = (ROOT / "docs" / "experts.md").read_text()
ITEMSIZE = {"f32": 4, "bf16": 2}
D, D_FF, TOKENS, TOP_K = 4, 6, 16, 2


def exchange(devices, layer, method="padded"):
    """A function of the rows, weights and counts of all devices: the layer's output, and the rows that each sends."""
    mesh = jax.make_mesh((devices,), ("expert",), (AxisType.Auto,), devices=jax.devices("cpu")[:devices])
    p = plan.Plan(layer, plan.Machine(), devices)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("expert"), out_specs=(P("expert"), P("expert")))
    def f(x, weights, counts):
        options = {"axis_name": "expert", "buffer_rows": p.buffer_rows, "block_rows": layer.block_rows}
        sent = moe.dispatch(x, counts.ravel(), method=method, **options)
        out = moe.combine(jax_gg.gmm(sent.rows, weights, sent.group_sizes), sent)
        return out, sent._sent.sizes[None]

    return f


def random_counts(rng, devices, layer, even):
    rows, experts = layer.tokens * layer.top_k, layer.experts
    if even:
        return np.full((devices, experts), rows // experts, np.int32)
    return rng.multinomial(rows, rng.dirichlet(np.ones(experts)), devices).astype(np.int32)


@pytest.mark.parametrize("devices", [2, 8])
@pytest.mark.parametrize("options", [{}, {"block_rows": 3}, {"skew": 1.5}, {"buffer_rows": 7}], ids=str)
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_bytes_of_padded(devices, options, training):
    """What the collectives of the compiled program take."""
    layer = plan.Layer(TOKENS, D, D, 16, TOP_K, dtype_bytes=4, method="padded", training=training, **options)
    f = exchange(devices, layer)
    rows = devices * TOKENS * TOP_K
    shapes = (rows, D), (16, D, D), (devices, 16), (rows, D)
    args = [jax.ShapeDtypeStruct(*x) for x in zip(shapes, (np.float32, np.float32, np.int32, np.float32), strict=True)]

    def step(x, weights, counts, dout):
        out, vjp = jax.vjp(lambda *args: f(*args, counts)[0], x, weights)
        return out, (vjp(dout) if training else None)

    text = jax.jit(step).lower(*args).compile().as_text()
    taken = 0
    for results in re.findall(r" = (.*?) all-to-all(?:-start)?\(", text):
        for dtype, shape in re.findall(r"(\w+)\[([\d,]+)\]", results):
            taken += ITEMSIZE[dtype] * int(np.prod([int(n) for n in shape.split(",")]))
    assert taken == plan.Plan(layer, plan.Machine(), devices).collective_bytes


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize(("devices", "node"), [(2, 8), (8, 8), (8, 2)])
def test_bytes_of_ragged(rng, devices, node, even):
    """The sizes that are passed to the collective; those of "padded" are the same, which the CPU can run."""
    layer = plan.Layer(TOKENS, D, D, 16, TOP_K, dtype_bytes=4, method="ragged")
    counts = random_counts(rng, devices, layer, even)
    mean = TOKENS * TOP_K
    skew = max(counts.sum(0).reshape(devices, -1).sum(1)) / mean
    layer = dataclasses.replace(layer, skew=skew)
    x, weights = operands.integers(rng, (devices * mean, D)), operands.integers(rng, (16, D, D))
    _, sizes = jax.jit(exchange(devices, layer))(x, weights, counts)
    sent = np.asarray(sizes).sum(-1) * D * 4  # [sender, receiver]
    p = plan.Plan(layer, plan.Machine(node=node), devices)
    # Two exchanges, forth and back.
    assert (2 * sent.sum(1) == p.collective_bytes).all()
    assert sent.sum(0).max() == p.received_rows * D * 4
    if even:
        leaves = sent.sum(1) - sent.diagonal()
        assert (2 * leaves == p.bytes_a_token * TOKENS).all()
        same_node = np.arange(devices)[:, None] // node == np.arange(devices) // node
        near = np.where(same_node, sent, 0).sum(0) - sent.diagonal()
        far = np.where(same_node, 0, sent).sum(0)
        assert [(a, b) for a, b in zip(near, far, strict=True)] == [p.bytes_over()] * devices


def test_memory():
    """Of the arrays of a layer."""
    p = plan.Plan(plan.Layer(10, 4, 6, 8, 2, dtype_bytes=2, skew=2.0), plan.Machine(), 4)
    assert p.weight_bytes == sum(np.zeros(s, np.float16).nbytes for s in [(2, 4, 6), (2, 4, 6), (2, 6, 4)])
    rows = [(20, 4), (40, 4), (40, 6), (40, 6), (40, 6), (40, 4), (20, 4)]
    assert p.row_bytes == sum(np.zeros(s, np.float16).nbytes for s in rows)
    padded = plan.Plan(dataclasses.replace(p.layer, method="padded", block_rows=5), p.machine, 4)
    assert padded.row_bytes == p.row_bytes + 2 * np.zeros((4, 5, 4), np.float16).nbytes


def test_groups():
    """The largest number of devices that the experts can be split over evenly."""
    groups = {n: (p.group, p.replicas, p.experts) for n in (1, 8, 24, 1024) for p in [plan.Plan(plan.Layer(), None, n)]}
    assert groups == {1: (1, 1, 256), 8: (8, 1, 32), 24: (8, 3, 32), 1024: (256, 4, 1)}


def test_rows_of_the_busiest():
    """A token goes to an expert once at most."""
    p = plan.Plan(plan.Layer(tokens=100, experts=8, top_k=2, skew=50.0), plan.Machine(), 8)
    assert p.busiest_rows == 8 * 100
    assert plan.Plan(dataclasses.replace(p.layer, skew=3.0), p.machine, 8).busiest_rows == 600


@pytest.mark.parametrize("training", [False, True])
def test_equal(training):
    """At that d_ff, exchange and matmul take as long, and half of each is hidden when they are cut in two."""
    p = plan.Plan(plan.Layer(tokens=10**6, training=training), plan.Machine(), 64)
    assert p.limit == "exchange"
    p = plan.Plan(dataclasses.replace(p.layer, d_ff=round(p.equal_at_d_ff)), p.machine, 64)
    assert p.matmul_time == pytest.approx(p.exchange_time, rel=1e-3)
    assert p.overlapped_time == pytest.approx(1.5 * p.matmul_time, rel=1e-3)
    assert p.hidden == pytest.approx(0.5, rel=1e-3)
    assert plan.Plan(dataclasses.replace(p.layer, d_ff=2 * p.layer.d_ff), p.machine, 64).limit == "matmul"


def test_chunks_read_the_matrices_again():
    """Where reading them is what takes the time, cutting the rows does not pay."""
    p = plan.Plan(plan.Layer(tokens=16, chunks=4), plan.Machine(), 8)
    assert p.overlapped_time > 3.9 * p.matmul_time
    assert p.hidden == 0


def test_one_device():
    p = plan.Plan(plan.Layer(), plan.Machine(), 1)
    assert (p.exchange_time, p.bytes_a_token, p.hidden, p.limit) == (0, 0, 1, "matmul")


@pytest.mark.skipif(not RESULTS.exists(), reason="an sdist has no results")
def test_time_of_gmm():
    """The default rates are measured, and predict what else was measured in the same state."""
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    forward = {
        (line["impl"], line["shape"]): line
        for line in lines
        if line.get("direction") == "fwd" and line["state"] == "hot"
    }
    machine = plan.Machine()
    assert machine.flops == pytest.approx(forward["jax_gg", "dsv3-ep32-32k"]["tflops"] * 1e12, rel=0.02)
    assert machine.memory == pytest.approx(forward["copy", "dsv3-ep32-32k"]["tbytes_per_s"] * 1e12, rel=0.02)
    ratios = []
    for problem in BENCHMARKS:
        layer = plan.Layer(d=problem.k, d_ff=problem.n)
        experts = sum(size > 0 for size in problem.sizes)
        predicted = 1e6 * plan.gmm_time(machine, layer, problem.rows, experts)
        ratios.append(forward["jax_gg", problem.name]["us"] / predicted)
    assert min(ratios) > 0.95, ratios
    assert max(ratios) < 1.25, ratios


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--skew .5", "argument --skew: got .5, expected a number of 1 or more"),
        ("--d 1.5", "argument --d: got 1.5, expected an integer of 1 or more"),
        ("--devices 8 0", "argument --devices: got 0, expected an integer of 1 or more"),
        ("--link 0", "argument --link: got 0, expected a number above 0"),
        ("--network nan", "argument --network: got nan, expected a number above 0"),
        ("--top-k 300", "--top-k: got 300, expected at most the 256 experts"),
        ("--block-rows 9", "--block-rows: got 9, expected none with --method ragged"),
        (
            "--method dense",
            "argument --method: invalid choice: 'dense' \\(choose from '?ragged'?, '?padded'?\\)",
        ),
    ],
)
def test_errors(capsys, arguments, message):
    with pytest.raises(SystemExit) as e:
        plan.main(arguments.split())
    assert e.value.code == 2
    assert re.fullmatch(rf"python -m jax_gg\.plan: error: {message}\n", capsys.readouterr().err)


def commands():
    return re.findall(r"^python -m jax_gg\.plan.*$", DOCS, re.MULTILINE)


@pytest.mark.parametrize("command", commands())
def test_tables_in_docs(capsys, command):
    """Each table is what the command before it prints."""
    plan.main(shlex.split(command)[3:])
    after = DOCS[DOCS.index(f"{command}\n```\n") :]
    assert after.split("```\n", 1)[1].strip().startswith(capsys.readouterr().out.strip())


def test_docs_have_tables():
    assert len(commands()) >= 3
