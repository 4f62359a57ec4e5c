"""Expert and tensor parallelism and FSDP through transformers' own distributed config.

transformers shards the weights as DTensors, closes over the experts' forward and passes local ids.
Rows of other ranks carry its own sentinel, the local number of experts. Only the experts and the
router are ours; losses and gradients must equal those of one process. Ranks communicate through
NCCL if there are enough CUDA devices, else through gloo.
"""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
import torch
import transformers
from packaging.version import Version
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from moe_patch import UnsupportedModelError, patch_model, patch_report, unpatch_model
from tests.support import tiny_models, window
from tests.support.adapters import EXPERTS, adapt, lora_config
from tests.support.dist_helpers import device, run_ranks
from tests.support.numerics import FP32, assert_close

pytestmark = window.sharded_loading
# Before ep_size, expert parallelism wrapped the router too, so that the router stays unpatched.
WRAPS_ROUTER = "ep_size" not in {field.name for field in fields(DistributedConfig)}
# Release 5.16 leaves the gradient of a routing weight on the rank of its expert and omits the sum
# over ranks. Even unpatched, only gradients of modules behind the last router are right. The others
# may even hold uninitialised memory.
SUMS_ROUTER_GRADIENTS = Version(transformers.__version__) >= Version("5.17")


def layouts(world):
    """Return transformers' options for each way to distribute a model over ``world`` ranks."""
    found = {"tp": {"tp_size": world}, "fsdp": {"fsdp_size": world}}
    if WRAPS_ROUTER:
        found["ep"] = {"tp_size": world, "enable_expert_parallel": True}
    else:
        found["ep"] = {"tp_size": world, "ep_size": world}
        found["ep all_reduce"] = found["ep"] | {"ep_implementation": "all_reduce"}
        found["ep and fsdp"] = {"fsdp_size": world, "ep_size": world}
    return found


def step(model, batch):
    """Return loss, logits and every gradient, gathered."""
    model.zero_grad(set_to_none=True)
    out = model(**batch)
    out.loss.backward()
    run = {"loss": out.loss.detach(), "logits": out.logits.detach()}
    for name, p in model.named_parameters():
        if p.grad is not None:
            run[name] = whole(p.grad).detach().clone()
    return run


def whole(t):
    """Gather a tensor from all ranks; torch 2.11 cannot do this for shards of a packed weight."""
    if not isinstance(t, DTensor):
        return t
    if t.device_mesh.ndim > 1 or type(t.placements[0]).__name__ != "_StridedShard":
        return t.full_tensor()
    (shard,), local = t.placements, t.to_local().contiguous()
    parts = [torch.empty_like(local) for _ in range(t.device_mesh.size())]
    torch.distributed.all_gather(parts, local, group=t.device_mesh.get_group())
    pieces = zip(*(part.chunk(shard.split_factor, shard.dim) for part in parts), strict=True)
    return torch.cat([torch.cat(piece, shard.dim) for piece in pieces], shard.dim)


def inputs(model):
    return {key: t.to(model.device) for key, t in tiny_models.inputs(model).items()}


def decode(model):
    ids = inputs(model)["input_ids"]
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
    found = {"rows": patch_report(model), "ours": step(model, inputs(model))}
    found["on"] = {p.device.type for p in model.parameters()}
    if model.device.type == "cpu":  # on a card transformers' own experts may need other dtypes
        unpatch_model(model)
        found["unpatched"] = step(model, inputs(model))
        patch_model(model)
    return found | {"tokens": decode(model)}


CASES = [(name, layout, 2) for name in ("qwen3_moe", "gpt_oss") for layout in layouts(2)]
CASES += [("qwen2_moe", "ep", 2), ("qwen2_moe", "tp", 2), ("deepseek_v3", "ep", 2)]
BEHIND = ("loss", "logits", "model.norm.weight", "lm_head.weight")
RANKS = {2: "ranks2", 4: "ranks4"}
# Four ranks share four heads, so that they need keys and values for each.
CASES += [("qwen3_moe", layout, 4) for layout in ("ep", "tp", "fsdp")]
CASES += [("qwen2_moe", "tp", 4), ("gpt_oss", "ep", 4), ("gpt_oss", "tp", 4)]
MARKS = {2: (), 4: pytest.mark.slow}


@pytest.mark.parametrize(
    ("name", "layout", "world"),
    [
        pytest.param(*case, id=f"{case[0]}-{case[1]}-{RANKS[case[2]]}", marks=MARKS[case[2]])
        for case in CASES
    ],
)
def test_ranks_equal_one_process(tmp_path, name, layout, world):
    over = {"num_key_value_heads": 4} if world == 4 else {}
    model = tiny_models.build(name, vocab_size=100, **over)
    model.save_pretrained(tmp_path)
    model.to(device(world))
    expected = {key: t.cpu() for key, t in step(model, inputs(model)).items()}
    tokens = decode(model).cpu()
    options = layouts(world)[layout]
    behind = [
        key
        for key in expected
        if key in BEHIND or f".{model.config.num_hidden_layers - 1}.mlp.experts." in key
    ]
    assert len(behind) >= len(BEHIND) + 2
    for found in run_ranks(parallel, type(model), str(tmp_path), options, world=world):
        left = WRAPS_ROUTER and layout == "ep"
        assert {row.tier for row in found["rows"]} == {"experts" if left else "full"}
        assert all(("wraps the router" in row.reason) == left for row in found["rows"])
        assert torch.equal(found["tokens"], tokens)
        assert found["on"] == {device(world).type}
        for run in (found[key] for key in ("ours", "unpatched") if key in found):
            assert run.keys() == expected.keys()
            for key in behind if layout == "ep" and not SUMS_ROUTER_GRADIENTS else expected:
                assert_close(run[key], expected[key], FP32, key)


def refusal(rank, model_class, folder, options, lora):
    """Return the message of our error, at patch time or at the first call."""
    model = load(model_class, folder, options)
    batch = inputs(model)
    if lora:
        model = adapt(model, lora_config(EXPERTS))
    with pytest.raises(UnsupportedModelError) as caught:
        patch_model(model)(**batch)
    return str(caught.value)


REFUSED = [("llama4", "tp", False, "Llama4TextExperts.*tp_forward")]
if not WRAPS_ROUTER:
    message = r"LoRA factors are for.*\(8, .*local weight is \(4, "
    REFUSED.append(("qwen3_moe", "ep and fsdp", True, message))


@pytest.mark.parametrize(("name", "layout", "lora", "message"), REFUSED, ids=lambda v: str(v)[:11])
def test_what_cannot_hold_is_refused_by_name(tmp_path, name, layout, lora, message):
    """Refuse undecorated experts, and adapters on experts of another rank.

    On the latter, PEFT alone fails with an error of torch.
    """
    model = tiny_models.build(name, vocab_size=100)
    model.save_pretrained(tmp_path)
    for found in run_ranks(refusal, type(model), str(tmp_path), layouts(2)[layout], lora):
        assert re.search(message, found), found
