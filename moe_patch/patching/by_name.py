"""Run experts by name, ``experts_implementation="moe_patch"``, without patching the model.

transformers calls the registered function for every experts module whose config names it. Patched
modules continue in :func:`moe_patch.runtime.forward.experts_forward`. All others run the experts
operator with default options, once their class has passed the self-check.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from moe_patch.config import PatchConfig
from moe_patch.errors import MoePatchError, UnsupportedModelError
from moe_patch.families import lookup
from moe_patch.ops.experts.flops import register_flop_formulas
from moe_patch.patching import selfcheck
from moe_patch.patching.discover import FoundBlock
from moe_patch.patching.resolve import refusals
from moe_patch.runtime.described import layout_of, read_glu
from moe_patch.runtime.experts import run_experts, stored_weight
from moe_patch.runtime.forward import EXPERTS_NAME, experts_forward, refuse_fp8
from moe_patch.runtime.module_patch import PATCH_KEY, ModulePatch
from moe_patch.runtime.spec import FamilySpec

# Attribute under which an experts module that runs by name caches its family entry.
SPEC = "_moe_patch_by_name"
_DEFAULTS = PatchConfig(strict=False)
# Kinds of experts that have passed the self-check in this process.
_passed: set[tuple] = set()


class ExpertsPatch(ModulePatch):
    """Patch record of an experts module; unpickling one registers EXPERTS_NAME."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register_experts()


def register_experts() -> None:
    """Register EXPERTS_NAME with transformers as an experts implementation (idempotent).

    In the registry for FP8 experts the name raises an error that points to quantize_experts. Also
    registers the operators' formulas with torch's FLOP counter.
    """
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(EXPERTS_NAME, experts_by_name)
    type(ALL_FP8_EXPERTS_FUNCTIONS).register(EXPERTS_NAME, refuse_fp8)
    register_flop_formulas()
    # Not at import time, because torch.compiler.assume_constant_result loads the compiler.
    torch.compiler.assume_constant_result(_first_traced_call)


def experts_by_name(
    experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run experts with transformers' signature: [T, D], [T, K] ids, [T, K] weights -> [T, D].

    Raises:
        UnsupportedModelError: the operator cannot run these experts, or its results differ from
            those of transformers.
    """
    patch = experts.__dict__.get(PATCH_KEY)
    if patch is not None and patch.role == "experts":
        return experts_forward(experts, hidden_states, top_k_index, top_k_weights)
    spec = experts.__dict__.get(SPEC)
    if spec is None and torch.compiler.is_compiling():
        spec = _first_traced_call(id(experts))
    elif spec is None:
        spec = _first_call(experts)
    return run_experts(experts, spec, hidden_states, top_k_index, top_k_weights, _DEFAULTS)


def _first_traced_call(identity: int) -> FamilySpec:
    """Run :func:`_first_call` while torch.compile traces; the module is given by its id().

    Before 2.13 torch passes plain constants alone to a function whose result it takes as constant.
    The caller holds the module, so the id is that of a living object.
    """
    return _first_call(ctypes.cast(identity, ctypes.py_object).value)


def _first_call(experts: Any) -> FamilySpec:
    """Check an experts module's class, then cache its family entry on the module."""
    found = lookup(experts)
    name = type(experts).__name__
    if found is None:
        spec = FamilySpec(model_types=(experts.config.model_type,), experts=name, tier="experts")
    else:
        spec = found[0].experts_only()
    try:
        _check(name, _without_adapters(experts), spec)
    except MoePatchError as error:
        raise UnsupportedModelError(
            f'experts_implementation="{EXPERTS_NAME}": {error}; '
            'model.set_experts_implementation("grouped_mm") goes back to transformers'
        ) from error
    experts.__dict__[SPEC] = spec
    return spec


def _check(name: str, experts: Any, spec: FamilySpec) -> None:
    """Compare a kind of experts with transformers, once per process.

    Raises:
        MoePatchError: the operator cannot run these experts, or the results differ.
    """
    block = FoundBlock(name, spec, experts=[(name, experts)])
    if why := refusals(experts, [block], _DEFAULTS).get(name):
        raise UnsupportedModelError(f"{name}: {why}")
    weight = stored_weight(experts, spec)
    kind = (
        type(experts),
        layout_of(experts, spec),
        read_glu(experts, spec),
        weight.dtype,
        weight.device.type,
    )
    if kind not in _passed and selfcheck.check(block, _DEFAULTS.backend) == "passed":
        _passed.add(kind)


def _without_adapters(experts: Any) -> Any:
    """Return the module, or a copy with the stored weights if PEFT parametrizes them now."""
    parametrizations = experts._modules.get("parametrizations")
    if parametrizations is None:
        return experts
    originals = {
        name: entry._parameters.get("original") for name, entry in parametrizations.items()
    }
    if not all(p is not None and p.is_floating_point() for p in originals.values()):
        return experts
    plain: Any = object.__new__(type(experts).__mro__[1])
    plain.__dict__.update(experts.__dict__)
    plain._parameters = {**experts._parameters, **originals}
    plain._modules = {n: m for n, m in experts._modules.items() if n != "parametrizations"}
    return plain
