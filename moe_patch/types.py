"""Data types passed between the stages, and the shape legend of the whole code base.

Legend (suffixes of tensor names):
    T tokens            K top-k                N = T*K rows (a row = one (token, choice) pair)
    E experts           D hidden size          F expert width
    H = 2F with a gate, F without (the output width of the up projection)
    R LoRA rank         G groups               P = sqrt(E) product-key axis
    S = E + 1 (row offsets per expert)
so ``x_TD`` is [tokens, hidden] and ``ids_TK`` is [tokens, top-k].

Data flows one way: logits -> Routing -> Plan -> experts -> combine -> + shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

NEG_INF = float("-inf")


# Exact types only: a subclass of Tensor can redefine operators.
PLAIN_TENSORS = {Tensor, torch.nn.Parameter}


@dataclass(frozen=True)
class RouteSpec:
    """Options that distinguish one family's routing from another's.

    Attributes:
        top_k: experts per token.
        score: "softmax", "sigmoid", "sqrtsoftplus" or "none".
        order: "score_topk" scores all experts and picks the best; "topk_score" picks the best
            logits and scores only those.
        fp32: evaluate the score in fp32; if False, in the dtype of the logits.
        bias_on: add the correction bias to the "scores" or to the "logits". It affects the choice
            of experts only.
        groups, top_groups: keep only the experts of the best ``top_groups`` of ``groups`` groups;
            0 means no group limit.
        group_score: score a group by the sum of its two best experts ("top2") or by its best
            expert ("max").
        group_fill: value that replaces the scores of excluded experts: -inf, or 0.0 in some
            families.
        renormalize: divide a token's weights by their sum plus ``eps``. With ``clamp_eps``, divide
            by their sum clamped to at least ``eps``.
        scale: factor applied to the weights at the end.
        weights_dtype: dtype of the weights; None keeps the dtype of the score.
        ties: "lower" (stable, lower id first) or "torch" (whatever torch.topk picks).
        batch_invariant: the Triton kernels sum a row in the same order for any number of rows.
    """

    top_k: int
    score: str = "softmax"
    order: str = "score_topk"
    fp32: bool = True
    bias_on: str = "scores"
    groups: int = 0
    top_groups: int = 0
    group_score: str = "top2"
    group_fill: float = NEG_INF
    renormalize: bool = False
    eps: float = 0.0
    clamp_eps: bool = False
    scale: float = 1.0
    weights_dtype: torch.dtype | None = None
    ties: str = "lower"
    batch_invariant: bool = False


@dataclass(frozen=True)
class Routing:
    """Output of a router: the chosen experts and their weights.

    Attributes:
        ids_TK: integer expert ids; an id outside [0, E) means an empty slot.
        weights_TK: floating-point routing weights, in the dtype that the family uses.
        logits_TE: raw router logits, which transformers records for the auxiliary loss.
    """

    ids_TK: Tensor
    weights_TK: Tensor
    logits_TE: Tensor

    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(token_N, expert_N, weight_N)`` in row order n = t*K + k."""
        T, K = self.ids_TK.shape
        token_N = torch.arange(T, device=self.ids_TK.device).repeat_interleave(K)
        return token_N, self.ids_TK.reshape(-1), self.weights_TK.reshape(-1)


class Plan(NamedTuple):
    """Deterministic assignment of rows to experts: a stable sort of the rows by expert id.

    A slot is a position in the sorted order ("plan order").

    Attributes:
        row_of_N: int32. Maps a slot to its row t*K + k. Slots past the last valid row hold -1.
        slot_of_TK: int32. The inverse: maps row (t, k) to its slot; -1 for an id outside [0, E).
        offsets_S: int32. Expert e owns slots offsets_S[e] to offsets_S[e + 1] - 1.
    """

    row_of_N: Tensor
    slot_of_TK: Tensor
    offsets_S: Tensor


@dataclass(frozen=True)
class Glu:
    """Activation of the experts: computes a from h, the output of the up projection.

    ``kind`` names the formula. Every formula is evaluated in fp32 (fp64 for fp64 inputs) and
    rounded once:
        silu, gelu, gelu_tanh, relu, relu2   a = act(gate) * up, or act(h) when not ``gated``
        swiglu_oai                           g = min(gate, limit), u = clamp(up, -limit, limit),
                                             a = (u + 1) * g * sigmoid(alpha * g)
    ``limit`` is finite only for families that clamp. For kinds other than swiglu_oai, gate is
    clamped from above and up from both sides before the activation (DeepSeek-V4, GLM-5).

    Attributes:
        gated: h holds gate and up (H = 2F); otherwise H = F and a = act(h).
        interleaved: gate and up alternate column by column (gpt_oss) instead of being two halves.
    """

    kind: str
    gated: bool = True
    interleaved: bool = False
    alpha: float = 1.0
    limit: float = float("inf")

    KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_oai")

    def __post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise ValueError(f"Glu.kind is {self.kind!r}; accepted: {', '.join(self.KINDS)}")
        if self.interleaved and not self.gated:
            raise ValueError("Glu.interleaved needs a gate")


class Lora(NamedTuple):
    """Low-rank factors of one projection: W_e + scaling * B_e @ A_e, never materialised.

    Attributes:
        A_ERI: [E, R, in features].
        B_EOR: [E, out features, R].
        scaling: factor of the product. Several active adapters are concatenated along R, with
            their scalings folded into B and scaling = 1.
    """

    A_ERI: Tensor
    B_EOR: Tensor
    scaling: float


class ExpertWeights(NamedTuple):
    """Parameters of the experts in logical [E, out, in] orientation, however they are stored.

    Transposed storage ([E, in, out], gpt_oss and llama4) is passed as a transposed view, so strides
    are arbitrary. A gradient is allocated with the strides of its weight. Frozen 4-bit or 8-bit
    weights are :class:`moe_patch.formats.packed.PackedWeight`, for both projections.

    Attributes:
        w13_EHD: up projection (gate and up together when gated).
        w2_EDF: down projection.
        b13_EH, b2_ED: optional biases.
    """

    w13_EHD: Tensor
    w2_EDF: Tensor
    b13_EH: Tensor | None = None
    b2_ED: Tensor | None = None


class Kept(NamedTuple):
    """Activations that forward saves for backward, in plan order, besides its inputs and the plan.

    A tensor that was not saved is empty. Backward recomputes it, bit for bit the same.

    Attributes:
        h_NH: output of the up projection.
        u13_NR, u2_NR: A x and A a, the inputs of the low-rank factors B of the up and the down
            projection. A backend may store them already multiplied by the scaling.
    """

    h_NH: Tensor
    u13_NR: Tensor
    u2_NR: Tensor


class ExpertsForward(NamedTuple):
    """Results of one forward of the experts.

    Attributes:
        out_TD: weighted sum over a token's experts, in the dtype of x.
        plan: plan of this forward; backward reuses it.
        kept: activations saved for backward.
        act_norm_TK: fp32 (fp64 for fp64) row norms of each expert's output, or an empty tensor.
    """

    out_TD: Tensor
    plan: Plan
    kept: Kept
    act_norm_TK: Tensor


class ExpertsNeeds(NamedTuple):
    """Flags for the gradients that a backward call computes; the others stay None, at no cost."""

    x: bool = False
    weights: bool = False
    w13: bool = False
    w2: bool = False
    b13: bool = False
    b2: bool = False
    lora13_A: bool = False
    lora13_B: bool = False
    lora2_A: bool = False
    lora2_B: bool = False
    norms: bool = False


class ExpertsBackward(NamedTuple):
    """Gradients in the order of :class:`ExpertsNeeds`; None where not requested.

    ``grad_norm_out_TK`` is ||dL/dy_tk||. ``grad_norm_params_TK`` is the norm of the row's
    contribution to the gradients of w13, w2 and the biases; ``grad_norm_lora_TK`` is the same for
    the low-rank factors.
    """

    x: Tensor | None = None
    weights: Tensor | None = None
    w13: Tensor | None = None
    w2: Tensor | None = None
    b13: Tensor | None = None
    b2: Tensor | None = None
    lora13_A: Tensor | None = None
    lora13_B: Tensor | None = None
    lora2_A: Tensor | None = None
    lora2_B: Tensor | None = None
    grad_norm_out_TK: Tensor | None = None
    grad_norm_params_TK: Tensor | None = None
    grad_norm_lora_TK: Tensor | None = None
