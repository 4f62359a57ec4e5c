"""Recorded norms are exact: per-token gradients, explicit outer products, low precision."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

from moe_patch import (
    patch_model,
    record,
)
from tests.support import tiny_models
from tests.support.adapters import EXPERTS
from tests.support.numerics import assert_close
from tests.support.signals_cases import (
    CHECKPOINTS,
    EXACT,
    GRADIENTS,
    checkpointed,
    experts_below,
    explicit_norms,
    last_layer,
    patched,
    per_token_norms,
    recorded,
    watch_output,
)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("lora", [(), EXPERTS, EXPERTS[1:]], ids=["plain", "both", "down"])
@pytest.mark.parametrize("reentrant", CHECKPOINTS, ids=["kept", "checkpoint", "reentrant"])
def test_norms_in_the_last_layer_equal_per_token_gradients(model_type, lora, reentrant) -> None:
    """Norms equal vmap(grad) per token and expert for a sum-reduced loss of the last block."""
    model = patched(model_type, lora=lora)
    checkpointed(model, reentrant)
    batch = tiny_models.inputs(model if not lora else model.get_base_model())
    (layer,) = recorded(model, batch).layers.values()
    expected = per_token_norms(model, batch, layer)
    assert layer.grad_norm_params.dtype == torch.float64
    assert_close(layer.grad_norm_params, expected["params"], EXACT, "parameters")
    if not lora:
        assert layer.grad_norm_lora is None
        return
    assert_close(layer.grad_norm_lora, expected["lora"], EXACT, "low-rank factors")


@pytest.mark.parametrize(
    ("model_type", "own_gate"),
    [
        ("qwen3_moe", False),
        ("gpt_oss", False),
        ("mixtral", False),
        ("muse_spark", False),  # a norm of its own between grouped products: rows seen by hooks
        ("gpt_oss", True),  # the same with biases
    ],
)
def test_norms_of_an_inner_layer_equal_explicit_outer_products(model_type, own_gate) -> None:
    model = patched(model_type, layers=2)
    experts = experts_below(tiny_models.blocks(model)[0][1])
    if own_gate:  # an activation put on the instance is run as it is
        experts._apply_gate = functools.partial(type(experts)._apply_gate, experts)
    seen = watch_output(experts)
    with record(model) as recorder:
        tiny_models.loss(model(**tiny_models.inputs(model))).backward()
    layer = next(iter(recorder.layers.values()))
    expected = explicit_norms(experts, seen, layer)
    assert_close(layer.act_norm, expected["act"], EXACT, "activation")
    assert_close(layer.grad_norm_output, expected["output"], EXACT, "output gradient")
    assert_close(layer.grad_norm_params, expected["params"], EXACT, "parameter gradient")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_norms_are_fp32_and_near_fp64(dtype) -> None:
    """Norms are fp32 and close to fp64 with the same low-precision weights, inputs and ids."""
    low = patch_model(tiny_models.build("qwen3_moe", dtype=dtype), self_check=False)
    high = patch_model(tiny_models.cast(copy.deepcopy(low), torch.float64), self_check=False)
    block, exact = (last_layer(model).mlp for model in (low, high))
    x = torch.randn(1, 9, 32).to(dtype)
    with record(low) as recorder:
        block(x).float().square().sum().backward()
    layer = list(recorder.layers.values())[-1]
    with record(high) as recorder:
        out = experts_below(exact)(x[0].double(), layer.ids, layer.weights.double())
        out.square().sum().backward()
    wanted = list(recorder.layers.values())[-1]
    for name in ("act_norm", *GRADIENTS):
        assert getattr(layer, name).dtype == torch.float32
        assert_close(getattr(layer, name), getattr(wanted, name), 2e-2, name)
