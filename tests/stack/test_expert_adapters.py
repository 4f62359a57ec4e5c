"""Adapters on experts under expert parallelism equal PEFT's own in one process.

Each rank holds the factors of its experts. Loss, gradients, clipping, an optimiser's step, the
saved file, what is loaded from it and generated tokens are compared. Ranks communicate through NCCL
if there are enough CUDA devices, else through gloo.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from moe_patch import patch_model
from moe_patch.expert_parallel import (
    attach_adapter,
    clip_gradients,
    load_adapter,
    shard_adapters,
)
from tests.support import expert_adapters as cases
from tests.support import window
from tests.support.dist_helpers import device, run_ranks
from tests.support.numerics import FP32, assert_close

pytestmark = window.expert_adapters
FILE, A = "adapter_model.safetensors", "lora_A.default.weight"


def ranks(rank, name, model_class, folder, world):
    found = {}
    for layout, (options, batches, _, dense) in cases.layouts(world).items():
        own = (rank * batches // world, 9)  # 9: the second pass of one step
        model = cases.load(model_class, folder, options)
        torch.manual_seed(0)
        model = patch_model(attach_adapter(model, cases.config(name, dense)))
        runs = {kind: cases.run(model, kind, own) for kind in cases.BATCHES}
        sizes = {p.to_local().numel() for p in model.parameters() if is_factor(p)}
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        runs["checkpointed"] = cases.run(model, "any", own)
        model.gradient_checkpointing_disable()
        runs["norm"] = {"norm": clip_gradients(model, 0.1)}
        cases.step(model)
        model.save_pretrained(f"{folder}/{layout}")
        found[layout] = {"runs": runs, "tokens": cases.decode(model), "sizes": sizes}
        again = load_adapter(
            cases.load(model_class, folder, options), f"{folder}/{layout}", is_trainable=True
        )
        found[layout]["loaded"] = cases.run(patch_model(again), "any", own)["loss"]
        found[layout]["after"] = cases.run(model, "any", own)["loss"]
    return found


def is_factor(p):
    return p.requires_grad and isinstance(p, DTensor)


class Expected(NamedTuple):
    """One process: runs on all batches of a step, then tokens and whole factors after the step."""

    runs: dict[str, dict[str, torch.Tensor]]
    tokens: torch.Tensor
    file: Path
    factors: list[torch.Tensor]


def expected(base, name, batches, dense, rank_batch, folder):
    model = cases.reference(copy.deepcopy(base), name, dense)
    every, runs = tuple(range(batches)) + (9,) * batches, {}
    for kind in cases.BATCHES:
        found = cases.run(model, kind, every)
        mean = {key: (t / batches).cpu() for key, t in found.items()}
        with torch.no_grad():
            own = [model(**on(model, kind, number)).loss for number in (rank_batch, 9)]
        runs[kind] = mean | {"loss": torch.stack(own).sum().cpu()}
    trained = [p for p in model.parameters() if p.grad is not None]
    for p in trained:
        p.grad /= batches
    norm = torch.nn.utils.clip_grad_norm_(trained, 0.1)
    runs |= {"checkpointed": runs["any"], "norm": {"norm": norm.cpu()}}
    cases.step(model)
    model.save_pretrained(folder)
    factors = [p for n, p in model.named_parameters() if ".experts." in n and "lora" in n]
    return Expected(runs, cases.decode(model).cpu(), folder / FILE, factors)


def on(model, kind, number):
    return {key: t.to(model.device) for key, t in cases.batch(kind, number).items()}


def check_ranks(tmp_path, name, world, **over):
    base = cases.make(name, **over)
    base.save_pretrained(tmp_path)
    base.to(device(world))
    results = run_ranks(ranks, name, type(base), str(tmp_path), world, world=world)
    wanted = {}
    for rank, found in enumerate(results):
        for layout, (_, batches, ep, dense) in cases.layouts(world).items():
            key = batches, dense, rank * batches // world
            if key not in wanted:
                wanted[key] = expected(base, name, *key, tmp_path / f"one{len(wanted)}")
            want, got = wanted[key], found[layout]
            for kind, run in want.runs.items():
                assert got["runs"][kind].keys() == run.keys()
                for one, value in run.items():
                    assert_close(got["runs"][kind][one], value, FP32, f"{layout} {one}")
            assert_close(got["loaded"], got["after"], FP32, layout)
            assert torch.equal(got["tokens"], want.tokens)
            same_file(tmp_path / layout / FILE, want.file)
            assert got["sizes"] == {p.numel() // ep for p in want.factors}
    return wanted


def peft_first(rank, model_class, folder):
    """Let transformers divide the experts of a model that carries adapters."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = cases.reference(model.to(device(2, rank)), "qwen3_moe", False)
    mesh = init_device_mesh(device(2).type, (2,), mesh_dim_names=("ep",))
    plan = {}
    for path, module in model.named_modules():
        if path.endswith("experts.base_layer.base_layer"):
            plan |= {f"{path}.{name}": "grouped_gemm" for name in module._parameters}
            plan[path] = "ep_dispatch_experts"
    apply_expert_parallelism(model, mesh, mesh, plan)
    return cases.run(patch_model(shard_adapters(model)), "any", (0,))


def peft_after(rank, model_class, folder):
    """Let PEFT attach whole factors to a model that transformers has distributed."""
    model = cases.load(model_class, folder, {"fsdp_size": 2, "ep_size": 2})
    model = cases.reference(model, "qwen3_moe", True)
    return cases.run(patch_model(shard_adapters(model)), "any", (rank,))


@cases.dispatches
def test_adapters_that_peft_attached(tmp_path):
    base = cases.make("qwen3_moe")
    base.save_pretrained(tmp_path)
    base.to(device(2))
    found = run_ranks(peft_first, type(base), str(tmp_path))
    wanted = cases.run(cases.reference(copy.deepcopy(base), "qwen3_moe", False), "any", (0,))
    after = run_ranks(peft_after, type(base), str(tmp_path))
    mean = cases.run(cases.reference(base, "qwen3_moe", True), "any", (0, 1))
    for one, other in zip(found, after, strict=True):
        assert one.keys() == wanted.keys()
        assert other.keys() == mean.keys()
        for key, value in wanted.items():
            assert_close(one[key], value.cpu(), FP32, key)
        for key, value in mean.items():
            if key != "loss":
                assert_close(other[key], value.cpu() / 2, FP32, key)


def trainer(rank, model_class, folder):
    """Train with transformers' Trainer, which clips, and saves on every rank."""
    model = cases.load(model_class, folder, {"fsdp_size": 2, "ep_size": 2})
    torch.manual_seed(0)
    model = patch_model(attach_adapter(model, cases.config("qwen3_moe", False)))
    args = TrainingArguments(
        f"{folder}/out", max_steps=2, per_device_train_batch_size=2, save_strategy="no",
        report_to=[], max_grad_norm=0.1, logging_steps=1, disable_tqdm=True,
        use_cpu=model.device.type == "cpu",
    )  # fmt: skip
    rows = [{key: t[0] for key, t in cases.batch("any", i).items()} for i in range(8)]
    run = Trainer(model=model, args=args, train_dataset=rows)
    run.train()
    run.save_model(f"{folder}/adapter")
    norms = [line["grad_norm"] for line in run.state.log_history if "grad_norm" in line]
    return norms, cases.run(model, "any", (0,))["loss"]


@cases.dispatches
def test_the_trainer_clips_and_saves_divided_adapters(tmp_path):
    base = cases.make("qwen3_moe")
    base.save_pretrained(tmp_path)
    (norms, loss), other = run_ranks(trainer, type(base), str(tmp_path))
    assert len(norms) == 2
    assert norms == other[0]
    alone = PeftModel.from_pretrained(base.to(device(2)), str(tmp_path / "adapter"))
    assert_close(alone(**on(alone, "any", 0)).loss.detach().cpu(), loss, FP32)


def same_file(path, reference):
    got, want = load_file(path), load_file(reference)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert_close(got[name], value, FP32, name)


@pytest.mark.parametrize("name", cases.MODELS)
def test_ranks_equal_one_process(tmp_path, name):
    wanted = check_ranks(tmp_path, name, 2)
    if name != "deepseek_v3":  # where groups of experts are excluded, others step in
        runs = wanted[1, not cases.DISPATCHES, 0].runs
        factors = [t for key, t in runs["few"].items() if key.endswith(A) and ".experts." in key]
        assert len(factors) == 4
        for grad in factors:  # rank 1 had no token at all
            first, last = grad.chunk(2)
            assert first.any()
            assert not last.any()


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.MODELS)
def test_four_ranks_equal_one_process(tmp_path, name):
    check_ranks(tmp_path, name, 4, num_key_value_heads=4)
