"""Low-rank factors of PEFT adapters on expert parameters, read without forming a merged weight.

PEFT wraps an experts module in one ParamWrapper per adapted parameter. A wrapper that we bound
hands its factors down for the duration of the call (see forward.py); one that was added after
patching shows itself as a live parametrization. Nothing here imports peft; what its releases do
unlike each other is in peft_release.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError, refuse_forward_mode
from moe_patch.formats.weights import is_packed
from moe_patch.runtime.modules import child_of, is_sharded, parameter_of
from moe_patch.runtime.peft_release import (
    factor_proxies,
    lora_proxies,
    param_wrapper_class,
    swaps_features,
)
from moe_patch.types import Lora

EXPERT_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj", "weight")


class Factors(NamedTuple):
    """One adapter's factors: delta = scaling * lhs @ rhs, in the weight's storage layout."""

    lhs: Tensor
    rhs: Tensor
    scaling: float


def is_param_wrapper(module: nn.Module) -> bool:
    """Whether a module is one of PEFT's wrappers around a parameter."""
    cls = param_wrapper_class()
    return cls is not None and isinstance(module, cls)


def base_of(wrapper: Any) -> Any:
    """The module under all wrappers: PEFT's ``get_base_layer``, at a fraction of its time."""
    module = wrapper
    while (inner := module._modules.get("base_layer")) is not None:
        module = inner
    return module


def fusion_obstacle(wrapper: Any) -> str | None:
    """Why this wrapper must run PEFT's own path whatever its state, or None."""
    if wrapper.parameter_name not in EXPERT_PARAMETERS:
        return f"parameter {wrapper.parameter_name!r} is not an expert projection"
    if wrapper.num_experts == 1:
        return "a single expert is a plain matrix to PEFT"
    dtype = parameter_of(base_of(wrapper), wrapper.parameter_name).dtype
    if is_packed(dtype):
        return f"experts are stored in {dtype}"
    return None


def paused(wrapper: Any) -> str | None:
    """Why PEFT's own path runs just now, though the wrapper could be fused; else None."""
    if wrapper.disable_adapters:
        return "adapters are disabled"
    return "adapters are merged into the weight" if wrapper.merged else None


def active_factors(wrapper: Any) -> list[Factors]:
    """The factors of a wrapper's active adapters, in their order and own dtype; read at call time.

    PEFT's ``get_delta_factors`` without its cast to the weight's dtype: those copies would be held
    until backward. PEFT packs A expert by expert and B rank by rank; where it did not swap the
    features, A reads the first dimension of the stored weight and B writes the second.
    """
    found = []
    all_a, all_b = child_of(wrapper, "lora_A"), child_of(wrapper, "lora_B")
    for name in wrapper.active_adapters:
        if name in all_a:
            a, b = parameter_of(all_a[name], "weight"), parameter_of(all_b[name], "weight")
            a_ERI = a.reshape(wrapper.num_experts, -1, a.shape[1])
            b_EOR = b.reshape(b.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
            pair = (b_EOR, a_ERI) if swaps_features(wrapper) else (a_ERI.mT, b_EOR.mT)
            found.append(Factors(*pair, wrapper.scaling[name]))
    return found


def live_factors(experts: Any, name: str) -> tuple[Tensor, list[Factors]] | None:
    """A parametrized parameter's original and factors, without evaluating the merged weight.

    Returns:
        None when the parameter is not parametrized, or not by PEFT's factor proxies alone (then
        reading the attribute gives PEFT's own merged weight).
    """
    parametrizations = experts._modules.get("parametrizations")
    if parametrizations is None or name not in parametrizations:
        return None
    entry, with_factors = parametrizations[name], factor_proxies()
    if not all(type(proxy) in with_factors for proxy in entry):
        return None
    return entry.original, [Factors(p.lhs, p.rhs, p.scaling) for p in entry]


def original_under_adapters(experts: Any, name: str) -> Tensor | None:
    """The weight under PEFT's parametrizations, merged ones included; None without any.

    Where another library parametrizes the weight too, its original says nothing: None.
    """
    parametrizations = experts._modules.get("parametrizations")
    if parametrizations is None or name not in parametrizations:
        return None
    entry, by_peft = parametrizations[name], lora_proxies()
    return entry.original if all(type(proxy) in by_peft for proxy in entry) else None


def own_version(weight: Tensor) -> Tensor:
    """An alias of a parametrized weight with a version counter of its own; no memory is copied.

    PEFT registers its parametrization anew in every forward, and torch then calls ``set_`` on the
    original. That raises its version, so that backward of an earlier forward would refuse it.
    Gradients reach the weight as through the weight itself. Until backward, autograd notices no
    change of the weight in place.

    Raises:
        UnsupportedOptionError: the weight carries a tangent, which an alias would drop.
    """
    refuse_forward_mode(weight)
    if torch.compiler.is_compiling():
        # A compiled graph saves its inputs: the alias has to be one, hence made outside.
        return torch.compiler.disable(_alias)(weight)
    return _alias(weight)


def _alias(weight: Tensor) -> Tensor:
    return _Alias.apply(weight) if weight.requires_grad else weight.data


class _Alias(torch.autograd.Function):
    """The identity. ``detach`` would share the version counter, ``data`` does not."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.data

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def refuse_merged(experts: Any, name: str) -> None:
    """What ``fuse_lora="require"`` promises of a call: PEFT has not put an adapter on the weight.

    Raises:
        UnsupportedOptionError: it has: its wrapper was added after patching.
    """
    parametrizations = experts._modules.get("parametrizations")
    if parametrizations is None or name not in parametrizations:
        return
    by_peft = lora_proxies()
    if any(isinstance(proxy, by_peft) for proxy in parametrizations[name]):
        raise UnsupportedOptionError(
            f"{type(experts).__name__}.{name}: fuse_lora='require' cannot hold: an adapter was "
            "added after patching; call patch_model again with the same options, or use "
            "fuse_lora='auto'"
        )


def to_lora(
    factors: list[Factors], w_EOI: Tensor, transposed: bool, dtype: torch.dtype, where: str
) -> Lora:
    """One Lora for all active adapters, in the factors' own dtype where there is one adapter.

    Several are cast, and concatenated along the rank with their scalings folded into B.

    Args:
        factors: per adapter, in storage layout; one at least.
        w_EOI: the weight in logical [E, out, in] orientation, for the shape check.
        transposed: the storage is [E, in, out], so that lhs is [E, in, R].
        dtype: compute dtype.
        where: names the module and parameter in errors.

    Raises:
        UnsupportedModelError: factors do not match the local weight (sharded, meta or foreign).
    """
    pairs = []
    for lhs, rhs, scaling in factors:
        a_ERI, b_EOR = (lhs.mT, rhs.mT) if transposed else (rhs, lhs)
        found = (*b_EOR.shape[:2], a_ERI.shape[2])
        if found != w_EOI.shape or a_ERI.is_meta or is_sharded(a_ERI):
            raise UnsupportedModelError(
                f"{where}: LoRA factors are for (E, out, in) = {found} "
                f"({type(a_ERI).__name__} on {a_ERI.device}), "
                f"the local weight is {tuple(w_EOI.shape)}; sharded experts need fuse_lora='off'"
            )
        pairs.append((a_ERI, b_EOR, scaling))
    if len(pairs) == 1:
        return Lora(*pairs[0])
    a_ERI = torch.cat([a.to(dtype) for a, _, _ in pairs], dim=1)
    b_EOR = torch.cat([b.to(dtype) * scaling for _, b, scaling in pairs], dim=2)
    return Lora(a_ERI, b_EOR, 1.0)
