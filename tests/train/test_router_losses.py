"""Router losses in a Trainer run: transformers' own auxiliary loss is the reference."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainingArguments

from moe_patch import UnsupportedModelError, UnsupportedOptionError, patch_model
from moe_patch.train.build import check_options
from moe_patch.train.config import make_config
from moe_patch.train.router_losses import RouterLossConfig, RouterLossTrainer
from tests.support import tiny_models
from tests.support.numerics import FP32, assert_close, rel_err

BALANCE = 0.05


def trainer(model, tmp_path, **losses):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    return RouterLossTrainer(model=model, args=args, router_losses=RouterLossConfig(**losses))


def padded(model):
    batch = tiny_models.inputs(model, seq=9)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, 4:] = 0
    return batch


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral", "minimax_m2"])
@pytest.mark.parametrize("patch", [False, True])
def test_load_balance_equals_transformers_own(model_type, patch, tmp_path):
    model = tiny_models.build(model_type).train()
    reference = copy.deepcopy(model)
    reference.config.output_router_logits = True
    reference.router_aux_loss_coef = BALANCE
    model.config.output_router_logits = False
    if patch:
        patch_model(model)
    batch = padded(model)
    wanted = reference(**batch).loss
    loss = trainer(model, tmp_path, load_balance=BALANCE).compute_loss(model, batch)
    assert_close(loss, wanted, FP32)
    mine, theirs = gradients(model, loss), gradients(reference, wanted)
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert_close(mine[name], gradient, 2 * FP32, name)
    assert rel_err(loss, model(**batch).loss) > 1e-3, "the loss would not show"


@pytest.mark.routers
@pytest.mark.families("deepseek_v3")
def test_z_loss_by_its_formula(tmp_path):
    model = patch_model(tiny_models.build("deepseek_v3").train())
    batch = tiny_models.inputs(model)
    logits = []
    gates = [m.mlp.gate for m in model.model.layers]
    hooks = [g.register_forward_hook(lambda _, __, out: logits.append(out[0])) for g in gates]
    plain = model(**batch).loss
    for hook in hooks:
        hook.remove()
    z = torch.stack([layer.logsumexp(-1).square().mean() for layer in logits]).mean()
    before = [list(gate._forward_hooks) for gate in gates]  # transformers' own recorder stays
    loss = trainer(model, tmp_path, z=0.1).compute_loss(model, batch)
    assert_close(loss, plain + 0.1 * z, FP32)
    assert [list(gate._forward_hooks) for gate in gates] == before


def test_accumulation_divides_what_is_added(tmp_path):
    model = tiny_models.build("qwen3_moe").train()
    batch = tiny_models.inputs(model)
    one = trainer(model, tmp_path, z=1.0)
    plain = model(**batch, num_items_in_batch=100).loss
    one.args.gradient_accumulation_steps = 4
    added = one.compute_loss(model, batch, num_items_in_batch=100) - plain
    whole = one.compute_loss(model, batch) - model(**batch).loss
    assert_close(added, whole / 4, 1e-4)


def test_reentrant_checkpointing_is_refused_by_name(tmp_path):
    model = tiny_models.build("qwen3_moe").train()
    one = trainer(model, tmp_path, load_balance=BALANCE)
    batch = tiny_models.inputs(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    gradients(model, one.compute_loss(model, batch))
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(UnsupportedOptionError, match="use_reentrant: false"):
        one.compute_loss(model, batch)


def test_a_router_without_plain_logits_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedModelError, match="does not return plain router logits"):
        trainer(tiny_models.build("gemma4"), tmp_path, z=1.0)


@pytest.mark.parametrize("where", ["last layer", "nowhere"])
def test_adapters_behind_the_routers(tmp_path, where):
    """Adapters get gradients as from the model's own loss; raise if none of them can."""
    targets = [f"layers.{i}.mlp.experts.down_proj" for i in ((0,) if where != "nowhere" else (1,))]
    model = get_peft_model(
        tiny_models.build("qwen3_moe"), LoraConfig(r=2, target_parameters=targets)
    )
    made = trainer(model, tmp_path, load_balance=0.5, z=0.1)
    batch = tiny_models.inputs(model.get_base_model())
    if where == "nowhere":
        with pytest.raises(UnsupportedOptionError, match="neither a router nor anything"):
            made.compute_loss(model.train(), batch)
        return
    made.compute_loss(model.train(), batch).backward()
    with_losses = [p.grad.clone() for n, p in model.named_parameters() if "lora_" in n]
    model.zero_grad()
    model(**batch).loss.backward()
    plain = [p.grad for n, p in model.named_parameters() if "lora_" in n]
    assert any(not torch.equal(a, b) for a, b in zip(with_losses, plain, strict=True))


def test_the_yaml_key_is_checked():
    node = {
        "model": {"model_type": "qwen3_moe"},
        "tokenizer": "train",
        "data": "python-stdlib-docstrings",
        "output_dir": "out",
        "router_losses": {"load_balance": 0.01, "zed": 1.0},
    }
    with pytest.raises(UnsupportedOptionError, match="zed"):
        check_options(make_config(node))
    node["router_losses"] = {"load_balance": -0.01}
    with pytest.raises(UnsupportedOptionError, match=r"load_balance is -0\.01"):
        check_options(make_config(node))
    node["router_losses"] = {"load_balance": 0.01, "z": 0.001}
    check_options(make_config(node))


@pytest.mark.parametrize(
    ("factors", "complaint"),
    [
        ({"load_balance": -0.01}, r"router_losses\.load_balance is -0\.01"),
        ({"z": float("nan")}, r"router_losses\.z is nan"),
        ({"z": float("inf"), "load_balance": 0.1}, r"router_losses\.z is inf"),
    ],
)
def test_a_factor_below_zero_or_not_finite_is_refused(factors, complaint):
    with pytest.raises(UnsupportedOptionError, match=complaint):
        RouterLossConfig(**factors)
