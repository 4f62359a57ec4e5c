"""delta_sc, smk_loss, gate_accuracy and the update filter against loops over rows, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_patch import (
    PatchStateError,
    UnsupportedOptionError,
    delta_sc,
    gate_accuracy,
    patch_model,
    record,
    smk_loss,
)
from moe_patch.ops.experts.op import Signals
from moe_patch.runtime.taps import LayerSignals, count_rows
from moe_patch.signals.losses import router_logits
from moe_patch.signals.recorder import Recorder
from moe_patch.signals.updates import keep_updates
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapt, lora_config
from tests.support.numerics import FP64, assert_bits, assert_close
from tests.support.signals_cases import build, experts_below, factors_of, sum_loss

E, K = 8, 4
FLOAT = torch.float64
TARGETS = ("delta_sc", "surprise")


def made_up(
    act: list[list[float]], surprise: list[list[float]], ids: list[list[int]] | None = None
) -> Recorder:
    """A recorder with one layer of given norms (both gradient norms are the surprise)."""
    act_TK, surprise_TK = torch.tensor(act, dtype=FLOAT), torch.tensor(surprise, dtype=FLOAT)
    ids_TK = torch.arange(act_TK.shape[1]).expand(act_TK.shape) if ids is None else ids
    ids_TK = torch.as_tensor(ids_TK)
    layer = LayerSignals("layer", ids=ids_TK, tokens_per_expert=count_rows(ids_TK, E))
    layer.signals = Signals(torch.empty(3, *act_TK.shape, dtype=FLOAT), act_TK)
    layer.signals.grads_3TK.copy_(torch.stack([surprise_TK] * 3))
    return Recorder({"layer": layer})


def recorded(model: Any) -> tuple[Any, Recorder]:
    batch = tiny_models.inputs(model if not hasattr(model, "peft_config") else model.base_model)
    with record(model, router_input=True) as recorder:
        sum_loss(model, batch).backward()
    return model, recorder


def patched(model_type: str = "qwen3_moe", lora: tuple[str, ...] = (), top_k: int = K) -> Any:
    model = build(model_type, layers=2, **tiny_models.with_experts(model_type, E, top_k))
    if lora:
        model = adapt(model, lora_config(lora))
    return patch_model(model, self_check=False)


def expected_delta(layer: LayerSignals, surprise_TK: Tensor) -> Tensor:
    def z(values: list[float]) -> list[float]:
        mean = sum(values) / len(values)
        std = (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
        return [(v - mean) / std for v in values]

    rows = zip(layer.act_norm.tolist(), surprise_TK.tolist(), strict=True)
    return torch.tensor(
        [[a - g for a, g in zip(z(act), z(grad), strict=True)] for act, grad in rows], dtype=FLOAT
    )


@pytest.mark.parametrize("gradient", ["params", "output"])
def test_delta_sc_is_the_difference_of_z_scores(gradient) -> None:
    _, recorder = recorded(patched())
    found = delta_sc(recorder, gradient=gradient)
    for path, layer in recorder.layers.items():
        surprise_TK = getattr(layer, f"grad_norm_{gradient}")
        assert_close(found[path], expected_delta(layer, surprise_TK), FP64, path)
        assert found[path].dtype == FLOAT


def test_equal_values_have_no_z_score_and_two_experts_only_a_sign() -> None:
    third = [[0.1, 0.1, 0.1]]  # whose mean rounds to another number
    assert delta_sc(made_up(third, [[1.0, 1.0, 1.0]]))["layer"].tolist() == [[0.0, 0.0, 0.0]]
    two = delta_sc(made_up([[1.0, 5.0]], [[3.0, 3.0]]))["layer"]
    assert_close(two, torch.tensor([[-1.0, 1.0]], dtype=FLOAT), FP64)
    tiny = delta_sc(made_up([[1e-200, 3e-200]], [[0.0, 0.0]]))["layer"]
    assert_close(tiny, torch.tensor([[-1.0, 1.0]], dtype=FLOAT), FP64)
    with pytest.raises(UnsupportedOptionError, match="one expert per token"):
        delta_sc(made_up([[1.0]], [[1.0]]))


@pytest.mark.parametrize("empty", [None, -1, E])
def test_two_experts_ranked_alike_tie_exactly(empty: int | None) -> None:
    """Tie exactly at 1 - 1 in both slots, however the norms round; the lower id is the target."""
    generator = torch.Generator().manual_seed(0)
    act, surprise = torch.rand(2, 200, 2, generator=generator, dtype=torch.float32).sort(-1).values
    ids = torch.tensor([[5, 2]]).expand(200, 2)
    if empty is not None:
        act, surprise = (torch.cat([t, t.new_zeros(200, 1)], 1) for t in (act, surprise))
        ids = torch.cat([ids, torch.full((200, 1), empty)], 1)
    recorder = made_up(act.tolist(), surprise.tolist(), ids.tolist())
    layer = recorder.layers["layer"]
    layer.signals = Signals(torch.empty(3, *act.shape), act)
    layer.signals.grads_3TK.copy_(surprise)
    assert (delta_sc(recorder)["layer"] == 0).all()
    # The router's first choice is 5; among equals the target is 2.
    assert gate_accuracy(recorder)["layer"] == 0.0


def test_empty_slots_take_no_part() -> None:
    full = delta_sc(made_up([[1.0, 2.0, 4.0]], [[3.0, 1.0, 1.0]]))["layer"]
    for empty in (-1, E):
        ids = [[0, empty, 1, 2]]
        recorder = made_up([[1.0, 0.0, 2.0, 4.0]], [[3.0, 0.0, 1.0, 1.0]], ids)
        found = delta_sc(recorder)["layer"]
        assert found[0, 1] == 0
        assert_close(found[:, [0, 2, 3]], full, FP64)
        # The empty slot's surprise of zero is no minimum.
        assert gate_accuracy(recorder, "surprise")["layer"] == 0.0


def test_first_choice_is_the_target_and_ties_go_to_the_lower_id() -> None:
    act, equal = [[1.0, 1.0]] * 3, [[2.0, 2.0]] * 3
    recorder = made_up(act, equal, [[1, 0], [2, 3], [5, 6]])
    for target in TARGETS:
        assert_close(
            gate_accuracy(recorder, target)["layer"], torch.tensor(2 / 3, dtype=FLOAT), FP64
        )
    silent = made_up(act, [[0.0, 0.0], [1.0, 2.0], [2.0, 1.0]])
    assert gate_accuracy(silent, "surprise")["layer"] == 0.5


def test_by_expert_every_token_of_the_same_experts_has_the_same_target() -> None:
    """Score 1.0 for a router that sends all tokens to the same experts in the right order."""
    surprise = [[1.0, 2.0, 3.0], [3.0, 1.0, 2.0], [0.1, 3.0, 4.0]]
    recorder = made_up([[1.0, 1.0, 1.0]] * 3, surprise)
    assert gate_accuracy(recorder, "surprise")["layer"] == pytest.approx(2 / 3)
    assert gate_accuracy(recorder, "surprise", "expert")["layer"] == 1.0


def expected_loss(logits_TE: Tensor, layer: LayerSignals, target: str, ce: float, kl: float) -> Any:
    """Row by row with torch's own losses."""
    delta_TK = expected_delta(layer, layer.grad_norm_params)
    total, rows = 0.0, 0
    for t in range(layer.ids.shape[0]):
        surprise_K = layer.grad_norm_params[t]
        if not surprise_K.any():
            continue
        best = delta_TK[t].argmax() if target == "delta_sc" else surprise_K.argmin()
        logits_K = logits_TE[t, layer.ids[t]]
        prior_K = torch.softmax(-surprise_K / surprise_K.mean(), 0)
        total = total + ce * torch.nn.functional.cross_entropy(logits_K, best)
        log_q_K = torch.log_softmax(logits_K, 0)
        total = total + kl * torch.nn.functional.kl_div(log_q_K, prior_K, reduction="sum")
        rows += 1
    return total / rows


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("ce", "kl"), [(1.0, 1.0), (0.5, 0.0), (0.0, 2.0)])
def test_smk_loss_and_its_gradient_equal_a_loop_over_rows(target, ce, kl) -> None:
    model, recorder = recorded(patched())
    weights = [block.gate.weight for _, block in tiny_models.blocks(model)]
    model.zero_grad()
    loss = smk_loss(recorder, model, target, ce, kl)
    loss.backward()
    layers = list(recorder.layers.values())
    inputs = [layer.router_input @ w.mT for layer, w in zip(layers, weights, strict=True)]
    expected = sum(
        expected_loss(x, layer, target, ce, kl) for x, layer in zip(inputs, layers, strict=True)
    ) / len(layers)
    assert_close(loss, expected, FP64)
    wanted = torch.autograd.grad(expected, weights)
    for weight, grad in zip(weights, wanted, strict=True):
        assert_close(weight.grad, grad, FP64)
    with_gradient = {n for n, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {n for n, p in model.named_parameters() if "gate.weight" in n}


@pytest.mark.routers
@pytest.mark.parametrize("reentrant", [None, False, True], ids=["kept", "checkpoint", "reentrant"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_logits_are_computed_again_with_adapters_and_without_hooks(model_type, reentrant) -> None:
    router = "router.weight" if model_type == "gpt_oss" else "gate.weight"
    model = patched(model_type, lora=(router, *EXPERTS))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    model, recorder = recorded(model)
    for module in model.modules():
        module.register_forward_hook(lambda *_: pytest.fail("a hook fired"))
    for layer in recorder.layers.values():
        assert_close(router_logits(model, layer), layer.logits, 1e-6, layer.path)
    model.zero_grad()
    smk_loss(recorder, model).backward()
    trained = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    wanted = {n for n, p in model.named_parameters() if p.requires_grad and "experts" not in n}
    assert trained == wanted
    assert len(wanted) == 2 * len(recorder.layers)
    with model.disable_adapter():
        layer = next(iter(recorder.layers.values()))
        base = router_logits(model, layer)
    assert torch.linalg.vector_norm(base - layer.logits) > 1e-2


def test_rows_without_surprise_are_left_out() -> None:
    """Leave out rows of a sequence labelled -100: they have no gradient in the last layer."""
    model = patched()
    batch = tiny_models.inputs(model)
    batch["labels"][0] = -100
    with record(model, router_input=True) as recorder:
        model(**batch).loss.backward()
    layer = list(recorder.layers.values())[-1]
    assert not layer.grad_norm_params[:7].any()
    assert layer.grad_norm_params[7:13].all()
    model.zero_grad()
    smk_loss(recorder, model).backward()
    gate = tiny_models.blocks(model)[-1][1].gate.weight
    before = gate.grad.clone()
    layer.router_input[:7] += 1.0
    model.zero_grad()
    smk_loss(recorder, model).backward()
    assert_bits(gate.grad, before)
    assert torch.isfinite(before).all()


def test_a_row_of_empty_slots_leaves_loss_and_gradient_finite() -> None:
    model, recorder = recorded(patched())
    gates = [block.gate.weight for _, block in tiny_models.blocks(model)]
    layers = list(recorder.layers.values())
    losses = []
    for _ in range(2):
        model.zero_grad()
        with torch.autograd.set_detect_anomaly(True):  # refuses NaN on the way, too
            losses.append(smk_loss(recorder, model))
            losses[-1].backward()
        assert all(torch.isfinite(gate.grad).all() and gate.grad.any() for gate in gates)
        for layer in layers:
            layer.ids[0] = -1
            layer.signals.act_norm_TK[0] = layer.signals.grads_3TK[:, 0] = 0.0
    assert torch.isfinite(losses[1])
    assert losses[1] != losses[0]


def test_what_was_not_recorded_is_named() -> None:
    model = patched()
    batch = tiny_models.inputs(model)
    with record(model) as recorder:
        loss = sum_loss(model, batch)
        with pytest.raises(PatchStateError, match="run forward and backward"):
            delta_sc(recorder)
        loss.backward()
    with pytest.raises(PatchStateError, match="router_input=True"):
        smk_loss(recorder, model)
    for wrong in ({"target": "best"}, {"gradient": "all"}):
        with pytest.raises(UnsupportedOptionError, match=f"{next(iter(wrong))} is"):
            smk_loss(recorder, model, **wrong)
    for k in (0, -1):
        with pytest.raises(UnsupportedOptionError, match=f"k is {k}; accepted: at least 1 expert"):
            keep_updates(recorder, model, k)
    with pytest.raises(UnsupportedOptionError, match="keep is 'most'; accepted: min, max"):
        keep_updates(recorder, model, 2, keep="most")


@pytest.mark.parametrize("by", TARGETS)
@pytest.mark.parametrize("keep", ["min", "max"])
def test_the_update_filter_keeps_the_best_experts(by, keep) -> None:
    model, recorder = recorded(patched("gpt_oss"))
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    masks = keep_updates(recorder, model, 3, by, keep)
    for path, layer in recorder.layers.items():
        score_TK = layer.grad_norm_params if by == "surprise" else delta_sc(recorder)[path]
        scores = {e: score_TK[layer.ids == e].mean().item() for e in layer.ids.unique().tolist()}
        order = sorted(scores, key=lambda e: scores[e], reverse=keep == "max")
        assert sorted(order[:3]) == masks[path].nonzero().flatten().tolist()
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            assert_bits(parameter.grad, before[name], name)
            continue
        mask = masks[name.partition(".experts.")[0]]
        assert_bits(parameter.grad[mask], before[name][mask], name)
        assert not parameter.grad[~mask].any()
        assert before[name][~mask].any()


def test_the_update_filter_knows_how_adapters_are_packed() -> None:
    """Unpack gradients by expert as PEFT's own unpacking does."""
    model, recorder = recorded(patched(lora=EXPERTS))

    def unpacked(block: Any) -> dict[str, tuple[Tensor, Tensor, float]]:
        parameters = [p for p in block.experts.parameters() if p.grad is not None]
        for p in parameters:
            p.data, p.grad = p.grad, p.data
        found = {name: tuple(factors_of(block)[name]) for name in factors_of(block)}
        found = {n: (a.detach().clone(), b.detach().clone(), s) for n, (a, b, s) in found.items()}
        for p in parameters:
            p.data, p.grad = p.grad, p.data
        return found

    moe = [m for _, m in model.named_modules() if "experts" in m._modules]
    assert experts_below(moe[0]) is not moe[0].experts
    before = [unpacked(block) for block in moe]
    masks = keep_updates(recorder, model, 3)
    for block, old, mask in zip(moe, before, masks.values(), strict=True):
        new = unpacked(block)
        for name in ("gate_up_proj", "down_proj"):
            for mine, theirs in zip(new[name][:2], old[name][:2], strict=True):
                assert_bits(mine[mask], theirs[mask], name)
                assert theirs[~mask].any()
                assert not mine[~mask].any()
