"""Families of vision-language models inside their full wrapper, with an image in every row.

Llama4ForConditionalGeneration is not among them: in transformers 5.24 its forward reads an output
that its text model does not have, patched or not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from moe_patch import patch_model, patch_report
from tests.support import tiny_models, window
from tests.support.all_families import LIMIT
from tests.support.parity import assert_parity, run_model
from tests.support.trace import assert_tier, executed

IMAGE, START, END = 90, 91, 92
SPECIAL = {
    "image_token_id": IMAGE, "video_token_id": 93, "vision_start_token_id": START,
    "vision_end_token_id": END, "image_start_token_id": START, "image_end_token_id": END,
    "video_start_token_id": 94, "video_end_token_id": 95,
    "boi_token_id": START, "eoi_token_id": END,
    "projection_hidden_size": 32, "audio_token_id": 96, "boa_token_id": 97, "eoa_token_index": 98,
}  # fmt: skip
# An image of 4 x 4 patches of 4 x 4 pixels, merged two by two into four image tokens.
VISION = {
    "depth": 2, "num_hidden_layers": 2, "hidden_size": 32, "num_heads": 4, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128, "patch_size": 4,
    "image_size": 16, "spatial_merge_size": 2, "pooling_kernel_size": 2, "out_hidden_size": 32,
    "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16,
    "position_embedding_size": 16, "pos_emb_height": 4, "pos_emb_width": 4,
}  # fmt: skip


def patches(values: int) -> dict[str, Tensor]:
    """Return Qwen's format: all patches of the batch in rows, and each image's grid."""
    pixels = torch.randn(2 * 16, values, generator=torch.Generator().manual_seed(4))
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}


def single_patches() -> dict[str, Tensor]:
    """Return Kimi's format: patches as small images, and each image's grid."""
    batch = patches(3 * 4 * 4)
    return {**batch, "pixel_values": batch["pixel_values"].view(-1, 3, 4, 4)}


def with_positions() -> dict[str, Tensor]:
    """Return Gemma's format: patches per image, and the column and row of each."""
    pixels = torch.rand(2, 16, 3 * 4 * 4, generator=torch.Generator().manual_seed(4))
    row, column = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    positions = torch.stack([column.flatten(), row.flatten()], dim=-1)
    return {"pixel_values": pixels, "image_position_ids": positions.expand(2, -1, -1)}


# Class prefix, recipe of the text tower, image inputs, argument names for token kinds.
MODELS = [
    ("Qwen3VLMoe", "qwen3_vl_moe", lambda: patches(3 * 2 * 4 * 4), ("mm_token_type_ids",)),
    ("Glm4vMoe", "glm4v_moe", lambda: patches(3 * 2 * 4 * 4), ("mm_token_type_ids",)),
    (
        "Ernie4_5_VLMoe",
        "ernie4_5_vl_moe",
        lambda: patches(3 * 4 * 4),
        ("mm_token_type_ids", "moe_mm_token_type_ids"),
    ),
    pytest.param(
        "Kimi_K25", "deepseek_v3", single_patches, ("mm_token_type_ids",), marks=window.kimi
    ),
    ("Gemma4", "gemma4", with_positions, ("mm_token_type_ids",)),
]


def declared(cls: Any, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in cls.__dataclass_fields__}


def build(prefix: str, text: Any) -> nn.Module:
    cls = getattr(transformers, f"{prefix}Config")
    vision = declared(getattr(transformers, f"{prefix}VisionConfig"), VISION)
    config = cls(text_config=text.to_dict(), vision_config=vision, **declared(cls, SPECIAL))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return tiny_models.randomise(model).train()


def batch_of(image: dict[str, Tensor], kinds: tuple[str, ...]) -> dict[str, Tensor]:
    words = torch.randint(3, 80, (2, 9), generator=torch.Generator().manual_seed(4))
    words[:, 2:8] = torch.tensor([START, *[IMAGE] * 4, END])
    return {"input_ids": words, **image, **{name: (words == IMAGE).int() for name in kinds}}


@pytest.mark.parametrize(("prefix", "recipe", "image", "kinds"), MODELS)
def test_full_wrapper(prefix, recipe, image, kinds):
    model = build(prefix, tiny_models.config(recipe))
    batch = batch_of(image(), kinds)
    reference = run_model(model, batch, output_router_logits=True)
    seen = [name for name in reference if "visual" in name or "vision" in name]
    assert any(reference[name] is not None and reference[name].any() for name in seen)
    patch_model(model)
    runs = []
    ran = executed(lambda: runs.append(run_model(model, batch, output_router_logits=True)))
    assert_tier("full", model, ran)
    assert {row.tier for row in patch_report(model)} == {"full"}
    assert_parity(runs[0], reference, LIMIT)
