"""TRL's SFT, DPO and GRPO trainers with MoePatchCallback: results equal those unpatched.

Needs TRL and datasets, which only the extra `dev` installs.
"""

from __future__ import annotations

import copy

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from moe_patch import patch_report
from moe_patch.integrations.trainer import MoePatchCallback
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, attention, lora_config
from tests.support.numerics import assert_close

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

STEPS = 3
WORDS = [f"w{i}" for i in range(80)]
COMMON = {
    "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 0.01, "logging_steps": 1,
    "report_to": [], "use_cpu": True, "seed": 3, "disable_tqdm": True, "save_strategy": "no",
    "bf16": False, "gradient_checkpointing": True,
}  # fmt: skip


def tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


def texts(count, length, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, len(WORDS), (count, length), generator=generator)
    return [" ".join(WORDS[i] for i in row) for row in ids.tolist()]


def rows(**columns):
    return datasets.Dataset.from_dict(columns)


def even_words(completions, **_):
    """A reward that depends on every sampled token."""
    return [
        float(sum(int(w[1:]) % 2 == 0 for w in c.split() if w[1:].isdigit())) for c in completions
    ]


def sft(folder, **common):
    args = trl.SFTConfig(str(folder), max_length=16, **COMMON)
    return trl.SFTTrainer(args=args, train_dataset=rows(text=texts(16, 12, 0)), **common)


def dpo(folder, model, **common):
    """Return a DPO trainer; with adapters, the base model is the reference."""
    data = rows(prompt=texts(16, 4, 0), chosen=texts(16, 6, 1), rejected=texts(16, 6, 2))
    args = trl.DPOConfig(str(folder), max_length=16, **COMMON)
    reference = None if common["peft_config"] else copy.deepcopy(model)
    return trl.DPOTrainer(model, reference, args=args, train_dataset=data, **common)


def grpo(folder, **common):
    """Set beta to 0 without adapters; else TRL would read a reference from a checkpoint."""
    beta = 0.04 if common["peft_config"] else 0.0
    args = trl.GRPOConfig(
        str(folder), num_generations=2, max_completion_length=6, beta=beta, **COMMON
    )
    data = rows(prompt=texts(16, 4, 0))
    return trl.GRPOTrainer(args=args, train_dataset=data, reward_funcs=even_words, **common)


MEASURES = {
    sft: ("loss",),
    dpo: ("loss", "rewards/margins"),
    grpo: ("loss", "reward", "completions/mean_length"),
}


def run(make, folder, lora, *callbacks):
    """Return the logged measures per step, and every trained weight."""
    model = tiny_models.build("qwen3_moe", output_router_logits=False)
    model.generation_config.update(pad_token_id=0, eos_token_id=2)
    config = lora_config(EXPERTS, attention("qwen3_moe"), lora_dropout=0.0) if lora else None
    torch.manual_seed(0)
    each = make(
        folder,
        model=model,
        processing_class=tokenizer(),
        peft_config=config,
        callbacks=list(callbacks),
    )
    each.train()
    logs = [log for log in each.state.log_history if "loss" in log]
    measures = {name: torch.tensor([log[name] for log in logs]) for name in MEASURES[make]}
    trained = {n: p.detach() for n, p in each.model.named_parameters() if p.requires_grad}
    return each.model, measures, trained


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("make", [sft, dpo, grpo], ids=lambda make: make.__name__)
def test_trainer_gives_what_the_unpatched_run_gives(make, lora, tmp_path):
    plain, expected, wanted = run(make, tmp_path / "plain", lora)
    assert not patch_report(plain)
    ours, measures, trained = run(make, tmp_path / "ours", lora, MoePatchCallback())
    reports = patch_report(ours)
    assert {row.tier for row in reports} == {"full"}
    assert all(("fused" in row.lora) == lora for row in reports)
    for name, values in expected.items():
        assert len(values) == STEPS
        assert_close(measures[name], values, 1e-4, name)
    assert trained.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_close(trained[name], value, 1e-3, name)
