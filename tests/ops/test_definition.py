"""The plain reference equals transformers' experts; all other code is compared with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moe_patch.ops.experts import definition as reference
from moe_patch.types import ExpertWeights, Glu
from tests.support import tiny_models
from tests.support.numerics import FP64, assert_close, probe


def first_experts(model_type: str, **overrides) -> nn.Module:
    return tiny_models.blocks(tiny_models.build(model_type, torch.float64, **overrides))[0][
        1
    ].experts


def rows(T: int = 37, E: int = 8, K: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """fp64 hidden states, distinct ids that leave expert 5 empty, weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(T, tiny_models.SIZES["hidden_size"], generator=generator).double()
    order = torch.rand(T, E, generator=generator)
    order[:, 5] = 2.0
    weights = torch.rand(T, K, generator=generator).double()
    return x, order.argsort(-1)[:, :K], weights


def assert_same(experts: nn.Module, w: ExpertWeights, glu: Glu) -> None:
    """Check output and every gradient of the reference against transformers' eager loop in fp64."""
    x, ids, weights = rows()
    x.requires_grad_()
    weights.requires_grad_()
    leaves = {"x": x, "weights": weights} | dict(experts.named_parameters())
    theirs = type(experts).forward.__wrapped__(experts, x, ids, weights)
    mine = reference.experts(x, ids, weights, w, glu)
    assert_close(mine, theirs, FP64, "out")
    ref_grads = torch.autograd.grad(probe(theirs), leaves.values())
    my_grads = torch.autograd.grad(probe(mine), leaves.values())
    for name, a, b in zip(leaves, my_grads, ref_grads, strict=True):
        assert b.any(), name
        assert_close(a, b, FP64, name)


@pytest.mark.parametrize(
    ("hidden_act", "kind"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_pytorch_tanh", "gelu_tanh"), ("relu", "relu")]
    + [("relu2", "relu2")],
)
def test_gated_side_by_side(hidden_act, kind) -> None:
    experts = first_experts("qwen3_moe", hidden_act=hidden_act)
    assert_same(experts, ExpertWeights(experts.gate_up_proj, experts.down_proj), Glu(kind))


@pytest.mark.parametrize("limit", [7.0, 0.5], ids=["clamp rare", "clamp often"])
def test_interleaved_transposed_biased_and_clamped(limit) -> None:
    experts = first_experts("gpt_oss")
    experts.limit = limit
    w = ExpertWeights(
        experts.gate_up_proj.mT, experts.down_proj.mT,
        experts.gate_up_proj_bias, experts.down_proj_bias,
    )  # fmt: skip
    assert_same(experts, w, Glu("swiglu_oai", interleaved=True, alpha=experts.alpha, limit=limit))


def test_without_a_gate() -> None:
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    config = NemotronHConfig(
        hidden_size=tiny_models.SIZES["hidden_size"], moe_intermediate_size=16, n_routed_experts=8,
        mlp_hidden_act="relu2",
    )  # fmt: skip
    experts = NemotronHExperts(config).double()
    for weight in experts.parameters():
        nn.init.normal_(weight, std=0.3)
    w = ExpertWeights(experts.up_proj, experts.down_proj)
    assert_same(experts, w, Glu("relu2", gated=False))


def test_clamped_side_by_side() -> None:
    """DeepSeek-V4's gate: clamp before the activation."""
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts

    class Stub(nn.Module):
        limit, act_fn = 1.5, nn.SiLU()

    h = (torch.randn(64, 32) * 2).double()
    theirs = DeepseekV4Experts._apply_gate(Stub(), h)
    assert_close(reference.gated_activation(h, Glu("silu", limit=1.5)), theirs, FP64)


@pytest.mark.parametrize("E", [8, 5])
def test_ids_outside_the_range_are_empty_slots(E) -> None:
    experts = first_experts("qwen3_moe")
    w = ExpertWeights(experts.gate_up_proj[:E], experts.down_proj[:E])
    x, ids, weights = rows()
    sentinel = torch.where(ids >= E, -1, ids)
    zeroed = torch.where(ids >= E, 0.0, weights)
    out = reference.experts(x, ids, weights, w, Glu("silu"))
    assert torch.equal(out, reference.experts(x, sentinel, weights, w, Glu("silu")))
    whole = ExpertWeights(experts.gate_up_proj, experts.down_proj)
    assert_close(out, reference.experts(x, ids, zeroed, whole, Glu("silu")), FP64)


@pytest.mark.parametrize("kind", ["silut", "", "SiLU"])
def test_unknown_kinds_are_refused_by_name(kind) -> None:
    with pytest.raises(ValueError, match="accepted: silu"):
        Glu(kind)
