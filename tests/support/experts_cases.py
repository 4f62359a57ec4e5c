"""Inputs and calls of the experts operator in every combination that decides its path."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

import torch
from torch import Tensor

from moe_patch.ops.experts.op import experts_mlp
from moe_patch.types import ExpertWeights, Glu, Lora
from tests.support.numerics import probe

E, K, D, F, R = 5, 3, 12, 7, 3


@dataclass(frozen=True)
class Case:
    """One combination of everything that decides the operator's path."""

    kind: str = "silu"
    gated: bool = True
    interleaved: bool = False
    transposed: bool = False
    bias: bool = False
    lora13: bool = False
    lora2: bool = False
    recompute: bool = False
    limit: float = float("inf")
    T: int = 37
    ids: str = "distinct"

    @property
    def glu(self) -> Glu:
        alpha = 1.702 if self.kind == "swiglu_oai" else 1.0
        return Glu(self.kind, self.gated, self.interleaved, alpha, self.limit)

    def __str__(self) -> str:
        changed = [f for f in fields(self) if getattr(self, f.name) != f.default]
        names = [
            f.name if f.type == "bool" else f"{f.name}={getattr(self, f.name)}" for f in changed
        ]
        return "-".join(names) or "plain"


def drawn(seed: int) -> Case:
    """Return a random case; swiglu_oai always has a gate, and only gates can interleave."""
    pick = random.Random(seed).choice
    kind = pick(Glu.KINDS)
    gated = kind == "swiglu_oai" or pick((True, True, False))
    return Case(
        kind, gated, gated and pick((True, False)), *(pick((True, False)) for _ in range(5)),
        limit=pick((float("inf"), 0.7)), T=pick((1, 7, 37)),
        ids=pick(("distinct", "distinct", "empty slots", "one takes all")),
    )  # fmt: skip


FULL = Case(bias=True, lora13=True, lora2=True)
OAI = Case("swiglu_oai", interleaved=True)
CASES = [
    Case(),
    *(Case(kind=kind) for kind in Glu.KINDS[1:]),
    *(Case(kind=kind, gated=False) for kind in Glu.KINDS[:-1]),
    *(Case(kind=kind, limit=0.7, interleaved=True) for kind in Glu.KINDS),
    Case("swiglu_oai", interleaved=True, transposed=True, bias=True, limit=0.7),
    *(Case(bias=True, lora13=a, lora2=b) for a, b in product((False, True), repeat=2)),
    *(Case(T=T, ids="empty slots") for T in (1, 7, 37)),
    *(drawn(seed) for seed in range(60)),
]


def make_ids(case: Case, generator: torch.Generator) -> Tensor:
    """Return distinct ids without expert 1, or with empty slots of both kinds, or all equal."""
    order = torch.rand(case.T, E, generator=generator)
    order[:, 1] = 2.0
    ids = order.argsort(-1)[:, :K]
    if case.ids == "one takes all":
        return torch.full_like(ids, 3)
    if case.ids == "empty slots":
        hole = torch.rand(ids.shape, generator=generator)
        return torch.where(hole < 0.2, -1, torch.where(hole > 0.8, E + 2, ids))
    return ids


def make_inputs(case: Case, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
    """Return leaf tensors by name, in storage layout; all but ids require gradients."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype).requires_grad_()

    H = 2 * F if case.gated else F
    out = {"x": normal(case.T, D)}
    out["weights"] = (torch.rand(case.T, K, generator=generator) + 0.1).to(dtype).requires_grad_()
    out["w13"] = normal(E, *((D, H) if case.transposed else (H, D)), std=0.4)
    out["w2"] = normal(E, *((F, D) if case.transposed else (D, F)), std=0.4)
    if case.bias:
        out |= {"b13": normal(E, H), "b2": normal(E, D)}
    if case.lora13:
        out |= {"a13": normal(E, R, D, std=0.4), "lb13": normal(E, H, R, std=0.4)}
    if case.lora2:
        out |= {"a2": normal(E, R, F, std=0.4), "lb2": normal(E, D, R, std=0.4)}
    return out | {"ids": make_ids(case, generator)}


def arguments(case: Case, t: dict[str, Tensor]) -> tuple:
    """(x, ids, weights, ExpertWeights, Glu, lora13, lora2)."""
    w13, w2 = (t["w13"].mT, t["w2"].mT) if case.transposed else (t["w13"], t["w2"])
    lora13 = Lora(t["a13"], t["lb13"], 0.7) if case.lora13 else None
    lora2 = Lora(t["a2"], t["lb2"], 1.3) if case.lora2 else None
    w = ExpertWeights(w13, w2, t.get("b13"), t.get("b2"))
    return t["x"], t["ids"], t["weights"], w, case.glu, lora13, lora2


def ours(case: Case, t: dict[str, Tensor], **kwargs: Any) -> Tensor:
    *args, lora13, lora2 = arguments(case, t)
    kwargs = {"backend": "torch", "recompute": case.recompute} | kwargs
    return experts_mlp(*args, lora13=lora13, lora2=lora2, **kwargs)


def gradients(out: Tensor, t: dict[str, Tensor]) -> dict[str, Tensor]:
    names = [name for name in t if name != "ids"]
    return dict(zip(names, torch.autograd.grad(probe(out), [t[n] for n in names]), strict=True))


def run(case: Case, t: dict[str, Tensor], **kwargs: Any) -> dict[str, Tensor]:
    out = ours(case, t, **kwargs)
    return {"out": out.detach()} | gradients(out, t)
