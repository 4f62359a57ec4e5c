"""Checks and counts that precede timing: results, repeats, bytes, operations."""

import dataclasses
import weakref

import pytest
import torch
from bench_lib import measure, moe_layer, timers
from bench_lib.ops import OPS
from bench_lib.shapes import Point
from bench_lib.spec import Program

from tests.support import bench_cases
from tests.support.bench_cases import TINY, TINY_LORA

pytestmark = bench_cases.NEEDS_GROUPED_MM


def spoiled(leaf: str | None, factor: float):
    """The plain grouped_mm layer with its output, or one gradient, multiplied by ``factor``."""

    def build(inputs, point):
        program = OPS["experts"].impl("torch_grouped_mm_early").build(inputs, point)
        if leaf is None:
            return Program(lambda: program.forward() * factor, program.leaves)
        return Program(program.forward, program.leaves, {leaf: lambda grad: grad * factor})

    return build


@pytest.mark.parametrize("leaf", [None, "x", "weights", "w13", "w2"])
@pytest.mark.parametrize("factor", [1 + 1e-4, float("nan")])
def test_a_wrong_output_or_gradient_is_never_timed(leaf, factor):
    op = OPS["experts"]
    inputs = op.make_inputs(TINY, torch.device("cpu"))
    expected = op.reference(TINY, inputs)
    program = spoiled(leaf, factor)(inputs, TINY)
    with pytest.raises(measure.WrongResultError, match="above the limit"):
        measure.check(op, TINY, program, inputs, expected)
    assert measure.check(op, TINY, spoiled(leaf, 1.0)(inputs, TINY), inputs, expected) < 1e-5


def test_the_check_covers_every_adapter_gradient():
    inputs = moe_layer.make_layer(TINY_LORA, torch.device("cpu"), train_base=False)
    expected = moe_layer.layer_reference(TINY_LORA, inputs)
    assert set(expected.by_token) == {"out", "x", "weights"}
    assert set(expected.by_expert) == set(moe_layer.FACTORS)


def test_results_that_change_between_passes_are_noticed():
    op = OPS["experts"]
    inputs = op.make_inputs(TINY, torch.device("cpu"))
    program = op.impl("torch_grouped_mm_early").build(inputs, TINY)
    calls = iter(range(100))

    def drifting():
        return program.forward() + (1e-3 if next(calls) == 4 else 0.0)

    assert measure.repeatable(op, TINY, program, inputs.dout_TD, 6)
    changed = Program(drifting, program.leaves)
    assert not measure.repeatable(op, TINY, changed, inputs.dout_TD, 6)


def test_saved_bytes_count_each_storage_once_and_no_input():
    x = torch.randn(10, requires_grad=True)
    cpu = torch.device("cpu")

    def forward():
        y = x.exp()
        return (y * y[:]).sin() * x

    # y (saved by exp and, through a view, by mul), y * y and sin(y * y); x is an input.
    assert timers.saved_bytes(forward, [x], cpu) == 3 * 40
    assert timers.saved_bytes(forward, [], cpu) == 4 * 40


def test_counting_saved_bytes_keeps_no_graph_alive():
    x, outputs = torch.randn(4, 8, requires_grad=True), []

    def forward():
        # softmax saves its own output.
        out = torch.softmax(x, dim=-1)
        outputs.append(weakref.ref(out))
        return out * 2

    timers.saved_bytes(forward, [x], torch.device("cpu"))
    assert outputs[0]() is None


@pytest.mark.parametrize(
    ("op", "R", "passes", "flops"),
    [
        ("experts", None, "fwd", 6),
        ("experts", None, "fwd+bwd", 18),
        ("lora", None, "fwd+bwd", 12),
        ("lora", 16, "fwd+bwd", 12),
    ],
)
def test_flops_and_ceiling_are_the_same_work(op, R, passes, flops):
    T, K, D, F = 4096, 8, 2048, 768
    work = OPS[op].work(Point("qwen3_30b", T, passes, "bf16", R))
    assert work.flops == flops * T * K * D * F
    assert sum(2 * b * m * k * n for b, m, k, n in work.matmuls) == work.flops


def test_moved_bytes_are_inputs_once_and_outputs_once():
    op = OPS["experts"]
    inputs = op.make_inputs(TINY, torch.device("cpu"))
    read = [*inputs.leaves().values(), inputs.ids_TK]
    forward = sum(t.nbytes for t in read) + inputs.x_TD.nbytes
    backward = inputs.dout_TD.nbytes + sum(t.nbytes for t in inputs.leaves().values())
    assert op.work(dataclasses.replace(TINY, passes="fwd")).moved_bytes == forward
    assert op.work(TINY).moved_bytes == forward + backward
    assert op.input_bytes(TINY) == sum(t.nbytes for t in read) + inputs.dout_TD.nbytes


def test_without_bounds_nothing_is_timed_for_them():
    # Using an absent CUDA device would be an error.
    bounds = measure.Bounds(OPS["experts"], torch.device("cuda"), measure.Settings(bounds=False))
    assert bounds.at(TINY) == {"floor_ms": None, "ceiling_ms": None}
