"""QuantTensor: an expert parameter stored in 4 or 8 bits that looks like the original weight.

For modules, optimisers and PEFT it is a frozen parameter of the weight's shape and dtype. It can be
moved, copied, saved and indexed by expert, which dequantises that expert. Every other operation
raises an error. So packed bytes never enter a product, and a whole weight is never dequantised
silently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_patch.errors import UnsupportedModelError
from moe_patch.formats import shard
from moe_patch.formats.packed import FORMATS, PackedWeight

SCALES = ("scale_0", "scale_1", "scale_2", "scale_3", "scale_4")


class QuantTensor(Tensor):
    """A floating tensor [E, rows, columns], in the module's layout, backed by packed bytes.

    Attributes:
        stored_in, packed: storage and bytes, as in :class:`PackedWeight`.
        columns_first: the bytes are contiguous along the first axis of an expert in the module.
        gathered: FSDP2 gathered the bytes for the current call.
        scale_0, ..: scales; separate attributes, so that Dynamo finds these tensors.
    """

    stored_in: str
    packed: Tensor
    columns_first: bool
    gathered: bool

    @staticmethod
    def __new__(cls, weight: PackedWeight) -> QuantTensor:
        return Tensor._make_wrapper_subclass(
            cls, weight.shape, dtype=weight.dtype, device=weight.device, requires_grad=False
        )

    def __init__(self, weight: PackedWeight) -> None:
        self.stored_in, self.packed = weight.storage, weight.packed
        self.columns_first, self.gathered = weight.transposed, weight.gathered
        for name, scale in zip(SCALES, weight.scales, strict=False):
            setattr(self, name, scale)

    @property
    def weight(self) -> PackedWeight:
        """Packed storage, with the axes in the module's order."""
        return packed_weight(self)

    def share(self, scales: tuple[Tensor, ...]) -> None:
        """Take over scales that are not gathered, the last ones, from a rank's part.

        The part may have been loaded anew since.
        """
        names = _scale_names(self.stored_in)
        for name, scale in zip(names[len(names) - len(scales) :], scales, strict=True):
            setattr(self, name, scale)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantTensor({self.stored_in}, {tuple(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuild, (self.weight, isinstance(self, torch.nn.Parameter))

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantTensor:
        if id(self) not in memo:
            copied = self.weight.each(torch.clone)
            memo[id(self)] = _rebuild(copied, isinstance(self, torch.nn.Parameter))
        return memo[id(self)]

    def share_memory_(self) -> QuantTensor:
        """Share the packed bytes and scales; the wrapper's own storage is empty."""
        for name in ("packed", *_scale_names(self.stored_in)):
            getattr(self, name).share_memory_()
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        context = self.stored_in, self.dtype, self.columns_first
        return ["packed", *_scale_names(self.stored_in)], context

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> QuantTensor:
        storage, dtype, columns_first = context
        scales = tuple(inner[name] for name in _scale_names(storage))
        return QuantTensor(PackedWeight(storage, inner["packed"], scales, dtype, columns_first))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            raise UnsupportedModelError(
                f"{func} was called on experts stored in 4 or 8 bits; accepted: moving, copying, "
                "saving and indexing them by expert. patch_model runs them (call it again after "
                "adding adapters); dequantize_experts gives plain weights"
            )
        return handler(*args, **(kwargs or {}))


def packed_weight(tensor: QuantTensor) -> PackedWeight:
    """Return the packed storage of a quantised parameter; Dynamo can trace this."""
    scales = tuple(getattr(tensor, name) for name in _scale_names(tensor.stored_in))
    return PackedWeight(
        tensor.stored_in, tensor.packed, scales, tensor.dtype, tensor.columns_first,
        gathered=tensor.gathered,
    )  # fmt: skip


def plain(tensor: Tensor) -> Tensor:
    """Return a plain weight: dequantise a quantised one whole, return any other unchanged."""
    if not isinstance(tensor, QuantTensor):
        return tensor
    return packed_weight(tensor).experts(0, tensor.shape[0])


def _scale_names(storage: str) -> tuple[str, ...]:
    return SCALES[: FORMATS[storage].scales]


def _rebuild(weight: PackedWeight, is_parameter: bool) -> QuantTensor:
    tensor = QuantTensor(weight)
    return parameter(tensor) if is_parameter else tensor


def parameter(tensor: QuantTensor) -> Any:
    """Return the tensor as a frozen parameter; its class stays QuantTensor."""
    return torch.nn.Parameter(tensor, requires_grad=False)


def _detach(tensor: QuantTensor) -> QuantTensor:
    return QuantTensor(tensor.weight)


def _clone(tensor: QuantTensor, *, memory_format: Any = None) -> QuantTensor:
    return QuantTensor(tensor.weight.each(torch.clone))


def _to_copy(
    tensor: QuantTensor,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    non_blocking: bool = False,
    **_: Any,
) -> QuantTensor:
    """Move the storage to ``device``; ``dtype`` only changes the dtype of dequantised experts."""
    moved = tensor.weight.each(lambda t: t.to(device, non_blocking=non_blocking, copy=True))
    return QuantTensor(replace(moved, dtype=dtype or tensor.dtype))


def _copy(tensor: QuantTensor, source: Tensor, non_blocking: bool = False) -> QuantTensor:
    """Copy in place between equal storages, for load_state_dict."""
    if not isinstance(source, QuantTensor) or source.weight.storage != tensor.weight.storage:
        found = source.weight.storage if isinstance(source, QuantTensor) else source.dtype
        raise UnsupportedModelError(
            f"experts stored in {tensor.weight.storage} were given a weight stored in {found}; "
            "accepted: the same storage (load plain weights before quantize_experts)"
        )
    mine, theirs = tensor.weight, source.weight
    for into, value in zip(
        (mine.packed, *mine.scales), (theirs.packed, *theirs.scales), strict=True
    ):
        into.copy_(value, non_blocking)
    return tensor


def _empty_like(tensor: QuantTensor, *, device: Any = None, **_: Any) -> QuantTensor:
    return QuantTensor(tensor.weight.each(lambda t: torch.empty_like(t, device=device)))


def _select(tensor: QuantTensor, dim: int, index: int) -> Tensor:
    if dim % 3 != 0:
        raise _not_by_expert(tensor, f"along axis {dim}")
    return tensor.weight[_expert(tensor, index)]


def _not_by_expert(tensor: QuantTensor, how: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"experts stored in {tensor.weight.storage} were indexed {how}; accepted: by expert, axis "
        "0, in steps of one"
    )


def _expert(tensor: QuantTensor, index: int) -> int:
    """Normalise an expert index; a negative one counts from the end."""
    E = tensor.shape[0]
    if not -E <= index < E:
        raise IndexError(f"expert {index} of {E} experts stored in {tensor.weight.storage}")
    return index % E


def _index(tensor: QuantTensor, indices: list[Tensor | None]) -> Tensor:
    """Index by one tensor of expert ids, or by a mask of experts."""
    ids = indices[0]
    if ids is None or len(indices) > 1 or (ids.dtype == torch.bool and ids.dim() != 1):
        raise _not_by_expert(tensor, "along several axes, or along an axis other than the first")
    if ids.dtype == torch.bool:
        ids = ids.nonzero().squeeze(1)
    chosen = [tensor.weight[_expert(tensor, e)] for e in ids.reshape(-1).tolist()]
    if not chosen:
        return torch.empty(0, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    return torch.stack(chosen).view(*ids.shape, *tensor.shape[1:])


def _slice(
    tensor: QuantTensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Tensor:
    if dim % 3 != 0 or step != 1:
        raise _not_by_expert(tensor, f"along axis {dim} in steps of {step}")
    first, last, _ = slice(start, end).indices(tensor.shape[0])
    return tensor.weight.experts(first, max(first, last))


def _split(tensor: QuantTensor, size: int, dim: int = 0) -> list[shard.QuantShard]:
    """Cut into the parts that FSDP2 holds."""
    if dim != 0:
        raise _not_by_expert(tensor, f"in parts along axis {dim}")
    return shard.split(tensor.weight, size, QuantTensor)


def _new_zeros(tensor: QuantTensor, size: Any, **_: Any) -> shard.QuantShard:
    return shard.zeros(tensor.weight, size[0], tensor.shape[0], QuantTensor)


def _as_strided(tensor: QuantTensor, size: Any, stride: Any, offset: int = 0) -> QuantTensor:
    if (tuple(size), tuple(stride), offset) != (tensor.shape, tensor.stride(), 0):
        raise _not_by_expert(tensor, "by strides")
    return _detach(tensor)


_aten = torch.ops.aten
_HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _detach,
    _aten.alias.default: _detach,
    _aten.clone.default: _clone,
    _aten._to_copy.default: _to_copy,
    _aten.copy_.default: _copy,
    _aten.empty_like.default: _empty_like,
    _aten.select.int: _select,
    _aten.index.Tensor: _index,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.new_zeros.default: _new_zeros,
    _aten.as_strided.default: _as_strided,
}
