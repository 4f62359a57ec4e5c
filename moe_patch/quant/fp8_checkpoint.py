"""Use the experts of FP8 checkpoints as transformers loads them, without a conversion."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from moe_patch.errors import UnsupportedModelError
from moe_patch.formats import fp8
from moe_patch.formats.packed import PackedWeight
from moe_patch.formats.tensor import QuantTensor, parameter
from moe_patch.patching.discover import FoundBlock, discover, selected
from moe_patch.quant import state
from moe_patch.runtime.described import layout_of
from moe_patch.runtime.modules import is_sharded


def adopt(model: nn.Module, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> None:
    """Replace each FP8Experts module of transformers by the family's own experts module.

    The parameters of the new module hold the bytes and scales of the old one.

    Args:
        model: model of an FP8 checkpoint; other models are left unchanged.
        include, exclude: glob patterns on block paths.

    Raises:
        UnsupportedModelError: an FP8Experts module has scales of blocks other than 128 x 128, is
            divided over ranks, or its family uses another weight layout.
    """
    from transformers.integrations.finegrained_fp8 import FP8Experts

    todo = [
        (block, block.block, found)
        for block in discover(model)
        if block.block is not None
        and selected(block, include, exclude)
        and type(found := block.block._modules.get("experts")) is FP8Experts
    ]
    made = [_own_experts(*one) for one in todo]
    for (_, holder, _), experts in zip(todo, made, strict=True):
        holder.experts = experts


def _own_experts(block: FoundBlock, holder: nn.Module, found: Any) -> nn.Module:
    where = f"{block.path}.experts ({type(found).__name__})"
    module = importlib.import_module(type(holder).__module__)
    with torch.device("meta"):
        experts = getattr(module, str(block.spec.experts))(found.config)
    layout = layout_of(experts, block.spec)
    if layout.is_transposed or layout.has_bias or not layout.is_concatenated:
        raise UnsupportedModelError(
            f"{where}: its family uses a weight layout other than that of FP8Experts; leave such a "
            "model to transformers"
        )
    dtype = found.config.dtype or torch.get_default_dtype()
    for name in (layout.up_name, "down_proj"):
        values, scales = getattr(found, name).data, getattr(found, f"{name}_scale_inv").data
        if is_sharded(values) or is_sharded(scales):
            raise UnsupportedModelError(
                f"{where}: {name} is divided over ranks; accepted: whole experts, which FSDP2 may "
                "shard after quantize_experts; expert and tensor parallelism take experts in 16 "
                "bits: load with FineGrainedFP8Config(dequantize=True)"
            )
        E, rows, columns = values.shape
        expected = (E, -(-rows // fp8.BLOCK), -(-columns // fp8.BLOCK))
        if values.dtype != fp8.DTYPE or scales.dtype != torch.float32 or scales.shape != expected:
            raise UnsupportedModelError(
                f"{where}: {name} is stored in {values.dtype} with scales {scales.dtype} "
                f"{tuple(scales.shape)}; accepted: {fp8.DTYPE} with fp32 scales {expected}, one "
                "per 128 x 128 block"
            )
        weight = PackedWeight("fp8", values.contiguous(), (scales.contiguous(),), dtype)
        setattr(experts, name, parameter(QuantTensor(weight)))
    state.watch(experts)
    return experts.train(found.training)
