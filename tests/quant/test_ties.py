"""Tied experts stay tied through quantize_experts and its undo, or are refused by name."""

from __future__ import annotations

import copy

import pytest
from torch import nn

from moe_patch import UnsupportedModelError, dequantize_experts, patch_model, quantize_experts
from moe_patch.formats.tensor import QuantTensor
from moe_patch.quant.surgery import ignore_in_ddp
from tests.support.numerics import FP32, assert_bits, assert_close
from tests.support.quant_models import STORAGES, build, logits, quantised
from tests.support.snapshots import assert_unchanged, snapshot

NAMES = ("gate_up_proj", "down_proj")


def _experts(model: nn.Module) -> list[nn.Module]:
    return [layer.mlp.experts for layer in model.model.layers]


def _tied(how: str = "parameter", layers: int = 2) -> nn.Module:
    """Tie the last layer's experts to the first's: one parameter, or two that share memory."""
    model = build(num_hidden_layers=layers)
    first, *_, last = _experts(model)
    for name in NAMES:
        own = getattr(first, name)
        setattr(last, name, own if how == "parameter" else nn.Parameter(own.data))
    return model


def _bytes(weight: nn.Parameter) -> list[int]:
    """Return the addresses of the tensors that hold a weight."""
    if isinstance(weight, QuantTensor):
        return [part.data_ptr() for part in (weight.weight.packed, *weight.weight.scales)]
    return [weight.data_ptr()]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("how", ["parameter", "memory"])
def test_tied_experts_stay_tied(how: str, storage: str) -> None:
    model, untied = _tied(how, layers=3), _tied(how, layers=3)
    for name in NAMES:
        last = _experts(untied)[-1]
        setattr(last, name, nn.Parameter(getattr(last, name).data.clone()))
    expected = logits(patch_model(quantize_experts(untied, storage)))
    patch_model(quantize_experts(model, storage))
    first, other, last = _experts(model)
    for step in (lambda: None, lambda: dequantize_experts(model)):
        step()
        for name in NAMES:
            one, two = getattr(first, name), getattr(last, name)
            assert (one is two) == (how == "parameter")
            assert _bytes(one) == _bytes(two)
            assert not set(_bytes(one)) & set(_bytes(getattr(other, name)))
        assert_close(logits(model), expected, FP32)
        assert_bits(logits(copy.deepcopy(model)), logits(model))


def test_a_tied_model_is_saved_loaded_and_left_out_of_ddp() -> None:
    model = quantize_experts(_tied(), "nf4")
    assert len(quantised(model)) == 2
    ignore_in_ddp(model)
    assert len(model._ddp_params_and_buffers_to_ignore) == 4
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert sum(name.endswith("down_proj.absmax") for name in state) == 2
    other = quantize_experts(_tied(), "nf4")
    for weight in quantised(other):
        weight.packed.zero_()
    other.load_state_dict(state)
    for name, value in other.state_dict().items():
        assert_bits(value, state[name], name)


def test_a_tie_that_would_be_cut_is_refused() -> None:
    """Refuse to cut a tie to an excluded block, or to a module that holds no experts."""
    said = (
        r"model\.layers\.0\.mlp\.experts\.gate_up_proj: cannot be quantised: it is tied to "
        r"model\.layers\.1\.mlp\.experts\.gate_up_proj \(Qwen3MoeExperts\)"
    )
    for how in ("parameter", "memory"):
        model = _tied(how)
        before = snapshot(model)
        with pytest.raises(UnsupportedModelError, match=said):
            quantize_experts(model, "nf4", exclude=("*layers.1.*",))
        assert_unchanged(before, snapshot(model))
    model = build(num_hidden_layers=1)
    model.teacher = nn.ParameterDict({"down": _experts(model)[0].down_proj})
    with pytest.raises(UnsupportedModelError, match=r"tied to teacher\.down \(ParameterDict\)"):
        quantize_experts(model, "fp8")
    assert not quantised(model)
