"""smk_loss in a training file: the added gradient, the logs, and the refusals."""

from __future__ import annotations

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments, default_data_collator

from moe_patch import (
    UnsupportedOptionError,
    delta_sc,
    gate_accuracy,
    patch_model,
    record,
    smk_loss,
)
from moe_patch.signals.balance import balance
from moe_patch.train import build
from moe_patch.train.config import load_config, make_config
from moe_patch.train.data import TokenBlocks
from moe_patch.train.loop import train_once
from moe_patch.train.router_losses import RouterLossConfig
from moe_patch.train.run import run
from moe_patch.train.smk import SmkConfig, SmkTrainer
from tests.support import tiny_models
from tests.support.numerics import FP64, assert_bits, assert_close
from tests.support.signals_cases import build as build_fp64
from tests.support.signals_cases import sum_loss

ROOT = Path(__file__).parents[2]
K = 4
WEIGHT = 0.5


def model_of(dtype: torch.dtype = torch.float32) -> Any:
    overrides = tiny_models.with_experts("qwen3_moe", 8, K)
    return patch_model(tiny_models.build("qwen3_moe", dtype=dtype, **overrides), self_check=False)


def blocks(rows: int = 4) -> TokenBlocks:
    return TokenBlocks(tiny_models.inputs(model_of(), batch=rows)["input_ids"])


def arguments(tmp_path: Path, **options: Any) -> TrainingArguments:
    options = {"max_steps": 1, "per_device_train_batch_size": 2, "max_grad_norm": 0.0, **options}
    return TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], save_strategy="no", logging_steps=1,
        disable_tqdm=True, **options,
    )  # fmt: skip


class Gradients(TrainerCallback):
    """Record the gradients in front of the first optimiser step, by name."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found = self.found or {
            n: p.grad.clone() for n, p in kwargs["model"].named_parameters() if p.grad is not None
        }


def gradients(tmp_path: Path, smk: SmkConfig, **options: Any) -> tuple[dict[str, Tensor], Any]:
    model, callback = model_of(), Gradients()
    with record(model, router_input=True) as recorder:
        trainer = SmkTrainer(
            model=model, args=arguments(tmp_path, **options), train_dataset=blocks(),
            data_collator=default_data_collator, callbacks=[callback], smk=smk, recorder=recorder,
        )  # fmt: skip
        trainer.train()
    return callback.found, trainer


@pytest.mark.parametrize("steps", [1, 2], ids=["one micro-batch", "two"])
def test_the_routers_get_the_gradient_of_smk_loss_and_nobody_else(tmp_path, steps) -> None:
    """Add exactly the gradient of smk_loss, computed by hand after each micro-batch."""
    smk = SmkConfig(target="surprise", weight=WEIGHT)
    options = {"gradient_accumulation_steps": steps, "per_device_train_batch_size": 2}
    found, trainer = gradients(tmp_path, smk, **options)
    plain, _ = gradients(tmp_path, SmkConfig(weight=0.0), **options)
    model = model_of()
    gates = {n: p for n, p in model.named_parameters() if "gate.weight" in n}
    added = {name: torch.zeros_like(gate) for name, gate in gates.items()}
    batches = list(trainer.get_train_dataloader())[:steps]
    for batch in batches:
        with record(model, router_input=True) as recorder:
            model(**batch).loss.backward()
        grads = torch.autograd.grad(smk_loss(recorder, model, "surprise"), list(gates.values()))
        for name, grad in zip(gates, grads, strict=True):
            added[name] += WEIGHT * grad / steps
    for name, grad in found.items():
        if name in added:
            assert_close(grad - plain[name], added[name], 1e-4, name)
            assert added[name].any()
        else:
            assert_bits(grad, plain[name], name)


def test_gradients_are_averaged_over_processes(tmp_path, monkeypatch) -> None:
    from accelerate import Accelerator

    asked = []
    original = Accelerator.reduce

    def reduce(self: Any, tensor: Tensor, reduction: str = "sum", **kwargs: Any) -> Tensor:
        asked.append((tuple(tensor.shape), reduction))
        return original(self, tensor, reduction, **kwargs)

    monkeypatch.setattr(Accelerator, "reduce", reduce)
    gradients(tmp_path, SmkConfig())
    assert asked == [((8, 32), "mean")] * 2


def test_what_is_logged_is_what_the_recorder_saw(tmp_path) -> None:
    model = model_of()
    smk = SmkConfig(target="surprise", weight=0.0)
    args = arguments(tmp_path, learning_rate=0.0)
    trained = train_once(model, args, blocks(2), name="smk", smk=smk)
    batch = {"input_ids": blocks(2).ids_NL, "labels": blocks(2).ids_NL}
    with record(model, router_input=True) as recorder:
        model(**batch).loss.backward()
    (metrics,) = trained.metrics.values()
    accuracy = torch.stack(list(gate_accuracy(recorder, "surprise").values())).mean()
    assert metrics["smk/gate_accuracy"] == pytest.approx(accuracy.item())
    for name, factors in (("smk/ce", {"kl": 0.0}), ("smk/kl", {"ce": 0.0})):
        wanted = smk_loss(recorder, model, "surprise", **factors).item()
        assert metrics[name] == pytest.approx(wanted, rel=1e-4)
    shares = [x.weights.amax(-1).mean().item() for x in recorder.layers.values()]
    assert metrics["smk/confidence"] == pytest.approx(sum(shares) / len(shares), rel=1e-5)
    loads = [balance(x.tokens_per_expert) for x in recorder.layers.values()]
    assert metrics["moe/max_violation"] == pytest.approx(max(x.max_violation for x in loads))


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "autocast"])
def test_beside_the_load_balance_loss(tmp_path, bf16) -> None:
    trained = train_once(
        model_of(),
        arguments(tmp_path, max_steps=2, bf16=bf16),
        blocks(),
        name="both",
        router_losses=RouterLossConfig(0.01),
        smk=SmkConfig(),
    )
    assert list(trained.losses) == list(trained.metrics) == [1, 2]
    assert all(value == value for found in trained.metrics.values() for value in found.values())


def test_the_configuration_trains_and_writes_the_measures(tmp_path) -> None:
    (tmp_path / "text.txt").write_text("routers choose experts and experts choose words. " * 400)
    overrides = {
        "data": {"source": str(tmp_path / "text.txt"), "block_size": 16},
        "tokenizer": {"source": "train", "vocab_size": 300},
        "training.max_steps": 2,
        "training.logging_steps": 1,
        "model.num_hidden_layers": 2,
        "model.hidden_size": 32,
        "output_dir": str(tmp_path / "out"),
    }
    config = load_config(ROOT / "configs" / "smk_tiny.yaml", overrides)
    assert (config.model.overrides["num_experts"], config.smk["target"]) == (16, "delta_sc")
    result = run(config)
    assert not result.failed
    with (result.folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2"]
    assert 0 <= float(rows[1]["smk/gate_accuracy"]) <= 1


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"smk": {"target": "best"}}, "smk.target is 'best'"),
        ({"smk": {"gradient": "all"}}, "smk.gradient is 'all'"),
        ({"smk": {"wait": 1}}, "unknown key 'wait'; did you mean 'weight'"),
        ({"smk": {}, "compare_unpatched": True}, "smk needs the records of a patched model"),
        ({"smk": {}, "moe_patch": False}, "smk needs the records of a patched model"),
    ],
)
def test_wrong_values_are_named(changes, match) -> None:
    node = {
        "model": {"model_type": "qwen3_moe"}, "tokenizer": "train", "data": "text.txt",
        "output_dir": "out", **changes,
    }  # fmt: skip
    with pytest.raises(UnsupportedOptionError, match=match):
        build.check_options(make_config(node))


def uniform(model: Any) -> Any:
    for _, block in tiny_models.blocks(model):
        block.gate.weight.data.zero_()
    return model


def fp64_recorder(model: Any) -> Any:
    with record(model, router_input=True) as recorder:
        sum_loss(model, tiny_models.inputs(model)).backward()
    return recorder


def test_a_router_without_an_opinion_is_perfect_by_output_and_not_by_parameters() -> None:
    """The trivial solution: equal weights leave nothing to tell experts apart by output.

    Every token ties, so the first choice is the target everywhere and the prior is even.
    """
    overrides = tiny_models.with_experts("qwen3_moe", 8, K)
    model = uniform(patch_model(build_fp64("qwen3_moe", 2, **overrides), self_check=False))
    recorder = fp64_recorder(model)
    for accuracy in gate_accuracy(recorder, "surprise", "output").values():
        assert accuracy == 1.0
    assert smk_loss(recorder, model, ce=0.0, gradient="output").item() == pytest.approx(0, abs=1e-9)
    for accuracy in gate_accuracy(recorder, "surprise").values():
        assert accuracy < 0.6
    assert smk_loss(recorder, model, ce=0.0).item() > 1e-3


def test_by_output_the_target_is_the_routers_own_last_choice() -> None:
    overrides = tiny_models.with_experts("qwen3_moe", 8, K)
    model = patch_model(build_fp64("qwen3_moe", 2, **overrides), self_check=False)
    for layer in fp64_recorder(model).layers.values():
        assert torch.equal(layer.grad_norm_output.argmin(-1), layer.weights.argmin(-1))
        assert not torch.equal(layer.grad_norm_params.argmin(-1), layer.weights.argmin(-1))


def test_by_expert_the_target_follows_from_the_chosen_experts_alone() -> None:
    """Rank experts by the root of the sum of squares over their rows, alike for all tokens."""
    overrides = tiny_models.with_experts("qwen3_moe", 8, K)
    model = patch_model(build_fp64("qwen3_moe", 2, **overrides), self_check=False)
    recorder = fp64_recorder(model)
    found = delta_sc(recorder, gradient="expert")
    for path, layer in recorder.layers.items():
        total_E = torch.stack(
            [layer.grad_norm_params[layer.ids == e].square().sum().sqrt() for e in range(8)]
        )
        surprise = total_E[layer.ids]
        for t in range(len(layer.ids)):
            z = [(v - v.mean()) / v.std(correction=0) for v in (layer.act_norm[t], surprise[t])]
            assert_close(found[path][t], z[0] - z[1], FP64, path)
        hits = (surprise.argmin(-1) == 0).double().mean()
        assert gate_accuracy(recorder, "surprise", "expert")[path] == pytest.approx(hits.item())
    smk_loss(recorder, model, "surprise", gradient="expert").backward()
    assert all(block.gate.weight.grad.any() for _, block in tiny_models.blocks(model))


def test_the_table_in_the_docs_is_that_of_the_rows() -> None:
    """docs/signals.md shows the output of smk_report.py for docs/data/smk_tiny.jsonl."""
    spec = importlib.util.spec_from_file_location(
        "smk_report", ROOT / "benchmarks" / "studies" / "smk_report.py"
    )
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    lines = (ROOT / "docs" / "data" / "smk_tiny.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({(row["variant"], row["seed"]) for row in rows}) == len(rows)
    text = (ROOT / "docs" / "signals.md").read_text()
    shown = text.split("<!-- smk table -->")[1].split("<!-- end of smk table -->")[0]
    assert shown.strip() == report.table(rows)
