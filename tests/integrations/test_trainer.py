"""MoePatchCallback inside Hugging Face Trainer: same losses, best model, resume, conflicts."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

from moe_patch import UnsupportedOptionError, patch_model, patch_report, unpatch_model
from moe_patch.integrations.trainer import MoePatchCallback
from moe_patch.tools.base_identity import known_base, read_record
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapt, attention, lora_config
from tests.support.numerics import assert_bits, assert_close
from tests.support.snapshots import assert_patched_stretch_unseen, logits

STEPS = 6


class Rows(torch.utils.data.Dataset):
    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, 90, (16, 7), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def build(lora=False):
    model = tiny_models.build("qwen3_moe")
    return adapt(model, lora_config(EXPERTS, attention("qwen3_moe"))) if lora else model


def arguments(folder, **changes):
    defaults = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4,
        "learning_rate": 0.01, "logging_steps": 1, "report_to": [], "use_cpu": True, "seed": 3,
        "disable_tqdm": True, "save_strategy": "no",
    }  # fmt: skip
    return TrainingArguments(str(folder), **(defaults | changes))


def trainer(model, folder, *callbacks, **changes):
    args = arguments(folder, **changes)
    return Trainer(
        model, args, train_dataset=Rows(0), eval_dataset=Rows(1), callbacks=list(callbacks)
    )


def losses(each):
    return torch.tensor([row["loss"] for row in each.state.log_history if "loss" in row])


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_losses_equal_the_unpatched_run(tmp_path, lora, accumulation):
    runs = []
    for callbacks in ([], [MoePatchCallback()]):
        each = trainer(build(lora), tmp_path, *callbacks, gradient_accumulation_steps=accumulation)
        assert bool(patch_report(each.model)) == bool(callbacks)
        each.train()
        runs.append(each)
    assert_close(losses(runs[1]), losses(runs[0]), 1e-4)
    assert len(losses(runs[1])) == STEPS
    assert {row.tier for row in patch_report(runs[1].model)} == {"full"}
    batch = tiny_models.inputs(build())
    assert_close(logits(runs[1].model, batch), logits(runs[0].model, batch), 1e-3)


def test_a_model_from_model_init_is_patched_when_training_begins(tmp_path):
    args = arguments(tmp_path, max_steps=1)
    each = Trainer(
        args=args, model_init=build, train_dataset=Rows(0), callbacks=[MoePatchCallback()]
    )
    each.train()
    assert {row.tier for row in patch_report(each.model)} == {"full"}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_best_model_and_resume(tmp_path, lora):
    """Load the best checkpoint and resume from the middle of a run, as unpatched.

    The first of two checkpoints has to be the best one, so that the last weights are replaced. An
    unpatched run decides whether the higher or the lower loss counts as best.
    """
    options = {
        "save_strategy": "steps", "eval_strategy": "steps", "save_steps": 3, "eval_steps": 3,
        "load_best_model_at_end": True, "metric_for_best_model": "loss",
    }  # fmt: skip
    first = trainer(build(lora), tmp_path / "first", eval_strategy="steps", eval_steps=3)
    first.train()
    early, late = (row["eval_loss"] for row in first.state.log_history if "eval_loss" in row)
    options["greater_is_better"] = early > late
    curves = []
    for name, callbacks in (("plain", []), ("ours", [MoePatchCallback()])):
        folder = tmp_path / name
        whole = trainer(build(lora), folder, *callbacks, **options)
        whole.train()
        assert whole.state.best_model_checkpoint.endswith("checkpoint-3")
        seen = [row["eval_loss"] for row in whole.state.log_history if "eval_loss" in row]
        best = whole.evaluate()["eval_loss"]
        assert abs(best / seen[1] - 1) > 1e-4
        # Without adapters and callback the Trainer leaves the experts as they are (5.9 to 5.24).
        assert best == pytest.approx(seen[0], rel=1e-6) or not (lora or callbacks)
        resumed = trainer(build(lora), folder, *callbacks, **options)
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
        curves.append([losses(whole), losses(resumed), torch.tensor(best)])
    assert {row.tier for row in patch_report(resumed.model)} == {"full"}
    assert_bits(curves[1][1], curves[1][0])
    for found, wanted in zip(*reversed(curves), strict=True):
        if lora or found is curves[1][0]:
            assert_close(found, wanted, 1e-4)


@pytest.mark.families("mixtral")
def test_a_resumed_full_fine_tuning_equals_the_whole_run(tmp_path):
    """Loss by loss and weight by weight, from a model of other weights; files rename its router."""
    options = {"save_strategy": "steps", "save_steps": 3}
    runs = []
    for seed, checkpoint in ((0, None), (5, str(tmp_path / "checkpoint-3"))):
        model = tiny_models.build("mixtral", seed=seed)
        each = trainer(model, tmp_path, MoePatchCallback(), **options)
        each.train(resume_from_checkpoint=checkpoint)
        runs.append(each)
    whole, resumed = runs
    assert len(losses(whole)) == STEPS
    assert_bits(losses(resumed), losses(whole))
    state = whole.model.state_dict()
    for name, value in resumed.model.state_dict().items():
        assert_bits(value, state[name], name)


def test_a_resumed_model_of_model_init_is_refused(tmp_path):
    """The Trainer makes it and loads into it before any callback is called."""
    folder = tmp_path / "checkpoint-2"
    trainer(build(), tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    each = Trainer(
        args=arguments(tmp_path), model_init=build, train_dataset=Rows(0),
        callbacks=[MoePatchCallback()],
    )  # fmt: skip
    with pytest.raises(UnsupportedOptionError, match=r"model_init and resume.*Trainer\(model="):
        each.train(resume_from_checkpoint=str(folder))


def test_a_checkpoint_that_lacks_weights_is_refused_before_a_step(tmp_path):
    trainer(build(), tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    file = tmp_path / "checkpoint-2" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if ".experts." in name)
    save_file({key: value for key, value in tensors.items() if key != name}, file)
    each = trainer(build(), tmp_path, MoePatchCallback())
    with pytest.raises(UnsupportedOptionError, match=rf"{name} is missing \(first of 1\)"):
        each.train(resume_from_checkpoint=str(file.parent))
    assert each.state.global_step == 2


def test_adapters_in_a_checkpoint_note_their_base(tmp_path):
    build().save_pretrained(tmp_path / "base")
    base = type(build()).from_pretrained(tmp_path / "base", attn_implementation="eager")
    model = adapt(base, lora_config(EXPERTS, attention("qwen3_moe")))
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer(model, tmp_path, MoePatchCallback(), **options).train()
    noted = read_record(tmp_path / "checkpoint-2")
    assert noted == known_base(tmp_path / "base")


def test_checkpoints_load_into_an_unpatched_model(tmp_path):
    each = trainer(build(), tmp_path, MoePatchCallback(), max_steps=2)
    each.train()
    each.save_model(str(tmp_path / "saved"))
    loaded = type(each.model).from_pretrained(tmp_path / "saved", attn_implementation="eager")
    batch = tiny_models.inputs(loaded)
    expected = logits(unpatch_model(each.model), batch)
    loaded.set_experts_implementation("eager")
    assert_bits(logits(loaded, batch), expected)


def test_patch_train_undo_continue():
    model = build()
    assert_patched_stretch_unseen(model, tiny_models.inputs(model))


def test_an_ema_copy_of_a_patched_model_is_patched_and_its_own():
    model = patch_model(build())
    batch = tiny_models.inputs(model)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    average.update_parameters(model)
    first = logits(copy.deepcopy(model), batch)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    assert_bits(logits(average.module, batch), first)
    average.update_parameters(model)
    assert {row.tier for row in patch_report(average.module)} == {"full"}
    assert not torch.equal(logits(average.module, batch), first)


def test_false_leaves_the_model_alone(tmp_path):
    each = trainer(build(), tmp_path, MoePatchCallback(False), max_steps=1)
    each.train()
    assert not patch_report(each.model)


def test_wrong_options_are_named_when_the_callback_is_made():
    with pytest.raises(UnsupportedOptionError, match="did you mean 'backend'"):
        MoePatchCallback(backends="torch")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_liger_kernel": True, "liger_kernel_config": None}, "use_liger_kernel.*swiglu"),
        ({"n_gpu": 2}, "2 GPUs in one process.*accelerate launch"),
    ],
)
def test_conflicting_arguments_are_one_sentence(change, message):
    given = {"use_liger_kernel": False, "liger_kernel_config": None, "n_gpu": 1} | change
    model = build()
    with pytest.raises(UnsupportedOptionError, match=message):
        MoePatchCallback().on_init_end(SimpleNamespace(**given), None, None, model=model)
    assert not patch_report(model)


def test_liger_without_its_experts_is_accepted():
    given = SimpleNamespace(use_liger_kernel=True, liger_kernel_config={"swiglu": False}, n_gpu=1)
    model = build()
    MoePatchCallback().on_init_end(given, None, None, model=model)
    assert patch_report(model)
