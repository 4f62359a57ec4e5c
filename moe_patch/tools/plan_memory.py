"""Memory of one training step from sizes alone: one function a part, each with its derivation.

Bytes throughout. T is tokens a step and process, b the bytes of a weight's dtype; D, H, F, K, E and
R are those of moe_patch/types.py. Nothing here allocates. ``plan_weights.py`` has what lasts from
step to step, ``cli/plan_sizes.py`` reads the sizes.
"""

from __future__ import annotations

import math

from moe_patch.formats.packed import decoded_at_once
from moe_patch.ops.experts.long_context import AUTO_FROM
from moe_patch.tools.plan_fp8 import backward_moments, forward_moments, is_in_fp8
from moe_patch.tools.plan_types import Layer, Moe, Recipe, Sizes

# CUDA's context and the loaded kernels on an H200 by NVML; no allocator of torch counts them.
CONTEXT = 768 << 20
# Share of the allocated peak that the caching allocator reserves beyond it, by measured rows.
FRAGMENTATION = 0.06
# Rows an expert up to which Hopper decodes in front of the product (kernels/packed/linear.py).
FRONT_ROWS = {"nf4": 320, "fp8": 512, "mxfp4": 0}


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

    Eager attention keeps probabilities of T keys instead of the log-sum-exp, in fp32 and cast. With
    sinks (gpt-oss) they are in the model's dtype only, beside one int64 index a row.
    """
    each = recipe.tokens * layer.eager + 8 if layer.eager else 4
    return layer.attention * itemsize + layer.heads * each


def eager_bytes(layer: Layer, recipe: Recipe, itemsize: int) -> int:
    """Return the peak of eager attention beyond what it keeps; 0 with a fused kernel.

    Backward holds the probabilities' gradient and the one behind the softmax at once, both of the
    width that is kept. Forward holds no more.
    """
    wide = 4 if layer.eager > itemsize else layer.eager
    return 2 * wide * layer.heads * recipe.tokens**2


def cached_bytes(layers: tuple[Layer, ...], recipe: Recipe, itemsize: int) -> int:
    """Return the largest sum of T x T tensors that one eager attention needs at once.

    They are too small for logits, which come after them, so the allocator keeps them beside those.
    """
    T = recipe.tokens
    return max(one.eager * one.heads * T**2 + eager_bytes(one, recipe, itemsize) for one in layers)


def layer_peak(layer: Layer, recipe: Recipe, itemsize: int) -> int:
    """Return the peak of one layer's backward beyond what it keeps.

    Backward of the experts comes first and frees what they keep before that of attention begins.
    """
    attention = eager_bytes(layer, recipe, itemsize)
    if layer.moe is None:
        return attention
    freed = experts_bytes(layer.moe, recipe, itemsize)
    return max(block_bytes(layer.moe, recipe, itemsize), attention - freed)


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
    if recipe.storage == "bf16" or (is_in_fp8(moe, recipe) and recipe.copied):
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


def chunk_of(moe: Moe, recipe: Recipe, itemsize: int) -> int:
    """Return how many tokens a block computes at a time (kernels/common/chunks.py)."""
    from moe_patch.kernels.common.chunks import (
        KEPT,
        PACKED,
        RECOMPUTED,
        TRAINED,
        auto_chunk,
        chunks,
    )

    if is_in_fp8(moe, recipe):
        return recipe.tokens
    limit = recipe.chunk if isinstance(recipe.chunk, int) else 0
    if recipe.chunk == "auto" and recipe.tokens > AUTO_FROM:
        again = TRAINED if recipe.full else RECOMPUTED
        use = again if recipe.recompute else KEPT
        use = use if recipe.storage == "bf16" else PACKED
        limit = auto_chunk(use, moe.top_k, (moe.hidden, moe.up, moe.width), itemsize)
    if not 0 < limit < recipe.tokens:
        return recipe.tokens
    first = chunks(recipe.tokens, moe.top_k, limit)[0].tokens
    return first.stop - first.start


def block_bytes(moe: Moe, recipe: Recipe, itemsize: int) -> int:
    """Return the peak of one block's forward and backward beyond what it keeps, buffers included.

    Values a token: K F in a and w a; K D in y and the rows of dx; D in out, dout and dx. dh is
    written over h, which ``recompute`` makes in backward only. Forward holds a, y and out. Backward
    holds dout and w a, later dout, dx and its rows. In chunks, a and y have a chunk's tokens, and
    out and dx are there from the start. Unless weights are packed, y and the rows of dx have some
    columns. A chunk's gradients of factors are in fp32, beside their sums. A full fine-tune then
    holds w a of all tokens, or with ``recompute`` fp32 sums of the weight gradients.
    Products in FP8 run at once and hold other buffers (tools/plan_fp8.py).
    Adapters in another dtype are cast for the products: one copy of the block's factors.
    """
    from moe_patch.kernels.common.chunks import COLUMNS, LEAST, forward_columns

    up, down = decode_bytes(moe, recipe, itemsize)
    tokens = chunk_of(moe, recipe, itemsize)
    row, out = tokens * itemsize * moe.top_k, recipe.tokens * moe.hidden * itemsize
    a, y = row * moe.width, row * moe.hidden
    sizes = 2 * moe.hidden + moe.up + moe.width
    factors = 0 if recipe.full else moe.experts * recipe.rank * sizes * moe.adapted // 2
    forward: tuple[int, ...] = (a + up, a + y + down, a + y + out)
    backward: tuple[int, ...] = (out + a + down, out + y + up, 2 * out + y)
    if tokens < recipe.tokens:
        dx = y
        if recipe.storage == "bf16":
            least, freed = (COLUMNS, moe.up) if recipe.recompute else (LEAST, 0)
            count = math.ceil(recipe.tokens / tokens)
            y = row * forward_columns(count, moe.top_k, moe.hidden, least, freed)
            dx = row * min(moe.hidden, max(COLUMNS, moe.width // LEAST * LEAST))
        sums, held = 4 * factors, a
        if recipe.full and recipe.recompute:
            sums = 4 * moe.experts * (moe.up + moe.width) * moe.hidden
        elif recipe.full:
            held = recipe.tokens * moe.top_k * moe.width * itemsize
        rows = held + dx if held > a else dx
        forward = (out + a + up, out + a + y + down)
        backward = (2 * out + sums + held + down, 2 * out + sums + rows + up)
    if is_in_fp8(moe, recipe):
        forward = forward_moments(moe, recipe, a, y, out)
        if recipe.copied:
            backward = backward_moments(moe, recipe, a, y, out)
    casts = factors * itemsize if recipe.adapter_bytes != itemsize else 0
    again = row * moe.up if recipe.recompute else 0
    return max(*forward, max(backward) + again) + casts


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
