"""Tiny models of every family, with routers and experts that make faults visible.

    model = build("qwen3_moe")                            fp32, CPU, deterministic
    model = build("deepseek_v3", dtype=torch.bfloat16, n_group=4)
    out = model(**inputs(model)); loss(out).backward()
    for path, block in blocks(model): ...

A new family is one line in tests/support/tiny_recipes.py.
Random values: gates std 0.5 and experts std 0.3 (outputs of size about one, no near-ties),
correction biases non-zero and of both signs, nothing left at zero.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn

from moe_patch import supported_model_types
from moe_patch.families import families, later_families
from tests.support.built import Built
from tests.support.numerics import probe
from tests.support.tiny_recipes import FAMILIES, SIZES, Tiny


@functools.cache
def runnable() -> tuple[str, ...]:
    """Return the names of recipes whose models the installed transformers has and can run."""
    listed = _auto("configuration_auto", "CONFIG_MAPPING_NAMES")

    def exists(where: str | None, model_type: str) -> bool:
        if where is None:
            return model_type in listed
        return importlib.util.find_spec(f"transformers.models.{where.split(':')[0]}") is not None

    return tuple(
        name
        for name, tiny in FAMILIES.items()
        if exists(tiny.config, name)
        and exists(tiny.model, name)
        and Version(transformers.__version__) >= Version(tiny.since or "0")
    )


@functools.cache
def patchable() -> tuple[str, ...]:
    """Return the runnable recipes that the registry does not refuse in this transformers."""
    tiers = supported_model_types()
    return tuple(name for name in runnable() if tiers[config(name).model_type] != "refused")


@functools.cache
def absent() -> frozenset[str]:
    """Return recipes that cannot be tested here: not runnable, or only in a later release."""
    later = {name for spec in later_families() for name in spec.model_types}
    tiers = supported_model_types()
    refused_here = {
        name
        for name in runnable()
        if (kind := config(name).model_type) in later and tiers[kind] == "refused"
    }
    return frozenset({*FAMILIES} - {*runnable()} | refused_here)


@functools.cache
def absent_parts() -> frozenset[str]:
    """Return the parts, as `needs` names them, that recipes runnable here lack in this release."""
    installed = Version(transformers.__version__)
    later = {name for spec in later_families() for name in spec.model_types}
    parts = {
        f"{name}.{field}"
        for name, tiny in FAMILIES.items()
        for field, since in tiny.later.items()
        if installed < Version(since)
    }
    return frozenset(
        parts | {f"{name}.entry" for name in runnable() if config(name).model_type in later}
    )


@functools.cache
def block_chosen() -> frozenset[str]:
    """Return recipes whose router returns only logits and whose block chooses (before 5.13)."""
    types = {name for spec in families() if spec.chooses_in_block for name in spec.model_types}
    return frozenset(name for name in runnable() if config(name).model_type in types)


def needs(model_type: str, over: Iterable[str] = (), entry: bool = False) -> tuple[str, ...]:
    """Return the arguments of the mark `families` for a test of one recipe.

    Args:
        model_type: a key of FAMILIES.
        over: names of config fields that the test sets.
        entry: whether it changes the family's entry in the registry.
    """
    parts = (*over, *(("entry",) if entry else ()))
    return (model_type, *(f"{model_type}.{part}" for part in parts))


def config(model_type: str, **overrides: Any) -> Any:
    """Return the family's config with our sizes; raise for an override that it does not declare."""
    tiny = FAMILIES[model_type]
    if tiny.config:
        cls = _load(tiny.config)
    else:
        cls = _auto("configuration_auto", "CONFIG_MAPPING")[model_type]
    declared = {f.name for f in fields(cls)} | set(cls.attribute_map)
    asked = {**tiny.over, **overrides}
    if unknown := sorted(set(asked) - declared):
        raise TypeError(f"{cls.__name__} does not declare {unknown}")
    own = {f.name for f in fields(cls)}
    values = {k: v for k, v in SIZES.items() if k in own and asked.get(k, v) is not None} | asked
    values = {k: v for k, v in values.items() if v is not None} | tiny.extra
    return cls(**values, attn_implementation="eager")


def folder(model_type: str) -> str:
    """Return the transformers folder that defines the classes of a recipe's model."""
    tiny = FAMILIES[model_type]
    return tiny.model.split(":")[0] if tiny.model else model_type


def with_experts(model_type: str, num_experts: int, top_k: int) -> dict[str, int]:
    """Return overrides for number of experts and top-k, by the names that the config declares."""
    declared = {f.name for f in fields(type(config(model_type)))}
    names = [n for n in ("n_routed_experts", "num_experts", "num_local_experts") if n in declared]
    return {names[0]: num_experts, "num_experts_per_tok": top_k}


def build(
    model_type: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> nn.Module:
    """Return a tiny random model on CPU, in train mode, experts on transformers' eager path.

    A copy of the first such model, because building one takes longer.

    Args:
        model_type: a key of FAMILIES.
        dtype: of the weights; modules that the family keeps in fp32 on load stay fp32.
        seed: of every weight.
        overrides: config values.
    """
    key = (model_type, dtype, seed, repr(sorted(overrides.items())))
    if " at 0x" in key[-1]:  # another object may get this address
        return _build(model_type, dtype, seed, overrides)
    if key not in _built or _built[key].changed():
        if len(_built) == MOST_BUILT:
            del _built[next(iter(_built))]
        _built[key] = Built(_build(model_type, dtype, seed, overrides))
    return _built[key].copy()


MOST_BUILT = 200
_built: dict[tuple, Built] = {}


def _build(model_type: str, dtype: torch.dtype, seed: int, overrides: dict[str, Any]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _model_class(model_type)(config(model_type, **overrides))
    randomise(model, seed)
    cast(model, dtype)
    for module in model.modules():  # some experts hold a separate config
        if "config" in module.__dict__:
            module.config._experts_implementation_internal = "eager"
    return model.train()


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast to ``dtype`` in place like from_pretrained: modules kept in fp32 stay in fp32.

    fp64 is for references and casts every tensor.
    """
    kept = {name: t.data for name, t in _tensors(model) if _kept_in_fp32(model, name, dtype)}
    model.to(dtype)
    for name, t in _tensors(model):
        if name in kept:
            t.data = kept[name]
    return model


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Set values that make faults visible, in place; see the head of this file."""
    generator = torch.Generator().manual_seed(seed + 1)

    def normal(t: Tensor, std: float) -> None:
        t.copy_(torch.randn(t.shape, generator=generator) * std)

    with torch.no_grad():
        for name, t in _tensors(model):
            parts = name.split(".")
            if parts[-1] == "tid2eid":
                choices = [torch.randperm(SIZES["num_experts"], generator=generator) for _ in t]
                t.copy_(torch.stack(choices)[:, : t.shape[1]])
            if not t.is_floating_point():
                continue
            if parts[-1] in CORRECTION_BIASES:
                t.copy_(mixed_bias(t.numel(), generator).view(t.shape))
            elif any(part in ("gate", "router") for part in parts[:-1]) and t.dim() <= 2:
                normal(t, 0.5)
            elif "experts" in parts and t.dim() >= 2:
                normal(t, 0.3)
            elif not torch.isfinite(t).all() or not t.any():
                normal(t, 0.1)
    return model


CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias", "balancing_biases")


def mixed_bias(size: int, generator: torch.Generator) -> Tensor:
    """Return non-zero values of both signs, shuffled: -0.3 .. 0.3 without 0."""
    half = torch.linspace(0.05, 0.3, (size + 1) // 2)
    return torch.cat([half, -half])[:size][torch.randperm(size, generator=generator)]


def inputs(model: nn.Module, batch: int = 2, seq: int = 7, seed: int = 1) -> dict[str, Tensor]:
    """Return a batch of the family: token ids (and labels if the model has a head), or others."""
    generator = torch.Generator().manual_seed(seed)
    name = type(model).__name__
    feed = next((t.feed for t in FAMILIES.values() if _class_name(t) == name), "ids")
    if feed == "pixels":
        pixels = torch.randn(batch, 3, 32, 32, generator=generator)
        return {"pixel_values": pixels, "dataset_index": torch.arange(batch)}
    if feed == "patches":
        grid = torch.tensor([[1, 4, 4]])
        return {"pixel_values": torch.randn(16, 3 * 14 * 14, generator=generator), "grid_thw": grid}
    if feed == "embeds":
        return {"inputs_embeds": torch.randn(batch, seq, SIZES["hidden_size"], generator=generator)}
    ids = torch.randint(3, 90, (batch, seq), generator=generator)
    batch_of_ids = {"input_ids": ids}
    if feed == "modalities":
        batch_of_ids["moe_mm_token_type_ids"] = (torch.arange(seq) // 3 % 2).expand(batch, seq)
    if feed == "seq2seq":
        batch_of_ids["decoder_input_ids"] = ids.clone()
    if has_head(model):
        batch_of_ids["labels"] = ids.clone()
    return batch_of_ids


def has_head(model: nn.Module) -> bool:
    """Return whether the model computes a loss from labels."""
    return "ForCausalLM" in type(model).__name__ or "ForConditional" in type(model).__name__


def hidden_output(output: Any) -> Tensor:
    """The last hidden states or feature maps of a model without a head."""
    return output.feature_maps[-1] if "feature_maps" in output else output.last_hidden_state


def loss(output: Any) -> Tensor:
    """The model's own loss, or a fixed random functional of its hidden states."""
    own = output.get("loss")
    return probe(hidden_output(output)) if own is None else own


def blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(path, block) of every module that holds an ``experts`` module with 3-D weights."""
    found = []
    for path, module in model.named_modules():
        experts = module._modules.get("experts")
        if experts is not None and any(p.dim() == 3 for p in experts.parameters()):
            found.append((path, module))
    return found


def hidden(
    block_or_model: nn.Module, batch: int, seq: int, seed: int = 2, dtype: torch.dtype | None = None
) -> Tensor:
    """Hidden states of size one for a block, [batch, seq, D], requiring grad."""
    named = list(block_or_model.named_parameters())
    weight = next((p for n, p in named if "experts" in n.split(".")), named[-1][1])
    D = SIZES["hidden_size"]
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, seq, D, generator=generator)
    return x.to(weight.device, dtype or weight.dtype).requires_grad_()


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def _kept_in_fp32(model: nn.Module, name: str, dtype: torch.dtype) -> bool:
    patterns: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        patterns |= set(model._keep_in_fp32_modules_strict)
    if dtype == torch.float16:
        patterns |= set(model._keep_in_fp32_modules)
    return any(f".{pattern}." in f".{name}." for pattern in patterns)


def _model_class(model_type: str) -> type[nn.Module]:
    tiny = FAMILIES[model_type]
    if tiny.model:
        return _load(tiny.model)
    config_class = _auto("configuration_auto", "CONFIG_MAPPING")[model_type]
    return _auto("modeling_auto", "MODEL_FOR_CAUSAL_LM_MAPPING")[config_class]


def _class_name(tiny: Tiny) -> str | None:
    return tiny.model and tiny.model.split(":")[1]


def _auto(file: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.auto.{file}"), name)


def _load(where: str) -> type:
    folder, name = where.split(":")
    kind = "configuration" if name.endswith("Config") else "modeling"
    return getattr(importlib.import_module(f"transformers.models.{folder}.{kind}_{folder}"), name)
