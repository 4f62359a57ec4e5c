"""Compile a patched model's kernels ahead, so that no training step waits for a compiler.

Triton compiles a kernel when it first sees a combination of dtypes, alignments and sizes. Each
distinct kind of block runs here on random tokens, forward and backward, once per size class of its
tiles. No gradient is accumulated, and the random state is restored. The compiled kernels also stay
in Triton's cache on disk for the next process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_patch.errors import PatchStateError, UnsupportedOptionError
from moe_patch.formats.packed import NAMES
from moe_patch.formats.tensor import QuantTensor
from moe_patch.ops.backend import choose_backend
from moe_patch.ops.routing_op import route_impl
from moe_patch.patching.checkable import why_not
from moe_patch.patching.discover import FoundBlock, discover
from moe_patch.patching.selfcheck import kind_of
from moe_patch.runtime.described import layout_of
from moe_patch.runtime.experts import compute_dtype, stored_weight
from moe_patch.runtime.module_patch import ModulePatch, patch_of
from moe_patch.runtime.spec import Arg, read
from moe_patch.schema import check_choice
from moe_patch.tools.on_meta import materialised, on_meta, published_storage
from moe_patch.tools.plan_memory import FRONT_ROWS
from moe_patch.types import Routing

# Rows of an average expert above the decode range: one for each further class of kernels/tiles.py.
ROWS_PER_EXPERT = (32, 128)
# Rows of an average expert for which every card decodes packed weights into a buffer.
ROWS_IN_BUFFER = 1 + max(FRONT_ROWS.values())
# Plans with more rows than this use kernels that smaller plans do not need.
MANY_ROWS = 1024
# A program of the routing kernels holds one of these numbers of tokens, or all if there are fewer.
ROUTED_TOKENS = (1, 2, 4, 8, 16, 32)


class WarmedBlock(NamedTuple):
    """One kind of block.

    Attributes:
        path: path of the first block of the kind.
        tokens: the token counts that ran.
        seconds: duration, mostly compilation.
        skipped: why nothing ran, or "".
    """

    path: str
    tokens: list[int]
    seconds: float
    skipped: str


def warmup(
    model_or_config: Any,
    tokens: Sequence[int] | None = None,
    *,
    training: bool = True,
    top_k: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    storage: str | None = None,
    progress: bool = True,
    **options: Any,
) -> list[WarmedBlock]:
    """Compile the kernels of every kind of MoE block, before training.

    Call it on the patched model with adapters attached, inside ``torch.autocast`` if training uses
    it: the tensors that require a gradient now decide which backward kernels are compiled. Blocks
    that cannot be called yet (FSDP units, weights on another machine) are skipped, with a reason.
    For them, or to fill Triton's cache on another machine, pass the config.

    Args:
        model_or_config: a patched model, which may be on "meta", or a transformers config.
        tokens: token counts (batch times sequence) of a call; default: one per size class of tiles,
            which covers every kernel that any count needs.
        training: also compile the backward kernels.
        top_k: experts per token, for blocks whose router stays with transformers.
        device: where to run blocks that are on "meta"; default: cuda if available.
        dtype: dtype of a config's weights; default: the config's own.
        storage: "nf4", "fp8" or "mxfp4", in which experts on "meta" are stored; "bf16" does not
            pack them. Default: that of a config's checkpoint, or else "bf16". Other experts keep
            their storage.
        progress: show a progress bar on stderr.
        options: a config's :class:`moe_patch.PatchConfig` options.

    Returns:
        One row per kind of block; ``_asdict()`` of each is JSON.

    Raises:
        PatchStateError: the model is not patched, or a recorder would count the random tokens.
        UnsupportedOptionError: options or a dtype together with a model, which has its own; an
            unknown storage, or one for experts that are not on "meta".
        UnsupportedModelError: experts that this storage cannot hold, by name.
    """
    if isinstance(model_or_config, nn.Module):
        if options or dtype is not None:
            raise UnsupportedOptionError(
                f"warmup: {sorted(options) or 'dtype'} together with a model; accepted: only with "
                "a config, because a patched model has its own"
            )
        model = model_or_config
    else:
        model = on_meta(model_or_config, dtype, options)
        storage = storage or published_storage(model_or_config)
    if storage is not None:
        check_choice("warmup: storage", storage, NAMES)
    from tqdm import tqdm

    bar = tqdm(_kinds(model), desc="compiling MoE kernels", disable=not progress)
    return [_warm(found, tokens, training, top_k, device, storage) for found in bar]


def _kinds(model: nn.Module) -> list[FoundBlock]:
    """Return the first patched block of each kind."""
    kinds: dict[tuple, FoundBlock] = {}
    for found in discover(model):
        if any(_patch(module) is not None for module in _modules(found)):
            kinds.setdefault(_kind(found), found)
    if not kinds:
        raise PatchStateError(f"{type(model).__name__} is not patched; call patch_model first")
    return list(kinds.values())


def _patch(module: Any) -> ModulePatch | None:
    patch = patch_of(module)
    return patch if patch is not None and patch.role != "refused" else None


def _modules(found: FoundBlock) -> list[Any]:
    block = [] if found.block is None else [found.block]
    return [*block, *(module for _, module in [*found.routers, *found.experts])]


def _kind(found: FoundBlock) -> tuple:
    trained = tuple(
        (p.requires_grad, tuple(p.shape))
        for _, module in [*found.experts, *found.wrappers]
        for p in module.parameters()
    )
    return kind_of(found), trained


def _warm(
    found: FoundBlock,
    tokens: Sequence[int] | None,
    training: bool,
    top_k: int | None,
    device: str | torch.device | None,
    storage: str | None,
) -> WarmedBlock:
    if not found.experts:
        return WarmedBlock(found.path, [], 0.0, "it has no experts module; its first call compiles")
    found, why = _ready(found, device, storage)
    if why:
        return WarmedBlock(found.path, [], 0.0, why)
    start, weight = time.perf_counter(), _weight(found)
    cuda = [weight.device] if weight.is_cuda else []
    with torch.random.fork_rng(devices=cuda), torch.set_grad_enabled(training):
        K = _top_k(found) or top_k
        if K is None:
            why = "only transformers' router has the number of experts per token: pass top_k"
            return WarmedBlock(found.path, [], 0.0, why)
        if not tokens:
            for T in ROUTED_TOKENS:
                _route(found, T)
        counts = list(tokens or _token_counts(weight, K))
        for T in counts:
            _run_both(found, T, K, training)
    if weight.is_cuda:
        torch.cuda.synchronize(weight.device)
    return WarmedBlock(found.path, counts, round(time.perf_counter() - start, 3), "")


def _ready(
    found: FoundBlock, device: str | torch.device | None, storage: str | None
) -> tuple[FoundBlock, str]:
    """Return a block that can run, and why not, or "".

    Raises:
        UnsupportedOptionError: a storage for experts that have values.
    """
    weight, default = _weight(found), "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device or default) if weight.is_meta else weight.device
    if storage is not None and not weight.is_meta:
        raise UnsupportedOptionError(
            f"warmup: storage={storage!r}, but {found.path} is not on the meta device; accepted: "
            "only with a config or a model on meta; other experts keep their storage"
        )
    if why := _uncompiled(found, place):
        return found, why
    if weight.is_meta:
        found = materialised(found, _modules(found), place, storage)
    return found, why_not(found, packed=True) or ""


def _token_counts(weight: Tensor, K: int) -> list[int]:
    """Return one token count per size class of tiles, and of ways to decode."""
    E = weight.shape[0]
    rows = {1, *(E * rows for rows in ROWS_PER_EXPERT), max(E * ROWS_PER_EXPERT[-1], MANY_ROWS)}
    if isinstance(weight, QuantTensor):
        rows.add(E * ROWS_IN_BUFFER)
    return sorted({-(-N // K) for N in rows})


def _run_both(found: FoundBlock, T: int, K: int, training: bool) -> None:
    """Run a block on T tokens; for training, run it without gradients as well."""
    weight = _weight(found)
    routing = _route(found, T) or _even(weight.shape[0], T, K, weight)
    _run(found, T, routing, training)
    if training:  # evaluation and reentrant checkpoints save nothing for backward
        with torch.no_grad():
            _run(found, T, routing, False)


def _uncompiled(found: FoundBlock, device: torch.device) -> str:
    """Say why a block on a device has no kernels to compile, or return "".

    Raises:
        PatchStateError: a recorder would count the random tokens.
    """
    patch = _patch(found.experts[0][1])
    assert patch is not None
    if any(r is not None and r.taps is not None for r in map(_patch, _modules(found))):
        raise PatchStateError(
            f"{found.path}: a recorder is attached, which would count the random tokens of a "
            "warm-up; call warmup before record"
        )
    choice = choose_backend(patch.config.backend, device, _weight(found).dtype)
    if choice.name == "torch":
        return f"nothing to compile on the torch backend ({choice.reason})"
    if found.spec.experts_forward is not None:
        return "its experts run a forward of their own, which warmup does not run"
    return ""


def _weight(found: FoundBlock) -> Tensor:
    return stored_weight(found.experts[0][1], found.spec)


def _top_k(found: FoundBlock) -> int | None:
    for chooser, spec in found.choosers:
        if "top_k" in spec.params:
            return int(read(chooser, spec.params["top_k"]))
    return None


def _route(found: FoundBlock, T: int) -> Routing | None:
    """Return the routing of T random tokens, or None if no router runs the common forward."""
    routing = None
    for router, spec in found.choosers:
        patch = _patch(router)
        if patch is None or spec.routing is None or spec.router_forward is not None:
            continue
        impl = route_impl(patch.config.backend, patch.config.batch_invariant)
        if spec.chooses_in_block:  # by its router's logits, which are fp32 in every family
            shape = T, _weight(found).shape[0]
            leaf = torch.randn(shape, device=_weight(found).device)
            leaf.requires_grad_(torch.is_grad_enabled())
            routing = spec.choose(router, leaf * 1.0, leaf, ties=patch.config.ties, impl=impl)
        else:
            weight = next(p for p in router.parameters() if p.dim() == 2)
            leaf = torch.randn(T, weight.shape[1], device=weight.device, dtype=weight.dtype)
            leaf.requires_grad_(torch.is_grad_enabled())
            x = leaf[None] * 1.0 if spec.router_input_3d else leaf * 1.0
            args: tuple = ()
            if isinstance(spec.bias, Arg):
                args = (torch.zeros(weight.shape[0], device=weight.device),)
            routing = spec.route(router, x, args, ties=patch.config.ties, impl=impl)
        if routing.weights_TK.requires_grad:
            ones_TK = torch.ones_like(routing.weights_TK)
            torch.autograd.grad(routing.weights_TK, leaf, ones_TK, allow_unused=True)
    return routing


def _even(E: int, T: int, K: int, weight: Tensor) -> Routing:
    ids_TK = torch.rand(T, E, device=weight.device).argsort(1)[:, :K].contiguous()
    return Routing(ids_TK, torch.rand(T, K, device=weight.device), weight.new_empty(0))


def _run(found: FoundBlock, T: int, routing: Routing, training: bool) -> None:
    """Run the experts with their adapters, forward and backward, as the block calls them."""
    for _, experts in found.experts:
        around = [w for _, w in found.wrappers if w.get_base_layer() is experts]
        outer: Any = around[0] if around else experts
        stored = stored_weight(experts, found.spec)
        dtype = compute_dtype(stored, stored, found.spec.experts_fp32)
        D = stored.shape[1] if layout_of(experts, found.spec).is_transposed else stored.shape[2]
        x_TD = torch.randn(T, D, device=stored.device, dtype=dtype).requires_grad_(training)
        weights_TK = routing.weights_TK.detach().requires_grad_(training)
        out = outer(x_TD, routing.ids_TK.detach(), weights_TK)
        if training:
            trained = [p for p in outer.parameters() if p.requires_grad]
            leaves = [x_TD, weights_TK, *trained]
            torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
