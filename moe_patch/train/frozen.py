"""Store frozen 16-bit weights in 4 bits by bitsandbytes, and make adapters in 16 bits.

``quantize_linear: nf4`` is about the Linear modules of the decoder layers, shared experts included,
and ``quantize_embedding: nf4`` about the input embedding. Experts, routers and the head stay as
they are: Liger's fused loss reads the head's 16-bit weight.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.patching.discover import FoundBlock, discover
from moe_patch.runtime.module_patch import patch_of
from moe_patch.train.build import build_base
from moe_patch.train.config import TrainConfig

BLOCK = 64  # values that share one of bitsandbytes' scales


def check_bitsandbytes(config: TrainConfig) -> None:
    """Refuse keys of a training file that need bitsandbytes where it is not installed.

    Raises:
        UnsupportedOptionError: bitsandbytes is not installed.
    """
    optimizer = str(config.training.get("optim", ""))
    needs = {
        "quantize_linear": config.quantize_linear is not None,
        "quantize_embedding": config.quantize_embedding is not None,
        f"training.optim: {optimizer}": any(w in optimizer for w in ("bnb", "8bit", "paged")),
    }
    key = next((key for key, used in needs.items() if used), None)
    if key is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise UnsupportedOptionError(
            f"{key}: bitsandbytes is not installed; run pip install bitsandbytes, or leave the key "
            "out"
        )


def stores_frozen(config: TrainConfig) -> bool:
    """Return whether some frozen weights are packed when the run begins."""
    keys = (config.quantize_experts, config.quantize_linear, config.quantize_embedding)
    return any(key is not None for key in keys)


def stored_base(
    config: TrainConfig, tokenizer: Any, device: torch.device, home: torch.device
) -> Any:
    """Return the model without adapters, its frozen weights stored as the file says.

    It is on the CPU if nothing is stored in 4 or 8 bits, else on ``home``. Experts are packed on
    ``device``, which trains.

    Raises:
        UnsupportedOptionError, UnsupportedModelError: as build_base, or as the functions below.
    """
    storage = config.quantize_experts
    base = build_base(config.model, tokenizer, config.seed, storage, home, device)
    if config.quantize_linear is not None:
        quantize_linears(base.to(home))
    if config.quantize_embedding is not None:
        quantize_embedding(base.to(home))
    return base


def check_offloaded(model: Any) -> None:
    """Refuse expert weights in host memory that the optimizer would train.

    Args:
        model: patched; experts in host memory have a seat.

    Raises:
        UnsupportedOptionError: ``modules_to_save`` makes some trainable (names the first).
    """
    for path, module in model.named_modules():
        patch = patch_of(module)
        if patch is None or patch.seat is None:
            continue
        for name, weight in module.named_parameters(recurse=False):
            if weight.dim() == 3 and weight.requires_grad:
                raise UnsupportedOptionError(
                    f"lora: {path}.{name} would be trained, but offload_experts freezes it in host "
                    "memory; accepted: adapters on it (target_parameters) instead of "
                    "modules_to_save, or offload_experts: false"
                )


def quantize_linears(model: Any) -> Any:
    """Replace the Linear modules of the decoder layers by bitsandbytes' Linear4bit, in place.

    Each weight [out, in] becomes NF4 with double quantisation on its own device; its 16-bit form is
    freed before the next one. Adapters go on afterwards: PEFT chooses its class by the module's.

    Args:
        model: a transformers model without adapters, on the device that trains.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: its layers have no Linear module.
    """
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    found = list(_linears(model))
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__}: its decoder layers have no Linear module to store in nf4; "
            "leave quantize_linear out"
        )
    while found:
        parent, name, linear = found.pop()  # the list would keep every 16-bit weight
        weight = linear.weight
        made = bitsandbytes.nn.Linear4bit(
            linear.in_features, linear.out_features, linear.bias is not None,
            compute_dtype=weight.dtype, quant_type="nf4", device="meta",
        )  # fmt: skip
        packed = bitsandbytes.nn.Params4bit(
            weight.data, requires_grad=False, quant_type="nf4", module=made
        )
        made.weight, made.bias = packed.to(weight.device), linear.bias
        setattr(parent, name, made)
    model.is_loaded_in_4bit = True  # PEFT puts its 4-bit adapters only on models marked so
    return model


def quantize_embedding(model: Any) -> Any:
    """Replace the input embedding [V, D] by bitsandbytes' EmbeddingNF4, in place.

    It decodes only the rows of a batch. Its scales are fp32, one per 64 values.

    Returns:
        The same object.

    Raises:
        UnsupportedModelError: the embedding is the head's weight as well, is no plain Embedding, or
            has rows that are no multiple of 64 values.
    """
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    old, head = model.get_input_embeddings(), model.get_output_embeddings()
    name = f"{type(model).__name__}: its input embedding"
    tied = head is not None and head.weight is old.weight
    if tied or type(old) is not nn.Embedding or old.embedding_dim % BLOCK:
        why = "is the head's weight as well" if tied else f"is {old}"
        raise UnsupportedModelError(
            f"{name} {why}; quantize_embedding accepts an Embedding of its own with rows of a "
            f"multiple of {BLOCK} values"
        )
    made = bitsandbytes.nn.EmbeddingNF4(
        old.num_embeddings, old.embedding_dim, dtype=old.weight.dtype, device="meta"
    )
    packed = bitsandbytes.nn.Params4bit(
        old.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=False,
        module=made,
    )  # fmt: skip
    made.weight = packed.to(old.weight.device)
    # bitsandbytes refuses to save this class; PEFT makes a whole state dict to keep the adapters'.
    made._save_to_state_dict = functools.partial(nn.Module._save_to_state_dict, made)
    model.set_input_embeddings(made)
    return model


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Yield (parent, name, module) of the Linear modules in decoder layers, but not of routers."""
    blocks = discover(model)
    skipped, lists = _routers(blocks), tuple({_list_of(block.path) for block in blocks})
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if (
                f"{path}.{name}".startswith(lists)
                and type(child) is nn.Linear
                and id(child) not in skipped
            ):
                yield parent, name, child


def _routers(blocks: list[FoundBlock]) -> set[int]:
    """Return the ids of all modules of routers; a block that routes itself reads its children."""
    found = {id(m) for block in blocks for _, router in block.routers for m in router.modules()}
    for block in blocks:
        if block.block is not None and (block.spec.chooses_in_block or not block.routers):
            found |= {id(child) for child in block.block.children()}
    return found


def _list_of(path: str) -> str:
    """Return the path of the list that holds a block's layer: "model.layers." of its 3rd layer."""
    parts = path.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[:at]) + "."
