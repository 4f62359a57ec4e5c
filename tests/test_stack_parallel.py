"""Expert and tensor parallelism and FSDP through transformers' own distributed config, on gloo.

transformers shards the weights as DTensors, closes over the experts' forward and hands it local
ids, with its own sentinel (the local number of experts) for rows of other ranks. Nothing here is
ours but the experts and the router: losses and gradients must be those of one process.
"""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from moe_patch import UnsupportedModelError, patch_model, patch_report, unpatch_model
from tests import tiny_models
from tests.adapters import EXPERTS, adapt, lora_config
from tests.dist_helpers import run_ranks
from tests.numerics import FP32, assert_close

LAYOUTS = {"tp": {"tp_size": 2}, "fsdp": {"fsdp_size": 2}}
# Before ep_size, expert parallelism wrapped the router as well, which then stays its own.
WRAPS_ROUTER = "ep_size" not in {field.name for field in fields(DistributedConfig)}
if WRAPS_ROUTER:
    LAYOUTS["ep"] = {"tp_size": 2, "enable_expert_parallel": True}
else:
    LAYOUTS["ep"] = {"tp_size": 2, "ep_size": 2}
    LAYOUTS["ep all_reduce"] = {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"}
    LAYOUTS["ep and fsdp"] = {"fsdp_size": 2, "ep_size": 2}


def step(model, batch):
    """Loss, logits and every gradient, gathered."""
    model.zero_grad(set_to_none=True)
    out = model(**batch)
    out.loss.backward()
    run = {"loss": out.loss.detach(), "logits": out.logits.detach()}
    for name, p in model.named_parameters():
        if p.grad is not None:
            grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            run[name] = grad.detach().clone()
    return run


def decode(model):
    ids = tiny_models.inputs(model)["input_ids"]
    model.config.output_router_logits = False  # the auxiliary loss cannot be had while decoding
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    return model.eval().generate(ids, max_new_tokens=4, do_sample=False)


def load(model_class, folder, options, **kwargs):
    return model_class.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        distributed_config=DistributedConfig(**options),
        **kwargs,
    ).train()


def parallel(rank, model_class, folder, options):
    model = load(model_class, folder, options, experts_implementation="grouped_mm")
    patch_model(model)
    rows = patch_report(model)
    ours = step(model, tiny_models.inputs(model))
    unpatch_model(model)
    theirs = step(model, tiny_models.inputs(model))
    return {"rows": rows, "step": ours, "unpatched": theirs, "tokens": decode(patch_model(model))}


CASES = [(name, layout) for name in ("qwen3_moe", "gpt_oss") for layout in LAYOUTS]
CASES += [("qwen2_moe", "ep"), ("qwen2_moe", "tp"), ("deepseek_v3", "ep")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), CASES)
def test_two_ranks_equal_one_process(tmp_path, name, layout):
    model = tiny_models.build(name, vocab_size=100)
    model.save_pretrained(tmp_path)
    expected, tokens = step(model, tiny_models.inputs(model)), decode(model)
    for found in run_ranks(parallel, type(model), str(tmp_path), LAYOUTS[layout]):
        left = WRAPS_ROUTER and layout == "ep"
        assert {row.tier for row in found["rows"]} == {"experts" if left else "full"}
        assert all(("wraps the router" in row.reason) == left for row in found["rows"])
        assert torch.equal(found["tokens"], tokens)
        for run in (found["step"], found["unpatched"]):
            assert run.keys() == expected.keys()
            for key, value in expected.items():
                assert_close(run[key], value, FP32, key)


def refusal(rank, model_class, folder, options, lora):
    """The message of our error, at patch time or at the first call."""
    model = load(model_class, folder, options)
    batch = tiny_models.inputs(model)
    if lora:
        model = adapt(model, lora_config(EXPERTS))
    with pytest.raises(UnsupportedModelError) as caught:
        patch_model(model)(**batch)
    return str(caught.value)


REFUSED = [("llama4", "tp", False, "Llama4TextExperts.*tp_forward")]
if not WRAPS_ROUTER:
    message = r"LoRA factors are for.*\(8, .*local weight is \(4, "
    REFUSED.append(("qwen3_moe", "ep and fsdp", True, message))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout", "lora", "message"), REFUSED, ids=lambda v: str(v)[:11])
def test_what_cannot_hold_is_refused_by_name(tmp_path, name, layout, lora, message):
    """Experts that transformers does not decorate; adapters on experts that live elsewhere.

    PEFT alone fails on the latter with an error of torch's.
    """
    model = tiny_models.build(name, vocab_size=100)
    model.save_pretrained(tmp_path)
    for found in run_ranks(refusal, type(model), str(tmp_path), LAYOUTS[layout], lora):
        assert re.search(message, found), found
