"""Run a model, a block, a router or an experts module, and compare two runs.

A run is a dict from a name ("out", "dx", "grad.experts.down_proj", ...) to a tensor or None. The
family tests and the negative controls use the same functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.families import lookup
from moe_patch.ops.routing import RouteImpl, route
from tests.support.numerics import assert_close, assert_same_choice, bf16_rule, dense_weights, probe
from tests.support.tiny_models import hidden_output

Run = dict[str, Tensor | None]


def run_model(model: nn.Module, batch: dict[str, Tensor], **kwargs: Any) -> Run:
    """Return outputs, router logits, auxiliary loss, and gradients of a functional of them all.

    Labels are omitted: a shifted cross-entropy has no value at one token.
    """
    model.zero_grad()
    torch.manual_seed(0)  # draw equal training noise
    out = model(**{k: v for k, v in batch.items() if k != "labels"}, **kwargs)
    result = out.logits if "logits" in out else hidden_output(out)
    objective = probe(result) / result.numel() ** 0.5
    aux_loss = out.get("aux_loss")
    if aux_loss is not None:
        objective = objective + aux_loss
    objective.backward()
    run: Run = {"out": result.detach()}
    # transformers' own loss is the number 0 if its router logits were not recorded.
    run["aux_loss"] = None if aux_loss is None else torch.as_tensor(aux_loss).float().detach()
    for i, logits in enumerate(out.get("router_logits") or ()):
        run[f"router_logits.{i}"] = None if logits is None else logits.detach()
    return run | _gradients(model)


def run_block(block: nn.Module, x: Tensor, *args: Tensor) -> Run:
    """Run forward and backward of one module, called as a module; keep further outputs too.

    The incoming gradient is the same fixed random tensor for equal shapes.
    """
    block.zero_grad()
    torch.manual_seed(0)
    x = x.detach().clone().requires_grad_()
    args = tuple(a.detach().clone().requires_grad_(a.is_floating_point()) for a in args)
    out = block(x, *args)
    outs = out if isinstance(out, tuple) else (out,)
    if outs[0].requires_grad:
        probe(outs[0]).backward()
    run: Run = {f"out.{i}": o.detach() for i, o in enumerate(outs)}
    run["dx"] = x.grad
    run |= {f"darg.{i}": a.grad for i, a in enumerate(args) if a.is_floating_point()}
    return run | _gradients(block)


def run_router(call: Callable[..., tuple], router: nn.Module, x: Tensor, *args: Tensor) -> Run:
    """Return logits, ids, weights and the gradients of a functional of the weights, by expert.

    Args:
        call: (router, x, *args) -> (logits, weights, ids); ``theirs`` or ``ours`` below.
    """
    router.zero_grad()
    x = x.detach().clone().requires_grad_()
    logits, weights, ids = call(router, x, *args)
    by_expert = torch.zeros_like(logits, dtype=weights.dtype).scatter(1, ids, weights)
    if by_expert.requires_grad:
        probe(by_expert).backward()
    run: Run = {"logits": logits.detach(), "ids": ids, "weights": weights.detach(), "dx": x.grad}
    return run | _gradients(router)


def theirs(router: nn.Module, x: Tensor, *args: Tensor) -> tuple:
    """Call transformers' own forward of the router's class."""
    return type(router).forward(router, x, *args)


def ours(
    router: nn.Module, x: Tensor, *args: Tensor, ties: str = "lower", impl: RouteImpl = route
) -> tuple:
    """Call the registry's routing function for the router's class, whatever the instance binds."""
    spec, role = lookup(router)
    assert role == "router"
    routing = spec.route(router, x, args, ties=ties, impl=impl)
    return routing.logits_TE, routing.weights_TK, routing.ids_TK


def assert_parity(mine: Run, reference: Run, limit: float, skip: tuple[str, ...] = ()) -> None:
    """Expect equal names and Nones in both runs, and tensors within ``limit``.

    A gradient that is zero in exact arithmetic is rounding noise with no size of its own. Every
    gradient's tolerance therefore includes NOISE times the largest gradient of the run.
    """
    assert mine.keys() == reference.keys()
    largest = max((v.norm().item() for k, v in reference.items() if _is_grad(k, v)), default=0.0)
    for name, value in reference.items():
        if name in skip:
            continue
        assert (mine[name] is None) == (value is None), f"{name}: None on one side only"
        if value is None:
            continue
        assert mine[name].dtype == value.dtype, f"{name}: {mine[name].dtype}, not {value.dtype}"
        size = value.norm().item()
        noise = NOISE * largest / size if _is_grad(name, value) and size > 0.0 else 0.0
        assert_close(mine[name], value, limit + noise, name)


NOISE = 1e-7


def _is_grad(name: str, value: Tensor | None) -> bool:
    return value is not None and name.startswith("grad.")


def assert_bf16_parity(mine: Run, eager: Run, fp64: Run, skip: tuple[str, ...] = ()) -> None:
    """Apply the low-precision rule to every tensor of a run."""
    assert mine.keys() == eager.keys() == fp64.keys()
    for name, ref in fp64.items():
        if ref is not None and name not in skip:
            bf16_rule(mine[name], eager[name], ref, name)


def assert_router_parity(
    call: Callable[..., tuple],
    router: nn.Module,
    x: Tensor,
    *args: Tensor,
    limit: float,
    choice: Callable[..., Tensor] | None = None,
) -> None:
    """Expect ``call`` to route like transformers' forward of the class, gradients included.

    Compares logits, ids as sets and weights by id on all rows. A row may differ only if ``choice``
    ties at the k-th place, and then in no score. Compares gradients on the rows that agree.

    Args:
        choice: (logits_TE, *args) -> the score that decides, bias included; None: no ties allowed.
    """
    mine, reference = run_router(call, router, x, *args), run_router(theirs, router, x, *args)
    assert_close(mine["logits"], reference["logits"], limit, "router logits")
    scores_TE = None if choice is None else choice(reference["logits"], *args)
    same_T = assert_same_choice(mine["ids"], reference["ids"], scores_TE)
    E = reference["logits"].shape[1]
    assert mine["weights"].dtype == reference["weights"].dtype
    by_expert = [dense_weights(run["ids"], run["weights"], E)[same_T] for run in (mine, reference)]
    assert_close(*by_expert, limit, "routing weights")
    kept = x.reshape(-1, x.shape[-1])[same_T].reshape(1, -1, x.shape[-1])
    kept = kept if x.dim() == 3 else kept[0]
    names = {"dx", *(name for name in mine if name.startswith("grad."))}
    runs = [run_router(each, router, kept, *args) for each in (call, theirs)]
    assert_parity(*({k: run[k] for k in names} for run in runs), limit)


def _gradients(module: nn.Module) -> Run:
    return {
        f"grad.{name}": None if p.grad is None else p.grad.detach().clone()
        for name, p in module.named_parameters()
    }
