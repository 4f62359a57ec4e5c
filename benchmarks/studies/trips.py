#!/usr/bin/env python3
"""Count the packages of moe_patch that a call of the experts, or of ``patch_model``, crosses.

A package at the top of moe_patch is one node, and so is a file beside the packages. A move is a
call or a return from one node into another. The model is a tiny Qwen3-MoE on the CPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import moe_patch

ROOT = Path(moe_patch.__file__).parent


def trip(call: Callable[[], object]) -> list[str]:
    """Return the nodes in the order in which the call passes through them."""
    nodes: list[str] = []

    def watch(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event in ("call", "return") and path.is_relative_to(ROOT):
            node = path.relative_to(ROOT).parts[0]
            if not nodes or nodes[-1] != node:
                nodes.append(node)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return nodes


def show(name: str, nodes: list[str]) -> None:
    """Print how many nodes and moves a trip has, and the nodes in order of their first visit."""
    seen = list(dict.fromkeys(nodes))
    print(f"{name}: {len(seen)} nodes, {len(nodes) - 1} moves: {', '.join(seen)}")


def main() -> None:
    """Print both trips."""
    config = Qwen3MoeConfig(
        hidden_size=16, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
        vocab_size=32, intermediate_size=16, mlp_only_layers=[],
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    show("patch_model", trip(lambda: moe_patch.patch_model(model)))
    block, hidden = model.model.layers[0].mlp, torch.randn(1, 5, 16)
    block(hidden)
    show("block, forward", trip(lambda: block(hidden)))


if __name__ == "__main__":
    main()
