"""Look up tensor names of merged checkpoints in llama.cpp's table, if gguf is installed."""

from __future__ import annotations

import re

import pytest

from moe_patch.serving.merge import merge
from tests.support.merge_cases import plain, save_adapter, save_base, tensors

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")

ARCHITECTURES = {
    "afmoe": "AFMOE", "deepseek_v3": "DEEPSEEK2", "dots1": "DOTS1", "ernie4_5_moe": "ERNIE4_5_MOE",
    "glm4_moe": "GLM4_MOE", "hunyuan_v1_moe": "HUNYUAN_MOE", "jamba": "JAMBA",
    "minimax_m2": "MINIMAXM2", "mixtral": "LLAMA", "olmoe": "OLMOE", "phimoe": "PHIMOE",
    "qwen2_moe": "QWEN2MOE", "qwen3_moe": "QWEN3MOE",
}  # fmt: skip


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_every_name_of_a_merged_checkpoint_maps(model_type, tmp_path):
    """convert_hf_to_gguf.py first stacks experts and renames the correction bias, as done here."""
    model = save_base(model_type, tmp_path / "base")
    save_adapter(model, tmp_path / "adapter")
    empty = plain(tmp_path / "base", tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "base", tmp_path / "out", empty)
    table = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, ARCHITECTURES[model_type]), 4)
    for name in tensors(tmp_path / "out"):
        asked = re.sub(r"experts\.\d+\.", "experts.", name)
        asked = asked.replace("e_score_correction_bias", "e_score_correction.bias")
        assert table.get_name(asked, try_suffixes=(".weight", ".bias")), name
