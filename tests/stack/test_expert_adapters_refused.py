"""Adapters on divided experts that cannot hold are refused by name, on every rank."""

from __future__ import annotations

import re

import pytest
import torch
from peft import LoraConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.distributed import DistributedConfig

from moe_patch import MoePatchError, UnsupportedModelError, patch_model, quantize_experts
from moe_patch.expert_parallel import attach_adapter, shard_adapters
from moe_patch.expert_parallel.layout import BATCHES, held_experts
from tests.support import expert_adapters as cases
from tests.support.adapters import EXPERTS, attention, lora_config
from tests.support.dist_helpers import run_ranks

pytestmark = cases.dispatches
TP, EP = {"tp_size": 2}, {"tp_size": 2, "ep_size": 2}
FSDP = {"fsdp_size": 2, "ep_size": 2}


def seeds_differ(rank, model, folder):
    torch.manual_seed(rank)
    attach_adapter(model, cases.config("qwen3_moe", True))


def options_differ(rank, model, folder):
    attach_adapter(model, lora_config(EXPERTS, r=2 + rank))


def fails_on_one(rank, model, folder):
    attach_adapter(model, lora_config(EXPERTS) if rank else LoraConfig(target_modules=["absent"]))


def tensor_parallel(rank, model, folder):
    attach_adapter(model, lora_config(EXPERTS))


def tensor_parallel_attention(rank, model, folder):
    try:
        attach_adapter(model, lora_config(EXPERTS, attention("qwen3_moe")))
    finally:
        assert not any("lora" in name for name, _ in model.named_parameters())


def merging(rank, model, folder):
    attach_adapter(model, lora_config(EXPERTS)).merge_and_unload()


def no_adapter(rank, model, folder):
    shard_adapters(model)


def whole_second_adapter(rank, model, folder):
    found = attach_adapter(model, lora_config(EXPERTS))
    for wrapper in found.modules():
        if hasattr(wrapper, "parameter_name"):  # as PEFT's add_adapter makes it
            a = wrapper.lora_A["default"]
            a.weight = torch.nn.Parameter(torch.zeros(a.weight.shape))
    patch_model(found)(**cases.batch("any", 0))


def saved_over_a_file(rank, model, folder):
    attach_adapter(model, lora_config(EXPERTS)).save_pretrained(f"{folder}/config.json")


def saved_with_a_state(rank, model, folder):
    attach_adapter(model, lora_config(EXPERTS)).save_pretrained(folder, state_dict={"a": 1})


def quantised(rank, model, folder):
    quantize_experts(model, "nf4")


def without_fusion(rank, model, folder):
    found = attach_adapter(model, lora_config(EXPERTS))
    patch_model(found, fuse_lora="off")(**cases.batch("any", 0))


CASES = (
    (seeds_differ, FSDP, r"differ between ranks: .*lora_A.*rank 1 and.*rank 0; accepted: equal"),
    (options_differ, EP, "differ between ranks: options of the adapters"),
    (fails_on_one, EP, "attach_adapter failed on another rank: rank 0: .*absent"),
    (tensor_parallel, TP, r"experts\.gate_up_proj: tensor parallelism .*divides each expert"),
    (tensor_parallel_attention, EP, r"q_proj\.weight: tensor parallelism .*over 'tp'"),
    (merging, FSDP, "merge_and_unload: nothing can be merged into experts that are divided"),
    (no_adapter, FSDP, "Qwen3MoeForCausalLM carries no adapter"),
    (whole_second_adapter, EP, "has factors of all experts, this rank holds a part"),
    (saved_over_a_file, FSDP, "save_pretrained failed on another rank: rank 0: ValueError"),
    (saved_with_a_state, EP, "state_dict is not accepted"),
    (quantised, EP, "gate_up_proj: DTensor on .* cannot .* expert and tensor .* in 16 bits"),
    (quantised, FSDP, "DTensor on .* cannot be quantised; accepted: plain, unsharded weights"),
    (without_fusion, EP, "fuse_lora='off' cannot hold"),
)


def refusals(rank, model_class, folder):
    """Return the message of our error for each case; on the rank that fails itself, of any."""
    found = []
    for function, options, _ in CASES:
        model = cases.load(model_class, folder, options)
        torch.manual_seed(0)
        with pytest.raises((MoePatchError, ValueError)) as caught:
            function(rank, model, folder)
        found.append((isinstance(caught.value, MoePatchError), str(caught.value)))
    return found


def test_what_cannot_hold_is_refused_by_name(tmp_path):
    model = cases.make("qwen3_moe")
    model.save_pretrained(tmp_path)
    for rank, found in enumerate(run_ranks(refusals, type(model), str(tmp_path))):
        for (ours, said), (function, _, message) in zip(found, CASES, strict=True):
            if ours or rank:
                assert re.search(message, said), (function.__name__, said)


def uneven(rank, model_class, folder):
    with pytest.raises(ValueError, match="Cannot evenly shard 7 experts across 2"):
        cases.load(model_class, folder, EP)
    with pytest.raises(RuntimeError, match="requires 4 processes"):
        cases.load(model_class, folder, {"fsdp_size": 2, "tp_size": 2, "ep_size": 2})
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    weight = distribute_tensor(torch.zeros(7, 2, 2), mesh, [Shard(0)])  # before transformers 5.19
    with pytest.raises(UnsupportedModelError, match="up: 7 experts over 2 ranks of 'ep'; accepted"):
        held_experts(weight, "up", BATCHES)


def test_experts_and_meshes_that_do_not_divide_are_refused_by_transformers(tmp_path):
    model = cases.make("qwen3_moe", num_experts=7)
    model.save_pretrained(tmp_path)
    run_ranks(uneven, type(model), str(tmp_path))
    with pytest.raises(ValueError, match="must divide"):
        DistributedConfig(fsdp_size=2, ep_size=4)
