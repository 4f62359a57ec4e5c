"""Negative controls of the parity run: faults in entries of the kinds that differ between families.

Each fault runs without an error and with the self-check off; the parity run must report a numeric
difference, and none without the fault.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn

from moe_patch import register_family
from moe_patch.families import families
from moe_patch.families.logits import linear_then_fp32
from moe_patch.ops.experts.definition import activate, split_gate
from moe_patch.ops.routing import softmax_topk
from moe_patch.runtime import forward
from moe_patch.runtime.module_patch import bound
from moe_patch.runtime.spec import Const, FamilySpec, GluRule
from moe_patch.types import NEG_INF
from tests.support import tiny_models
from tests.support.all_families import check


class Fault(NamedTuple):
    """One fault: what changes in the entry of a recipe, and the config that makes it visible.

    ``change`` is (entry) -> fields; ``attribute`` replaces a function of the library instead.
    """

    what: str
    name: str
    change: Callable[[FamilySpec], dict[str, Any]] | None = None
    over: dict[str, Any] = {}
    prepare: Callable[[nn.Module], Any] | None = None
    attribute: tuple[str, Any] | None = None


def params(**values: Any) -> Callable[[FamilySpec], dict[str, Any]]:
    """Routing parameters of the entry replaced by constants."""
    constants = {name: Const(value) for name, value in values.items()}
    return lambda spec: {"params": {**spec.params, **constants}}


def fields(**values: Any) -> Callable[[FamilySpec], dict[str, Any]]:
    return lambda spec: values


def softmax_first(spec: FamilySpec) -> dict[str, Any]:
    return {"routing": softmax_topk}


def max_as_top2(spec: FamilySpec) -> dict[str, Any]:
    """Score DeepSeek-V2's groups by the sum of the best two instead of the maximum."""
    names = ("top_k", "groups", "top_groups", "scale")
    kept = {name: spec.params[name] for name in names}
    return {"routing": softmax_topk, "params": {**kept, "group_score": Const("top2")}}


@bound
def weight_on_the_output(
    experts: nn.Module, patch: Any, hidden: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    return forward.experts_forward(experts, hidden, ids_TK, weights_TK)


def clamped_afterwards(h: Tensor, glu: Any) -> Tensor:
    gate, up = split_gate(h, glu)
    return activate(gate, glu.kind).clamp(max=glu.limit) * up.clamp(-glu.limit, glu.limit)


def all_scores_negative(model: nn.Module) -> None:
    """Set biases below -1: a group masked with 0.0 then beats every expert that was kept."""
    for name, tensor in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensor -= 2.0


def flat_scores(model: nn.Module) -> None:
    """Make scores nearly equal: else the best of a group is nearly all of its sum."""
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data *= 0.1


CLAMP = {"swiglu_limit": 0.5}
FAULTS = [
    # All four experts of the other group are chosen, so that no tie decides.
    Fault(
        "groups masked with -inf, not 0.0", "axk2", params(group_fill=NEG_INF),
        {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 4}, all_scores_negative,
    ),
    Fault("group score top-2 sum, not maximum", "deepseek_v2", max_as_top2, {}, flat_scores),
    Fault("group score maximum, not top-2 sum", "mistral4", params(group_score="max")),
    Fault(
        "epsilon added, not a lower bound", "ernie4_5_moe", params(clamp_eps=False),
        {"moe_norm_min": 0.5},
    ),
    Fault("not renormalised", "qwen3_5_moe", params(renormalize=False)),
    Fault("scaled in the router too", "minimax_m3_vl", params(scale=2.5)),
    Fault("scaled in the router too", "beam", params(scale=2.5)),
    Fault("scaling left out", "hy_v3", params(scale=1.0), {"router_scaling_factor": 2.5}),
    Fault("bias on the scores, not the logits", "kolibri1", params(bias_on="scores")),
    Fault("bias left out", "lfm2_moe", fields(bias=None)),
    Fault("softmax over all, then top-k", "granitemoe", softmax_first),
    Fault(
        "logits not soft-capped", "laguna", fields(logits=linear_then_fp32),
        {"moe_router_logit_softcapping": 1.0},
    ),
    Fault("gate and up not clamped", "glm5_next", fields(glu=GluRule("silu")), CLAMP),
    Fault(
        "clamped after the activation", "hy_v4", None, CLAMP,
        attribute=("moe_patch.ops.experts.torch_backend.gated_activation", clamped_afterwards),
    ),
    Fault(
        "alpha left out", "minimax_m3_vl",
        fields(glu=GluRule("swiglu_oai", limit="swiglu_limit")), {"swiglu_alpha": 1.7},
    ),
    Fault(
        "weight on the output, not the input", "llama4",
        fields(experts_forward=weight_on_the_output),
    ),
]  # fmt: skip


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    model_type = tiny_models.config(fault.name).model_type
    original = next(spec for spec in families() if model_type in spec.model_types)
    with pytest.MonkeyPatch.context() as replaced:
        if fault.attribute is not None:
            replaced.setattr(*fault.attribute)
        if fault.change is not None:
            register_family(dataclasses.replace(original, **fault.change(original)))
        try:
            yield
        finally:
            register_family(original)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault,
            id=f"{fault.name}: {fault.what}",
            marks=pytest.mark.families(*tiny_models.needs(fault.name, fault.over, entry=True)),
        )
        for fault in FAULTS
    ],
)
def test_fault_is_reported(fault):
    healthy = check(fault.name, False, fault.prepare, **fault.over)
    assert not healthy.problem, healthy.problem
    with planted(fault):
        result = check(fault.name, False, fault.prepare, **fault.over)
    assert "differs by" in result.problem, result.problem or "the fault went unnoticed"
