"""Changing a patched model's dtype or device, and autocast around a training step.

Mixed dtypes inside one block and models under autocast are in
tests/patching/test_block_training.py.
"""

from __future__ import annotations

import copy

import pytest
import torch

from moe_patch import patch_model, unpatch_model
from tests.support import tiny_models
from tests.support.numerics import FP32, assert_bits, assert_close
from tests.support.snapshots import logits

CASTS = {
    "to bf16": lambda m: m.to(torch.bfloat16),
    "to fp16": lambda m: m.to(torch.float16),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "bf16 and back": lambda m: m.bfloat16().float(),
}


def correction_biases(model):
    return {
        name: t
        for name, t in [*model.named_parameters(), *model.named_buffers()]
        if name.rpartition(".")[2] in tiny_models.CORRECTION_BIASES
    }


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe", "minimax_m2", "qwen3_moe"])
def test_cast_after_patching_equals_the_twin(name, cast):
    """Every tensor, the correction bias included, has the same dtype as in the unpatched twin.

    In low precision the output equals that of a model patched after the cast (near ties differ).
    """
    twin = tiny_models.build(name)
    ours = patch_model(copy.deepcopy(twin))
    batch = tiny_models.inputs(twin)
    for model in (ours, twin):
        CASTS[cast](model)
    for (key, mine), (other, theirs) in zip(
        ours.state_dict().items(), twin.state_dict().items(), strict=True
    ):
        assert key == other
        assert_bits(mine, theirs, key)
    for key, bias in correction_biases(ours).items():
        assert bias.dtype == correction_biases(twin)[key].dtype
    assert bool(correction_biases(ours)) == (name != "qwen3_moe")
    out, eager = logits(ours, batch), logits(twin, batch)
    assert out.dtype == eager.dtype
    if ours.dtype in (torch.float32, torch.float64):
        assert_close(out, eager, FP32)
    patched_alone = patch_model(copy.deepcopy(twin))
    assert_bits(logits(patched_alone, batch), out)
    assert_bits(logits(unpatch_model(ours), batch), eager)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_a_training_step_under_autocast(name):
    """Train fp32 masters under bf16 autocast with fp32 gradients and the unpatched twin's loss."""
    twin = tiny_models.build(name)
    ours = patch_model(copy.deepcopy(twin))
    batch = tiny_models.inputs(twin, 4, 16)
    losses = []
    for model in (ours, twin):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for _ in range(5):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            for key, p in model.named_parameters():
                assert p.grad is None or p.grad.dtype == torch.float32, key
            optimizer.step()
        losses.append(loss.detach())
    assert_close(losses[0], losses[1], 2e-2)
    grads = [{k for k, p in m.named_parameters() if p.grad is not None} for m in (ours, twin)]
    assert grads[0] == grads[1]


def test_casting_back_and_forth_in_training():
    """Evaluation in bf16 between fp32 steps, as full-bf16 evaluation does it on a copy."""
    ours = patch_model(tiny_models.build("qwen2_moe"))
    batch = tiny_models.inputs(ours)
    expected = logits(ours, batch)
    low = copy.deepcopy(ours).bfloat16()
    assert logits(low, batch).dtype == torch.bfloat16
    assert_close(logits(low, batch).float(), expected, 5e-2)
    assert_bits(logits(ours, batch), expected)
