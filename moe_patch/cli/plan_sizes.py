"""Read the sizes of :mod:`moe_patch.tools.plan_types` from a model on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from moe_patch.cli.inspect import block_sizes
from moe_patch.errors import UnsupportedModelError
from moe_patch.patching.discover import FoundBlock, discover
from moe_patch.patching.fp8_reason import planned_reason
from moe_patch.runtime.described import layout_of
from moe_patch.tools.plan_types import Input, Layer, Moe, Sizes, Weight

# Output projections of attention; they read what attention keeps anyway.
OUT = ("o_proj", "out_proj", "dense", "wo")
# Query projections of latent attention; that of A.X-K2 holds a gate as well.
QUERIES = ("q_b_proj", "q_proj", "q_gate_proj")
NO_CARD = torch.device("cpu")


def read_sizes(
    model: Any,
    targets: dict[str, list[str]],
    attention: str | None = None,
    device: torch.device = NO_CARD,
) -> Sizes:
    """Return the sizes of a model.

    Args:
        model: a transformers model without adapters; on the meta device it costs nothing.
        targets: as lora_targets returns them; empty for full fine-tuning.
        attention: the run's ``attn_implementation``; None is the model's own. All but "eager"
            count as fused.
        device: the card; a CPU stands for a Hopper card elsewhere.

    Raises:
        UnsupportedModelError: it has no MoE block, or a block whose activations are unknown.
    """
    blocks = discover(model)
    if not blocks:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no MoE block; accepted: MoE models (`moe-patch families` "
            "lists them)"
        )
    config = model.config.get_text_config()
    if not hasattr(config, "vocab_size"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no vocabulary, so a run has no logits to count; accepted: "
            "models that predict tokens"
        )
    moes = {block.path: _moe(block, targets, device) for block in blocks}
    layers = dict(_layers(model, blocks))
    fused = type(model)._supports_sdpa or config._attn_implementation != "eager"
    fused = fused if attention is None else attention != "eager"
    return Sizes(
        weights=tuple(_weights(model, blocks, list(layers), targets, device)),
        layers=tuple(
            _layer(path, layer, blocks, moes, targets, config, fused)
            for path, layer in layers.items()
        ),
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        itemsize=next(model.parameters()).itemsize,
    )


def _moe(block: FoundBlock, targets: dict[str, list[str]], device: torch.device) -> Moe:
    """Return a block's sizes, or say why its memory cannot be derived."""
    if block.refused:
        raise UnsupportedModelError(f"{block.path}: {block.reason}")
    sizes = block_sizes(block)
    if "top_k" not in sizes:
        raise UnsupportedModelError(
            f"{block.path}: its experts do not run on moe_patch's operator, so the memory of "
            "their activations is unknown; accepted: families whose experts do (`moe-patch "
            "families` lists them)"
        )
    path, experts = block.experts[0]
    layout = layout_of(experts, block.spec)
    names = targets.get("target_parameters", [])
    adapted = sum(_ends(f"{path}.{name}", names) for name in (layout.up_name, "down_proj"))
    up = sizes["width"] * (2 if layout.has_gate else 1)
    decoded = planned_reason(experts, block.spec, device)
    return Moe(
        sizes["experts"], sizes["top_k"], sizes["hidden"], up, sizes["width"], adapted, decoded
    )  # fmt: skip


def _layers(model: nn.Module, blocks: list[FoundBlock]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of the lists that hold blocks, the dense ones included."""
    lists: dict[str, None] = {}
    for block in blocks:
        parts = block.path.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if at is None:
            raise UnsupportedModelError(
                f"{block.path}: this block is not in a list of layers; accepted: models that keep "
                "their layers in lists"
            )
        lists[".".join(parts[:at])] = None
    for path in lists:
        for name, layer in model.get_submodule(path).named_children():
            yield f"{path}.{name}", layer


def _ends(path: str, names: list[str]) -> bool:
    return any(path == name or path.endswith(f".{name}") for name in names)


def _weights(
    model: Any,
    blocks: list[FoundBlock],
    layers: list[str],
    targets: dict[str, list[str]],
    device: torch.device,
) -> Iterator[Weight]:
    kinds = _kinds(model, blocks)
    projections = {
        f"{path}.{name}": planned_reason(experts, block.spec, device)
        for block in blocks
        for path, experts in block.experts
        for name in (layout_of(experts, block.spec).up_name, "down_proj")
    }
    modules = dict(model.named_modules())
    embedding = _untied_embedding(model)
    for name, parameter in model.named_parameters():
        path, _, last = name.rpartition(".")
        module = modules[path]
        kind = kinds.get(id(module)) or _kind(module)
        layer = next((i for i, at in enumerate(layers) if name.startswith(f"{at}.")), -1)
        packed_linear = kind == "linear" and last == "weight" and layer >= 0
        by_module = last == "weight" and _ends(path, targets.get("target_modules", []))
        adapted = by_module or _ends(name, targets.get("target_parameters", []))
        packable = packed_linear or name in projections or module is embedding
        yield Weight(
            kind, tuple(parameter.shape), layer, adapted, packable, parameter.itemsize,
            projections.get(name, ""),
        )  # fmt: skip


def _untied_embedding(model: Any) -> nn.Module | None:
    """Return the input embedding, unless its weight is the head's as well."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return None if head is not None and head.weight is embedding.weight else embedding


def _kinds(model: Any, blocks: list[FoundBlock]) -> dict[int, str]:
    """Return the kinds that a module's place decides, by id of the module."""
    found = {}
    for one in (model.get_input_embeddings(), model.get_output_embeddings()):
        if one is not None:
            found[id(one)] = "embeddings"
    for block in blocks:
        found |= {id(m): "experts" for _, e in block.experts for m in e.modules()}
        found |= {id(m): "router" for _, r in block.routers for m in r.modules()}
        if block.spec.chooses_in_block and block.block is not None:
            found[id(block.block.get_submodule(block.spec.router_attr))] = "router"
    return found


def _kind(module: nn.Module) -> str:
    if "Norm" in type(module).__name__:
        return "norms"
    return "linear" if isinstance(module, nn.Linear) else "other"


def _layer(
    path: str,
    layer: nn.Module,
    blocks: list[FoundBlock],
    moes: dict[str, Moe],
    targets: dict[str, list[str]],
    config: Any,
    fused: bool,
) -> Layer:
    inside = [block for block in blocks if block.path.startswith(f"{path}.")]
    skipped = _owned(inside)
    heads, attention, eager = 0, 0, 0
    partial = _is_partly_rotated(config)
    inputs: list[Input] = []
    mlps: list[int] = []
    norms: list[tuple[int, int]] = []
    for name, module in layer.named_modules():
        if id(module) in skipped:
            continue
        here = f"{path}.{name}".rstrip(".")
        linears = {n: m for n, m in module.named_children() if type(m) is nn.Linear}
        own = config.hidden_size if _is_inside(here, inside) else 0
        copied = partial or "kv_b_proj" in linears
        inputs += _inputs(here, linears, targets, own, () if copied else OUT)
        norms += _norms(module, linears)
        mlps += _mlp(linears)
        if "Attention" in type(module).__name__ and linears.keys() & {*OUT}:
            attention += _attention(linears)
            heads += config.num_attention_heads
            eager = 0 if fused else _eager(module)
    moe = moes[inside[0].path] if inside else None
    merged = _merged(path, layer, targets)
    return Layer(tuple(norms), attention, heads, eager, tuple(mlps), tuple(inputs), merged, moe)


def _eager(attention: nn.Module) -> int:
    """Return the bytes that eager attention keeps of each probability.

    With sinks (gpt-oss) softmax stays in the model's dtype; others make it in fp32 and cast it.
    """
    width = next(attention.parameters()).itemsize
    return width if "sinks" in attention._parameters else 4 + width


def _is_inside(path: str, blocks: list[FoundBlock]) -> bool:
    return any(f"{path}.".startswith(f"{block.path}.") for block in blocks)


def _owned(blocks: list[FoundBlock]) -> set[int]:
    """Return the ids of all modules of experts and routers."""
    owners = [owner for block in blocks for _, owner in (*block.experts, *block.routers)]
    return {id(module) for owner in owners for module in owner.modules()}


def _mlp(linears: dict[str, nn.Linear]) -> list[int]:
    """Return the width of a gated MLP, or nothing for another module."""
    if "down_proj" in linears and {"gate_proj", "gate_up_proj"} & linears.keys():
        return [linears["down_proj"].in_features]
    return []


def _merged(path: str, layer: nn.Module, targets: dict[str, list[str]]) -> int:
    """Return the numbers of 2-D parameters that PEFT adapts by a merged weight."""
    names = targets.get("target_parameters", [])
    return sum(
        p.numel()
        for n, p in layer.named_parameters()
        if p.dim() == 2 and _ends(f"{path}.{n}", names)
    )


def _is_partly_rotated(config: Any) -> bool:
    """Return whether q is concatenated after rotation.

    The fused kernels lay their output out like q, so that the output projection then reads a copy.
    """
    rope = config.rope_parameters if hasattr(config, "rope_parameters") else None
    kinds = [rope, *rope.values()] if rope else []
    factors = (one.get("partial_rotary_factor") for one in kinds if isinstance(one, dict))
    return any(factor not in (None, 1) for factor in factors)


def _inputs(
    path: str,
    linears: dict[str, nn.Linear],
    targets: dict[str, list[str]],
    kept: int,
    outputs: tuple[str, ...],
) -> Iterator[Input]:
    """Yield the tensors that sibling Linear modules read; siblings of one width share one.

    ``kept`` is the width of the block's own input, which the experts keep; 0 outside a block.
    ``outputs`` names output projections that read attention's own output rather than a copy.
    """
    modules, parameters = (targets.get(f"target_{k}", []) for k in ("modules", "parameters"))
    groups: dict[tuple[int, bool, bool], list[int]] = {}
    for name, linear in linears.items():
        where = f"{path}.{name}"
        is_kept = name in outputs or linear.in_features == kept
        key = linear.in_features, name in OUT, is_kept
        counts = groups.setdefault(key, [0, 0])
        counts[0] += _ends(where, modules)
        counts[1] += _ends(f"{where}.weight", parameters)
    for (features, _, is_kept), (adapted, merged) in groups.items():
        yield Input(features, adapted, merged, is_kept)


def _norms(module: nn.Module, linears: dict[str, nn.Linear]) -> Iterator[tuple[int, int]]:
    """Yield (values, rows) a token of the norms that are children; q and k have a row a head."""
    for name, child in module.named_children():
        if "Norm" not in type(child).__name__:
            continue
        values = rows = 0
        if (weight := next(child.parameters(recurse=False), None)) is not None:
            values, rows = weight.numel(), 1
        projection = linears.get(name.replace("_norm", "_proj"))
        if name in ("q_norm", "k_norm") and projection is not None and values:
            rows = max(1, projection.out_features // values)
            values *= rows
        yield values, rows


def _attention(linears: dict[str, nn.Linear]) -> int:
    """Return values a token of q, k, v and the output.

    Latent attention expands keys to the width of q, and values to that of the output.
    """
    out = next(linears[name].in_features for name in OUT if name in linears)
    if "kv_b_proj" in linears:
        query = next(linears[name] for name in QUERIES if name in linears).out_features
        return 2 * query + 2 * out
    return out + sum(m.out_features for name, m in linears.items() if name not in OUT)
