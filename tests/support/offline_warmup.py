"""Kernels that warmup, and then every later size, compiles for sm_90, on any machine.

A program: the block runs on CPU tensors under a driver that compiles and launches nothing, so only
the names of compiled kernels mean anything. Prints them as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "tiles")]

import torch  # noqa: E402
import triton  # noqa: E402
from compile_only import compiling_for  # noqa: E402

from moe_patch import patch_model  # noqa: E402
from moe_patch.tools.warmup import warmup  # noqa: E402
from tests.support import tiny_models  # noqa: E402
from tests.support.parity import run_block  # noqa: E402

SHARED_MEMORY = 227 * 1024
SIZES = (512, *range(1, 34), 48, 63, 64, 65, 128, 129, 255, 256, 257, 300, 511, 513, 600)


def main() -> None:
    names: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *_, fn, **__: names.append(fn.name)
    model = tiny_models.build("qwen3_moe", dtype=torch.bfloat16)
    with (
        mock.patch("moe_patch.ops.backend.why_not_triton", return_value=None),
        compiling_for((9, 0), SHARED_MEMORY, measured=False),
    ):
        patch_model(model, self_check=False)
        warmup(model, progress=False)
        warmed = list(names)
        _, block = tiny_models.blocks(model)[0]
        for tokens in SIZES:
            x = torch.randn(1, tokens, tiny_models.SIZES["hidden_size"], dtype=torch.bfloat16)
            run_block(block, x)
            with torch.no_grad():
                block(x)
    print(json.dumps({"warmup": warmed, "later": names[len(warmed) :]}))


if __name__ == "__main__":
    main()
