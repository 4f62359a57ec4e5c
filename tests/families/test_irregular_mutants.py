"""Faults planted in the special families: each runs, and parity and the self-check catch it.

The table says which of the two; the standard families' faults are in tests/project/test_mutants.py.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_patch import UnsupportedModelError, patch_model
from moe_patch.families import families, inkling, register_family, zaya
from moe_patch.families.logits import linear_fp32
from moe_patch.ops.product_key import product_key_topk
from moe_patch.ops.routing import topk_softmax
from moe_patch.runtime import forward
from moe_patch.runtime.module_patch import bound
from moe_patch.runtime.spec import Const, FamilySpec, GluRule
from tests.support import tiny_models
from tests.support.parity import assert_parity
from tests.support.special import LIMIT, seeded


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        name: what is wrong.
        recipe, over: the tiny model that it is planted in.
        entry: values of the family's entry that are replaced.
        attribute: (dotted name, replacement) of something that the family's functions use.
        self_check: whether the patch-time self-check catches it too. The self-check runs in eval
            mode, on tokens of which none may happen to be skipped.
    """

    name: str
    recipe: str
    over: dict[str, Any] = dataclasses.field(default_factory=dict)
    entry: dict[str, Any] = dataclasses.field(default_factory=dict)
    attribute: tuple[str, Any] | None = None
    self_check: bool = True


@bound
def common_experts(experts: Any, patch: Any, x: Tensor, ids: Tensor, w: Tensor) -> Tensor:
    """The weight on the output (Llama-4), no identity experts (LongCat-Flash)."""
    return forward.experts_forward(experts, x, ids, w)


def unscaled(router: Any, routing: Any) -> tuple:
    probabilities = torch.softmax(routing.logits_TE, dim=-1, dtype=torch.float32)
    return probabilities, routing.weights_TK, routing.ids_TK


@bound
def skipped_tokens_keep_their_weight(router: Any, patch: Any, x: Tensor, states: Any = None, *,
                                     router_states: Any = None) -> tuple:  # fmt: skip
    state = zaya.router_state(router, x, router_states if states is None else states)
    routing = patch.spec.choose(router, zaya.class_logits(router, state), x)
    ids = routing.ids_TK.masked_fill(routing.ids_TK == router.num_experts, 0)
    return routing.logits_TE, routing.weights_TK, ids, state.clone()


@bound
def normalised_over_the_chosen_alone(router: Any, patch: Any, x: Tensor) -> tuple:
    logits, weights, ids, gammas = inkling.router_forward.__wrapped__(router, patch, x)
    scale = router.route_scale * router.global_scale
    return logits, weights / weights.sum(-1, keepdim=True) * scale, ids, gammas


def axes_swapped(x: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> Any:
    return product_key_topk(y, x, *args, **kwargs)


class CutWeightsGradient:
    """Multiplication of weight and factor with its true gradient."""

    @staticmethod
    def apply(weight: Tensor, factor: Tensor) -> Tensor:
        return weight * factor


def params(recipe: str, **changes: Any) -> dict[str, Any]:
    """The params of a recipe's entry with some replaced."""
    return {"params": {**entry_of(recipe).params, **changes}}


def entry_of(recipe: str) -> FamilySpec:
    folder = tiny_models.folder(recipe)
    return next(s for s in families() if s.module == folder and (s.block or s.logits))


SIGMOID = {"expert_selection_fn": "sigmoid", "norm_topk_prob": True}
LIMITS = {"mlp_layer_types": ["sparse", "sparse"], "swiglu_limits": [0.3, 0.3]}
FAULTS = [
    Fault("weight on the output, not the input", "llama4",
          entry={"experts_forward": common_experts}),
    Fault("softmax over the chosen, not sigmoids", "llama4", entry={"routing": topk_softmax}),
    Fault("identity experts forgotten", "longcat_flash", entry={"experts_forward": common_experts}),
    Fault("clamp before the activation", "step3p7", LIMITS,
          {"glu": GluRule("act_fn", limit="limit")}),
    Fault("clamp forgotten", "deepseek_v4", {"swiglu_limit": 0.3}, {"glu": GluRule("act_fn")}),
    Fault("expert's own scale forgotten", "gemma4", entry={"returns": unscaled}),
    Fault("logits recorded, not probabilities", "gemma4", entry={"returns": None}),
    Fault("skipped tokens keep their weight", "zaya",
          entry={"router_forward": skipped_tokens_keep_their_weight}, self_check=False),
    Fault("normalised over the chosen alone", "inkling",
          entry={"router_forward": normalised_over_the_chosen_alone}),
    Fault("sigmoid, not sqrt(softplus)", "deepseek_v4",
          entry=params("deepseek_v4", score_fn=Const(nn.Sigmoid()))),
    Fault("epsilon of another size", "inkling2", entry=params("inkling2", eps=Const(1e-2))),
    Fault("output multiplier forgotten", "muse_spark", {"output_multiplier": 0.5},
          {"logits": linear_fp32}),
    Fault("softmax, not sigmoid", "cohere2_moe", SIGMOID,
          params("cohere2_moe", selection=Const("softmax"))),
    Fault("weights not divided by k", "openai_privacy_filter", entry={"routing": topk_softmax}),
    Fault("product-key axes swapped", "doge",
          attribute=("moe_patch.families.doge.product_key_topk", axes_swapped)),
    Fault("gradient of the cut weight", "phimoe", {"router_jitter_noise": 0.5},
          attribute=("moe_patch.families.phimoe._Scaled", CutWeightsGradient), self_check=False),
]  # fmt: skip


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Fault], None]]:
    """Plant a fault in the registry or in a module, and remove it again."""
    originals: list[FamilySpec] = []

    def put(fault: Fault) -> None:
        if fault.attribute is not None:
            monkeypatch.setattr(*fault.attribute)
        if fault.entry:
            originals.append(entry_of(fault.recipe))
            register_family(dataclasses.replace(originals[0], **fault.entry))

    yield put
    for spec in originals:
        register_family(spec)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(
            fault, id=f"{fault.recipe}: {fault.name}", marks=pytest.mark.families(fault.recipe)
        )
        for fault in FAULTS
    ],
)
def test_a_fault_is_caught(fault: Fault, plant: Callable[[Fault], None]) -> None:
    reference = tiny_models.build(fault.recipe, **fault.over)
    expected = seeded(copy.deepcopy(reference))
    assert_parity(seeded(patch_model(copy.deepcopy(reference))), expected, LIMIT)
    plant(fault)
    if fault.self_check:
        with pytest.raises(UnsupportedModelError, match="self-check"):
            patch_model(copy.deepcopy(reference))
    else:
        patch_model(copy.deepcopy(reference))
    found = seeded(patch_model(copy.deepcopy(reference), self_check=False))
    with pytest.raises(AssertionError, match="relative error"):
        assert_parity(found, expected, LIMIT)
