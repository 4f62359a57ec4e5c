"""Shapes by name, and the point of the grid that one row stands for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    # Storage of the weights; everything else is in bf16.
    "nf4": torch.bfloat16,
    "fp8": torch.bfloat16,
}


@dataclass(frozen=True)
class Shape:
    """The sizes of one model's MoE layer.

    Attributes:
        name: its name in rows.
        D, F, E, K: hidden size, expert width (both None if an op has none), experts, top-k.
        tokens, dtype: override the op's defaults if the shape is meant for one machine only.
    """

    name: str
    D: int | None
    F: int | None
    E: int
    K: int
    tokens: tuple[int, ...] | None = None
    dtype: str | None = None


_ROUTING_SHAPES = (
    Shape("E64_K8", None, None, 64, 8),
    Shape("E128_K8", None, None, 128, 8),
    Shape("E512_K10", None, None, 512, 10),
    # DeepSeek-V3's groups; its router computes in fp32.
    Shape("E256_K8_G8", None, None, 256, 8, dtype="fp32"),
)
_PRODUCT_KEY_SHAPES = tuple(
    Shape(f"P{P}_K{K}", None, None, P * P, K) for P in (64, 128, 256) for K in (16, 32)
)
# Twelve layers of Qwen3-30B-A3B: sequences per step x their length, gradient checkpointing or not.
_MODEL_SHAPES = tuple(
    Shape(f"qwen3_30b_12L_{batch}{ckpt}", 2048, 768, 128, 8, tokens=(16384,))
    for batch in ("4x4096", "1x16384")
    for ckpt in ("", "_ckpt")
)
_SHAPES = (
    *_ROUTING_SHAPES,
    *_PRODUCT_KEY_SHAPES,
    *_MODEL_SHAPES,
    Shape("qwen3_30b", 2048, 768, 128, 8),
    Shape("olmoe", 2048, 1024, 64, 8),
    Shape("mixtral", 4096, 14336, 8, 2),
    Shape("glm45_air", 4096, 1408, 128, 8),
    Shape("dsv3_e64", 7168, 2048, 64, 8),
    # Small enough for a laptop: on this shape the torch backend is compared with HF's default.
    Shape("cpu_e64", 256, 128, 64, 8, tokens=(2048,), dtype="fp32"),
    # Shapes of --dry-run: the second for weights that are stored in blocks.
    Shape("tiny", 32, 16, 4, 2, tokens=(16,), dtype="fp32"),
    Shape("tiny128", 128, 128, 4, 2, tokens=(16,), dtype="fp32"),
)
SHAPES = {shape.name: shape for shape in _SHAPES}


@dataclass(frozen=True)
class Point:
    """One point of the grid; together with an implementation it makes one row.

    Attributes:
        shape: a name in :data:`SHAPES`.
        T: tokens.
        passes: "fwd" or "fwd+bwd".
        dtype: a name in :data:`DTYPES`.
        R: LoRA rank, or None.
    """

    shape: str
    T: int
    passes: str
    dtype: str
    R: int | None = None

    @property
    def sizes(self) -> Shape:
        return SHAPES[self.shape]

    @property
    def rows(self) -> int:
        """Return N = T * K."""
        return self.T * self.sizes.K

    @property
    def backward(self) -> bool:
        return self.passes == "fwd+bwd"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]
