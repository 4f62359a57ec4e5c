"""Grids by name: ``bench.py all --preset NAME`` runs them, the most important part first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Segment:
    """A part of an op's grid; None takes the op's own. Rows of one segment stand side by side.

    Attributes:
        name: its name for ``--segments``.
        op: the op.
        impls, shapes, tokens, passes, ranks: the part of the grid.
        left_out: implementations that do not run here, with the reason; they get rows.
    """

    name: str
    op: str
    impls: tuple[str, ...] | None = None
    shapes: tuple[str, ...] | None = None
    tokens: tuple[int, ...] | None = None
    passes: tuple[str, ...] | None = None
    ranks: tuple[int | None, ...] | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)


_EXPERTS = ("moe_patch", "hf_grouped_mm", "torch_grouped_mm_early", "scattermoe")
_VARIANTS = ("moe_patch:recompute", "moe_patch:batch_invariant")
_PORTABLE = ("moe_patch:portable", "hf_grouped_mm")
_PORTABLE_LORA = ("moe_patch:portable", "peft", "split_lora")
_OURS, _RELEASED = ("moe_patch",), ("qwen3_30b", "glm45_air")
_ROUTING = ("moe_patch", "torch", "torch_compile")
_LORA = ("moe_patch", "peft", "split_lora", "axolotl_lora")
# Its rows are in segments of their own.
_SLOW_TO_TUNE = {"axolotl_lora": "not run: it compiles and times hundreds of tiles at each size"}
_CHECKPOINTED = ("qwen3_30b_12L_4x4096_ckpt", "qwen3_30b_12L_1x16384_ckpt")
_PLAIN = ("qwen3_30b_12L_4x4096", "qwen3_30b_12L_1x16384")
_SMALL, _LARGE = ("qwen3_30b", "olmoe"), ("mixtral", "glm45_air", "dsv3_e64")

PRESETS = {
    "quick": (
        Segment("experts", "experts", (*_EXPERTS, "sonicmoe"), ("qwen3_30b",), (4096, 32768)),
        Segment(
            "lora", "lora", _LORA, ("qwen3_30b",), (16384,), ranks=(16,), left_out=_SLOW_TO_TUNE
        ),
        Segment("decode", "decode", shapes=("qwen3_30b",), tokens=(1, 8, 64)),
    ),
    # The contents of README and tables at T = 16384: short enough to run several times per machine.
    "repeat": (
        Segment(
            "experts",
            "experts",
            (*_EXPERTS, "sonicmoe"),
            (*_SMALL, *_LARGE),
            (16384,),
            left_out={"sonicmoe": "not run: it times some 80 tiles at each new size"},
        ),
        Segment("lora", "lora", _LORA, _SMALL, (16384,), left_out=_SLOW_TO_TUNE),
        Segment("routing", "routing", _ROUTING, tokens=(32768,)),
        Segment("model", "model", shapes=_CHECKPOINTED),
        Segment("sonicmoe", "experts", ("sonicmoe",), ("qwen3_30b",), (16384,)),
    ),
    # The kernels of cards without Hopper's instructions, timed on a card that has them.
    "portable": (
        Segment("experts", "experts", _PORTABLE[:2], ("qwen3_30b", "olmoe", "glm45_air")),
        Segment("experts_large", "experts", _PORTABLE[:2], ("mixtral", "dsv3_e64"), (16384,)),
        Segment("lora", "lora", _PORTABLE_LORA, ("qwen3_30b", "olmoe", "glm45_air"), ranks=(16,)),
        Segment("lora_large", "lora", _PORTABLE_LORA, ("mixtral",), (16384,), ranks=(16,)),
    ),
    # Few points: the preset runs six times, on two releases of Triton in turn on one card.
    "releases": (
        Segment("experts", "experts", _OURS, _RELEASED, (1024, 16384), ("fwd+bwd",)),
        Segment("lora", "lora", _OURS, _RELEASED, (1024, 16384), ("fwd+bwd",), (16,)),
        Segment("decode", "decode", _OURS, ("qwen3_30b",), (1, 16)),
        Segment("quantised", "quantised", _OURS, ("qwen3_30b",), (16384,)),
    ),
    "block": (Segment("block", "block"),),
    "h100": (
        Segment("experts", "experts", _EXPERTS, _SMALL),
        # SonicMoE times some 80 tiles at each new size, so it has segments of its own.
        Segment("sonicmoe", "experts", ("sonicmoe",), ("qwen3_30b",), (16384, 32768)),
        Segment("lora", "lora", _LORA, _SMALL, left_out=_SLOW_TO_TUNE),
        Segment("experts_large", "experts", _EXPERTS, _LARGE, (16384,)),
        Segment("sonicmoe_others", "experts", ("sonicmoe",), ("olmoe", *_LARGE), (16384,)),
        Segment(
            "lora_large", "lora", _LORA, ("mixtral", "glm45_air"), (16384,), left_out=_SLOW_TO_TUNE
        ),
        Segment("axolotl", "lora", ("axolotl_lora",), _SMALL, (16384, 4096), ranks=(16,)),
        Segment(
            "axolotl_large",
            "lora",
            ("axolotl_lora",),
            ("mixtral", "glm45_air"),
            (16384,),
            ranks=(16,),
        ),
        Segment("model", "model", shapes=_CHECKPOINTED),
        Segment("decode", "decode", shapes=("qwen3_30b",), tokens=(1, 4, 16, 64)),
        Segment("signals", "signals", passes=("fwd+bwd",)),
        Segment("routing", "routing", _ROUTING, tokens=(32768,)),
        Segment("product_key", "product_key", tokens=(32768,)),
        Segment("plan", "plan"),
        Segment("quantised", "quantised"),
        Segment("model_plain", "model", shapes=_PLAIN),
        Segment("experts_long", "experts", _EXPERTS[:2], _LARGE, (32768,)),
        Segment("variants", "experts", _VARIANTS, ("qwen3_30b",), (16384,)),
        Segment("product_key_short", "product_key", tokens=(1024,)),
        Segment("routing_short", "routing", shapes=("E128_K8",), tokens=(1, 64)),
        Segment("sonicmoe_short", "experts", ("sonicmoe",), ("qwen3_30b",), (4096,)),
        Segment("experts_short", "experts", _EXPERTS, _LARGE, (4096,)),
    ),
}
