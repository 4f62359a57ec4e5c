"""Ready-made PEFT arguments for MoE models, and a warning when an adapter misses the experts.

The experts of most families are 3-D parameters. ``target_modules="all-linear"`` reaches them only
in model types whose names PEFT rewrites. Elsewhere the adapter attaches and trains attention, but
never touches an expert.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from moe_patch.errors import UnsupportedModelError
from moe_patch.patching.discover import FoundBlock, discover
from moe_patch.patching.lora_ranks import rank_arguments
from moe_patch.runtime.adapters import EXPERT_PARAMETERS
from moe_patch.runtime.peft_release import rewritten_target

# An Indexer chooses the keys of sparse attention, and the output depends on it only through that
# choice. Its adapters would get no gradient, which DistributedDataParallel reports as an error.
UNTRAINED = "Indexer"
# Names of expert projections that were modules once: most MLPs; Mixtral and DBRX; Granite.
EXPERT_MODULES = ("gate_proj", "w1", "w2", "w3", "v1", "input_linear", "output_linear")


def lora_targets(
    model: nn.Module,
    experts: bool = True,
    router: bool = True,
    shared: bool = True,
    attention: bool = True,
    budget: int | None = None,
) -> dict[str, Any]:
    """Return arguments for ``peft.LoraConfig`` that adapt the chosen parts of an MoE model.

    Args:
        model: a transformers model, patched or not, without adapters.
        experts: both projections of every expert.
        router: the router's weight.
        shared: the Linear modules of shared experts and of their gate.
        attention: the Linear modules of attention, but not those of sparse attention's indexer.
        budget: the largest number of trainable parameters; None leaves the ranks to the caller.

    Returns:
        ``{"target_modules": [...], "target_parameters": [...]}``, name suffixes as PEFT matches
        them: ``LoraConfig(r=16, **lora_targets(model))``. With ``budget`` also ``r``,
        ``lora_alpha``, ``rank_pattern`` and ``alpha_pattern``, the largest ranks that fit:
        ``LoraConfig(**lora_targets(model, budget=10_000_000))``.

    Raises:
        UnsupportedModelError: the model has no MoE block, has none of the chosen parts, or already
            carries adapters.
        UnsupportedOptionError: the budget is too small for rank 1; names the least.
    """
    _refuse_adapters(model)
    blocks = discover(model)
    if not blocks:
        raise UnsupportedModelError(
            f"{type(model).__module__}.{type(model).__name__}: no MoE block found to target"
        )
    modules: set[str] = set()
    parameters: set[str] = set()
    for block in blocks:
        if experts:
            parameters |= _expert_parameters(block)
        if router:
            _add_router(block, modules, parameters)
        if shared and block.block is not None:
            modules |= _shared_linears(block)
    if attention:
        modules |= _attention_linears(model)
    rewritten = _rewritten_by_peft(model, modules)
    modules -= rewritten
    parameters |= {f"{name}.weight" for name in rewritten}
    if not modules and not parameters:
        raise UnsupportedModelError(
            f"{type(model).__name__}: none of the chosen parts can carry an adapter"
        )
    targets = {"target_modules": sorted(modules), "target_parameters": sorted(parameters)}
    return targets if budget is None else targets | rank_arguments(model, targets, blocks, budget)


def _refuse_adapters(model: nn.Module) -> None:
    """Raise if the model has adapters: its paths lead to PEFT's layers, which are no targets."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    found = [(path, m) for path, m in model.named_modules() if isinstance(m, kinds)]
    if found:
        path, layer = found[0]
        raise UnsupportedModelError(
            f"{type(model).__module__}.{type(model).__name__}: lora_targets found {len(found)} "
            f"PEFT layers, the first a {type(layer).__name__} at {path}; accepted: a model "
            "without adapters; call it before get_peft_model or add_adapter, or after "
            "unload() or merge_and_unload()"
        )


def _rewritten_by_peft(model: nn.Module, modules: set[str]) -> set[str]:
    """Return module targets that PEFT would take for old names of expert weights.

    For model types whose experts were once separate Linear modules, PEFT rewrites gate_proj, w1 and
    the like to the fused expert parameter, in whichever module. A shared expert with such a name
    would get no adapter, and the routed experts twice the rank. The caller targets these weights as
    parameters instead.
    """
    return {name for name in modules if rewritten_target(name, model)}


def missed_experts(model: Any) -> str | None:
    """Return a warning if the adapters target experts but adapt none of them, else None.

    ``target_modules="all-linear"`` targets every Linear module, experts included.

    Args:
        model: a model, a PeftModel, or a wrapper around one.
    """
    tuners = [module for module in model.modules() if "peft_config" in module.__dict__]
    blocks = discover(model)
    if not blocks or any(block.wrappers for block in blocks):
        return None
    wanted = _targets_for_experts([c for tuner in tuners for c in _lora_configs(tuner)], blocks)
    if not wanted and not any(map(_names_every_linear, tuners)):
        return None
    return (
        f"the LoRA config names {', '.join(wanted) or 'every Linear module'} but no expert of "
        f"{len(blocks)} MoE blocks carries an adapter; experts are 3-D parameters: "
        "moe_patch.lora_targets(model) gives the target_parameters"
    )


def _targets_for_experts(configs: list[Any], blocks: list[FoundBlock]) -> list[str]:
    """Return the names, then the regular expressions, with which LoRA configs target experts."""
    own = {_suffix(path, 1) for block in blocks for path, _ in block.experts}
    names = {name for config in configs for name in _asked(config) if _names_experts(name, own)}
    # In place of names, a config may hold one regular expression over module paths.
    patterns = {c.target_modules for c in configs if isinstance(c.target_modules, str)}
    matching = (pattern for pattern in sorted(patterns) if _matches_experts(pattern, blocks))
    return [*sorted(names), *map(repr, matching)]


def _names_every_linear(tuner: nn.Module) -> bool:
    """Return whether a config targets every Linear but the head, as "all-linear" expands to.

    PEFT replaces the word itself before other code can read it.
    """
    from transformers import PreTrainedModel

    model = tuner._modules.get("model")
    if not isinstance(model, PreTrainedModel):
        return False
    head = model.get_output_embeddings()
    linear = {
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    adapted = {path.removesuffix(".base_layer") for path in linear if path.endswith(".base_layer")}
    inside = tuple(f"{path}." for path in adapted)
    every_one = all(path.startswith(inside) for path in linear)
    return every_one and any(_asked(config) == adapted for config in _lora_configs(tuner))


def _names_experts(target: str, experts_attributes: set[str]) -> bool:
    *path, name = target.split(".")
    holder = [part for part in path if not part.isdecimal()]  # experts.0.w1
    known = name in EXPERT_PARAMETERS or name in EXPERT_MODULES
    return known and (not holder or holder[-1] in experts_attributes)


def _matches_experts(pattern: str, blocks: list[FoundBlock]) -> bool:
    """Return whether a regular expression matches an expert's weight, as module or parameter."""
    holders = {
        f"{block.plain_path}{path.removeprefix(block.path)}{index}"
        for block in blocks
        for path, _ in block.experts
        for index in ("", ".0")
    }
    names = (*EXPERT_PARAMETERS, *EXPERT_MODULES)
    return any(re.fullmatch(pattern, f"{path}.{name}") for path in holders for name in names)


def _lora_configs(tuner: nn.Module) -> list[Any]:
    from peft import LoraConfig

    configs = tuner.__dict__["peft_config"].values()
    return [config for config in configs if isinstance(config, LoraConfig)]


def _asked(config: Any) -> set[str]:
    """Return the names of modules and parameters that a LoraConfig targets."""
    values = (config.target_modules, config.target_parameters)
    return {name for value in values if not isinstance(value, str) for name in value or ()}


def _suffix(path: str, parts: int = 2) -> str:
    return ".".join(path.split(".")[-parts:])


def _expert_parameters(block: FoundBlock) -> set[str]:
    return {
        f"{_suffix(path)}.{name}"
        for path, experts in block.experts
        for name, parameter in experts.named_parameters(recurse=False)
        if name in EXPERT_PARAMETERS and parameter.dim() == 3
    }


def _add_router(block: FoundBlock, modules: set[str], parameters: set[str]) -> None:
    routers = block.routers
    # Such a block reads its router's correction bias directly, which fails on PEFT's wrapper.
    if block.spec.chooses_in_block and block.block is not None and block.spec.bias is None:
        name = block.spec.router_attr
        routers = [(f"{block.path}.{name}", block.block.get_submodule(name))]
    for path, router in routers:
        if isinstance(router, nn.Linear):
            continue  # PEFT would wrap the module and break on its tuple output
        weight = router._parameters.get("weight")
        if weight is not None and weight.dim() == 2:
            parameters.add(f"{_suffix(path)}.weight")
        if block.spec_of(router).router_reads_weight:
            continue
        modules |= {
            f"{_suffix(path, 1)}.{name}"
            for name, child in router.named_children()
            if type(child) is nn.Linear
        }


def _is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module is nn.Linear itself, or bitsandbytes' form of it in 4 or 8 bits."""
    packed = type(module).__module__.startswith("bitsandbytes.")
    return type(module) is nn.Linear or (packed and isinstance(module, nn.Linear))


def _shared_linears(block: FoundBlock) -> set[str]:
    assert block.block is not None
    return {
        _suffix(name)
        for name, module in block.block.named_modules()
        if _is_plain_linear(module) and name.startswith("shared")
    }


def _attention_linears(model: nn.Module) -> set[str]:
    untrained = {
        part
        for module in model.modules()
        if UNTRAINED in type(module).__name__
        for part in module.modules()
    }
    found = set()
    for path, module in model.named_modules():
        if "Attention" not in type(module).__name__:
            continue
        for name, child in module.named_modules():
            if _is_plain_linear(child) and child not in untrained:
                found.add(_suffix(f"{path}.{name}"))
    return found
