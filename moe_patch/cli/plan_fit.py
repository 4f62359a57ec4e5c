"""The first recipe that fits a card, for ``plan --memory``."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections.abc import Container
from dataclasses import replace
from typing import Any

import torch

from moe_patch.cli.plan_recipe import said
from moe_patch.errors import UnsupportedOptionError
from moe_patch.tools.plan_total import first_fitting, make_plan, most_tokens
from moe_patch.tools.plan_types import Recipe, Sizes

EMBEDDING_BLOCK = 64  # rows of other widths cannot be stored in 4 bits (train/frozen.py)
# What --memory may choose where the user did not, least preferred last; the last key to give up
# is the rank. Experts leave the card only if nothing else fits (see fit).
CHOICES: dict[str, tuple[Any, ...]] = {
    "checkpointing": (False, True),
    "liger": (False, True),
    "storage": ("bf16", "fp8", "nf4"),
    "optimizer": ("adamw", "adamw_8bit"),
    "linear": ("bf16", "nf4"),
    "adapters": ("fp32", "bf16"),
    "embedding": ("bf16", "nf4"),
    "rank": (16, 8, 4),
}


def choices_of(
    fixed: dict[str, Any], storages: Container[str], model_type: str, dtype: torch.dtype
) -> dict[str, tuple[Any, ...]]:
    """Return the values to try for each option that is not fixed."""
    choices = {name: values for name, values in CHOICES.items() if name not in fixed}
    if dtype != torch.bfloat16:  # bf16 adapters on a wider base would be a cast each time
        choices.pop("adapters", None)
    if "storage" in choices:
        choices["storage"] = tuple(s for s in CHOICES["storage"] if s in storages)
    if "liger" in choices and not _may_run_on_liger(model_type):
        choices["liger"] = (False,)
    return choices


def _may_run_on_liger(model_type: str) -> bool:
    """Return whether Liger has kernels for a model type, or True if it is not installed here."""
    from moe_patch.train.liger import check_liger_knows

    if importlib.util.find_spec("liger_kernel") is None:
        return True
    try:
        check_liger_knows(model_type)
    except UnsupportedOptionError:
        return False
    return True


def fit(
    args: argparse.Namespace,
    sizes: Sizes,
    recipe: Recipe,
    choices: dict[str, tuple[Any, ...]],
    memory: int,
) -> Recipe:
    """Return the first recipe of the choices that fits.

    If none does and the user did not exclude it, experts go to host memory in their smallest
    storage, because each step copies them. FSDP2 would shard them, so then they stay.

    Raises:
        UnsupportedOptionError: none fits; says what is missing, and the nearest that does.
    """
    if sizes.hidden % EMBEDDING_BLOCK:
        choices = {name: values for name, values in choices.items() if name != "embedding"}
    found, least = first_fitting(sizes, recipe, choices, memory)
    whole = recipe.ranks == 1 or recipe.ddp
    if found is None and args.offload is None and whole and not recipe.full:
        smallest = {name: choices[name][-1:] for name in choices.keys() & {"storage"}}
        away = replace(recipe, offload=True)
        found, least = first_fitting(sizes, away, choices | smallest, memory)
    if found is not None:
        return found
    needed = make_plan(sizes, least).needed
    tokens = most_tokens(sizes, least, memory)
    nearest = f"{tokens:,} tokens" if tokens else f"a card of {math.ceil(needed / 1e8) / 10} GB"
    missing = (needed - memory) / 2**30
    raise UnsupportedOptionError(
        f"--memory {args.memory}: no recipe for {args.model} fits at {recipe.tokens:,} tokens; "
        f"the smallest ({said(least)}) needs {needed / 2**30:.1f} GiB, which is {missing:.1f} GiB "
        f"too much; accepted: {nearest}"
    )
