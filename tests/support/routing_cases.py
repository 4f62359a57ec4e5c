"""Routing choices, of families and others, and their logits for tests of the routing kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_patch.types import RouteSpec

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INF = float("inf")
# Invalid logits, by the pattern of the error for them.
WRONG_LOGITS = {
    r"torch\.int64 of shape \(2, 4\)": torch.ones(2, 4, dtype=torch.int64),
    r"torch\.bool of shape \(2, 4\)": torch.ones(2, 4, dtype=torch.bool),
    r"torch\.float8_e4m3fn of shape \(2, 4\)": torch.zeros(2, 4).to(torch.float8_e4m3fn),
    r"torch\.float32 of shape \(4,\)": torch.zeros(4),
    r"torch\.float32 of shape \(1, 2, 4\)": torch.zeros(1, 2, 4),
    "a list": [[0.0, 1.0]],
}
DEEPSEEK = {"score": "sigmoid", "renormalize": True, "eps": 1e-20, "scale": 2.5}

# E, whether there is a bias, the choice; a line's comment says why.
SPECS = {
    "qwen3": (64, False, RouteSpec(8, renormalize=True)),
    "olmoe": (60, False, RouteSpec(4)),
    "mixtral": (8, False, RouteSpec(2, renormalize=True, fp32=False)),
    "gpt_oss": (32, False, RouteSpec(4, order="topk_score", fp32=False)),
    "topk_fp32_bias": (8, True, RouteSpec(2, order="topk_score", weights_dtype=F32)),
    "topk_sigmoid": (16, False, RouteSpec(1, score="sigmoid", order="topk_score")),
    "deepseek_v3": (32, True, RouteSpec(8, groups=4, top_groups=2, **DEEPSEEK)),
    "deepseek_v2": (  # 5 experts per group, excluded ones get 0.0 and may be chosen
        40, False,
        RouteSpec(
            6, groups=8, top_groups=1, group_score="max", group_fill=0.0, scale=16.0, fp32=False
        ),
    ),
    "groups_not_power_of_two": (
        30, True,
        RouteSpec(6, score="sqrtsoftplus", groups=3, top_groups=2, group_fill=0.0, scale=1.5),
    ),
    "max_of_groups": (  # 4 experts per group; one group of three is left
        12, True,
        RouteSpec(3, score="sigmoid", groups=3, top_groups=1, group_score="max", renormalize=True),
    ),
    "cast_to_fp16": (60, False, RouteSpec(4, renormalize=True, weights_dtype=F16)),
    "clamp": (
        30, True,
        RouteSpec(6, score="sqrtsoftplus", fp32=False, renormalize=True, clamp_eps=True, eps=3.0),
    ),
    "bias_on_logits": (24, True, RouteSpec(3, bias_on="logits", renormalize=True, eps=1e-9)),
    "raw": (64, True, RouteSpec(8, score="none")),
    "one_expert": (1, False, RouteSpec(1)),
    "all_chosen": (5, False, RouteSpec(5, renormalize=True)),
    "odd": (100, True, RouteSpec(7, score="sigmoid", bias_on="logits")),
    "odd_and_wide": (511, False, RouteSpec(31, renormalize=True)),
    "wide": (257, False, RouteSpec(32, score="sigmoid")),
    "widest": (512, False, RouteSpec(10, renormalize=True)),
    "widest_and_most": (512, True, RouteSpec(32, score="sigmoid", renormalize=True, eps=1e-9)),
    "qwen3_30b": (128, False, RouteSpec(8, renormalize=True)),
    "deepseek_v3_full": (256, True, RouteSpec(8, groups=8, top_groups=4, **DEEPSEEK)),
}  # fmt: skip
# How far one rounding of a result can be from fp64, by dtype, relative in norm.
LIMITS = {F32: 2e-6, F16: 1e-3, BF16: 4e-3}


def inputs(
    name: str, T: int, dtype: torch.dtype, device: str
) -> tuple[Tensor, RouteSpec, Tensor | None]:
    E, biased, spec = SPECS[name]
    if spec.groups == 0:
        logits_TE = torch.randint(-4, 5, (T, E), device=device).to(dtype)
        bias_E = torch.randint(-2, 3, (E,), device=device) / 4 if biased else None
        return logits_TE, spec, bias_E
    # Sums of two scores must tie exactly or not at all. Avoid sigmoid(x) + sigmoid(-x), and equal
    # sums of unequal terms: exponentials that differ in the last bit may split such ties.
    logits_TE = torch.randint(0, 9, (T, E), device=device).to(dtype)
    last_of_group_E = (torch.arange(E, device=device) + 1) % (E // spec.groups) == 0
    return logits_TE, spec, torch.where(last_of_group_E, -8.0, 0.5) if biased else None


def in_fp64(spec: RouteSpec) -> RouteSpec:
    return RouteSpec(**{**vars(spec), "weights_dtype": None})


def strided(logits_TE: Tensor) -> dict[str, Tensor]:
    """Return views of every layout of torch, over memory that is Inf outside of the logits."""
    T, E = logits_TE.shape
    wide = torch.full((3 * T, 2 * E + 3), INF, device=logits_TE.device, dtype=logits_TE.dtype)
    wide[::3, 1 : 2 * E + 1 : 2] = logits_TE
    return {
        "column by column": logits_TE.T.contiguous().T,
        "other rows and columns between": wide[::3, 1 : 2 * E + 1 : 2],
        "one row for all": logits_TE[:1].expand(T, -1),
        "one logit per row": logits_TE[:, :1].expand(-1, E),
    }
