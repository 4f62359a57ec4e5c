"""Compare a patched model with the unpatched one: outputs, losses, router logits, gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.patching.discover import discover

# Limits of relative errors. Values: fp32 rounds through dozens of layers; in 16 bits both paths
# round. Gradients pass through twice as many layers.
# FP8 products differ by up to 5% in each layer, whatever the model's dtype.
VALUES = {"float64": 1e-6, "float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1, "fp8": 2e-1}
GRADIENTS = {"float64": 1e-5, "float32": 1e-3, "float16": 5e-2, "bfloat16": 2e-1, "fp8": 4e-1}
# Limits of the share of rows that differ in the first differing layer: rounding flips near ties.
CHOICES = {"float64": 1e-3, "float32": 1e-3, "float16": 0.1, "bfloat16": 0.2, "fp8": 0.3}


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        name: the kind of tensor compared; the worst of its kind is reported.
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
        """Return whether the error is within the limit; False for NaN."""
        return self.error <= self.limit


@dataclass
class Run:
    """Results of one forward and backward by name, and the chosen experts by layer."""

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
    *,
    compute: str = "decoded",
) -> tuple[list[Check], list[Any]]:
    """Compare a patched run with the unpatched one; expert choices separately from values.

    If rounding flips expert choices, values are compared in a second patched run that replays the
    unpatched model's experts.

    Args:
        model: in eval mode, unpatched; patched by this call.
        batch: keyword arguments of its forward.
        reference: the result of :func:`run` for the same model and batch.
        dtype: a key of the limits.
        backend: as in :class:`moe_patch.PatchConfig`.
        limit: replaces all limits.
        compute: as in :class:`moe_patch.PatchConfig`; FP8 products have limits of their own.

    Returns:
        The checks, and the rows of the report.

    Raises:
        UnsupportedModelError: a block cannot be patched.
    """
    from moe_patch.patching.patch import patch_model
    from moe_patch.patching.report import patch_report

    patch_model(model, backend=backend, compute=compute)
    dtype = dtype if compute == "decoded" else "fp8"
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
    """Run forward and backward once; return all results on the CPU."""
    model.zero_grad(set_to_none=True)
    with _watch_ids(model) as ids:
        out = model(**batch)
        objective, values = _objective(out)
        objective.backward()
    gradients = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Run({n: v.detach().cpu() for n, v in values.items()}, gradients, ids)


def _objective(out: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the scalar to differentiate, and the outputs to compare by name."""
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
    """Collect the expert ids that each experts module receives, by module path."""
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
    """Replay the reference's experts if some row chose others; yield whether it did."""
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
    """Return which rows chose different experts, compared as sets."""
    return (ids_TK.sort(-1).values != others_TK.sort(-1).values).any(-1)


def _choices(ours: dict[str, Tensor], theirs: dict[str, Tensor], limit: float) -> Check:
    """Check the first layer with a different choice, because its inputs are still the same."""
    for path, ids_TK in theirs.items():
        apart_T = _rows_apart(ours[path], ids_TK)
        if apart_T.any():
            share = apart_T.double().mean().item()
            where = f"{int(apart_T.sum())} of {len(apart_T)} rows of {path}"
            # A single near tie costs one row, however few rows there are.
            return Check("expert choice", where, share, max(limit, 1 / len(apart_T)))
    return Check("expert choice", f"{len(theirs)} layers", 0.0, limit)


def _errors(pairs: dict[str, tuple[Tensor, Tensor]], noise: float) -> dict[str, float]:
    """Return relative errors by name; each norm grows by ``noise`` times the largest norm."""
    sizes = {name: theirs.double().norm().item() for name, (_, theirs) in pairs.items()}
    noise *= max(sizes.values())
    return {
        name: (ours.double() - theirs.double()).norm().item() / max(sizes[name] + noise, 1e-300)
        for name, (ours, theirs) in pairs.items()
    }


def _worst(
    kind: str, ours: dict[str, Tensor], theirs: dict[str, Tensor], limit: float
) -> Check | None:
    """Return the largest relative error among tensors of a kind, or None without any."""
    names = [n for n in theirs if kind == "gradient" or n.rstrip(" 0123456789") == kind]
    if not names:
        return None
    if kind == "gradient" and ours.keys() != theirs.keys():
        lost = sorted(ours.keys() ^ theirs.keys())
        return Check("gradients", f"on one side only: {lost[0]}", float("inf"), limit)
    # A gradient that is zero in exact arithmetic consists of rounding noise only.
    noise = 8 * torch.finfo(theirs[names[0]].dtype).eps if kind == "gradient" else 0.0
    errors = _errors({n: (ours[n], theirs[n]) for n in names}, noise)
    bad = [n for n in names if errors[n] != errors[n]]
    worst = bad[0] if bad else max(errors, key=lambda n: errors[n])
    where = worst if worst != kind else ""
    return Check("gradients" if kind == "gradient" else kind, where, errors[worst], limit)
