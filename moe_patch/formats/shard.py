"""QuantShard: one rank's experts of a quantised parameter, as FSDP2 holds and gathers them.

FSDP2 cuts a parameter along its first axis and keeps each rank's part as the local tensor of a
DTensor. It gathers what ``fsdp_pre_all_gather`` returns, torch's extension point for subclasses. A
part keeps its bytes and its own scales; both are gathered as bytes. Scales that belong to no single
expert are small and stay whole on every rank. Gathered bytes are a parameter of the original class
again, so no 16-bit weight exists at any time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_patch.errors import UnsupportedModelError
from moe_patch.formats import nf4
from moe_patch.formats.packed import PackedWeight

Whole = Callable[[PackedWeight], Tensor]


class QuantShard(Tensor):
    """Experts [count, rows, columns] of a parameter, in memory for ``held`` of them (padding).

    It can be copied, moved, padded and gathered, but not decoded: NF4's scales are numbered through
    the experts of all ranks.

    Attributes:
        held_weight: the bytes, with padding at the end.
        total: number of experts on all ranks.
        whole: makes a parameter of the original class.
    """

    held_weight: PackedWeight
    total: int
    whole: Whole

    @staticmethod
    def __new__(cls, held: PackedWeight, count: int, total: int, whole: Whole) -> QuantShard:
        shape = (count, *held.shape[1:])
        return Tensor._make_wrapper_subclass(
            cls, shape, dtype=held.dtype, device=held.device, requires_grad=False
        )

    def __init__(self, held: PackedWeight, count: int, total: int, whole: Whole) -> None:
        self.held_weight, self.total, self.whole = held, total, whole

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantShard({self.held_weight.storage}, {tuple(self.shape)} of {self.total})"

    @property
    def weight(self) -> PackedWeight:
        """The bytes without padding."""
        return cut(self.held_weight, 0, self.shape[0])

    def like(self, held: PackedWeight, count: int | None = None) -> QuantShard:
        """Return a part of the same parameter with other memory."""
        return QuantShard(held, self.shape[0] if count is None else count, self.total, self.whole)

    def narrow(self, dim: int, start: int, length: int) -> QuantShard:  # type: ignore[override]
        """Return the first ``length`` experts, over the same memory (FSDP2's padding)."""
        if dim != 0 or start != 0:
            raise _refused(f"narrow along axis {dim} from {start}")
        return self.like(self.held_weight, length)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return what FSDP2 gathers, bytes [held, ..] and scales [held, ..], and other scales.

        FSDP2 calls a method of one argument without comparing sizes with those of the parameter,
        which bytes do not have. On a mesh of one rank it takes over the first tensor alone, so all
        scales are handed over beside it.
        """
        packed, scales = self.held_weight.packed, self.held_weight.scales
        if mesh.size() == 1:
            return (packed.view(torch.uint8),), scales
        return (packed.view(torch.uint8), scales[0].view(packed.shape[0], -1)), scales[1:]

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: tuple[Tensor, ...],
        dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """Make the whole parameter over the gathered memory; ``out`` lies over it already."""
        if out is not None:
            out.share(metadata)
            return None
        held = self.held_weight
        packed, scales = outputs[0][: self.total], metadata
        if len(outputs) > 1:
            own = outputs[1][: self.total]
            flat = held.storage == "nf4"
            own = own.flatten() if flat else own.view(-1, *held.scales[0].shape[1:])
            scales = (own, *metadata)
        weight = replace(
            held, packed=packed.view(held.packed.dtype), scales=scales, dtype=dtype, gathered=True
        )
        return self.whole(weight), ()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise _refused(str(func))
        return handler(*args, **(kwargs or {}))


def _refused(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{what} was called on one rank's part of experts stored in 4 or 8 bits; accepted: FSDP2 "
        "(fully_shard), moving, copying, sharded state dicts, or those of the whole model through "
        "accelerate's fsdp2_load_full_state_dict. A forward gathers the experts"
    )


def cut(weight: PackedWeight, start: int, end: int) -> PackedWeight:
    """Return experts ``start`` to ``end`` as views; scales of all experts stay whole."""
    own = weight.scales[0]
    each = scales_per_expert(weight) if weight.storage == "nf4" else 1
    scales = (own[start * each : end * each], *weight.scales[1:])
    return replace(weight, packed=weight.packed[start:end], scales=scales)


def scales_per_expert(weight: PackedWeight) -> int:
    """Return the number of NF4's 8-bit scales of one expert."""
    _, rows, columns = weight.stored_shape
    return rows * columns // nf4.BLOCK


def split(weight: PackedWeight, size: int, whole: Whole) -> list[QuantShard]:
    """Cut a parameter into parts of ``size`` experts, the last one smaller, as views."""
    E = weight.shape[0]
    parts = [cut(weight, start, min(start + size, E)) for start in range(0, E, size)]
    return [QuantShard(part, part.shape[0], E, whole) for part in parts]


def zeros(weight: PackedWeight, experts: int, total: int, whole: Whole) -> QuantShard:
    """Allocate a part of ``experts`` experts, with the weight's scales of all experts."""
    each = scales_per_expert(weight) if weight.storage == "nf4" else 1
    own = weight.scales[0]
    scale = own.new_zeros((experts * each, *own.shape[1:]))
    packed = weight.packed.new_zeros((experts, *weight.packed.shape[1:]))
    held = replace(weight, packed=packed, scales=(scale, *weight.scales[1:]))
    return QuantShard(held, experts, total, whole)


def _each(shard: QuantShard, function: Callable[[Tensor], Tensor]) -> QuantShard:
    return shard.like(shard.held_weight.each(function))


def _alias(shard: QuantShard, *_: Any) -> QuantShard:
    return shard.like(shard.held_weight)


def _clone(shard: QuantShard, *, memory_format: Any = None) -> QuantShard:
    return _each(shard, torch.clone)


def _to_copy(
    shard: QuantShard,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    non_blocking: bool = False,
    **_: Any,
) -> QuantShard:
    moved = _each(shard, lambda t: t.to(device, non_blocking=non_blocking, copy=True))
    return moved.like(replace(moved.held_weight, dtype=dtype or shard.dtype))


def _copy(shard: QuantShard, source: Any, non_blocking: bool = False) -> QuantShard:
    mine = shard.weight
    theirs = source.weight if isinstance(source, QuantShard) else None
    if theirs is None or (theirs.storage, theirs.shape) != (mine.storage, mine.shape):
        found = f"{type(source).__name__} {tuple(source.shape)}, {source.dtype}"
        raise _refused(f"copy_ from {found} (a state dict of the whole model?)")
    for into, value in zip(
        (mine.packed, *mine.scales), (theirs.packed, *theirs.scales), strict=True
    ):
        into.copy_(value, non_blocking)
    return shard


def _empty_like(shard: QuantShard, *, device: Any = None, **_: Any) -> QuantShard:
    return _each(shard, lambda t: torch.empty_like(t, device=device))


def _pin(shard: QuantShard, device: Any = None) -> QuantShard:
    return _each(shard, Tensor.pin_memory)


def _is_pinned(shard: QuantShard, device: Any = None) -> bool:
    return shard.held_weight.packed.is_pinned()


def _new(shard: QuantShard, size: Any, **_: Any) -> QuantShard:
    return zeros(shard.held_weight, size[0], shard.total, shard.whole)


_aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _alias,
    _aten.alias.default: _alias,
    _aten.view.default: _alias,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
    _aten.empty_like.default: _empty_like,
    _aten._pin_memory.default: _pin,
    _aten.is_pinned.default: _is_pinned,
    _aten.new_zeros.default: _new,
    _aten.new_empty.default: _new,
}
