"""Expert and tensor parallelism and FSDP through transformers' own distributed config, on gloo.

transformers shards the weights as DTensors, closes over the experts' forward and hands it local
ids, with its own sentinel (the local number of experts) for rows of other ranks. Nothing here is
ours but the experts and the router: losses and gradients must be those of one process.
"""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from moe_patch import patch_model, patch_report, unpatch_model
from tests import tiny_models
from tests.dist_helpers import run_ranks
from tests.numerics import FP32, assert_close

LAYOUTS = {
    "ep": {"tp_size": 2, "ep_size": 2},
    "ep all_reduce": {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
    "ep and fsdp": {"fsdp_size": 2, "ep_size": 2},
    "tp": {"tp_size": 2},
    "fsdp": {"fsdp_size": 2},
}


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
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    return model.eval().generate(ids, max_new_tokens=4, do_sample=False)


def parallel(rank, model_class, folder, options):
    model = model_class.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="grouped_mm",
        distributed_config=DistributedConfig(**options),
    ).train()
    patch_model(model)
    rows = patch_report(model)
    ours = step(model, tiny_models.inputs(model))
    unpatch_model(model)
    theirs = step(model, tiny_models.inputs(model))
    return {"rows": rows, "step": ours, "unpatched": theirs, "tokens": decode(patch_model(model))}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_two_ranks_equal_one_process(tmp_path, name, layout):
    model = tiny_models.build(name)
    model.save_pretrained(tmp_path)
    expected, tokens = step(model, tiny_models.inputs(model)), decode(model)
    for found in run_ranks(parallel, type(model), str(tmp_path), LAYOUTS[layout]):
        assert {row.tier for row in found["rows"]} == {"full"}
        assert torch.equal(found["tokens"], tokens)
        for run in (found["step"], found["unpatched"]):
            assert run.keys() == expected.keys()
            for key, value in expected.items():
                assert_close(run[key], value, FP32, key)
