"""Tiny models whose last layer is a MoE layer, and per-row gradients of transformers' own experts.

per_token_norms(model, batch, recorder)   torch.func.vmap(grad) over the tokens of the last block
explicit_norms(model, path, ...)          one row at a time, from the gradient at the block's output
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch import patch_model, record
from moe_patch.runtime.module_patch import patch_of
from tests.support import tiny_models
from tests.support.adapters import adapt, lora_config
from tests.support.numerics import FP32, assert_close

PROJECTIONS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
EXACT = 1e-10
GRADIENTS = ("grad_norm_output", "grad_norm_params")
CHECKPOINTS = (None, False, True)


def sum_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the summed cross-entropy of tokens with separate labels: no token affects another."""
    logits = model(input_ids=batch["input_ids"]).logits
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), batch["input_ids"].flatten(), reduction="sum"
    )


def build(model_type: str, layers: int = 1, **overrides: Any) -> nn.Module:
    """Return an fp64 model of a few layers, each with a MoE block."""
    return tiny_models.build(model_type, dtype=torch.float64, num_hidden_layers=layers, **overrides)


def listening(model: nn.Module) -> list[nn.Module]:
    """Return the modules that a recorder or a replay has tapped."""
    records = [(m, patch_of(m)) for m in model.modules()]
    return [m for m, patch in records if patch is not None and patch.taps is not None]


def last_layer(model: nn.Module) -> Any:
    """The last decoder layer, through PEFT's wrappers."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return inner.model.layers[-1]


def experts_below(block: nn.Module) -> Any:
    """The experts module of a block, through PEFT's wrappers."""
    experts = block.experts
    while hasattr(experts, "base_layer"):
        experts = experts.base_layer
    return experts


def with_batched_products(experts: nn.Module) -> nn.Module:
    """Return a copy of an experts module on transformers' batched_mm, which has static shapes."""
    twin = copy.deepcopy(experts)
    twin.__dict__.pop("_moe_patch", None)
    twin.config = copy.copy(twin.config)
    twin.config._experts_implementation_internal = "batched_mm"
    return twin


def factors_of(block: nn.Module) -> dict[str, tuple[Tensor, Tensor, float]]:
    """The adapters' factors by parameter name, in storage layout; their product is PEFT's."""
    found = {}
    wrapper: Any = block.experts
    while hasattr(wrapper, "base_layer"):
        a, b = (each["default"].weight for each in (wrapper.lora_A, wrapper.lora_B))
        a_ERI = a.reshape(wrapper.num_experts, -1, a.shape[1])
        b_EOR = b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
        delta = wrapper.get_delta_weight("default")
        pair = (b_EOR, a_ERI)
        if not wrapper.__dict__.get("_did_swap_in_out_features"):  # PEFT 0.18 swaps nothing
            pair = (a_ERI.mT, b_EOR.mT)
        assert_close(wrapper.scaling["default"] * pair[0] @ pair[1], delta, FP32)
        found[wrapper.parameter_name] = (*pair, wrapper.scaling["default"])
        wrapper = wrapper.base_layer
    return found


def residual_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the residual to which the last layer adds its block's output, [T, D]."""
    seen = []
    hook = last_layer(model).post_attention_layernorm.register_forward_pre_hook(
        lambda module, args: seen.append(args[0].detach())
    )
    with torch.no_grad():
        sum_loss(model, batch)
    hook.remove()
    return seen[-1].flatten(0, 1)


def per_token_norms(model: Any, batch: dict[str, Tensor], layer: Any) -> dict[str, Tensor]:
    """Return [T, K] norms of each token's gradient by expert, by ``torch.func.vmap(grad)``.

    Args:
        layer: the recorded layer, for the block's input, ids and weights.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder = last_layer(model)
    twin = with_batched_products(experts_below(decoder.mlp))
    base = {n: p.detach() for n, p in twin.named_parameters() if n in PROJECTIONS}
    factors = factors_of(decoder.mlp)
    scalings = {name: scaling for name, (_, _, scaling) in factors.items()}
    low = {name: (a.detach(), b.detach()) for name, (a, b, _) in factors.items()}

    def loss(weights: Any, adapters: Any, x: Tensor, rest: Tensor, ids: Any, w: Any, label: Any):
        merged = dict(weights)
        for name, (lhs, rhs) in adapters.items():
            merged[name] = merged[name] + scalings[name] * lhs @ rhs
        routed = torch.func.functional_call(twin, merged, (x[None], ids[None], w[None]))
        logits = inner.lm_head(inner.model.norm(rest[None] + routed))
        return nn.functional.cross_entropy(logits, label[None])

    grads = torch.func.vmap(
        torch.func.grad(loss, argnums=(0, 1)), in_dims=(None, None, 0, 0, 0, 0, 0)
    )(
        base, low, layer.router_input, residual_of(model, batch), layer.ids, layer.weights,
        batch["input_ids"].flatten(),
    )  # fmt: skip
    norms = {"params": _by_expert(list(grads[0].values()))}
    if low:
        norms["lora"] = _by_expert([g for pair in grads[1].values() for g in pair])
    return {name: norm_TE.gather(1, layer.ids) for name, norm_TE in norms.items()}


def _by_expert(grads: list[Tensor]) -> Tensor:
    """Return [T, E], the root of the sum of squares over all axes behind the expert axis."""
    return sum(g.flatten(2).square().sum(-1) for g in grads).sqrt()


def watch_output(experts: nn.Module) -> dict[str, Tensor]:
    """Fill "x" and "dout" of an experts module by hooks, when the model runs."""
    seen: dict[str, Tensor] = {}

    def after(module: nn.Module, args: tuple, out: Tensor) -> None:
        seen["x"] = args[0].detach()
        out.register_hook(lambda grad: seen.__setitem__("dout", grad.detach()))

    experts.register_forward_hook(after)
    return seen


def explicit_norms(experts: Any, seen: dict[str, Tensor], layer: Any) -> dict[str, Tensor]:
    """Return [T, K] norms of each row alone, through transformers' own eager experts."""
    params = [p for n, p in experts.named_parameters() if n in PROJECTIONS]
    names = ("act", "output", "params")
    norms = {name: torch.zeros(layer.ids.shape, dtype=torch.float64) for name in names}
    for (t, k), e in zip(
        torch.cartesian_prod(*map(torch.arange, layer.ids.shape)).tolist(),
        layer.ids.flatten().tolist(),
        strict=True,
    ):
        ones = torch.ones(1, 1, dtype=torch.float64)
        y = type(experts).forward.__wrapped__(
            experts, seen["x"][t : t + 1], torch.tensor([[e]]), ones
        )
        dy = layer.weights[t, k] * seen["dout"][t : t + 1]
        grads = torch.autograd.grad(y, params, dy)
        values = (y.detach().norm(), dy.norm(), sum(g.square().sum() for g in grads).sqrt())
        for name, value in zip(names, values, strict=True):
            norms[name][t, k] = value
    return norms


def patched(model_type: str, layers: int = 1, lora: tuple[str, ...] = (), **patch: Any) -> Any:
    """Return a patched model of a few layers, with adapters on the targets in ``lora``."""
    model = build(model_type, layers)
    if lora:
        model = adapt(model, lora_config(lora))
    return patch_model(model, self_check=False, **patch)


def recorded(model: Any, batch: dict[str, Tensor]) -> Any:
    """Return the record of one forward and backward."""
    with record(model, router_input=True) as recorder:
        sum_loss(model, batch).backward()
    return recorder


def checkpointed(model: Any, reentrant: bool | None) -> None:
    """Enable gradient checkpointing of either kind, or none for None."""
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()


def correction_biases(model: Any) -> dict[str, Tensor]:
    """The correction biases of a model by name, parameters and buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {n: t for n, t in named if n.split(".")[-1] in tiny_models.CORRECTION_BIASES}
