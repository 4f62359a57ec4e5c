"""A patched model beside the unpatched one: outputs, losses, router logits and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.patching.discover import discover

# Relative errors. Values: fp32 rounding through dozens of layers; in 16 bits both sides round.
# Gradients have passed twice as many layers.
VALUES = {"float64": 1e-6, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}
GRADIENTS = {"float64": 1e-5, "float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1}
# Share of the rows of the first layer that differs at all: near ties that rounding decides.
CHOICES = {"float64": 1e-3, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.2}


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: what is compared; the worst of its kind.
        where: which parameter or layer was the worst.
        error: relative error, norm(a - b) / norm(b); for "expert choice" the share of rows.
        limit: the largest error that passes.
    """

    name: str
    where: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        return self.error <= self.limit


@dataclass
class Run:
    """What one forward and backward gave, by name, and the experts chosen by layer."""

    values: dict[str, Tensor]
    gradients: dict[str, Tensor]
    ids: dict[str, Tensor]


def compare(
    model: nn.Module,
    batch: dict[str, Any],
    reference: Run,
    dtype: str,
    backend: str = "auto",
    limit: float | None = None,
) -> tuple[list[Check], list[Any]]:
    """Run patched, and patched on the unpatched model's experts, beside the unpatched run.

    Args:
        model: in eval mode, unpatched; patched by this call.
        batch: keyword arguments of its forward.
        reference: what :func:`run` returned for the same model and batch.
        dtype: a key of the limits.
        backend: as in :class:`moe_patch.PatchConfig`.
        limit: in place of all limits.

    Returns:
        The checks, and the rows of the report.

    Raises:
        UnsupportedModelError: a block cannot be patched.
    """
    from moe_patch.patching.patch import patch_model
    from moe_patch.patching.report import patch_report

    patch_model(model, backend=backend)
    free = run(model, batch)
    with _same_experts(model, free, reference) as again:
        ours = run(model, batch) if again else free
    checks = []
    if reference.ids:
        checks.append(_choices(free.ids, reference.ids, CHOICES[dtype] if limit is None else limit))
    kinds = (
        ("loss", ours.values, reference.values, VALUES),
        ("logits", ours.values, reference.values, VALUES),
        ("hidden states", ours.values, reference.values, VALUES),
        ("auxiliary loss", ours.values, reference.values, VALUES),
        ("router logits", ours.values, reference.values, VALUES),
        ("gradient", ours.gradients, reference.gradients, GRADIENTS),
    )
    for name, mine, theirs, limits in kinds:
        found = _worst(name, mine, theirs, limits[dtype] if limit is None else limit)
        checks += [] if found is None else [found]
    return checks, list(patch_report(model))


def run(model: Any, batch: dict[str, Any]) -> Run:
    """Run forward and backward once; everything they gave, on the CPU."""
    model.zero_grad(set_to_none=True)
    with _watch_ids(model) as ids:
        out = model(**batch)
        objective, values = _objective(out)
        objective.backward()
    gradients = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Run({n: v.detach().cpu() for n, v in values.items()}, gradients, ids)


def _objective(out: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """What to differentiate, and the outputs to compare by name."""
    values = {}
    if out.get("logits") is not None:
        values["logits"] = out.logits
    elif out.get("last_hidden_state") is not None:
        values["hidden states"] = out.last_hidden_state
    if out.get("loss") is not None:
        values["loss"] = out.loss
    if out.get("aux_loss") is not None:
        values["auxiliary loss"] = out.aux_loss
    for i, logits in enumerate(out.get("router_logits") or ()):
        if logits is not None:
            values[f"router logits {i}"] = logits
    if "loss" in values:
        return values["loss"], values
    result = next(iter(values.values()))
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(result.shape, generator=generator).to(result.device, result.dtype)
    return (result * probe).mean(), values


@contextmanager
def _watch_ids(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Expert ids by experts module, as the block hands them over."""
    seen: dict[str, Tensor] = {}

    def hook(path: str) -> Any:
        def keep(module: nn.Module, args: tuple) -> None:
            integers = [a for a in args[1:] if isinstance(a, Tensor) and not a.is_floating_point()]
            if integers:
                seen[path] = integers[0].detach().cpu()

        return keep

    with ExitStack() as stack:
        for block in discover(model):
            for path, experts in block.experts:
                handle = experts.register_forward_pre_hook(hook(path))
                stack.callback(handle.remove)
        yield seen


@contextmanager
def _same_experts(model: nn.Module, ours: Run, reference: Run) -> Iterator[bool]:
    """Replay the reference's experts where some row chose others; whether that is so."""
    from moe_patch.signals.replay import replay_routing
    from moe_patch.signals.trace import RoutingTrace

    ids = list(reference.ids.values())
    differ = [_rows_apart(ours.ids[p], reference.ids[p]).any() for p in reference.ids]
    if not any(differ) or len({i.shape for i in ids}) != 1 or len(ids) != len(discover(model)):
        yield False
        return
    with replay_routing(model, RoutingTrace(torch.stack(ids, dim=1))):
        yield True


def _rows_apart(ids_TK: Tensor, others_TK: Tensor) -> Tensor:
    """Which rows chose other experts, as sets."""
    return (ids_TK.sort(-1).values != others_TK.sort(-1).values).any(-1)


def _choices(ours: dict[str, Tensor], theirs: dict[str, Tensor], limit: float) -> Check:
    """The first layer in which a row chose other experts: below it all inputs are the same."""
    for path, ids_TK in theirs.items():
        apart_T = _rows_apart(ours[path], ids_TK)
        if apart_T.any():
            share = apart_T.double().mean().item()
            where = f"{int(apart_T.sum())} of {len(apart_T)} rows of {path}"
            # One row is what a single near tie costs, however few rows there are.
            return Check("expert choice", where, share, max(limit, 1 / len(apart_T)))
    return Check("expert choice", f"{len(theirs)} layers", 0.0, limit)


def _errors(pairs: dict[str, tuple[Tensor, Tensor]], noise: float) -> dict[str, float]:
    """Relative errors by name; ``noise`` is a share of the largest norm, added to each norm."""
    sizes = {name: theirs.double().norm().item() for name, (_, theirs) in pairs.items()}
    noise *= max(sizes.values())
    return {
        name: (ours.double() - theirs.double()).norm().item() / max(sizes[name] + noise, 1e-300)
        for name, (ours, theirs) in pairs.items()
    }


def _worst(
    kind: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], limit: float
) -> Check | None:
    """The tensor with the largest relative error among those of a kind; None without any."""
    names = [n for n in theirs if kind == "gradient" or n.rstrip(" 0123456789") == kind]
    if not names:
        return None
    if kind == "gradient" and ours.keys() != theirs.keys():
        lost = sorted(ours.keys() ^ theirs.keys())
        return Check("gradients", f"on one side only: {lost[0]}", float("inf"), limit)
    # A gradient that is zero in exact arithmetic is rounding noise without a size of its own.
    noise = 8 * torch.finfo(theirs[names[0]].dtype).eps if kind == "gradient" else 0.0
    errors = _errors({n: (ours[n], theirs[n]) for n in names}, noise)
    bad = [n for n in names if errors[n] != errors[n]]
    worst = bad[0] if bad else max(errors, key=lambda n: errors[n])
    where = worst if worst != kind else ""
    return Check("gradients" if kind == "gradient" else kind, where, errors[worst], limit)
