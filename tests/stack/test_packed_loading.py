"""Packed experts that one process loads and accelerate sends, and ``moe-patch train`` over them."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from moe_patch import (
    UnsupportedModelError,
    UnsupportedOptionError,
    load_quantized,
    patch_model,
    quantize_experts,
)
from moe_patch.quant import elsewhere, fp8_loading
from moe_patch.quant.elsewhere import materialise_adapters
from moe_patch.quant.sharded_state import rank0_only
from moe_patch.train import sharded
from moe_patch.train.config import make_config
from moe_patch.train.run import run
from tests.quant.test_fp8_checkpoint import loads_fp8, write_fp8
from tests.stack.test_ranks import gathered, optimizer_of, train
from tests.support.adapters import adapt, attention, lora_config
from tests.support.dist_helpers import run_ranks
from tests.support.numerics import FP32, assert_bits, assert_close
from tests.support.packed_ranks import (
    accelerator,
    base,
    batch_of,
    build,
    device,
    launched_with_fsdp2,
    whole_batch,
)
from tests.support.quant_models import EXPERTS
from tests.support.train_nodes import TEXT, node

# Folder -> storage; the first is in 16 bits, the others are as save_pretrained writes packed ones.
FOLDERS = {"plain": "nf4", "packed": "nf4", "blocks": "mxfp4"}
DTYPE = torch.float32


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write one checkpoint of each kind, of five experts."""
    found = tmp_path_factory.mktemp("checkpoints")
    build(num_experts=5, output_router_logits=False, vocab_size=300).save_pretrained(
        found / "plain"
    )
    base("nf4", 5).save_pretrained(found / "packed")
    base("mxfp4", 5).save_pretrained(found / "blocks")
    return found


def load(path, storage):
    model = load_quantized(str(path), storage, dtype=DTYPE)
    torch.manual_seed(1)
    targets = attention("gpt_oss" if storage == "mxfp4" else "qwen3_moe")
    return patch_model(adapt(model, lora_config(EXPERTS, targets)).train())


def sent(rank, folders, kinds):
    """Train what rank 0 loads; return devices before, logits, and adapters after two steps."""
    found = {}
    for name, storage in kinds.items():
        with launched_with_fsdp2():
            made = accelerator()
            model = load(folders / name, storage)
            assert rank0_only()
            materialise_adapters(model)
            frozen = {p.device.type for p in model.parameters() if not p.requires_grad}
            optimizer = optimizer_of(model)
            model, optimizer = made.prepare(model, optimizer)
            batch = batch_of(rank)
            with torch.no_grad():
                logits = model(input_ids=batch["input_ids"]).logits
            train(model, batch, 2, optimizer)
            adapters = {n: gathered(t) for n, t in get_peft_model_state_dict(model).items()}
            found[name] = frozen, logits, adapters
    return found


def check_sent(results, folders, kinds):
    for name, storage in kinds.items():
        model = load(folders / name, storage).to(device(2))
        for rank, result in enumerate(results):
            frozen, logits, _ = result[name]
            assert frozen == ({"cpu"} if rank == 0 else {"meta"}), name
            with torch.no_grad():
                own = model(input_ids=batch_of(rank, 0)["input_ids"]).logits
            assert_bits(logits, own.cpu(), f"{name} logits of rank {rank}")
        train(model, whole_batch(), 2, optimizer_of(model))
        expected = get_peft_model_state_dict(model)
        for _, _, adapters in (result[name] for result in results):
            assert adapters.keys() == expected.keys()
            for key, value in expected.items():
                assert_close(adapters[key], value.cpu(), FP32, f"{name} {key}")


def test_rank_0_loads_and_the_others_hold_nothing_before(folders):
    check_sent(run_ranks(sent, folders, FOLDERS), folders, FOLDERS)


def sent_as_by_a_card(rank, folders, kinds):
    """Load as where a device computes in FP8, so that transformers keeps Linear modules in FP8."""
    with mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment"):
        return sent(rank, folders, kinds)


@loads_fp8
def test_rank_0_loads_an_fp8_checkpoint(tmp_path, monkeypatch):
    """Dequantise attention on rank 0, whatever its device computes in; others have no FP8 there."""
    write_fp8(tmp_path / "published", 128, num_experts=5, output_router_logits=False)
    kinds = {"published": "fp8"}
    results = run_ranks(sent_as_by_a_card, tmp_path, kinds)
    monkeypatch.setattr(fp8_loading, "rank0_only", lambda: True)
    check_sent(results, tmp_path, kinds)


def divided_fp8(rank, folder):
    """Return the message for FP8 experts as a card has them under expert parallelism."""
    with mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPE)
    experts = model.model.layers[0].mlp.experts
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    part = distribute_tensor(experts.gate_up_proj.data, mesh, [Shard(0)], src_data_rank=None)
    experts.gate_up_proj = torch.nn.Parameter(part, requires_grad=False)
    with pytest.raises(UnsupportedModelError) as refused:
        quantize_experts(model, "fp8")
    return str(refused.value)


@loads_fp8
def test_divided_fp8_experts_are_refused(tmp_path):
    write_fp8(tmp_path, 128)
    for said in run_ranks(divided_fp8, tmp_path):
        assert "gate_up_proj is divided over ranks; accepted: whole experts" in said


def test_zeros_of_older_transformers_are_forgotten():
    """Before 5.23 it fills the parameters of other ranks; tied ones stay tied."""
    model = build(tie_word_embeddings=True)
    elsewhere._forget_zeros(model)
    assert all(p.is_meta for p in model.parameters())
    assert not any(b.is_meta for b in model.buffers())
    assert model.lm_head.weight is model.model.embed_tokens.weight


def unmaterialised(rank, folder):
    with launched_with_fsdp2():
        accelerator()
        model = load(folder, "nf4")
        try:
            model.state_dict()
        except UnsupportedModelError as error:
            return str(error)
    return ""


def test_adapters_without_memory_are_refused_before_the_optimiser_is_mixed_up(folders):
    first, second = run_ranks(unmaterialised, folders / "plain")
    assert not first
    assert "materialise_adapters" in second


def config_of(folder, checkpoint, ranks, **training):
    (folder / "text.txt").write_text(TEXT)
    options = {
        "max_steps": 3, "per_device_train_batch_size": 4 // ranks, "optim": "sgd",
        "learning_rate": 0.5, "gradient_checkpointing": True, "report_to": "none",
        # One process may see one card alone, and the losses of a CPU are as good.
        "use_cpu": ranks == 1 or device(2).type == "cpu", "disable_tqdm": True,
    }  # fmt: skip
    name = f"{ranks}{'resumed' if 'resume_from_checkpoint' in training else ''}"
    return make_config(
        node(
            model={"path": str(checkpoint), "dtype": "float32"},
            tokenizer={"source": "train", "vocab_size": 300},
            data={"source": str(folder / "text.txt"), "block_size": 16},
            quantize_experts="nf4",
            training={**options, **training},
            output_dir=str(folder / name),
        )
    )


def run_command(rank, config):
    with launched_with_fsdp2():
        result = run(config)
    return [check.passed for check in result.checks], dict(result.trained["patched"].losses)


def test_the_training_command_equals_one_process(folders, tmp_path):
    whole = run(config_of(tmp_path, folders / "plain", 1))
    results = run_ranks(run_command, config_of(tmp_path, folders / "plain", 2))
    assert results[0][0] == [True]
    for _, losses in results[:1]:
        assert losses == pytest.approx(whole.trained["patched"].losses, rel=1e-5)
    one, two = (load_file(tmp_path / n / "adapter/adapter_model.safetensors") for n in "12")
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert_close(two[name], value, FP32, name)


@pytest.mark.slow
def test_the_training_command_resumes(folders, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "optim": "adamw_torch"}
    saving["learning_rate"] = 0.01
    run_ranks(run_command, config_of(tmp_path, folders / "plain", 2, **saving))
    saving["resume_from_checkpoint"] = str(tmp_path / "2/checkpoints/checkpoint-1")
    run_ranks(run_command, config_of(tmp_path, folders / "plain", 2, **saving))
    one, two = (
        load_file(tmp_path / n / "adapter/adapter_model.safetensors") for n in ("2", "2resumed")
    )
    for name, value in one.items():
        assert_bits(two[name], value, name)


def test_zero3_and_the_first_fsdp_are_refused(monkeypatch):
    monkeypatch.setattr(sharded, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(UnsupportedOptionError, match="ZeRO-3 cuts each parameter"):
        sharded.check_packed()
    monkeypatch.setattr(sharded, "is_deepspeed_zero3_enabled", lambda: False)
    sharded.check_packed()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(UnsupportedOptionError, match="FSDP 1 joins parameters"):
        sharded.check_packed()


def test_a_distributed_config_is_refused(folders):
    with pytest.raises(UnsupportedOptionError, match="sets distributed_config itself"):
        load_quantized(str(folders / "plain"), "nf4", distributed_config=object())
