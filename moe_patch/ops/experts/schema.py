"""Schemas, implementations and fakes of the experts operators.

``experts``, ``inference`` and ``experts_bwd`` are the implementations.
:mod:`moe_patch.ops.experts.autograd` defines the operators and their autograd formulas. In plain
eager execution the implementations are called directly.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_patch.formats.packed import packed_weights
from moe_patch.ops.direct import in_dtype
from moe_patch.types import ExpertsNeeds, ExpertWeights, Glu, Kept, Lora, Plan

_BACKEND_MODULES = {
    "torch": "moe_patch.ops.experts.torch_backend",
    "triton": "moe_patch.kernels.experts.experts",
    "triton in chunks": "moe_patch.kernels.experts.chunked",
}

_OPERANDS = (
    "Tensor w13, Tensor w2, Tensor? b13, Tensor? b2, Tensor? a13, Tensor? lb13, Tensor? a2, "
    "Tensor? lb2, float s13, float s2, float alpha, float limit, str options"
)
EXPERTS = (
    f"(Tensor x, Tensor ids, Tensor weights, {_OPERANDS}, bool[] keep, Tensor? signals, "
    "Tensor[] scales) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
INFERENCE = f"(Tensor x, Tensor ids, Tensor weights, {_OPERANDS}, Tensor[] scales) -> Tensor"
EXPERTS_BWD = (
    f"(Tensor dout, Tensor x, Tensor weights, {_OPERANDS}, Tensor row_of_N, Tensor slot_of_TK, "
    "Tensor offsets, Tensor h, Tensor u13, Tensor u2, bool[] needs, Tensor[] scales) -> Tensor[]"
)
INPLACE_H = EXPERTS_BWD.replace("Tensor h,", "Tensor(a!) h,")


# The options are one string of words: torch takes time for each argument and accepts no tuple.
# Floats stay separate arguments, because compilers with dynamic shapes turn them into symbols.
class Options(NamedTuple):
    """Options encoded by :func:`encode_options`."""

    kind: str
    gated: bool
    interleaved: bool
    backend: str
    batch_invariant: bool
    chunk: int
    alone: bool
    storage: str


def encode_options(
    glu: Glu,
    backend: str,
    batch_invariant: bool,
    storage: str,
    chunk: int = 0,
    alone: bool = False,
) -> str:
    """Encode the options.

    Args:
        storage: from :func:`moe_patch.formats.packed.plain_weights`.
        chunk: run more tokens than these in chunks, on the Triton backend; 0 for all at once.
        alone: only the output is used.
    """
    activation = f"{glu.kind} {glu.gated:d} {glu.interleaved:d}"
    return f"{activation} {backend} {batch_invariant:d} {chunk} {alone:d} {storage}"


@functools.cache
def read_options(encoded: str) -> Options:
    """Decode the string of :func:`encode_options`."""
    kind, gated, interleaved, backend, invariant, chunk, alone, storage = encoded.split(" ", 7)
    return Options(
        kind, gated == "1", interleaved == "1", backend, invariant == "1", int(chunk), alone == "1",
        storage,
    )  # fmt: skip


def alone_options(encoded: str, chunk: int) -> str:
    """Return the options of a call whose output alone is used, in chunks of ``chunk`` tokens."""
    *first, _chunk, _alone, storage = encoded.split(" ", 7)
    return " ".join([*first, str(chunk), "1", storage])


@functools.cache
def read_glu(encoded: str, alpha: float, limit: float) -> Glu:
    """Decode the activation from the options and its two numbers."""
    options = read_options(encoded)
    return Glu(options.kind, options.gated, options.interleaved, alpha, limit)


def experts_fake(x: Any, ids: Any, weights: Any, *args: Any) -> Any:
    """Fake implementation of ``experts``."""
    w13, w2, _, _, a13, _, a2, *_, options, keep, _, scales = args
    save_h, save_u13, save_u2, norms = keep
    from moe_patch.kernels.common.chunks import chunk_count

    decoded = read_options(options)
    w13 = packed_weights(ExpertWeights(w13, w2), scales, decoded.storage, x.dtype).w13_EHD
    T, K = ids.shape
    plans = torch.sym_max(1, chunk_count(T, decoded.chunk)) if decoded.chunk else 1
    return (
        x.new_empty(x.shape),
        ids.new_empty(T * K, dtype=torch.int32),
        ids.new_empty(T, K, dtype=torch.int32),
        ids.new_empty(plans * (w13.shape[0] + 1), dtype=torch.int32),
        x.new_empty(T * K, w13.shape[1]) if save_h else x.new_empty(0),
        x.new_empty(T * K, a13.shape[1]) if save_u13 else x.new_empty(0),
        x.new_empty(T * K, a2.shape[1]) if save_u2 else x.new_empty(0),
        x.new_empty(T, K, dtype=torch.promote_types(x.dtype, torch.float32))
        if norms
        else x.new_empty(0),
    )


def experts_bwd_fake(dout: Any, *args: Any) -> Any:
    """Fake implementation of ``experts_bwd``."""
    inputs, slot_of_TK, needs = args[:10], args[-7], args[-2]
    x, a13, a2 = args[0], args[6], args[8]
    grads = [
        gradient_of(t) if need and t is not None else x.new_empty(0)
        for t, need in zip(inputs, needs[:10], strict=True)
    ]
    wide = torch.promote_types(x.dtype, torch.float32)
    has_lora = a13 is not None or a2 is not None
    norms = [
        x.new_empty(slot_of_TK.shape, dtype=wide) if needs[10] and present else x.new_empty(0)
        for present in (True, True, has_lora)
    ]
    return grads + norms


def gradient_of(t: Tensor) -> Tensor:
    """Allocate a gradient: like its weight or low-rank factor, or else contiguous."""
    return torch.empty_like(t) if t.dim() == 3 else t.new_empty(t.shape)


@functools.cache
def _module(backend: str) -> ModuleType:
    return importlib.import_module(_BACKEND_MODULES[backend])


def _operands(
    args: Sequence[Any], scales: list[Tensor], x: Tensor
) -> tuple[ExpertWeights, Glu, Lora | None, Lora | None, ModuleType, dict[str, int]]:
    w13, w2, b13, b2, a13, lb13, a2, lb2, s13, s2, alpha, limit, encoded = args
    options, dtype = read_options(encoded), x.dtype
    # The torch backend has no such option, because it cannot be batch invariant.
    own: dict[str, int] = {"batch_invariant": True} if options.batch_invariant else {}
    module = options.backend
    if 0 < options.chunk < x.shape[0]:
        module, own["chunk"] = "triton in chunks", options.chunk
        if options.alone:
            own["alone"] = True
    return (
        packed_weights(ExpertWeights(w13, w2, b13, b2), scales, options.storage, dtype),
        read_glu(encoded, alpha, limit),
        None if a13 is None else Lora(in_dtype(a13, dtype), in_dtype(lb13, dtype), s13),
        None if a2 is None else Lora(in_dtype(a2, dtype), in_dtype(lb2, dtype), s2),
        _module(module),
        own,
    )


_NOTHING = contextlib.nullcontext()


def _no_autocast(device_type: str) -> contextlib.AbstractContextManager:
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return _NOTHING


def experts(x: Any, ids: Any, weights: Any, *args: Any) -> tuple[Tensor, ...]:
    """Return (out, three tensors of the plan, h, u13, u2, norms).

    A tensor that is not saved is empty; several may be the same empty tensor.
    """
    *operands, keep, _, scales = args
    w, glu, lora13, lora2, backend, options = _operands(operands, scales, x)
    save_h, save_u13, save_u2, norms = keep
    with _no_autocast(x.device.type):
        out, plan, kept, act_norm = backend.experts_forward(
            x, ids, weights, w, glu, lora13, lora2, save_h=save_h, save_u13=save_u13,
            save_u2=save_u2, norms=norms, **options,
        )  # fmt: skip
    return out, *plan, *kept, act_norm


def experts_operator(*args: Any) -> tuple[Tensor, ...]:
    """Run :func:`experts` and copy its empty outputs: outputs of an operator must not alias."""
    return tuple(t if t.numel() else t.new_empty(t.shape) for t in experts(*args))


def inference(x: Any, ids: Any, weights: Any, *args: Any) -> Tensor:
    """Return only the output of :func:`experts`."""
    *operands, scales = args
    w, glu, lora13, lora2, backend, options = _operands(operands, scales, x)
    with _no_autocast(x.device.type):
        return backend.experts_forward(
            x, ids, weights, w, glu, lora13, lora2, save_h=False, **options
        ).out_TD


_FACTORS = ("lora13_A", "lora13_B", "lora2_A", "lora2_B")


def experts_bwd(
    dout: Any, x: Any, weights: Any, *args: Any, overwrite_h: bool = False
) -> Sequence[Tensor | None]:
    """Return the fields of ExpertsBackward; None for those not requested."""
    *operands, row_of_N, slot_of_TK, offsets, h, u13, u2, needs, scales = args
    w, glu, lora13, lora2, backend, options = _operands(operands, scales, x)
    needs = ExpertsNeeds(*needs)
    plan = Plan(row_of_N, slot_of_TK, offsets)
    with _no_autocast(x.device.type):
        grads = backend.experts_backward(
            dout, x, weights, w, glu, lora13, lora2, plan, Kept(h, u13, u2), needs,
            overwrite_h=overwrite_h, **options,
        )  # fmt: skip
    if lora13 is None and lora2 is None:
        return grads
    typed = {
        name: in_dtype(getattr(grads, name), factor.dtype)
        for name, factor in zip(_FACTORS, operands[4:8], strict=True)
        if getattr(grads, name) is not None
    }
    return grads._replace(**typed)


def experts_bwd_operator(dout: Any, x: Any, *args: Any, overwrite_h: bool = False) -> list[Tensor]:
    """Run :func:`experts_bwd` with empty tensors for None: an operator returns only tensors."""
    grads = experts_bwd(dout, x, *args, overwrite_h=overwrite_h)
    return [x.new_empty(0) if g is None else g for g in grads]
