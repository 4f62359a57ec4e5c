"""Check whole blocks at patch time, for families that bind forwards of their own.

The block runs on two sets of twins of its modules: same classes, same weights, no hooks. One set
carries the forwards that the patch is about to bind; the other stays transformers' own. Nothing is
bound on the model itself, and none of its hooks fires.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.patching.bindings import Binding
from moe_patch.patching.discover import DECORATED, FoundBlock
from moe_patch.patching.entry_fit import fitting, mismatch, require_call
from moe_patch.patching.selfcheck import TOKENS, moderate, random_tensors
from moe_patch.runtime.adapters import is_param_wrapper
from moe_patch.runtime.compare import Direct, compare, limit_for
from moe_patch.runtime.forward import EXPERTS_NAME
from moe_patch.runtime.module_patch import PATCH_KEY, bind, is_ours


def check_block(found: FoundBlock, bindings: Sequence[Binding]) -> None:
    """Compare outputs and, in fp32 and fp64, the gradient of the hidden states.

    In low precision only the best three quarters of the rows count, because near-ties in the
    router may be resolved differently.

    Raises:
        UnsupportedModelError: a difference exceeds the limit (names block, error and limit).
        EntryMismatchError: the block's class does not fit its entry.
    """
    block: Any = found.block
    ours, theirs = twins(block), twins(block)
    _prepare(found, bindings, ours, theirs)
    prefix = f"module.{found.spec.router_attr}."
    with fitting(block):
        router: nn.Module = getattr(theirs[block], found.spec.router_attr)
        tensors = random_tensors(router, prefix)
        width = next(p for p in router.parameters() if p.dim() == 2).shape[1]
    # Experts hold the largest weight; some families keep the router beside it in fp32.
    weight = max((p for p in block.parameters() if p.is_floating_point()), key=Tensor.numel)
    x = torch.randn(2, TOKENS // 2, width, device=weight.device, dtype=weight.dtype)
    if found.spec.shared is not None and found.spec.router_forward is None:
        with fitting(block):  # only the common forwards give the router what the block gets
            tensors = moderate(router, found.spec, tensors, x.flatten(0, 1), prefix)
    limit = limit_for(weight)
    exact = limit <= 1e-5
    call = found.spec.check_call or _call
    if found.spec.check_call is None:
        require_call(block, (x,))
    reference = _run(Direct(theirs[block], call), tensors, x, exact)
    with fitting(block):
        mine = _run(Direct(ours[block], call), tensors, x, exact)
    if (shapes := _shapes(reference)) != _shapes(mine):
        raise mismatch(block, f"it returns {shapes}, its entry {_shapes(mine)}")
    for name, theirs_of in reference.items():
        pair = mine[name], theirs_of
        compare(found.path, name, *(pair if exact else _closest_rows(*pair)), limit)


def _prepare(
    found: FoundBlock,
    bindings: Sequence[Binding],
    ours: Mapping[Any, Any],
    theirs: Mapping[Any, Any],
) -> None:
    """Bind our forwards to one twin of a block, and let both run their experts eagerly."""
    for _, experts in found.experts:
        _run_eagerly(ours[experts], theirs[experts])
    for module, function, patch, attribute in bindings:
        if patch.role != "lora":
            bind(ours[module], function, patch, attribute)


def _run_eagerly(*experts: Any) -> None:
    """Switch experts to eager; some of transformers' implementations have no backward."""
    for twin in experts:
        if "config" in twin.__dict__:
            twin.config = copy.copy(twin.config)
            twin.config._experts_implementation_internal = "eager"


def _shapes(results: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(result.shape) for name, result in results.items()}


def twins(block: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return copies of a block's modules that share only its tensors, keyed by the original.

    Hooks, bound forwards, patch records and PEFT's parameter wrappers are not copied. Experts that
    run on this library, by name or by a patch, run transformers' own code in the copies.
    """
    made: dict[nn.Module, nn.Module] = {}

    def twin_of(module: Any) -> nn.Module:
        if is_param_wrapper(module):
            module = module.get_base_layer()
        if module in made:
            return made[module]
        twin = object.__new__(type(module))
        made[module] = twin
        for key, value in module.__dict__.items():
            if is_ours(value) or key == PATCH_KEY:
                continue
            if isinstance(value, dict) and key.startswith("_"):
                value = type(value)() if "_hooks" in key else type(value)(value)
            twin.__dict__[key] = value
        if _runs_by_name(module):
            twin.config = copy.copy(module.config)
            twin.config._experts_implementation_internal = "eager"
        for name, child in module._modules.items():
            twin._modules[name] = None if child is None else twin_of(child)
        return twin

    twin_of(block)
    return made


def _runs_by_name(module: Any) -> bool:
    """Return whether transformers' registry dispatches an experts module to this library."""
    decorated = all(name in module.__dict__ for name in DECORATED)
    return decorated and module.config._experts_implementation == EXPERTS_NAME


def _call(block: nn.Module, hidden: Tensor) -> Any:
    return block(hidden)


def _run(direct: Direct, tensors: dict[str, Tensor], x: Tensor, grad: bool) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    out = torch.func.functional_call(direct, tensors, (x,))
    outs = out if isinstance(out, tuple) else (out,)
    results = {f"block output {i}": o for i, o in enumerate(outs) if o.is_floating_point()}
    first = outs[0]
    if grad and first.requires_grad:
        dout = torch.linspace(-1, 1, first.numel(), device=x.device, dtype=first.dtype)
        (dx,) = torch.autograd.grad(first, x, dout.view(first.shape))
        results["gradient of the block's hidden states"] = dx
    return {name: t.detach() for name, t in results.items()}


def _closest_rows(mine: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Return the three quarters of the rows that agree best."""
    mine, reference = (t.reshape(-1, t.shape[-1]).double() for t in (mine, reference))
    order = (mine - reference).norm(dim=-1).argsort()[: max(1, mine.shape[0] * 3 // 4)]
    return mine[order], reference[order]
