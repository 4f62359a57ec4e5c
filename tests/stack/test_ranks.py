"""DDP and FSDP2 with two processes whose tokens use different experts (gloo, NCCL on cards)."""

from __future__ import annotations

import accelerate
import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moe_patch import patch_model, patch_report
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapt, attention, lora_config
from tests.support.dist_helpers import device, run_ranks
from tests.support.numerics import FP32, assert_bits, assert_close

STEPS = 5
LORA = lora_config(EXPERTS, attention("qwen3_moe"), lora_alpha=1)
LIMIT = 1e-6
# Experts that each rank's tokens use: 0 and 1 on rank 0, 6 and 7 on rank 1.
OWN = ((0, 1), (6, 7))


def split_model(name="qwen3_moe", **overrides):
    """Return a model whose router reads one direction of the stream, set by the token."""
    model = tiny_models.build(name, output_router_logits=False, **overrides)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table *= 5.0
        table[:50, 0] = 6.0
        table[50:, 0] = -6.0
        for _, block in tiny_models.blocks(model):
            block.gate.weight *= 0.01
            block.gate.weight[list(OWN[0]), 0] = 2.0
            block.gate.weight[list(OWN[1]), 0] = -2.0
    return model


def batch_of(rank):
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3 + 50 * rank, 45 + 50 * rank, (2, 7), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


def whole_batch():
    first, second = batch_of(0), batch_of(1)
    return {key: torch.cat([first[key], second[key]]) for key in first}


def record_choices(model, seen):
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda _m, _a, out: seen.append(out[2].unique().tolist()))


def optimizer_of(model, momentum=0.0):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.02, momentum=momentum)


def train(model, batch, steps=STEPS, optimizer=None):
    """Return gradients of the first step and parameters after the last, gathered."""
    optimizer = optimizer or optimizer_of(model)
    first = {}
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        model(**batch).loss.backward()
        first = first or {n: gathered(p.grad) for n, p in trainable(model)}
        optimizer.step()
    return first, {n: gathered(p) for n, p in trainable(model)}


def trainable(model):
    return [(n.removeprefix("module."), p) for n, p in model.named_parameters() if p.requires_grad]


def gathered(tensor):
    tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tensor.detach().clone()


def build(lora, rank=0):
    model = adapt(split_model(), LORA) if lora else split_model()
    return model.to(device(2, rank))


def to_rank(batch, rank):
    return {key: t.to(device(2, rank)) for key, t in batch.items()}


def one_process(lora, momentum=0.0):
    """Train in one process and return the result that the ranks together must give."""
    model = build(lora)
    run = train(model, to_rank(whole_batch(), 0), optimizer=optimizer_of(model, momentum))
    return [{name: t.cpu() for name, t in each.items()} for each in run]


def ddp(rank, lora):
    model, seen = patch_model(build(lora, rank)), []
    record_choices(model, seen)
    wrapped = DistributedDataParallel(model, find_unused_parameters=False)
    return *train(wrapped, to_rank(batch_of(rank), rank)), seen


def shard(model, units):
    if units.startswith("accelerate"):
        return shard_by_accelerate(model, efficient=units.endswith("from one rank"))
    for layer in (m for m in model.modules() if type(m).__name__.endswith("DecoderLayer")):
        if units == "experts":
            fully_shard(layer.mlp.experts)
        fully_shard(layer)
    return fully_shard(model)


def shard_by_accelerate(model, efficient):
    """Shard as Accelerator.prepare does under its FSDP2 plugin (on CPU it would use DDP)."""
    accelerator = accelerate.Accelerator(cpu=device(2).type == "cpu")
    accelerator.state.fsdp_plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer"],
        cpu_ram_efficient_loading=efficient,
    )
    return fsdp2_prepare_model(accelerator, model)


def fsdp2(rank, units, order, lora):
    model, seen = build(lora, rank), []
    record_choices(model, seen)
    if order == "patch first":
        patch_model(model)
    model = shard(model, units)
    if order == "shard first":
        patch_model(model)
    assert {row.tier for row in patch_report(model)} == {"full"}
    run = train(model, to_rank(batch_of(rank), rank))
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return *run, seen, {key: value.clone() for key, value in state.items()}


def check(results, expected):
    """Expect each rank to use only its own experts, and all to agree with one process."""
    for rank, (gradients, parameters, seen, *_) in enumerate(results):
        assert seen
        assert all(set(ids) <= set(OWN[rank]) for ids in seen), seen
        assert gradients.keys() == expected[0].keys()
        for name, value in parameters.items():
            assert_bits(value, results[0][1][name], name)
        for name, value in gradients.items():
            assert_close(value, expected[0][name], FP32, f"gradient of {name}")
        for name, value in parameters.items():
            assert_close(value, expected[1][name], LIMIT, name)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_ddp_without_unused_parameter_search(lora):
    check(run_ranks(ddp, lora), one_process(lora))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("units", "order"),
    [
        ("layers", "patch first"),
        ("layers", "shard first"),
        ("experts", "patch first"),
        ("accelerate", "patch first"),
        ("accelerate, weights from one rank", "patch first"),
    ],
)
def test_fsdp2(units, order, lora):
    """Five steps, and the state that they save."""
    model = build(lora)
    train(model, to_rank(whole_batch(), 0))
    results = run_ranks(fsdp2, units, order, lora)
    check(results, one_process(lora))
    saved, trained = results[0][3], model.state_dict()
    assert saved.keys() == trained.keys()
    for name, value in trained.items():
        assert_close(saved[name], value.cpu(), LIMIT, name)


def start(rank, kind, lora):
    model = patch_model(build(lora, rank))
    model = DistributedDataParallel(model) if kind == "ddp" else shard(model, "layers")
    return model, optimizer_of(model, momentum=0.9)


def resumed(rank, kind, lora, folder):
    """Three steps after two, and the same three in a new model that reads what two left."""
    batch = to_rank(batch_of(rank), rank)
    whole, optimizer = start(rank, kind, lora)
    train(whole, batch, 2, optimizer)
    parts = dict(zip(("model", "optimizer"), get_state_dict(whole, optimizer), strict=True))
    dcp.save(parts, checkpoint_id=folder)
    expected = train(whole, batch, 3, optimizer)
    again, optimizer = start(rank, kind, lora)
    train(again, batch, 1, optimizer)  # the optimizer's state exists, with other values
    parts = dict(zip(("model", "optimizer"), get_state_dict(again, optimizer), strict=True))
    dcp.load(parts, checkpoint_id=folder)
    set_state_dict(
        again, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
    )
    return expected, train(again, batch, 3, optimizer)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_save_and_resume(kind, lora, tmp_path):
    for whole, again in run_ranks(resumed, kind, lora, str(tmp_path)):
        for found, wanted in zip(again, whole, strict=True):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert_bits(found[name], value, name)


def mixed_precision(rank):
    """fp32 masters, bf16 in forward and backward, the same batch on both ranks."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = patch_model(build(lora=False, rank=rank))
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    gradients, _ = train(model, to_rank(batch_of(0), rank), steps=1)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return gradients


def test_fsdp2_mixed_precision_equals_a_bf16_model():
    model = patch_model(build(lora=False))
    for p in model.parameters():  # buffers stay in fp32, as under the policy
        p.data = p.data.bfloat16()
    expected, _ = train(model, to_rank(batch_of(0), 0), steps=1)
    for gradients in run_ranks(mixed_precision):
        for name, value in gradients.items():
            assert value.dtype == torch.float32
            assert_close(value, expected[name].float().cpu(), FP32, name)
