"""Sizes of a model and options of a training run, for :mod:`moe_patch.tools.plan_memory`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("experts", "linear", "embeddings", "router", "norms", "other")
OPTIMIZERS = ("adamw", "adamw_8bit", "sgd")


class Weight(NamedTuple):
    """One parameter: its kind (one of KINDS), shape, layer (-1: none), and if adapters target it.

    ``packable`` means a 3-D expert projection, or the weight of a Linear or of an untied input
    embedding for bitsandbytes.
    ``itemsize`` is its own: some routers stay in fp32. ``decoded`` says why a projection is not
    multiplied in FP8 although ``compute`` requests it, or "".
    """

    kind: str
    shape: tuple[int, ...]
    layer: int
    adapted: bool
    packable: bool
    itemsize: int
    decoded: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Input(NamedTuple):
    """Linear modules that read the same tensor of ``features`` values a token.

    ``adapted`` of them have adapters of their own, and ``merged`` ones by their weight as a
    parameter. ``kept`` means that something else keeps the tensor anyway.
    """

    features: int
    adapted: int
    merged: int
    kept: bool


class Moe(NamedTuple):
    """Sizes of an MoE block.

    ``up`` is H, ``adapted`` the number of adapted expert projections, and ``decoded`` as in Weight.
    """

    experts: int
    top_k: int
    hidden: int
    up: int
    width: int
    adapted: int
    decoded: str = ""


class Layer(NamedTuple):
    """One decoder layer.

    Attributes:
        norms: (values, rows) a token of every norm.
        attention: values a token of q, k, v and the output together, in all softmax attentions.
        heads: heads of them; each keeps a log-sum-exp in fp32.
        eager: bytes that attention without a fused kernel keeps of each of its T x T
            probabilities a head; 0 with one.
        mlps: inner widths of gated MLPs outside the routed experts.
        inputs: of all Linear modules outside the routed experts.
        merged: values of the 2-D weights with adapters by parameter; PEFT merges them in each call.
        moe: the MoE block, or None.
    """

    norms: tuple[tuple[int, int], ...]
    attention: int
    heads: int
    eager: int
    mlps: tuple[int, ...]
    inputs: tuple[Input, ...]
    merged: int
    moe: Moe | None


@dataclass(frozen=True)
class Sizes:
    """A model: parameters, layers, hidden size, vocabulary, and bytes of a weight's value."""

    weights: tuple[Weight, ...]
    layers: tuple[Layer, ...]
    hidden: int
    vocab: int
    itemsize: int


@dataclass(frozen=True)
class Recipe:
    """Options of a training run.

    Attributes:
        tokens: in one forward of one process.
        rank: of the adapters; ignored with ``full``.
        storage: of the experts; "bf16" is the model's dtype, whichever it is.
        linear: of frozen Linear modules: "bf16", or "nf4" by bitsandbytes.
        embedding: of the frozen input embedding: "bf16", or "nf4" by bitsandbytes.
        optimizer: one of OPTIMIZERS.
        chunk: ``chunk_tokens`` of the patch.
        ranks: processes: FSDP2, which shards weights; DDP with ``ddp`` or Linear modules in 4 bits.
        ddp: every process keeps the whole model.
        accumulation: forwards before a step; beyond one, gradients are there during all of them.
        adapters: "fp32", as PEFT makes them, or "bf16".
        hopper: the card decodes few rows an expert without a buffer.
        offload: experts are in host memory.
        compute: option of :class:`moe_patch.PatchConfig`; ``copied`` says whether experts have
            transposed copies.
    """

    tokens: int = 2048
    rank: int = 16
    storage: str = "bf16"
    linear: str = "bf16"
    optimizer: str = "adamw"
    checkpointing: bool = True
    recompute: bool = False
    chunk: int | str = "auto"
    liger: bool = False
    full: bool = False
    ranks: int = 1
    ddp: bool = False
    accumulation: int = 1
    adapters: str = "fp32"
    hopper: bool = False
    offload: bool = False
    embedding: str = "bf16"
    compute: str = "decoded"

    @property
    def copied(self) -> bool:
        """Return whether experts have transposed copies, which FSDP2 would keep on no rank."""
        return self.compute == "fp8_copy" and self.storage == "fp8" and self.shards == 1

    @property
    def adapter_bytes(self) -> int:
        return 4 if self.adapters == "fp32" else 2

    @property
    def shards(self) -> int:
        """Return the number of parts into which FSDP2 cuts the weights."""
        return 1 if self.ddp or {self.linear, self.embedding} != {"bf16"} else self.ranks
