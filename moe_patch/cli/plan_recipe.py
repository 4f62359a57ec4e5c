"""The training file of a plan's recipe, for ``moe-patch train``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import yaml

from moe_patch.errors import UnsupportedOptionError
from moe_patch.tools.plan_types import Recipe

OPTIM = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit", "sgd": "sgd"}


def said(recipe: Recipe) -> str:
    """Return a recipe in words."""
    in_fp8 = f" (compute: {recipe.compute})" if recipe.compute != "decoded" else ""
    words = [
        "full" if recipe.full else f"rank {recipe.rank}",
        f"experts in {recipe.storage}" + in_fp8,
        recipe.optimizer,
        "checkpointing" if recipe.checkpointing else "no checkpointing",
        "Liger" if recipe.liger else "no Liger",
    ]
    words += ["experts in host memory"] if recipe.offload else []
    words += ["Linear in nf4"] * (recipe.linear != "bf16")
    words += ["embedding in nf4"] * (recipe.embedding != "bf16")
    words += ["bf16 adapters"] * (recipe.adapter_bytes == 2 and not recipe.full)
    return ", ".join(words)


def training_node(
    args: argparse.Namespace, recipe: Recipe, targets: dict[str, list[str]], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the training file of a recipe as a mapping.

    Raises:
        UnsupportedOptionError: bf16 adapters on a model of another dtype.
    """
    bf16_adapters = recipe.adapter_bytes == 2 and not recipe.full
    if bf16_adapters and dtype != torch.bfloat16:
        raise UnsupportedOptionError(
            f"--adapters bf16: a training file needs a bfloat16 model for them, found {dtype}; "
            "accepted: --dtype bfloat16"
        )
    name = str(dtype).removeprefix("torch.")
    rate = 1e-5 if recipe.full else 2e-4
    node: dict[str, Any] = {
        "model": _model(args, name),
        "data": {"source": "python-stdlib-docstrings", "block_size": recipe.tokens},
    }
    if not recipe.full:
        node["lora"] = {"r": recipe.rank, "lora_alpha": 2 * recipe.rank, **targets}
    node["training"] = {
        "max_steps": 500,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": recipe.accumulation,
        "learning_rate": rate,
        "bf16": dtype == torch.bfloat16,
        "gradient_checkpointing": recipe.checkpointing,
        "optim": OPTIM[recipe.optimizer],
    }
    if bf16_adapters:
        node["adapter_dtype"] = "bfloat16"
    storages = {"experts": recipe.storage, "linear": recipe.linear, "embedding": recipe.embedding}
    node |= {f"quantize_{what}": s for what, s in storages.items() if s != "bf16"}
    options = {"recompute": recipe.recompute, "offload_experts": recipe.offload}
    chosen: dict[str, Any] = {name: True for name, on in options.items() if on}
    chosen |= {} if recipe.compute == "decoded" else {"compute": recipe.compute}
    node["moe_patch"] = chosen or True
    node["liger"] = recipe.liger
    node["output_dir"] = f"outputs/{Path(args.model).name or 'plan'}"
    return node


def _model(args: argparse.Namespace, dtype: str) -> dict[str, str]:
    own = {} if args.attention is None else {"attn_implementation": args.attention}
    return {"path": args.model, "dtype": dtype, **own}


def text_of(node: dict[str, Any], recipe: Recipe, model: str) -> str:
    """Return the file's text, with the packages that it needs in comments."""
    lines = [f"# moe-patch plan {model}: {recipe.tokens:,} tokens, {said(recipe)}."]
    needs = ["liger-kernel"] if recipe.liger else []
    packed = recipe.optimizer == "adamw_8bit" or {recipe.linear, recipe.embedding} != {"bf16"}
    needs += ["bitsandbytes"] if packed else []
    lines += [f"# Needs: pip install {' '.join(needs)}"] if needs else []
    how = "FSDP2" if recipe.shards > 1 else "DDP"
    lines += [f"# Start {recipe.ranks} processes with accelerate launch ({how})."] * (
        recipe.ranks > 1
    )
    return "\n".join(lines) + "\n" + yaml.safe_dump(node, sort_keys=False)


def write(path: str, text: str) -> None:
    """Write a new file.

    Raises:
        UnsupportedOptionError: it exists, or cannot be written.
    """
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UnsupportedOptionError(
            f"--recipe {path}: {error.strerror}; accepted: a new file in an existing folder"
        ) from error
