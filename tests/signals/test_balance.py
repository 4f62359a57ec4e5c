"""Load measures, the bias update of every kind of family, two ranks, logs of a Trainer."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments

from moe_patch import (
    PatchStateError,
    UnsupportedOptionError,
    patch_model,
    record,
    update_expert_bias,
)
from moe_patch.signals.balance import (
    balance,
    balance_metrics,
    balance_table,
    bias_of,
    log_balance,
)
from tests.support import tiny_models
from tests.support.numerics import FP32, assert_bits, assert_close
from tests.support.signals_cases import correction_biases

RATE = 0.01
# Places of the bias: on the router (flat, or as one row), or on the block that passes it.
FAMILIES = (
    "deepseek_v3", "ernie4_5_moe", "minimax_m2", "afmoe", "kolibri1",
    pytest.param(
        "lfm2_moe", marks=pytest.mark.families(*tiny_models.needs("lfm2_moe", entry=True))
    ),
)  # fmt: skip


def patched(model_type: str) -> Any:
    return patch_model(tiny_models.build(model_type), self_check=False)


@pytest.mark.parametrize(
    ("load", "violation", "entropy", "dead"),
    [
        ([5, 5, 5, 5], 0.0, 1.0, 0),
        ([20, 0, 0, 0], 3.0, 0.0, 3),
        ([10, 10, 0, 0], 1.0, 0.5, 2),
        ([3, 1, 0, 0], 2.0, (0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / math.log(4), 2),
    ],
)
def test_measures(load, violation, entropy, dead) -> None:
    found = balance(torch.tensor(load))
    assert found.max_violation == pytest.approx(violation, rel=1e-12)
    assert found.entropy == pytest.approx(entropy, rel=1e-12)
    assert found.dead == dead
    assert math.isnan(balance(torch.zeros(4)).max_violation)
    assert balance(torch.zeros(4)).dead == 4


@pytest.mark.parametrize("model_type", FAMILIES)
def test_each_bias_moves_against_its_load(model_type) -> None:
    model = patched(model_type)
    before = {name: t.clone() for name, t in correction_biases(model).items()}
    assert before
    with record(model) as recorder:
        for seed in (1, 2):  # two micro-batches of one optimiser step
            tiny_models.loss(model(**tiny_models.inputs(model, seed=seed))).backward()
    loads = {path: layer.load.clone() for path, layer in recorder.layers.items()}
    signs = update_expert_bias(model, recorder, rate=RATE)
    assert signs.keys() == loads.keys()
    after = correction_biases(model)
    for (path, load), (name, old) in zip(loads.items(), before.items(), strict=True):
        assert name.startswith(path)
        mean = load.double().mean()
        wanted = torch.tensor([0 if c == mean else (1 if c < mean else -1) for c in load])
        assert {-1, 1} <= set(wanted.tolist())
        assert torch.equal(signs[path], wanted.to(signs[path].dtype))
        assert_close(after[name].flatten() - old.flatten(), RATE * wanted, 1e-4, name)
        assert after[name].grad_fn is None
        assert after[name].requires_grad is old.requires_grad


def test_many_updates_even_out_the_load() -> None:
    model = patched("deepseek_v3")
    batch = tiny_models.inputs(model, batch=8, seq=16)
    violations = []
    with record(model) as recorder, torch.no_grad():
        for _ in range(60):
            model(**batch)
            update_expert_bias(model, recorder, rate=0.02)
            closed = recorder.step()
            violations.append(balance(closed.load["model.layers.1.mlp"]).max_violation)
    assert violations[-1] < 0.5 * violations[0]


def test_under_grad_and_between_forward_and_backward_nothing_changes_for_autograd() -> None:
    plain, updated = patched("deepseek_v3"), patched("deepseek_v3")
    batch = tiny_models.inputs(plain)
    tiny_models.loss(plain(**batch)).backward()
    with record(updated) as recorder:
        loss = tiny_models.loss(updated(**batch))
        update_expert_bias(updated, recorder)
        loss.backward()
    for mine, theirs in zip(updated.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            assert_bits(mine.grad, theirs.grad)


def test_a_trained_bias_is_updated_outside_the_graph() -> None:
    model = patched("afmoe")
    for bias in correction_biases(model).values():
        bias.requires_grad_(True)
    with record(model) as recorder:
        model(**tiny_models.inputs(model))
    before = {name: bias.detach().clone() for name, bias in correction_biases(model).items()}
    update_expert_bias(model, recorder)
    for name, bias in correction_biases(model).items():
        assert bias.is_leaf
        assert bias.requires_grad
        assert not torch.equal(bias, before[name])


def test_errors() -> None:
    model = patched("qwen3_moe")
    with record(model) as recorder:
        model(**tiny_models.inputs(model))
    with pytest.raises(UnsupportedOptionError, match="no recorded layer .* has a correction bias"):
        update_expert_bias(model, recorder)
    model = patched("minimax_m2")
    with record(model) as recorder:
        model(**tiny_models.inputs(model))
        recorder.step()
    with pytest.raises(PatchStateError, match="no forward since the last step"):
        update_expert_bias(model, recorder)
    layer = next(iter(recorder.layers.values()))
    layer.bias = layer.bias.clone()
    with pytest.raises(PatchStateError, match="no parameter or buffer"):
        bias_of(model, layer)


class Reporter(TrainerCallback):
    """Record the logs that the integrations named by ``report_to`` receive."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen.append((state.global_step, dict(logs)))


def trainer_of(model: Any, folder: Any, **options: Any) -> Any:
    batch = tiny_models.inputs(model)
    rows = [{name: t[i] for name, t in batch.items()} for i in (0, 1)] * 4
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
        report_to=[], save_strategy="no", disable_tqdm=True,
        **{"max_steps": 4, "logging_steps": 2, **options},
    )  # fmt: skip
    return Trainer(model, args, train_dataset=rows, eval_dataset=rows, callbacks=[Reporter()])


def reported(trainer: Any) -> list[tuple[int, dict[str, float]]]:
    """Return step and values of every report with measures of the load."""
    (reporter,) = (c for c in trainer.callback_handler.callbacks if isinstance(c, Reporter))
    return [(step, logs) for step, logs in reporter.seen if "moe/entropy" in logs]


def test_a_trainer_updates_the_biases_once_a_step(tmp_path) -> None:
    model = patched("deepseek_v3")
    before = {name: bias.clone() for name, bias in correction_biases(model).items()}
    trainer = trainer_of(model, tmp_path)
    with record(model) as recorder:
        log_balance(trainer, recorder, print_table=False, bias_rate=RATE)
        trainer.train()
    for (path, bias), old in zip(correction_biases(model).items(), before.values(), strict=True):
        loads = [closed.load[path.partition(".gate.")[0]].double() for closed in recorder.history]
        signs = sum(torch.sign(load.mean() - load) for load in loads)
        assert len(loads) == 4
        assert_close(bias - old, RATE * signs, 1e-4, path)


def test_what_is_evaluated_between_steps_counts_for_none(tmp_path) -> None:
    def trained(folder: str, **options: Any) -> tuple[list[Any], list[Tensor]]:
        model = patched("deepseek_v3")
        trainer = trainer_of(model, tmp_path / folder, **options)
        with record(model) as recorder:
            log_balance(trainer, recorder, print_table=False, bias_rate=RATE)
            trainer.train()
        loads = [load for closed in recorder.history for load in closed.load.values()]
        return loads, list(correction_biases(model).values())

    plain = trained("plain")
    evaluated = trained("evaluated", eval_strategy="steps", eval_steps=1, eval_on_start=True)
    for mine, theirs in zip(evaluated, plain, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert_bits(one, other)


def test_a_trainer_that_logs_by_epoch_logs_the_load_too(tmp_path) -> None:
    model = patched("qwen3_moe")
    options = {"max_steps": -1, "num_train_epochs": 2, "logging_strategy": "epoch"}
    trainer = trainer_of(model, tmp_path, **options)
    with record(model) as recorder:
        log_balance(trainer, recorder, print_table=False)
        trainer.train()
    assert [step for step, _ in reported(trainer)] == [2, 4]
    for (_, entry), closed in zip(reported(trainer), recorder.history[1::2], strict=True):
        assert entry == pytest.approx({**balance_metrics(closed), "epoch": entry["epoch"]})


def test_a_trainer_logs_the_load_and_prints_a_table(tmp_path, capsys) -> None:
    model = patched("qwen3_moe")
    trainer = trainer_of(model, tmp_path)
    with record(model) as recorder:
        log_balance(trainer, recorder)
        trainer.train()
    assert [step for step, _ in reported(trainer)] == [2, 4]
    assert len(recorder.history) == 4
    for (_, entry), closed in zip(reported(trainer), recorder.history[1::2], strict=True):
        found = [balance(load) for load in closed.load.values()]
        assert int(sum(load.sum() for load in closed.load.values())) == len(found) * 4 * 7 * 2
        wanted = max(layer.max_violation for layer in found)
        assert_close(torch.tensor(entry["moe/max_violation"]), torch.tensor(wanted), FP32)
        assert entry["moe/dead_experts"] == sum(layer.dead for layer in found)
    table = balance_table(recorder)
    assert table in capsys.readouterr().out
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [
        [path, str(4 * 4 * 7 * 2)] for path in recorder.layers
    ]
