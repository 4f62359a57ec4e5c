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
    words = [
        "full" if recipe.full else f"rank {recipe.rank}",
        f"experts in {recipe.storage}" + (", twice (fp8_copy)" if recipe.copied else ""),
        recipe.optimizer,
        "checkpointing" if recipe.checkpointing else "no checkpointing",
        "Liger" if recipe.liger else "no Liger",
    ]
    return ", ".join(words)


def training_node(
    args: argparse.Namespace, recipe: Recipe, targets: dict[str, list[str]], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the training file of a recipe as a mapping.

    Raises:
        UnsupportedOptionError: a training file has no key for an option.
    """
    if args.adapters == "bf16" or args.linear == "nf4":
        option = "--adapters bf16" if args.adapters == "bf16" else "--linear nf4"
        raise UnsupportedOptionError(
            f"{option}: a training file has no key for this option; leave it out with --memory or "
            "--recipe"
        )
    name = str(dtype).removeprefix("torch.")
    rate = 1e-5 if recipe.full else 2e-4
    node: dict[str, Any] = {
        "model": {"path": args.model, "dtype": name},
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
    options: dict[str, Any] = {"recompute": True} if recipe.recompute else {}
    options |= {} if recipe.compute == "decoded" else {"compute": recipe.compute}
    if recipe.storage != "bf16":
        node["quantize_experts"] = recipe.storage
    node["moe_patch"] = options or True
    node["liger"] = recipe.liger
    node["output_dir"] = f"outputs/{Path(args.model).name or 'plan'}"
    return node


def text_of(node: dict[str, Any], recipe: Recipe, model: str) -> str:
    """Return the file's text, with the packages that it needs in comments."""
    lines = [f"# moe-patch plan {model}: {recipe.tokens:,} tokens, {said(recipe)}."]
    needs = ["liger-kernel"] if recipe.liger else []
    needs += ["bitsandbytes"] if recipe.optimizer == "adamw_8bit" else []
    lines += [f"# Needs: pip install {' '.join(needs)}"] if needs else []
    lines += [f"# Start {recipe.ranks} processes with accelerate launch."] * (recipe.ranks > 1)
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
