"""Faults to plant, as data: each runs without error and must be caught by a test.

The first ten are faults that public bug reports describe. The others guard the remaining parts of
the formula. ``caught_by`` names exactly the checks of tests/project/test_mutants.py that
catch the fault.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.ops.experts import definition as reference
from moe_patch.ops.experts import torch_backend
from moe_patch.ops.routing import route, sigmoid_topk, softmax_topk, topk_softmax
from moe_patch.runtime import adapters, forward
from moe_patch.runtime.spec import FamilySpec, GluRule
from moe_patch.types import ExpertWeights, Routing

ALL = ("router", "router in bf16", "block", "model", "adapters", "self-check")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: what is wrong.
        model_type, over: the tiny model that it is planted in.
        caught_by: names of the checks that fail.
        entry: values of the family entry that are replaced.
        attribute: (object, name, replacement) of a function of the library that is replaced.
        prepare: changes the model's weights so that the fault matters.
        bound: False leaves the model unpatched and says nothing.
    """

    name: str
    model_type: str
    caught_by: tuple[str, ...]
    over: dict[str, Any] = dataclasses.field(default_factory=dict)
    entry: Callable[[FamilySpec], dict[str, Any]] | None = None
    attribute: tuple[Any, str, Any] | None = None
    prepare: Callable[[nn.Module], None] | None = None
    bound: bool = True

    def __str__(self) -> str:
        return self.name


def routing(function: Callable[..., Routing]) -> Callable[[FamilySpec], dict[str, Any]]:
    """Return an entry change that replaces the routing function by one of the same signature."""

    def change(spec: FamilySpec) -> dict[str, Any]:
        @wraps(spec.routing)
        def mutated(*args: Any, **kwargs: Any) -> Routing:
            return function(*args, **kwargs)

        mutated.__signature__ = inspect.signature(spec.routing)
        del mutated.__wrapped__  # the trace must see that this ran
        return {"routing": mutated}

    return change


def bias_ignored(logits: Tensor, bias: Tensor | None, **kwargs: Any) -> Routing:
    return sigmoid_topk(logits, None, **kwargs)


def weights_from_biased_scores(logits: Tensor, bias: Tensor, **kwargs: Any) -> Routing:
    routed = sigmoid_topk(logits, bias, **kwargs)
    weights = (torch.sigmoid(logits.float()) + bias).gather(1, routed.ids_TK)
    weights = weights / weights.sum(-1, keepdim=True) * kwargs.get("scale", 1.0)
    return dataclasses.replace(routed, weights_TK=weights.to(routed.weights_TK.dtype))


def groups_masked_with_zero(logits: Tensor, bias: Tensor, **kwargs: Any) -> Routing:
    return sigmoid_topk(logits, bias, **kwargs | {"group_fill": 0.0})


def group_score_by_max(logits: Tensor, bias: Tensor, **kwargs: Any) -> Routing:
    def by_max(logits: Tensor, spec: Any, bias: Tensor) -> Routing:
        return route(logits, dataclasses.replace(spec, group_score="max"), bias)

    return sigmoid_topk(logits, bias, **kwargs | {"impl": by_max})


def scaled_twice(logits: Tensor, bias: Tensor, *, scale: float, **kwargs: Any) -> Routing:
    return sigmoid_topk(logits, bias, scale=scale * scale, **kwargs)


def scaled_only_when_normalised(
    logits: Tensor, bias: Tensor, *, scale: float, renormalize: bool, **kwargs: Any
) -> Routing:
    scale = scale if renormalize else 1.0
    return sigmoid_topk(logits, bias, scale=scale, renormalize=renormalize, **kwargs)


def softmax_in_bf16(logits: Tensor, bias: Tensor | None, **kwargs: Any) -> Routing:
    routed = softmax_topk(logits.bfloat16(), bias, **kwargs | {"fp32": False})
    return dataclasses.replace(routed, logits_TE=logits)


def topk_before_softmax(logits: Tensor, bias: Tensor | None, *, renormalize: bool, **kw: Any):
    return topk_softmax(logits, bias, fp32=True, **kw)


def b_factor_expert_major(wrapper: Any) -> list[adapters.Factors]:
    factors = []
    for name, (lhs, rhs, scaling) in zip(
        wrapper.active_adapters, adapters.active_factors(wrapper), strict=True
    ):
        b = wrapper.lora_B[name].weight
        wrong = b.view(b.shape[0], lhs.shape[0], -1).permute(1, 0, 2)
        pair = (wrong, rhs) if adapters.swaps_features(wrapper) else (lhs, wrong.mT)
        factors.append(adapters.Factors(*pair, scaling))
    return factors


def ties_to_the_higher_id(logits: Tensor, bias: Tensor | None, **kwargs: Any) -> Routing:
    mirrored = softmax_topk(logits.flip(-1), bias, **kwargs)
    ids = logits.shape[-1] - 1 - mirrored.ids_TK
    weights = torch.softmax(logits.float(), -1).gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True)
    return Routing(ids, weights.to(mirrored.weights_TK.dtype), logits)


def no_gradient_through_the_weights(logits: Tensor, bias: Tensor, **kwargs: Any) -> Routing:
    routed = softmax_topk(logits, bias, **kwargs)
    return dataclasses.replace(routed, weights_TK=routed.weights_TK.detach())


def probabilities_recorded(logits: Tensor, bias: Tensor | None, **kwargs: Any) -> Routing:
    routed = softmax_topk(logits, bias, **kwargs)
    return dataclasses.replace(routed, logits_TE=torch.softmax(logits, -1))


def gate_and_up_swapped(h: Tensor, glu: Any) -> tuple[Tensor, Tensor]:
    up, gate = h.chunk(2, dim=-1)
    return gate, up


def without(name: str, backward: Callable[..., Any] = torch_backend.experts_backward):
    """Return the backward with one gradient set to zero."""

    def run(*args: Any, **options: Any) -> Any:
        grads = backward(*args, **options)
        grad = getattr(grads, name)
        return grads if grad is None else grads._replace(**{name: torch.zeros_like(grad)})

    return run


def last_slot_dropped(
    x: Tensor, ids: Tensor, weights: Tensor, w: ExpertWeights, *rest: Any,
    forward: Callable[..., Any] = torch_backend.experts_forward, **kwargs: Any,
) -> Any:  # fmt: skip
    return forward(x, torch.cat([ids[:, :-1], torch.full_like(ids[:, :1], -1)], 1), weights, w,
                   *rest, **kwargs)  # fmt: skip


def all_biases(value: float) -> Callable[[nn.Module], None]:
    def prepare(model: nn.Module) -> None:
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.fill_(value)

    return prepare


GROUPS = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
EXPERTS_ONLY = ("block", "model", "adapters", "self-check")

MUTANTS = [
    Mutant("correction bias ignored", "deepseek_v3", ALL, entry=routing(bias_ignored)),
    Mutant("correction bias ignored", "minimax_m2", ALL, entry=routing(bias_ignored)),
    Mutant(
        "weights taken from biased scores", "deepseek_v3", ALL,
        entry=routing(weights_from_biased_scores),
    ),
    Mutant(
        "excluded groups masked with 0.0", "deepseek_v3",
        ("router", "router in bf16", "block", "model", "self-check"), GROUPS,
        entry=routing(groups_masked_with_zero), prepare=all_biases(-2.0),
    ),
    Mutant("group score by max", "glm4_moe", ALL, GROUPS, entry=routing(group_score_by_max)),
    Mutant("scaling factor applied twice", "glm4_moe", ALL, entry=routing(scaled_twice)),
    Mutant(
        "scaling factor only when normalised", "deepseek_v3", ALL, {"norm_topk_prob": False},
        entry=routing(scaled_only_when_normalised),
    ),
    Mutant("softmax in bf16", "qwen3_moe", ALL, entry=routing(softmax_in_bf16)),
    Mutant(
        "top-k before softmax", "qwen2_moe", ALL, {"norm_topk_prob": False},
        entry=routing(topk_before_softmax),
    ),
    Mutant(
        "LoRA B factor read expert-major", "qwen3_moe", ("adapters",),
        attribute=(forward, "active_factors", b_factor_expert_major),
    ),
    Mutant("patch that binds nothing", "qwen3_moe", ("trace",), bound=False),
    Mutant(
        "no gradient through the weights", "qwen3_moe",
        ALL,
        entry=routing(no_gradient_through_the_weights),
    ),
    Mutant(
        "probabilities recorded as logits", "mixtral",
        ("router", "router in bf16", "model", "adapters", "self-check"),
        entry=routing(probabilities_recorded),
    ),
    Mutant("ties to the higher id", "qwen3_moe", ("ties",), entry=routing(ties_to_the_higher_id)),
    Mutant(
        "shared expert without its gate", "qwen2_moe", EXPERTS_ONLY,
        entry=lambda spec: {"shared_gate": None},
    ),
    Mutant(
        "gate and up swapped", "olmoe", EXPERTS_ONLY,
        attribute=(reference, "split_gate", gate_and_up_swapped),
    ),
    Mutant(
        "clamp left out", "gpt_oss", EXPERTS_ONLY, {"swiglu_limit": 1.0},
        entry=lambda spec: {"glu": GluRule("swiglu_oai", alpha="alpha")},
    ),
    Mutant(
        "last slot of each token dropped", "mixtral", EXPERTS_ONLY,
        attribute=(torch_backend, "experts_forward", last_slot_dropped),
    ),
    *(
        Mutant(
            f"gradient left out: {name}", "gpt_oss", ("block", "model", "self-check", *more),
            attribute=(torch_backend, "experts_backward", without(name)),
        )
        for name, more in [
            ("x", ("adapters",)), ("weights", ("adapters",)),
            ("w13", ()), ("w2", ()), ("b13", ()), ("b2", ()),
        ]
    ),
]  # fmt: skip
