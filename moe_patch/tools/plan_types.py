"""Sizes of a model and options of a training run, for :mod:`moe_patch.tools.plan_memory`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("experts", "linear", "embeddings", "router", "norms", "other")
OPTIMIZERS = ("adamw", "adamw_8bit", "sgd")


class Weight(NamedTuple):
    """One parameter: its kind (one of KINDS), shape, layer (-1: none), and if adapters target it.

    ``packable`` means a 3-D expert projection, or the weight of a Linear for bitsandbytes.
    ``itemsize`` is its own: some routers stay in fp32.
    """

    kind: str
    shape: tuple[int, ...]
    layer: int
    adapted: bool
    packable: bool
    itemsize: int

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
    """Sizes of an MoE block; ``up`` is H, ``adapted`` the number of adapted expert projections."""

    experts: int
    top_k: int
    hidden: int
    up: int
    width: int
    adapted: int


class Layer(NamedTuple):
    """One decoder layer.

    Attributes:
        norms: (values, rows) a token of every norm.
        attention: values a token of q, k, v and the output together, in all softmax attentions.
        heads: heads of them; each keeps a log-sum-exp in fp32.
        eager: the attention keeps its T x T probabilities, because it has no fused kernel.
        mlps: inner widths of gated MLPs outside the routed experts.
        inputs: of all Linear modules outside the routed experts.
        merged: values of the 2-D weights with adapters by parameter; PEFT merges them in each call.
        moe: the MoE block, or None.
    """

    norms: tuple[tuple[int, int], ...]
    attention: int
    heads: int
    eager: bool
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
        optimizer: one of OPTIMIZERS.
        ranks: processes: DDP for packed experts, else FSDP2, which shards weights.
        accumulation: forwards before a step; beyond one, gradients are there during all of them.
        adapter_bytes: of an adapter's value; PEFT makes fp32.
        hopper: the card decodes few rows an expert without a buffer.
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
    liger: bool = False
    full: bool = False
    ranks: int = 1
    accumulation: int = 1
    adapter_bytes: int = 4
    hopper: bool = False
    compute: str = "decoded"

    @property
    def copied(self) -> bool:
        return self.compute == "fp8_copy" and self.storage == "fp8"

    @property
    def sharded(self) -> bool:
        return self.ranks > 1 and self.storage == "bf16" and self.linear == "bf16"
