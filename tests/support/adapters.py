"""PEFT adapters on tiny models: the same adapter on an unpatched reference and on a patched model.

pair = adapted_pair("qwen3_moe", parameters=EXPERTS, order="peft first", r=3)
pair.reference, pair.ours          equal weights and adapters, PeftModel around both
assert_same_step(pair)             logits, loss and every adapter gradient agree
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from moe_patch import patch_model
from moe_patch.runtime.adapters import is_param_wrapper
from moe_patch.runtime.module_patch import patch_of
from tests.support import tiny_models
from tests.support.numerics import FP32, assert_close, rel_err

FAMILIES = (
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)
ORDERS = ("peft first", "patch first", "patch first, again after")

UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
EXPERTS = (UP, DOWN)
ATTENTION = {"deepseek_v3": ("q_b_proj", "kv_b_proj", "o_proj")}
_SHARED_EXPERTS = tuple(f"shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
_GATED_SHARED_EXPERT = (
    *(f"shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    "shared_expert_gate",
)
SHARED = {
    "deepseek_v3": _SHARED_EXPERTS,
    "glm4_moe": _SHARED_EXPERTS,
    "qwen2_moe": _GATED_SHARED_EXPERT,
    "qwen3_next": _GATED_SHARED_EXPERT,
}


class Pair(NamedTuple):
    """Two PeftModels with equal weights and adapters; only ``ours`` is patched."""

    reference: PeftModel
    ours: PeftModel
    batch: dict[str, Tensor]


def attention(model_type: str) -> list[str]:
    """Names of attention projections that every family's LoRA recipes adapt."""
    return list(ATTENTION.get(model_type, ("q_proj", "v_proj", "o_proj")))


def router_parameter(model_type: str) -> str:
    """The router's weight as a target parameter."""
    return "router.weight" if model_type == "gpt_oss" else "gate.weight"


def recipe(model_type: str) -> list[str]:
    """Both expert projections and the router, as target parameters.

    The router is omitted if the block chooses, reading the router's bias past PEFT's wrapper.
    """
    if model_type in tiny_models.block_chosen():
        return list(EXPERTS)
    return [*EXPERTS, router_parameter(model_type)]


def lora_config(
    parameters: Sequence[str] = (), modules: Sequence[str] = (), **options: Any
) -> LoraConfig:
    """Return a LoraConfig with random factors (a fresh adapter would be an exact no-op)."""
    defaults = {"r": 3, "lora_alpha": 6, "init_lora_weights": False}
    return LoraConfig(
        target_parameters=list(parameters) or None,
        target_modules=list(modules),
        **(defaults | options),
    )


def adapt(model: nn.Module, config: LoraConfig, seed: int = 5) -> PeftModel:
    """Call get_peft_model with reproducible factors, without PEFT's advice on configs."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        return get_peft_model(model, config)


def adapted_pair(
    model_type: str,
    parameters: Sequence[str] = (),
    modules: Sequence[str] = (),
    *,
    order: str = "peft first",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    overrides: dict[str, Any] | None = None,
    patch: dict[str, Any] | None = None,
    **options: Any,
) -> Pair:
    """A reference and a patched model with the same adapter.

    Args:
        order: when patch_model is called, one of ORDERS.
        device: where both models and the batch are; their values do not depend on it.
        overrides: values of the model's config.
        patch: options of patch_model.
        options: options of the LoraConfig.
    """
    reference = tiny_models.build(model_type, dtype=dtype, **(overrides or {}))
    batch = {key: value.to(device) for key, value in tiny_models.inputs(reference).items()}
    reference = reference.to(device)
    ours = copy.deepcopy(reference)
    if order != "peft first":
        patch_model(ours, **(patch or {}))
    reference = adapt(reference, lora_config(parameters, modules, **options))
    ours = adapt(ours, lora_config(parameters, modules, **options))
    if order != "patch first":
        patch_model(ours, **(patch or {}))
    return Pair(reference, ours, batch)


def as_in_peft_018(model: nn.Module, seed: int = 5) -> None:
    """Lay out the experts' factors as in PEFT 0.18: in and out as stored, never swapped.

    Later releases run such wrappers too, for transposed experts.
    """
    torch.manual_seed(seed)
    for wrapper in filter(is_param_wrapper, model.modules()):
        if wrapper.num_experts > 1:
            E, first, second = wrapper.get_param().shape
            for name, rank in wrapper.r.items():
                wrapper.lora_A[name] = nn.Linear(first, rank * E, bias=False)
                wrapper.lora_B[name] = nn.Linear(rank * E, second, bias=False)
            wrapper._did_swap_in_out_features = False


def adapter_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradient of every trainable parameter; each has to exist."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing = [name for name, p in trainable.items() if p.grad is None]
    assert trainable, "nothing is trainable"
    assert not missing, f"no gradient for {missing}"
    return {name: p.grad for name, p in trainable.items()}


def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Run forward and backward from cleared gradients, and return the logits."""
    model.zero_grad(set_to_none=True)
    out = model(**batch)
    out.loss.backward()
    return out.logits.detach()


def limit_on(batch: dict[str, Tensor]) -> float:
    """Return the limit for fp32: a GPU sums in another order than PEFT's own products."""
    return FP32 if next(iter(batch.values())).is_cpu else 2 * FP32


def assert_same_step(pair: Pair, limit: float | None = None) -> None:
    """Expect equal logits and adapter gradients of both models, and no zero gradient."""
    limit = limit_on(pair.batch) if limit is None else limit
    expected, found = step(pair.reference, pair.batch), step(pair.ours, pair.batch)
    assert_close(found, expected, limit, "logits")
    wanted, got = adapter_gradients(pair.reference), adapter_gradients(pair.ours)
    assert wanted.keys() == got.keys()
    for name, gradient in wanted.items():
        assert gradient.any(), f"{name}: the reference's gradient is zero, the comparison is empty"
        assert_close(got[name], gradient, limit, name)


def assert_adapters_act(model: PeftModel, batch: dict[str, Tensor], least: float = 1e-2) -> None:
    """Expect adapters to change the logits by more than any tolerance here."""
    with torch.no_grad():
        adapted = model(**batch).logits
        with model.disable_adapter():
            base = model(**batch).logits
    assert rel_err(adapted, base) > least


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """The experts modules below any wrappers, in order."""
    return [
        m for m in model.modules() if any(n in m._parameters for n in ("gate_up_proj", "down_proj"))
    ]


def no_factors_left(model: nn.Module) -> bool:
    """Return whether no experts module still holds the factors passed down for a call."""
    records = [patch_of(experts) for experts in expert_modules(model)]
    return all(r is None or (r.factors, r.used, r.caller) == (None, (), {}) for r in records)
