"""Kernels that warmup, and then every later size, compiles for sm_90, on any machine.

A program. Its argument is "plain", or a value of ``compute`` for experts in FP8 with adapters. The
block runs on CPU tensors under a driver that compiles and launches nothing, so only the names of
compiled kernels mean anything. Prints them as one line of JSON.
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
from torch import Tensor  # noqa: E402

from moe_patch import patch_model, quantize_experts  # noqa: E402
from moe_patch.kernels.common import versions  # noqa: E402
from moe_patch.kernels.experts.call import Call  # noqa: E402
from moe_patch.runtime import fp8  # noqa: E402
from moe_patch.tools.warmup import warmup  # noqa: E402
from tests.support import tiny_models  # noqa: E402
from tests.support.adapters import EXPERTS, adapt, lora_config  # noqa: E402
from tests.support.parity import run_block  # noqa: E402

SHARED_MEMORY = 227 * 1024
SIZES = (512, *range(1, 34), 48, 63, 64, 65, 128, 129, 255, 256, 257, 300, 511, 513, 600)


WIDE = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 1}
# Above this, backward of FP8 experts without copies decodes into a buffer.
LONG = (2048, 2049, 8192)


def gathered(call: Call, rows_TD: Tensor) -> Tensor:
    """Return memory for the rows of a plan, which no kernel has written here."""
    return rows_TD.new_empty(call.tiles.plan.row_of_N.shape[0], rows_TD.shape[1])


def main(compute: str) -> None:
    names: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *_, fn, **__: names.append(fn.name)
    options, sizes = {}, SIZES
    if compute == "plain":
        model = tiny_models.build("qwen3_moe", dtype=torch.bfloat16)
    else:
        options, sizes = {"compute": compute}, (*SIZES, *LONG)
        model = quantize_experts(tiny_models.build("qwen3_moe", torch.bfloat16, **WIDE), "fp8")
        model = adapt(model, lora_config(EXPERTS, [], r=8))
        versions._GATES[triton.__version__] = versions.Gates(True, True, fp8=True)
    with (
        mock.patch("moe_patch.ops.backend.why_not_triton", return_value=None),
        mock.patch.object(fp8, "_is_hopper", return_value=True),
        mock.patch.object(Call, "_gathered", gathered),
        compiling_for((9, 0), SHARED_MEMORY, measured=False),
    ):
        patch_model(model, self_check=False, **options)
        warmup(model, progress=False)
        warmed = list(names)
        _, block = tiny_models.blocks(model)[0]
        for tokens in sizes:
            x = torch.randn(1, tokens, model.config.hidden_size, dtype=torch.bfloat16)
            run_block(block, x)
            with torch.no_grad():
                block(x)
    print(json.dumps({"warmup": warmed, "later": names[len(warmed) :]}))


if __name__ == "__main__":
    main(sys.argv[1])
