"""Compare each distinct kind of block with transformers at patch time, before binding.

Router and experts are compared separately, so that a tie in the router cannot change the experts'
input. The router is compared with transformers' own forward on random weights and inputs; the
experts with the class's original eager forward on equal ids. If more is bound, whole blocks are
compared too (blockcheck.py). Checks use eval mode, a forked RNG, no hooks and at most 64 tokens.
Afterwards every attribute, buffer, gradient, training flag and RNG state is what it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.config import PatchConfig
from moe_patch.errors import MoePatchError, UnsupportedModelError, first_line
from moe_patch.ops.routing_op import route_impl
from moe_patch.patching.checkable import involved, why_not
from moe_patch.patching.discover import FoundBlock
from moe_patch.patching.entry_fit import fitting, require_call, require_form
from moe_patch.runtime.compare import Direct, compare, limit_for
from moe_patch.runtime.described import layout_of, read_glu
from moe_patch.runtime.experts import run_experts, stored_weight
from moe_patch.runtime.modules import undecorated_forward
from moe_patch.runtime.spec import Arg, FamilySpec

TOKENS = 48
EXPERTS = 4
# Largest standard deviation of random logits, and how often matrices are halved to get there.
_LARGEST, _HALVINGS = 4.0, 16


def kind_of(found: FoundBlock) -> tuple:
    """Return a key that equal kinds of blocks share: classes, tensors and the values we read."""
    spec = found.spec
    modules = [m for _, m in [*found.routers, *found.experts]]
    tensors = tuple(
        (n, tuple(p.shape), p.dtype, p.device) for m in modules for n, p in m.named_parameters()
    )
    routing = tuple(str(value) for _, m in found.routers for value in found.spec_of(m).values_of(m))
    if found.block is not None and spec.chooses_in_block:
        routing += tuple(str(value) for value in spec.values_of(found.block))
    activations = tuple(read_glu(m, spec) for _, m in found.experts if spec.experts_forward is None)
    return type(found.block), tuple(type(m) for m in modules), tensors, routing, activations


def check(found: FoundBlock, backend: str, training: bool = False) -> str:
    """Compare one block with transformers; return "passed" or "skipped: why".

    Args:
        found: the block.
        backend: as in :class:`moe_patch.PatchConfig`.
        training: check in train mode, where random draws of a router may differ from ours.

    Raises:
        UnsupportedModelError: a difference exceeds the limit (names module, error and limit).
    """
    if why := why_not(found):
        return f"skipped: {why}"
    with sandbox(found, training):
        for path, router in found.routers:
            spec = found.spec_of(router)
            if spec.routing is not None and spec.router_forward is None:
                _check_router(path, router, spec, backend)
        for path, experts in found.experts:
            if found.spec.experts_forward is None:
                _check_experts(path, experts, found.spec, backend)
    return "passed"


def random_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Return random floating-point tensors by name, scaled so that logits are about one in size."""
    tensors = {}
    for name, t in [*module.named_parameters(), *module.named_buffers()]:
        if t.is_floating_point():
            noise = torch.randn(t.shape, device=t.device)
            noise *= t.shape[-1] ** -0.5 if t.dim() > 1 else 0.3
            tensors[prefix + name] = noise.to(t.dtype)
    return tensors


def moderate(
    router: nn.Module, spec: FamilySpec, tensors: dict[str, Tensor], x_TD: Tensor, prefix: str
) -> dict[str, Tensor]:
    """Halve the random matrices of a router with adapters until its logits are about one in size.

    An adapter's scaling may be large. Scores that underflow tie, and transformers breaks ties in an
    order of its own.
    """
    adapted = any("base_layer" in module._modules for module in router.modules())
    if spec.logits is None or not adapted:
        return tensors
    direct = Direct(router, spec.logits)
    with torch.no_grad():
        for _ in range(_HALVINGS):
            own = {f"module.{name.removeprefix(prefix)}": t for name, t in tensors.items()}
            if torch.func.functional_call(direct, own, (x_TD,)).std() <= _LARGEST:
                break
            tensors = {name: t / 2 if t.dim() > 1 else t for name, t in tensors.items()}
    return tensors


def _check_router(path: str, router: nn.Module, spec: FamilySpec, backend: str) -> None:
    tensors = random_tensors(router, "module.")
    args: tuple = ()
    with fitting(router):
        weight = next(p for p in router.parameters() if p.dim() == 2)
        x = torch.randn(TOKENS, weight.shape[1], device=weight.device, dtype=weight.dtype)
        if spec.router_input_3d:
            x = x.view(2, TOKENS // 2, -1)
        if isinstance(spec.bias, Arg):
            args = (torch.randn(weight.shape[0], device=weight.device) * 0.3,)
        tensors = moderate(router, spec, tensors, x, "module.")
    _compare_routers(path, router, spec, backend, tensors, x, args)
    # Positive scores hide how excluded groups are filled; negative ones reveal it. Where zeros fill
    # them, excluded experts tie, so use transformers' own order of ties.
    if isinstance(spec.bias, Arg):
        args = (args[0] - 2,)
    elif spec.bias is not None:
        name = f"module.{spec.bias}"
        with fitting(router):
            tensors = tensors | {name: tensors[name] - 2}
    if spec.bias is not None:
        _compare_routers(path, router, spec, backend, tensors, x, args, ties="torch")


def _compare_routers(
    path: str,
    router: nn.Module,
    spec: FamilySpec,
    backend: str,
    tensors: dict[str, Tensor],
    x: Tensor,
    args: tuple,
    ties: str = "lower",
) -> None:
    def ours(module: nn.Module, hidden: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        impl = route_impl(backend)
        routing = spec.route(module, hidden, rest, ties=ties, impl=impl)
        if spec.returns is not None:
            return spec.returns(module, routing)
        return routing.logits_TE, *_ordered(spec, routing.weights_TK, routing.ids_TK)

    def theirs(module: nn.Module, hidden: Tensor, *rest: Tensor) -> Any:
        return type(module).forward(module, hidden, *rest)

    x = x.detach().requires_grad_()
    require_call(router, (x, *args))
    reference = torch.func.functional_call(Direct(router, theirs), tensors, (x, *args))
    with fitting(router):
        mine = torch.func.functional_call(Direct(router, ours), tensors, (x, *args))
    require_form(router, reference, mine)
    logits, weights, ids = mine[0], *_ordered(spec, *mine[1:3])
    ref_logits, ref_weights, ref_ids = reference[0], *_ordered(spec, *reference[1:3])
    limit = limit_for(next(p for p in router.parameters() if p.dim() == 2))
    compare(path, "router logits", logits, ref_logits, limit)
    dense = torch.zeros_like(logits, dtype=torch.float64)
    ours_TE = dense.scatter(1, ids, weights.double())
    theirs_TE = dense.scatter(1, ref_ids, ref_weights.double())
    # Compare as sets: the two may choose different numbers of experts per token.
    chosen_TE, ref_chosen_TE = (dense.scatter(1, i, 1.0) for i in (ids, ref_ids))
    agree_T = (chosen_TE == ref_chosen_TE).all(-1)
    needed = 1.0 if limit <= 1e-5 else 0.75
    if agree_T.double().mean() < needed:
        raise UnsupportedModelError(
            f"{path} ({type(router).__name__}): self-check: {int((~agree_T).sum())} of "
            f"{len(agree_T)} rows choose other experts than transformers; "
            "pass self_check=False only if you know why"
        )
    compare(path, "routing weights", ours_TE[agree_T], theirs_TE[agree_T], limit)
    # Add the logits, so that the gradient is not mere noise where the weights are constant.
    dx, ref_dx = (
        torch.autograd.grad((by_expert + raw)[agree_T].square().sum(), x)[0]
        for by_expert, raw in ((ours_TE, logits), (theirs_TE, ref_logits))
    )
    compare(path, "router's hidden-state gradient", dx, ref_dx, limit)


def _ordered(spec: FamilySpec, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Swap between a router's own order of weights and ids and (weights, ids)."""
    return (other, one) if spec.ids_first else (one, other)


def _check_experts(path: str, experts: nn.Module, spec: FamilySpec, backend: str) -> None:
    """Compare output and all gradients on copies of a few experts; the last one gets no rows."""
    weight = stored_weight(experts, spec)
    few = min(weight.shape[0], EXPERTS)
    used = max(1, few - 1)
    tensors = {
        f"module.{name}": p.detach()[:few].clone().requires_grad_()
        for name, p in experts.named_parameters(recurse=False)
        if p.dim() > 1 and p.is_floating_point()
    }
    D = weight.shape[1] if layout_of(experts, spec).is_transposed else weight.shape[2]
    ids = torch.rand(TOKENS, used, device=weight.device).argsort(-1)[:, :2].contiguous()
    x = torch.randn(TOKENS, D, device=weight.device, dtype=weight.dtype).requires_grad_()
    weights = torch.rand(ids.shape, device=weight.device).to(weight.dtype).requires_grad_()
    grad = torch.randn(TOKENS, D, device=weight.device, dtype=weight.dtype)
    original, config = undecorated_forward(experts), PatchConfig(backend=backend)

    def ours(module: nn.Module, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return run_experts(module, spec, hidden, ids, weights, config)

    def run(function: Any) -> tuple[Tensor, ...]:
        out = torch.func.functional_call(Direct(experts, function), tensors, (x, ids, weights))
        return out, *torch.autograd.grad(out, (x, weights, *tensors.values()), grad)

    require_call(experts, (x, ids, weights))
    reference = run(original)
    with fitting(experts):
        mine = run(ours)
    names = ["experts output", "hidden-state gradient", "routing-weight gradient"]
    names += [f"gradient of {name.removeprefix('module.')}" for name in tensors]
    for name, ours_of, theirs_of in zip(names, mine, reference, strict=True):
        compare(path, name, ours_of, theirs_of, limit_for(weight))


@contextmanager
def sandbox(found: FoundBlock, training: bool = False) -> Iterator[None]:
    """Set eval or train mode, gradients on, autocast off, and a seeded RNG; then restore them.

    Any failure inside refuses the block: transformers' own code fails on some configs.
    """
    modules = involved(found)
    devices = {p.device for m in modules for p in m.parameters()}
    cuda = [d for d in devices if d.type == "cuda"]
    with ExitStack() as stack:
        for device_type in {d.type for d in devices}:
            stack.enter_context(torch.autocast(device_type, enabled=False))
        stack.enter_context(torch.random.fork_rng(devices=cuda))
        stack.enter_context(_mode(modules, training))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        # torch.manual_seed would also seed devices that this process has not used yet.
        torch.default_generator.manual_seed(0)
        for device in cuda:
            torch.cuda.default_generators[device.index].manual_seed(0)
        try:
            yield
        except (MoePatchError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"{found.path}: self-check: the block does not run on random data: "
                f"{first_line(error)}; check the config's values (for example, more experts per "
                "token than experts)"
            ) from error


@contextmanager
def _mode(modules: list[nn.Module], training: bool) -> Iterator[None]:
    flags = [(sub, sub.training) for module in modules for sub in module.modules()]
    try:
        for sub, _ in flags:
            sub.training = training
        yield
    finally:
        for sub, training in flags:
            sub.training = training
