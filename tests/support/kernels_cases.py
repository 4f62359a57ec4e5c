"""Cases of the Triton experts, and one call of each: by the kernels and by the reference.

tests/support/kernels_checks.py has the checks of these calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_patch.kernels.experts.experts import experts_backward, experts_forward
from moe_patch.ops.experts import definition as reference
from moe_patch.types import ExpertsBackward, ExpertsNeeds, ExpertWeights, Glu, Lora
from tests.support.numerics import assert_bits

SILU = Glu("silu")
GPT_OSS = Glu("swiglu_oai", interleaved=True, alpha=1.702, limit=7.0)


@dataclass(frozen=True)
class Case:
    """One experts call.

    Attributes:
        T, K, E, D, F, glu: sizes and activation.
        ids: "distinct" with a few empty slots of both kinds, "one" expert taking all, "empty" slots
            only, "sparse": two experts of many.
        bias, rank, transposed, norms: optional parts of the call.
        save_h, save_u: tensors that forward keeps for backward.
        strides: "plain"; "odd": hidden states and gradients as slices of wider tensors; "peft":
            factors B with the experts innermost.
    """

    T: int
    K: int
    E: int
    D: int
    F: int
    glu: Glu = SILU
    ids: str = "distinct"
    bias: bool = False
    rank: int = 0
    transposed: bool = False
    save_h: bool = True
    save_u: bool = True
    norms: bool = False
    strides: str = "plain"


SMALL = {
    "silu": Case(13, 2, 5, 40, 24),
    "gpt_oss": Case(13, 2, 5, 40, 24, GPT_OSS, bias=True, transposed=True),
    "lora": Case(13, 2, 5, 40, 24, rank=4, norms=True, bias=True),
    "transposed_clamped": Case(9, 3, 4, 33, 17, Glu("gelu_tanh", limit=1.0), transposed=True),
    "ungated": Case(13, 2, 5, 40, 24, Glu("relu2", gated=False), rank=3),
    "recompute": Case(13, 2, 5, 40, 24, Glu("gelu"), save_h=False),
    "relu": Case(5, 1, 3, 24, 16, Glu("relu")),
    "one_expert": Case(37, 2, 3, 16, 16, ids="one"),
    "all_empty": Case(6, 2, 3, 16, 16, ids="empty", norms=True, rank=2),
    "no_tokens": Case(0, 2, 3, 16, 16, norms=True, rank=2, bias=True),
    "peft": Case(13, 2, 5, 40, 24, rank=3, strides="peft"),
    "one_token": Case(1, 1, 1, 16, 8),
    "odd_strides": Case(13, 2, 5, 40, 24, strides="odd"),
}
LARGE = SMALL | {
    "qwen3_like": Case(1000, 8, 128, 256, 96),
    "tile_edges": Case(777, 3, 6, 272, 136, norms=True),
    "wide": Case(513, 2, 4, 1025, 704),
    "narrow": Case(257, 6, 60, 32, 8),
    "many_experts": Case(300, 10, 512, 80, 56),
    "sparse": Case(2000, 2, 64, 128, 64, ids="sparse"),
    "one_takes_all": Case(3000, 1, 8, 128, 64, ids="one"),
    "gpt_oss_like": Case(600, 4, 32, 288, 96, GPT_OSS, bias=True, transposed=True, norms=True),
    "llama4_like": Case(600, 1, 16, 256, 192, transposed=True),
    "nemotron_like": Case(600, 6, 16, 256, 200, Glu("relu2", gated=False)),
    "lora_16": Case(1500, 8, 32, 512, 256, rank=16, norms=True),
    "peft_16": Case(1500, 8, 32, 512, 256, rank=16, strides="peft"),
    "half_tile": Case(1500, 2, 4, 256, 1408),
    "lora_72": Case(700, 2, 8, 256, 136, GPT_OSS, rank=72, bias=True, transposed=True),
    "decode": Case(3, 8, 64, 512, 256),
    # Gate and up side by side over many rows: every activation, a bias, ranks small, odd and large.
    "beside_gelu": Case(700, 2, 4, 256, 136, Glu("gelu"), bias=True),
    "beside_oai": Case(700, 2, 4, 256, 136, replace(GPT_OSS, interleaved=False), bias=True),
    "lora_8": Case(700, 2, 4, 256, 136, Glu("silu", limit=3.0), rank=8, bias=True),
    "lora_17": Case(700, 2, 4, 256, 136, Glu("relu2"), rank=17),
    "lora_40": Case(700, 2, 4, 256, 136, Glu("gelu_tanh"), rank=40, save_h=False),
    "lora_256": Case(700, 2, 4, 256, 136, Glu("relu"), rank=256, bias=True),
}
NAMES = ("x", "weights", "w13", "w2", "b13", "b2", "lora13_A", "lora13_B", "lora2_A", "lora2_B")


@dataclass
class Inputs:
    """The tensors of a case; ``tensors`` holds those that take gradients, by :data:`NAMES`."""

    case: Case
    ids_TK: Tensor
    tensors: dict[str, Tensor]
    dout_TD: Tensor

    def call(self, tensors: dict[str, Tensor]) -> tuple[ExpertWeights, Lora | None, Lora | None]:
        w = ExpertWeights(tensors["w13"], tensors["w2"], tensors.get("b13"), tensors.get("b2"))
        if not self.case.rank:
            return w, None, None
        lora13 = Lora(tensors["lora13_A"], tensors["lora13_B"], 0.5)
        return w, lora13, Lora(tensors["lora2_A"], tensors["lora2_B"], 2.0)


def make_ids(case: Case, device: str) -> Tensor:
    T, K, E = case.T, case.K, case.E
    if case.ids == "one":
        return torch.full((T, K), E - 1, device=device)
    if case.ids == "empty":
        return torch.full((T, K), E, device=device) - (E + 1) * torch.randint(
            0, 2, (T, K), device=device
        )
    if case.ids == "sparse":
        return torch.randint(0, 2, (T, K), device=device) * (E - 1)
    ids_TK = torch.rand(T, E, device=device).argsort(1)[:, :K]
    dropped = torch.rand(T, K, device=device)
    return torch.where(dropped < 0.05, -1, torch.where(dropped > 0.95, E + 3, ids_TK))


def make_inputs(case: Case, dtype: torch.dtype, device: str) -> Inputs:
    """Return inputs whose values are about one at every stage, for meaningful relative errors."""
    T, K, E, D, F, R = case.T, case.K, case.E, case.D, case.F, case.rank
    H = 2 * F if case.glu.gated else F

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device) * scale).to(dtype)

    def weight(O: int, I: int) -> Tensor:
        stored = (
            random(E, I, O, scale=I**-0.5) if case.transposed else random(E, O, I, scale=I**-0.5)
        )
        return stored.transpose(1, 2) if case.transposed else stored

    def rows(width: int) -> Tensor:
        return (
            random(T, width + 13)[:, 5 : 5 + width] if case.strides == "odd" else random(T, width)
        )

    tensors = {
        "x": rows(D),
        "weights": torch.rand(T, K, device=device),
        "w13": weight(H, D),
        "w2": weight(D, F),
    }
    if case.bias:
        tensors |= {"b13": random(E, H), "b2": random(E, D)}
    if R:
        tensors |= {
            "lora13_A": random(E, R, D, scale=D**-0.5),
            "lora13_B": random(E, H, R, scale=R**-0.5),
        }
        tensors |= {
            "lora2_A": random(E, R, F, scale=F**-0.5),
            "lora2_B": random(E, D, R, scale=R**-0.5),
        }
    if case.strides == "peft":
        for name in ("lora13_B", "lora2_B"):
            stored_ORE = tensors[name].permute(1, 2, 0).contiguous()
            tensors[name] = stored_ORE.permute(2, 0, 1)
    dout_TD = random(D).expand(T, D) if case.strides == "odd" else rows(D)
    return Inputs(case, make_ids(case, device), tensors, dout_TD)


def run_kernels(
    inputs: Inputs,
    needs: ExpertsNeeds | None = None,
    batch_invariant: bool = False,
    overwrite_h: bool = False,
) -> tuple[dict[str, Tensor], ExpertsBackward]:
    """Return our output and gradients by name, and h as forward kept it, if still readable."""
    case, tensors = inputs.case, inputs.tensors
    w, lora13, lora2 = inputs.call(tensors)
    needs = needs or ExpertsNeeds(**{name: name in tensors for name in NAMES}, norms=case.norms)
    args = tensors["x"], inputs.ids_TK, tensors["weights"], w, case.glu, lora13, lora2
    forward = experts_forward(
        *args, save_h=case.save_h, save_u13=case.save_u, save_u2=case.save_u, norms=case.norms,
        batch_invariant=batch_invariant,
    )  # fmt: skip
    h_NH, valid = forward.kept.h_NH, int(forward.plan.offsets_S[-1])
    kept_h = h_NH[:valid].clone()
    backward = experts_backward(
        inputs.dout_TD, tensors["x"], tensors["weights"], w, case.glu, lora13, lora2,
        forward.plan, forward.kept, needs, batch_invariant=batch_invariant,
        overwrite_h=overwrite_h,
    )  # fmt: skip
    if not overwrite_h:
        assert_bits(h_NH[:valid], kept_h, "h")
    found = {"out": forward.out_TD} | {
        name: getattr(backward, name) for name in NAMES if name in tensors
    }
    return found | ({"act_norm": forward.act_norm_TK} if case.norms else {}), backward


def run_reference(inputs: Inputs, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return results of the reference under autograd, evaluated in ``dtype``."""
    leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in inputs.tensors.items()}
    w, lora13, lora2 = inputs.call(leaves)
    out_TD = reference.experts(
        leaves["x"], inputs.ids_TK, leaves["weights"], w, inputs.case.glu, lora13, lora2
    )
    if not out_TD.requires_grad:
        return {"out": out_TD} | {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    grads = torch.autograd.grad(
        out_TD,
        list(leaves.values()),
        inputs.dout_TD.to(dtype),
        allow_unused=True,
        materialize_grads=True,
    )
    return {"out": out_TD.detach()} | dict(zip(leaves, grads, strict=True))
