"""Write bases, adapters and PEFT's own merges to files, for the tests of merging."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn

from moe_patch import lora_targets
from moe_patch.cli import adapted
from moe_patch.cli.output import quiet_libraries
from moe_patch.serving.checkpoint import Checkpoint
from moe_patch.serving.merge import merge
from tests.support import tiny_models
from tests.support.adapters import adapt

# Every kind of hub layout: per expert, fused, transposed, MLA, shared experts, two towers, hybrid.
LAYOUTS = (
    "deepseek_v3", "dots3_note", "ernie4_5_vl_moe", "gemma4", "glm4_moe", "gpt_oss", "jamba",
    "laguna", "llama4", "mixtral", "nemotron_h", "qwen3_moe", "qwen3_next", "qwen3_vl_moe",
)  # fmt: skip


@quiet_libraries()
def save_base(
    model_type: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **over: Any
) -> nn.Module:
    """Save a tiny base with transformers, in the hub's layout, and return its model."""
    model: Any = tiny_models.build(model_type, dtype=dtype, **over)
    model.save_pretrained(folder)
    return model


@quiet_libraries()
def save_adapter(model: nn.Module, folder: Path, **options: Any) -> PeftModel:
    """Save a random adapter on the targets in ``options``, or else on those of lora_targets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "target_modules" not in options and "target_parameters" not in options:
            options |= lora_targets(model)
        defaults = {"r": 3, "lora_alpha": 6, "init_lora_weights": False}
        adapter = adapt(model, LoraConfig(**(defaults | options)))
        adapter.save_pretrained(folder)
    return adapter


@quiet_libraries()
def by_peft(model_class: Any, base: Path, adapter: Path, out: Path) -> dict[str, Tensor]:
    """Merge into the fp32 base with PEFT, save with transformers, and return the tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_class.from_pretrained(base, dtype=torch.float32)
        merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
        merged.save_pretrained(out)
    return tensors(out)


def tensors(folder: Path) -> dict[str, Tensor]:
    """Return all stored tensors of a checkpoint."""
    found: dict[str, Tensor] = {}
    for file in Checkpoint(folder).files:
        found |= load_file(folder / file)
    return found


def plain(base: Path, adapter: Path) -> nn.Module:
    """Return the empty model of a base, as built by the command."""
    return adapted.plain_model(base, str(adapter))[1]


def merged(folder: Path, adapter: str = "adapter", out: str = "out", **options: Any) -> Any:
    """Merge the folder's adapter into its base; return the summary and the tensors."""
    base = folder / "base"
    done = merge(folder / adapter, base, folder / out, plain(base, folder / adapter), **options)
    return done, tensors(folder / out)


def assert_equal_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Check that every tensor of ``found`` equals the expected one cast to its dtype."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        wanted = expected[name].to(value.dtype)
        assert value.shape == wanted.shape, name
        same = torch.equal(value.view(torch.uint8), wanted.view(torch.uint8))
        assert same, f"{name}: {(value != wanted).sum()} of {value.numel()} values differ"


def remake(folder: Path) -> Path:
    """Delete the folder and return its path."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder
