"""Models and blocks without weights, and random weights for a block."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from moe_patch.config import PatchConfig
from moe_patch.formats.packed import STORAGES
from moe_patch.formats.tensor import QuantTensor
from moe_patch.patching.discover import FoundBlock
from moe_patch.patching.patch import patch_model
from moe_patch.quant.mxfp4_checkpoint import fill_block
from moe_patch.quant.stored import quantisation, stored
from moe_patch.quant.surgery import pack_block


def on_meta(config: Any, dtype: torch.dtype | None, options: dict[str, Any]) -> nn.Module:
    """Return the patched model of a transformers config, without weights.

    Args:
        config: the config.
        dtype: dtype of the weights; None is the config's own.
        options: of :class:`moe_patch.PatchConfig`.
    """
    from transformers import AutoModel, AutoModelForCausalLM

    auto = AutoModelForCausalLM
    if type(config) not in AutoModelForCausalLM._model_mapping:
        auto = AutoModel
    config = copy.deepcopy(config)  # from_config modifies it
    dtype = dtype or config.dtype or torch.float32
    with torch.device("meta"):
        # No attention runs here, and this machine may lack the one in the config.
        model = auto.from_config(config, dtype=dtype, attn_implementation="eager")
    return patch_model(model, PatchConfig.parse(None, **options))


def published_storage(config: Any) -> str | None:
    """Return the storage of a config's checkpoint, "fp8" or "mxfp4", if its experts keep it.

    They do unless transformers is to dequantise them (``dequantize`` in the config).
    """
    found = stored(config)
    if found is None or not found.is_read or found.method not in ("fp8", "mxfp4"):
        return None
    return None if (quantisation(config) or {}).get("dequantize") else found.method


def materialised(
    found: FoundBlock, modules: list[nn.Module], device: torch.device, storage: str | None
) -> FoundBlock:
    """Return a copy of a block with small random weights.

    Args:
        found: a block on the meta device.
        modules: its modules.
        device: where the copy's weights are.
        storage: in which its experts are packed, if they are not yet; None or "bf16": they are not.

    Raises:
        UnsupportedModelError: experts that this storage cannot hold.
    """
    twin, owned = copy.deepcopy((found, modules))
    storage = _unpacked(twin) or storage
    for module in [*owned, *(wrapper for _, wrapper in twin.wrappers)]:
        if any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
            module.to_empty(device=device)
            for tensor in [*module.parameters(), *module.buffers()]:
                if tensor.is_floating_point():
                    nn.init.normal_(tensor.data, std=0.02)
                else:
                    tensor.data.zero_()
    if storage == "mxfp4":
        fill_block(twin)
    elif storage in STORAGES:
        pack_block(twin, storage, device)
    return twin


def _unpacked(block: FoundBlock) -> str | None:
    """Replace packed experts on meta by plain ones; return their storage, or None."""
    storage = None
    for _, experts in block.experts:
        for name, value in experts._parameters.items():
            if isinstance(value, QuantTensor):
                storage = value.stored_in
                plain = torch.empty(value.shape, dtype=value.dtype, device="meta")
                experts._parameters[name] = nn.Parameter(plain, requires_grad=False)
    return storage
