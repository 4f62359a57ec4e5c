"""Memory of a training step from sizes alone: one function a part, each with its derivation.

Bytes throughout. T is tokens a step and process, b the bytes of a weight's dtype; D, H, F, K, E and
R are those of moe_patch/types.py. Nothing here allocates. ``cli/plan_sizes.py`` reads the sizes.
"""

from __future__ import annotations

import math

from moe_patch.formats.packed import decoded_at_once
from moe_patch.quant.memory import packed_bytes
from moe_patch.tools.plan_types import KINDS, Layer, Moe, Recipe, Sizes, Weight

# CUDA's context and the loaded kernels; no allocator of torch counts them.
CONTEXT = 600 << 20
# Share of the allocated peak that the caching allocator reserves beyond it.
FRAGMENTATION = 0.05
# Rows an expert up to which Hopper decodes in front of the product (kernels/packed/linear.py).
FRONT_ROWS = {"nf4": 320, "fp8": 512, "mxfp4": 0}


def weight_bytes(sizes: Sizes, recipe: Recipe) -> dict[str, int]:
    """Return the bytes of the weights by kind.

    Expert projections take quant.memory.packed_bytes in a packed storage, and a Linear in 4 bits
    the same as one expert in NF4. All other weights take b a value. Transposed copies of FP8
    experts take as much again.
    """
    found = dict.fromkeys(KINDS, 0)
    for one in sizes.weights:
        storage = {"experts": recipe.storage, "linear": recipe.linear}.get(one.kind, "bf16")
        if storage == "bf16" or not one.packable:
            found[one.kind] += one.numel * one.itemsize
        else:
            E, rows, columns = (1, *one.shape)[-3:]
            copies = 2 if one.kind == "experts" and recipe.copied else 1
            found[one.kind] += copies * packed_bytes((E, rows, columns), storage)
    return found


def adapter_tensors(weight: Weight, rank: int) -> tuple[int, ...]:
    """Return the values of the factors A and B of one weight [.., out, in], R of each an expert."""
    if not weight.adapted:
        return ()
    *experts, rows, columns = weight.shape
    each = rank * math.prod(experts)
    return each * columns, each * rows


def trained_tensors(sizes: Sizes, recipe: Recipe) -> list[tuple[str, int, int]]:
    """Return (kind, values, bytes of a value) of trained tensors: all weights, or the adapters."""
    if recipe.full:
        return [(one.kind, one.numel, one.itemsize) for one in sizes.weights]
    each = recipe.adapter_bytes
    return [("", n, each) for one in sizes.weights for n in adapter_tensors(one, recipe.rank)]


def trained_bytes(sizes: Sizes, recipe: Recipe) -> int:
    """Return the bytes of all trained tensors, which their gradients take once more."""
    return sum(count * each for _, count, each in trained_tensors(sizes, recipe))


def optimizer_bytes(sizes: Sizes, recipe: Recipe) -> int:
    """Return the bytes of the optimiser's states.

    AdamW of torch: two moments in the tensor's dtype. 8-bit AdamW of bitsandbytes: two bytes a
    value and two fp32 scales per 256 values; tensors below 4,096 values and embeddings (by the
    Trainer) have fp32 moments. Plain SGD has no state.
    """
    if recipe.optimizer == "sgd":
        return 0
    if recipe.optimizer == "adamw":
        return 2 * trained_bytes(sizes, recipe)
    total = 0
    for kind, count, _ in trained_tensors(sizes, recipe):
        wide = count < 4096 or kind == "embeddings"
        total += 8 * count if wide else 2 * count + 8 * -(-count // 256)
    return total


def norm_bytes(layer: Layer, recipe: Recipe, itemsize: int) -> int:
    """Return bytes a token kept by a layer's norms.

    transformers' RMSNorm keeps its input in fp32 and 1 / rms of every row; a trained weight keeps
    the normalised rows. Liger keeps its input in the model's dtype and 1 / rms.
    """
    each = itemsize if recipe.liger else 4 + (itemsize if recipe.full else 0)
    return sum(values * each + 4 * rows for values, rows in layer.norms)


def linear_bytes(layer: Layer, recipe: Recipe, itemsize: int) -> int:
    """Return bytes a token kept by Linear modules outside the experts.

    A frozen Linear keeps nothing; a trained one its input, once for all that read it. An adapter in
    fp32 casts its input for autocast, so each keeps its own copy; one in the model's dtype shares
    it. B keeps R values a token. A weight with a merged adapter is like a trained one.
    """
    total = 0
    for one in layer.inputs:
        own = recipe.adapter_bytes != itemsize and not recipe.full
        copies = one.adapted if own else 0
        shared = recipe.full or one.merged or (one.adapted and not own)
        if shared and not one.kept:
            copies += 1
        total += copies * one.features * itemsize
        total += 0 if recipe.full else one.adapted * recipe.rank * itemsize
    return total


def attention_bytes(layer: Layer, recipe: Recipe, itemsize: int) -> int:
    """Return bytes a token kept by attention: q, k, v, the output and a log-sum-exp a head.

    Eager attention keeps probabilities of T keys instead of the log-sum-exp: fp32 and cast.
    """
    each = recipe.tokens * (4 + itemsize) if layer.eager else 4
    return layer.attention * itemsize + layer.heads * each


def mlp_bytes(layer: Layer, itemsize: int) -> int:
    """Return bytes a token kept by gated MLPs: gate, act(gate) and up; ``inputs`` has the rest."""
    return sum(3 * width * itemsize for width in layer.mlps)


def router_bytes(moe: Moe, itemsize: int) -> int:
    """Return bytes a token kept by the router's operator: logits, int64 ids, routing weights."""
    return moe.experts * itemsize + moe.top_k * (8 + itemsize)


def experts_bytes(moe: Moe, recipe: Recipe, itemsize: int) -> int:
    """Return bytes kept by the experts' operator: x, the plan, h and u (docs/architecture.md).

    x is D values a token. The plan is row_of_N, slot_of_TK and E + 1 offsets, int32. h is K H
    values, and u K R for each adapted projection; ``recompute`` keeps neither.
    """
    T, K = recipe.tokens, moe.top_k
    plan = 4 * (2 * T * K + moe.experts + 1)
    rank = 0 if recipe.full else moe.adapted * recipe.rank
    rows = 0 if recipe.recompute else K * (moe.up + rank) * itemsize
    return T * (moe.hidden * itemsize + rows) + plan


def kept_bytes(layer: Layer, recipe: Recipe, itemsize: int) -> int:
    """Return the bytes that one layer keeps from forward to backward, without checkpointing.

    They include the weights that PEFT merges in a call, W + s B A for shared experts and routers.
    """
    merged = 0 if recipe.full else layer.merged * itemsize
    token = norm_bytes(layer, recipe, itemsize) + linear_bytes(layer, recipe, itemsize)
    token += attention_bytes(layer, recipe, itemsize) + mlp_bytes(layer, itemsize)
    if layer.moe is None:
        return token * recipe.tokens + merged
    token += router_bytes(layer.moe, itemsize)
    return token * recipe.tokens + experts_bytes(layer.moe, recipe, itemsize) + merged


def decode_bytes(moe: Moe, recipe: Recipe, itemsize: int) -> tuple[int, int]:
    """Return the buffers into which the up and the down projection are decoded.

    One of them is there at a time (formats.packed.decoded_at_once). For few rows Hopper decodes in
    front of the product, and needs NF4's scales in fp32 alone: 4 bytes per 64 values.
    """
    if recipe.storage == "bf16":
        return 0, 0
    shapes = (moe.up, moe.hidden), (moe.hidden, moe.width)
    few = recipe.tokens * moe.top_k <= moe.experts * FRONT_ROWS[recipe.storage]
    if recipe.hopper and few:
        each = [moe.experts * rows * columns // 16 for rows, columns in shapes]
        return (each[0], each[1]) if recipe.storage == "nf4" else (0, 0)
    up, down = (
        decoded_at_once(moe.experts, rows, columns, itemsize) * rows * columns * itemsize
        for rows, columns in shapes
    )
    return up, down


def block_bytes(moe: Moe, recipe: Recipe, itemsize: int) -> int:
    """Return the peak of one block's forward and backward beyond what it keeps, buffers included.

    Values a token: K F in a and w a; K D in y and the rows of dx; D in out, dout and dx. dh is
    written over h. Forward holds a, y and out. Backward holds dout and w a, later dout, dx and its
    rows.
    Adapters in another dtype are cast for the products: one copy of the block's factors.
    """
    up, down = decode_bytes(moe, recipe, itemsize)
    row = recipe.tokens * itemsize
    a, y, out = row * moe.top_k * moe.width, row * moe.top_k * moe.hidden, row * moe.hidden
    stages = (a + up, a + y + down, a + y + out, out + a + down, out + y + up, 2 * out + y)
    casts = 0
    if not recipe.full and recipe.adapter_bytes != itemsize and moe.adapted:
        sizes = 2 * moe.hidden + moe.up + moe.width
        casts = moe.experts * recipe.rank * sizes * itemsize * moe.adapted // 2
    again = row * moe.top_k * moe.up if recipe.recompute else 0
    return max(stages) + casts + again


def logits_bytes(sizes: Sizes, recipe: Recipe) -> int:
    """Return the peak of head and loss over the vocabulary V, beyond the last hidden states.

    transformers: log-softmax, its gradient and that of the logits in fp32 at once: 12 T V bytes.
    Liger's fused loss makes logits in chunks of about T D / V rows, in the model's dtype and fp32.
    It keeps the gradient of the hidden states, and with ``full`` that of the head.
    """
    T, V, D, b = recipe.tokens, sizes.vocab, sizes.hidden, sizes.itemsize
    if not recipe.liger:
        return 12 * T * V
    rows = 1 << max(0, math.ceil(T / math.ceil(V / D)) - 1).bit_length()
    head = V * D * b if recipe.full else 0
    return min(T, rows) * V * (b + 4) + T * D * b + head
