"""Run one call of a patched module again, on our path and on transformers', and compare.

Both run on copies of the live inputs and on detached weights, without hooks, recorders or probes,
from the same random state. That state is restored, so the current step does not change. Outputs are
compared and, for experts and blocks, gradients of inputs and trained parameters for a fixed
direction. Routers are compared apart from the experts, so that a tie cannot change these. Their
result is the number of tokens with other experts, and the error of the other tokens' weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.debug.unpatched import paused, unobserved
from moe_patch.formats.tensor import QuantTensor, plain
from moe_patch.runtime.adapters import Factors
from moe_patch.runtime.compare import FP8_LIMIT, LIMITS, Direct, relative_error
from moe_patch.runtime.fp8 import DECODED
from moe_patch.runtime.module_patch import PATCH_KEY, current_factors, is_ours, patch_of
from moe_patch.runtime.modules import has_accelerate_hook, is_sharded, undecorated_forward

INPUTS = ("hidden states", "ids", "routing weights")
# Live batches have more rows and less even values than the self-check, so extend its limits.
SLACK = 5.0


@dataclass(frozen=True)
class Comparison:
    """One comparison of a live call with transformers.

    Attributes:
        path: the block.
        role: what was called: "experts", "block" (as a whole) or "router".
        step: number of the module's training forward, from 1 on.
        errors: name of the compared tensor -> relative error.
        limit: errors up to here are rounding.
        other_experts: for a router, how many tokens choose other experts than transformers.
        skipped: why nothing was compared, or empty.
    """

    path: str
    role: str
    step: int
    errors: dict[str, float] = field(default_factory=dict)
    limit: float = 0.0
    other_experts: int = 0
    skipped: str = ""

    @property
    def within(self) -> bool:
        """Return whether all errors are within the limit; False for NaN, True without any."""
        return all(error <= self.limit for error in self.errors.values())

    def __str__(self) -> str:
        head = f"moe_patch: shadow_check, step {self.step}, {self.path} ({self.role}): "
        if self.skipped:
            return f"{head}not compared: {self.skipped}"
        found = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
        if self.role == "router":
            found += f", tokens with other experts {self.other_experts}"
        verdict = "" if self.within else f"; ABOVE THE LIMIT of {self.limit:.0e}"
        return f"{head}{found}{verdict}"


def shadow_results(model: nn.Module) -> list[Comparison]:
    """Return every comparison that ``shadow_check`` has made in a patched model, by step."""
    patches = [patch for m in model.modules() if (patch := patch_of(m)) is not None]
    found = [r for patch in patches if patch.probe is not None for r in patch.probe.results]
    return sorted(found, key=lambda result: result.step)


def compare(
    path: str, role: str, step: int, module: nn.Module, args: tuple, kwargs: dict
) -> Comparison:
    """Run a module's call on both paths; never raise on a difference.

    Args:
        path, role, step: as in :class:`Comparison`.
        module: a patched module, inside its call.
        args: copies of the call's arguments.
        kwargs: the call's keyword arguments.
    """
    if (why := _why_not(module, args)) is not None:
        return Comparison(path, role, step, skipped=why)
    modules = list(module.modules())
    with ExitStack() as stack:
        stack.enter_context(unobserved(modules))
        stack.enter_context(torch.enable_grad())
        # A checkpoint around the step counts saved tensors and must not see those of these runs.
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
        ours = _run(module, _ours, args, kwargs, merge=False)
        with paused(modules):
            theirs = _run(module, _theirs, args, kwargs, merge=True)
    limit = _limit(module, args)
    if role != "router":
        return Comparison(path, role, step, _outputs(ours, theirs), limit)
    errors, rows = _routers(ours[0], theirs[0])
    return Comparison(path, role, step, errors, limit, other_experts=rows)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _why_not(module: nn.Module, args: tuple) -> str | None:
    for m in module.modules():
        if has_accelerate_hook(m):
            return "an accelerate hook moves the weights"
        if any(is_sharded(p) for p in m.parameters(recurse=False)):
            return "sharded weights (DTensor)"
    experts = module.__dict__.get("num_experts")
    if len(args) == 3 and experts is not None:
        ids = args[1]
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < experts:
            return "ids of experts on other devices (expert parallelism)"
    return None


def _limit(module: nn.Module, args: tuple) -> float:
    """Return the limit of the lowest precision involved."""
    tensors = [*args, *module.parameters()]
    dtypes = {t.dtype for t in tensors if isinstance(t, Tensor)} & LIMITS.keys()
    device_type = next(t.device.type for t in args if isinstance(t, Tensor))
    if torch.is_autocast_enabled(device_type):
        dtypes.add(torch.get_autocast_dtype(device_type))
    if device_type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        dtypes.add(torch.float16)
    limit = SLACK * max(LIMITS[dtype] for dtype in dtypes)
    patch = patch_of(module)
    in_fp8 = patch is not None and patch.config.compute != DECODED
    return max(limit, 2 * FP8_LIMIT) if in_fp8 else limit


def _ours(module: Any, *args: Any, **kwargs: Any) -> Any:
    for name in ("_old_forward", "forward"):
        if is_ours(bound := module.__dict__.get(name)):
            return bound(*args, **kwargs)
    return type(module).forward(module, *args, **kwargs)


def _theirs(module: Any, *args: Any, **kwargs: Any) -> Any:
    return undecorated_forward(module)(module, *args, **kwargs)


def _run(
    module: nn.Module, function: Callable[..., Any], args: tuple, kwargs: dict, merge: bool
) -> tuple[tuple, dict[str, Tensor]]:
    """Return outputs, and gradients by name; ``merge`` adds the call's factors to their weights."""
    inputs = [_leaf(a.clone()) if isinstance(a, Tensor) else a for a in args]
    named = {name: _copy(p) for name, p in module.named_parameters()}
    factors = {
        parameter: [Factors(_leaf(f.lhs), _leaf(f.rhs), f.scaling) for f in given]
        for parameter, given in current_factors(module).items()
    }
    tensors = {f"module.{name}": p for name, p in named.items()}
    if merge:
        for parameter, given in factors.items():
            tensors[f"module.{parameter}"] = merged_weight(named[parameter], given)
    with _with_factors(module, {} if merge else factors), _forked(args):
        out = torch.func.functional_call(Direct(module, function), tensors, tuple(inputs), kwargs)
    outs = out if isinstance(out, tuple) else (out,)
    return outs, _gradients(outs[0], _leaves(inputs, named, factors))


def _leaves(
    inputs: list[Any], named: dict[str, Tensor], factors: dict[str, list[Factors]]
) -> dict[str, Any]:
    """Return inputs, parameters and factors by the name of their gradient."""
    leaves = {**dict(zip(INPUTS, inputs, strict=False)), **named}
    for parameter, given in factors.items():
        leaves |= {f"{parameter}, A of adapter {i}": f.rhs for i, f in enumerate(given)}
        leaves |= {f"{parameter}, B of adapter {i}": f.lhs for i, f in enumerate(given)}
    return {f"gradient of {name}": leaf for name, leaf in leaves.items()}


def _copy(parameter: nn.Parameter) -> Tensor:
    """Return a new parameter on the same memory.

    PEFT's own path writes to the weight and registers it again with its type. Through detach() the
    write would change the version of the step's own tensor. A plain tensor would become a buffer.
    """
    if isinstance(parameter, QuantTensor):
        return _leaf(parameter, trained=False)
    return nn.Parameter(parameter.data, parameter.requires_grad)


def _leaf(tensor: Tensor, trained: bool = True) -> Tensor:
    return tensor.detach().requires_grad_(trained and tensor.is_floating_point())


def merged_weight(weight: Tensor, factors: list[Factors]) -> Tensor:
    """Return the weight with its adapters added, in storage layout; dequantise a quantised one."""
    weight = plain(weight)
    for lhs, rhs, scaling in factors:
        weight = weight + (scaling * (lhs @ rhs)).to(weight.dtype)
    return weight


@contextmanager
def _with_factors(module: nn.Module, factors: dict[str, list[Factors]]) -> Iterator[None]:
    patch = module.__dict__[PATCH_KEY]
    before = patch.factors
    try:
        patch.factors = factors or None
        yield
    finally:
        patch.factors = before


@contextmanager
def _forked(args: tuple) -> Iterator[None]:
    """Give both runs the same random state, and restore it afterwards."""
    devices = {a.device for a in args if isinstance(a, Tensor) and a.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        yield


def _gradients(out: Tensor, leaves: dict[str, Any]) -> dict[str, Tensor]:
    wanted = {n: t for n, t in leaves.items() if isinstance(t, Tensor) and t.requires_grad}
    if not out.requires_grad:
        return {}
    direction = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
    grads = torch.autograd.grad(
        out, list(wanted.values()), direction.to(out.dtype), allow_unused=True
    )
    return {n: g for n, g in zip(wanted, grads, strict=True) if g is not None}


def _outputs(
    ours: tuple[tuple, dict[str, Tensor]], theirs: tuple[tuple, dict[str, Tensor]]
) -> dict[str, float]:
    pairs = {}
    for i, (mine, reference) in enumerate(zip(ours[0], theirs[0], strict=True)):
        if isinstance(mine, Tensor) and mine.is_floating_point():
            pairs["output" if i == 0 else f"output {i}"] = (mine, reference)
    pairs |= {name: (ours[1][name], theirs[1][name]) for name in ours[1].keys() & theirs[1].keys()}
    return {name: relative_error(*pair) for name, pair in sorted(pairs.items(), reverse=True)}


def _routers(ours: tuple, theirs: tuple) -> tuple[dict[str, float], int]:
    """Return errors of logits and of weights, the latter where choices agree; count the rest."""
    (logits_TE, weights_TK, ids_TK), (ref_TE, ref_TK, ref_ids_TK) = ours[:3], theirs[:3]
    same_T = (ids_TK.sort(-1).values == ref_ids_TK.sort(-1).values).all(-1)
    zeros = torch.zeros(logits_TE.shape, dtype=torch.float64, device=logits_TE.device)
    mine = zeros.scatter(1, ids_TK.long(), weights_TK.detach().double())
    reference = zeros.scatter(1, ref_ids_TK.long(), ref_TK.detach().double())
    errors = {
        "logits": relative_error(logits_TE, ref_TE),
        "weights": relative_error(mine[same_T], reference[same_T]),
    }
    return errors, int((~same_T).sum())
