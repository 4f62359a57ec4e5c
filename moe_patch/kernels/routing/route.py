"""Routing in Triton: logits_TE -> ids_TK, weights_TK in one launch, and dlogits_TE in one launch.

``ops.routing.route`` defines the result, including the order of ties and the rounding. A program
processes whole rows; nothing is accumulated across programs.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from moe_patch.kernels.common.device import cdiv, next_power_of_2, on_device_of
from moe_patch.kernels.common.launcher import Constants, Launcher
from moe_patch.kernels.routing.math import TRITON_DTYPE
from moe_patch.kernels.routing.route_kernels import backward_kernel, forward_kernel
from moe_patch.kernels.routing.select import Tile, tile_of
from moe_patch.types import RouteSpec

# Columns of a row per thread. More columns save shuffles, as long as there are enough registers. A
# column needs one packed key if logits are packed, or else a logit, a score and keys.
PACKED_COLUMNS = 32
WIDE_PACKED_COLUMNS = 64  # for rows of up to 512 columns
SCORED_COLUMNS = {2: 16, 4: 8}  # by bytes per logit
BACKWARD_COLUMNS = 16
# More rows than any program holds.
MANY = 1 << 20
# Registers per thread of the forward kernel. The rare exact pass would need more, which would halve
# the active warps. With these limits it spills, and nothing else does.
FORWARD_REGISTERS = 80
WIDE_REGISTERS = 128


class RouteForward(NamedTuple):
    """Outputs of a forward launch.

    Attributes:
        ids_TK: expert ids in descending order of the choice score, in the requested dtype.
        weights_TK: routing weights in the dtype of the spec.
    """

    ids_TK: Tensor
    weights_TK: Tensor


class Columns(NamedTuple):
    """Mapping of experts to the columns of a forward tile: group by group, padded.

    Attributes:
        groups, size: groups * size is the number of experts; one group without a group limit.
        groups_p2, size_p2: both padded to powers of two; the tile has groups_p2 * size_p2 columns.
    """

    groups: int
    size: int
    groups_p2: int
    size_p2: int


def score_dtype(logits_dtype: torch.dtype, spec: RouteSpec) -> torch.dtype:
    """Return the dtype to which scores are rounded."""
    return torch.float32 if spec.fp32 else logits_dtype


def columns_of(num_experts: int, spec: RouteSpec) -> Columns:
    """Return the columns that a spec needs; a limit to all groups counts as no limit."""
    limited = spec.order == "score_topk" and spec.groups > 1 and spec.top_groups < spec.groups
    groups = spec.groups if limited else 1
    size = num_experts // groups
    return Columns(groups, size, next_power_of_2(groups), next_power_of_2(size))


def _tile(columns: int, tokens: int, itemsize: int, per_thread: int, spec: RouteSpec) -> Tile:
    """Return the tile of a program; its summation order would depend on a small ``tokens``."""
    return tile_of(columns, MANY if spec.batch_invariant else tokens, itemsize, per_thread)


def route_forward(
    logits_TE: Tensor,
    spec: RouteSpec,
    bias_E: Tensor | None = None,
    ids_dtype: torch.dtype = torch.int64,
) -> RouteForward:
    """Choose ``spec.top_k`` experts per row and compute their weights, in one launch.

    Args:
        logits_TE: router logits, fp32, bf16 or fp16, any strides, E at most 512.
        spec: the family's options, with ties="lower".
        bias_E: correction bias in one of these dtypes, for the choice only.
        ids_dtype: int32 or int64.
    """
    T, E = logits_TE.shape
    bias_dtype = None if bias_E is None else bias_E.dtype
    new = logits_TE.new_empty
    ids_TK = new(T, spec.top_k, dtype=ids_dtype)
    weights_TK = new(T, spec.top_k, dtype=spec.weights_dtype or score_dtype(logits_TE.dtype, spec))
    if T > 0:
        made = forward_constants(
            spec, E, rounded_up(T), logits_TE.dtype, bias_dtype, logits_TE.is_cuda
        )
        with on_device_of(logits_TE):
            _launch_forward(
                (cdiv(T, made["B"]),),
                (logits_TE, logits_TE if bias_E is None else bias_E.contiguous(), ids_TK,
                 weights_TK),
                (T,),
                (*logits_TE.stride(), float(spec.eps), float(spec.scale), float(spec.group_fill)),
                made,
            )  # fmt: skip
    return RouteForward(ids_TK, weights_TK)


def route_backward(
    dweights_TK: Tensor, logits_TE: Tensor, ids_TK: Tensor, spec: RouteSpec
) -> Tensor:
    """Compute the gradient of the logits, contiguous, in their dtype; one program writes a row.

    The gradient is evaluated in fp32 from the logits and rounded once. It treats the rounding of
    forward as the identity. The choice of ids has no gradient.

    Args:
        dweights_TK: gradient of the routing weights, any floating dtype and strides.
        logits_TE: logits of the forward pass.
        ids_TK: ids chosen in forward, any integer dtype, distinct within a row; an id outside
            [0, E) is an empty slot.
        spec: the family's options.
    """
    T, E = logits_TE.shape
    dlogits_TE = torch.empty(T, E, dtype=logits_TE.dtype, device=logits_TE.device)
    if T == 0:
        return dlogits_TE
    made = _backward_constants(spec, E, rounded_up(T), logits_TE.dtype)
    with on_device_of(logits_TE):
        _launch_backward(
            (cdiv(T, made["B"]),),
            (dweights_TK, logits_TE, ids_TK, dlogits_TE),
            (T,),
            (*dweights_TK.stride(), *logits_TE.stride(), *ids_TK.stride(), float(spec.eps),
             float(spec.scale)),
            made,
        )  # fmt: skip
    return dlogits_TE


def rounded_up(tokens: int) -> int:
    """Round the tokens up to a power of two, on which the tile depends, for few cache entries."""
    return min(next_power_of_2(tokens), MANY)


@functools.cache
def _backward_constants(spec: RouteSpec, E: int, tokens: int, logits: torch.dtype) -> Constants:
    tile = _tile(next_power_of_2(E), tokens, logits.itemsize, BACKWARD_COLUMNS, spec)
    # A softmax over all experts, renormalised by its plain sum, is a softmax over the chosen ones.
    # The other logits cancel, also in the gradient, and so does a NaN among them.
    topk_first, renormalize = spec.order == "topk_score", spec.renormalize
    if spec.score == "softmax" and spec.renormalize and spec.eps == 0.0:
        topk_first, renormalize = True, False
    return Constants(
        E=E, K=spec.top_k, KP=next_power_of_2(spec.top_k),
        # For one row, the compiler would pass the tile through shared memory for each of K terms.
        B=max(2, tile.rows), W=tile.chunks, L=tile.chunk,
        SCORE=spec.score, TOPK_FIRST=topk_first, RENORMALIZE=renormalize, CLAMP=spec.clamp_eps,
        num_warps=1,
    )  # fmt: skip


@functools.cache
def forward_constants(
    spec: RouteSpec,
    E: int,
    tokens: int,
    logits: torch.dtype,
    bias: torch.dtype | None,
    on_cuda: bool,
) -> Constants:
    """Return the constants of forward_kernel; ``tokens`` is :func:`rounded_up`."""
    columns = columns_of(E, spec)
    scores = score_dtype(logits, spec)
    choice = scores if bias is None else torch.promote_types(scores, bias)
    by_logits = spec.order == "topk_score" or spec.bias_on == "logits"
    packing = _packing(logits, choice, bias is not None or columns.groups > 1)
    # Renormalised softmax weights of the chosen logits do not depend on the other logits.
    sums_chosen = packing == "monotone" and not by_logits and spec.renormalize and spec.eps == 0.0
    per_thread, registers = _per_thread(packing == "monotone", E, logits.itemsize)
    width = columns.groups_p2 * columns.size_p2
    tile = _tile(width, tokens, logits.itemsize, per_thread, spec)
    return Constants(
        E=E, K=spec.top_k, KP=next_power_of_2(spec.top_k),
        B=tile.rows, W=tile.chunks, L=tile.chunk,
        GROUPS=columns.groups, SIZE=columns.size,
        GROUPS_P2=columns.groups_p2, SIZE_P2=columns.size_p2,
        TOP_GROUPS=spec.top_groups, TOP2=spec.group_score == "top2",
        SCORE=spec.score, TOPK_FIRST=spec.order == "topk_score", BY_LOGITS=by_logits,
        HAS_BIAS=bias is not None, PACKING=packing,
        SCORE_DTYPE=TRITON_DTYPE[scores], CHOICE_DTYPE=TRITON_DTYPE[choice],
        SUM=spec.score == "softmax" and spec.order == "score_topk" and not sums_chosen,
        RENORMALIZE=spec.renormalize, CLAMP=spec.clamp_eps,
        POSITIVE_NAN=on_cuda and torch.version.hip is None,
        num_warps=1, enable_fp_fusion=False, **_register_limit(registers),
    )  # fmt: skip


def _per_thread(packed: bool, num_experts: int, itemsize: int) -> tuple[int, int]:
    """Return the columns and the register limit of a thread."""
    if not packed:
        return SCORED_COLUMNS[itemsize], FORWARD_REGISTERS
    if num_experts > 256:
        return WIDE_PACKED_COLUMNS, WIDE_REGISTERS
    return PACKED_COLUMNS, FORWARD_REGISTERS


def _register_limit(registers: int) -> dict[str, int]:
    return {"maxnreg": registers} if torch.version.hip is None else {}


def _packing(logits: torch.dtype, choice: torch.dtype, reordered: bool) -> str:
    if choice.itemsize == 2:
        return "short"
    return "monotone" if logits.itemsize == 2 and not reordered else "truncated"


_launch_forward, _launch_backward = Launcher(forward_kernel), Launcher(backward_kernel)
