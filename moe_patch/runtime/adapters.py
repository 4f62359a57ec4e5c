"""Read low-rank factors of PEFT adapters on expert parameters, without the merged weight.

PEFT wraps an experts module in one ParamWrapper per adapted parameter. A wrapper with our forward
passes its factors to the experts for the duration of a call (see forward.py). A wrapper that was
added after patching appears as a live parametrization. This file does not import peft;
peft_release.py covers the differences between its releases.
"""

from __future__ import annotations

from collections.abc import Iterable
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
# On a wrapper whose factors are DTensors: how many of its experts this rank holds.
HELD_KEY = "_moe_patch_held"


class Factors(NamedTuple):
    """One adapter's factors: delta = scaling * lhs @ rhs, in the weight's storage layout."""

    lhs: Tensor
    rhs: Tensor
    scaling: float


def is_param_wrapper(module: nn.Module) -> bool:
    """Return whether a module is a PEFT ParamWrapper."""
    cls = param_wrapper_class()
    return cls is not None and isinstance(module, cls)


def base_of(wrapper: Any) -> Any:
    """Return the module under all wrappers: a faster ``get_base_layer`` of PEFT."""
    module = wrapper
    while (inner := module._modules.get("base_layer")) is not None:
        module = inner
    return module


def why_not_fused(wrapper: Any) -> str | None:
    """Return why this wrapper must always run PEFT's own path, or None if it can be fused."""
    if wrapper.parameter_name not in EXPERT_PARAMETERS:
        return f"parameter {wrapper.parameter_name!r} is not an expert projection"
    if wrapper.num_experts == 1:
        return "a single expert is a plain matrix to PEFT"
    dtype = parameter_of(base_of(wrapper), wrapper.parameter_name).dtype
    if is_packed(dtype):
        return f"experts are stored in {dtype}"
    return None


def adapted_twice(wrappers: Iterable[tuple[str, Any]]) -> str | None:
    """Say which parameter two wrappers adapt, one around the other; None if there is none.

    PEFT before 0.21 lets a model with adapters get others of the same parameters, from a second
    get_peft_model. A call passes one wrapper's factors to the experts, so the other's would be
    lost.

    Args:
        wrappers: path and wrapper, in any order.
    """
    seen: dict[tuple[int, str], str] = {}
    for path, wrapper in wrappers:
        other = seen.setdefault((id(base_of(wrapper)), wrapper.parameter_name), path)
        if other != path:
            return (
                f"two adapters wrap {wrapper.parameter_name}, one attached to {other} and one to "
                f"{path}; accepted: one PeftModel (attach the second with add_adapter, or "
                "merge_and_unload() the first before), or fuse_lora='off', which leaves both to "
                "PEFT"
            )
    return None


def paused(wrapper: Any) -> str | None:
    """Return why PEFT's own path has to run at the moment, or None."""
    if wrapper.disable_adapters:
        return "adapters are disabled"
    return "adapters are merged into the weight" if wrapper.merged else None


def active_factors(wrapper: Any) -> list[Factors]:
    """Return the factors of a wrapper's active adapters, in order and in the adapters' dtype.

    Same as PEFT's ``get_delta_factors`` but without the cast to the weight's dtype, because
    autograd would hold the cast copies until backward. PEFT stores A expert by expert and B rank by
    rank. Where it did not swap the features, A reads the first dimension of the stored weight and B
    writes the second.
    """
    found = []
    all_a, all_b = child_of(wrapper, "lora_A"), child_of(wrapper, "lora_B")
    held = wrapper.__dict__.get(HELD_KEY)
    E = wrapper.num_experts if held is None else held
    for name in wrapper.active_adapters:
        if name in all_a:
            a, b = parameter_of(all_a[name], "weight"), parameter_of(all_b[name], "weight")
            if held is not None:
                _require_divided(wrapper, name, a)
                a, b = a.to_local(), b.to_local()
            a_ERI = a.reshape(E, -1, a.shape[1])
            b_EOR = b.reshape(b.shape[0], -1, E).permute(2, 0, 1)
            pair = (b_EOR, a_ERI) if swaps_features(wrapper) else (a_ERI.mT, b_EOR.mT)
            found.append(Factors(*pair, wrapper.scaling[name]))
    return found


def _require_divided(wrapper: Any, adapter: str, factor: Tensor) -> None:
    """Refuse whole factors beside divided ones: their shape would pass for a larger rank."""
    if not is_sharded(factor):
        raise UnsupportedModelError(
            f"{type(base_of(wrapper)).__name__}.{wrapper.parameter_name}: adapter {adapter!r} has "
            "factors of all experts, this rank holds a part of them; accepted: divided factors; "
            "call moe_patch.expert_parallel.shard_adapters(model)"
        )


def live_factors(experts: Any, name: str) -> tuple[Tensor, list[Factors]] | None:
    """Return a parametrized parameter's original and factors, without forming the merged weight.

    Returns:
        None if the parameter has no parametrization, or one that is not a factor proxy of PEFT. In
        the second case reading the attribute gives PEFT's merged weight.
    """
    parametrizations = experts._modules.get("parametrizations")
    if parametrizations is None or name not in parametrizations:
        return None
    entry, with_factors = parametrizations[name], factor_proxies()
    if not all(type(proxy) in with_factors for proxy in entry):
        return None
    return entry.original, [Factors(p.lhs, p.rhs, p.scaling) for p in entry]


def original_under_adapters(experts: Any, name: str) -> Tensor | None:
    """Return the weight under PEFT's parametrizations, merged ones included; None without any.

    Also None if another library parametrizes the weight too: its original may be anything then.
    """
    parametrizations = experts._modules.get("parametrizations")
    if parametrizations is None or name not in parametrizations:
        return None
    entry, by_peft = parametrizations[name], lora_proxies()
    return entry.original if all(type(proxy) in by_peft for proxy in entry) else None


def own_version(weight: Tensor) -> Tensor:
    """Return an alias of a parametrized weight with its own version counter; copies no memory.

    PEFT registers its parametrization again in every forward, and torch then calls ``set_`` on the
    original. That increments the version, so backward of an earlier forward would raise an error.
    Gradients flow to the weight as usual. Autograd does not notice if the weight changes in place
    before backward.

    Raises:
        UnsupportedOptionError: the weight carries a tangent, which an alias would drop.
    """
    refuse_forward_mode(weight)
    if torch.compiler.is_compiling():
        # A compiled graph saves its inputs, so the alias must be an input: create it outside.
        return torch.compiler.disable(_alias)(weight)
    return _alias(weight)


def _alias(weight: Tensor) -> Tensor:
    return _Alias.apply(weight) if weight.requires_grad else weight.data


class _Alias(torch.autograd.Function):
    """Identity with gradient. Uses ``data`` since ``detach`` would share the version counter."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.data

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


def refuse_merged(experts: Any, name: str) -> None:
    """Refuse a merged weight in a call, as ``fuse_lora="require"`` promises.

    Raises:
        UnsupportedOptionError: PEFT parametrized the weight, so its wrapper was added after
            patching.
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
    """Combine the factors of all active adapters into one Lora.

    A single adapter keeps its dtype. Several adapters are cast to ``dtype`` and concatenated along
    the rank, with their scalings folded into B.

    Args:
        factors: factors of each adapter, in storage layout; at least one.
        w_EOI: the weight in logical [E, out, in] orientation, for the shape check.
        transposed: True if the storage is [E, in, out], so that lhs is [E, in, R].
        dtype: compute dtype.
        where: name of the module and parameter, for errors.

    Raises:
        UnsupportedModelError: the factors do not match the local weight (sharded or on meta).
    """
    pairs = []
    for lhs, rhs, scaling in factors:
        a_ERI, b_EOR = (lhs.mT, rhs.mT) if transposed else (rhs, lhs)
        found = (*b_EOR.shape[:2], a_ERI.shape[2])
        if found != w_EOI.shape or a_ERI.is_meta or is_sharded(a_ERI):
            raise UnsupportedModelError(
                f"{where}: the LoRA factors are for (E, out, in) = {found} "
                f"({type(a_ERI).__name__} on {a_ERI.device}), "
                f"the local weight is {tuple(w_EOI.shape)}; accepted: factors of the experts that "
                "this rank holds; call moe_patch.expert_parallel.shard_adapters(model)"
            )
        pairs.append((a_ERI, b_EOR, scaling))
    if len(pairs) == 1:
        return Lora(*pairs[0])
    a_ERI = torch.cat([a.to(dtype) for a, _, _ in pairs], dim=1)
    b_EOR = torch.cat([b.to(dtype) * scaling for _, b, scaling in pairs], dim=2)
    return Lora(a_ERI, b_EOR, 1.0)
