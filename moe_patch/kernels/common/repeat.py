"""Repeat a pass of kernels: record its launches once, then replay them on new addresses.

A pass is a function that allocates, launches, and returns some of its allocations. With the same
shapes, strides, dtypes, alignment and options it launches the same kernels with the same numbers;
only addresses differ. The first call with such a key compiles, the second is recorded, and later
calls replay the launches. All tensors that are not returned share one workspace.

Some passes are never replayed. They call a product of torch's, launch through Triton itself, or
have arguments that share memory. Nothing is replayed while a launch hook is set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.runtime import driver

from moe_patch.formats.packed import PackedWeight
from moe_patch.kernels.common.device import device_of, is_current
from moe_patch.kernels.common.launcher import encode, hooked
from moe_patch.kernels.common.recording import Recorded, Recording
from moe_patch.kernels.common.versions import decided
from moe_patch.types import PLAIN_TENSORS, ExpertsNeeds, ExpertWeights, Glu

Pass = TypeVar("Pass", bound=Callable[..., Any])

# With more tokens the card takes longer than the host, and recording holds all its allocations.
_MOST_TOKENS = 2048
# The limit for products in FP8, which take the card less time.
_MOST_TOKENS_IN_FP8 = 4096
# Limit on keys per pass; each number of tokens adds one per kind of layer.
_MOST_KEYS = 256
_SCALARS = {bool, int, float, str, type(None), ExpertsNeeds, Glu}
_NEW, _SEEN = "new", "seen"


def repeated(function: Pass) -> Pass:
    """Wrap a pass: record its second call with a key, and replay it from then on.

    The first argument is a tensor with one row per token. Calls with arguments other than tensors,
    scalars, experts multiplied in FP8, and tuples of them run unchanged. The launches must not
    depend on a tensor's values.
    """
    kept: dict[Hashable, Recorded | str | None] = {}

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        first = args[0]
        key: list[Any] = [device_of(first), decided(), *options]
        tensors: list[Any] = [None]
        addresses = [0]
        if (
            not 0 < first.shape[0] <= _most_tokens(args)
            or not is_current(first)
            or not _read((*args, *options.values()), key, tensors, addresses)
            or hooked()
        ):
            return function(*args, **options)
        known = tuple(key)
        found = kept.get(known, _NEW)
        if type(found) is Recorded:
            if found.driver is driver.active:
                return _repeat(found, tensors, addresses)
            found = _NEW
        if found is None:
            return function(*args, **options)
        if found is _NEW:
            if len(kept) >= _MOST_KEYS:
                kept.clear()
            kept[known] = _SEEN
            return function(*args, **options)
        with Recording(tensors) as recording:
            result = function(*args, **options)
        kept[known] = recording.of(result)
        return result

    run.kept = kept  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def _most_tokens(args: tuple[Any, ...]) -> int:
    """Return the limit on tokens: 0 for packed experts that are decoded, which is not recorded.

    The fourth argument of an experts pass are the experts.
    """
    w: Any = args[3].w13_EHD if len(args) > 3 and type(args[3]) is ExpertWeights else None
    if type(w) is not PackedWeight:
        return _MOST_TOKENS
    return _MOST_TOKENS_IN_FP8 if w.in_fp8 else 0


def _read(values: Iterable[Any], key: list[Any], tensors: list[Any], addresses: list[int]) -> bool:
    """Append the arguments' part of the key and their tensors; return False for an unknown kind."""
    for value in values:
        kind = type(value)
        if kind in PLAIN_TENSORS:
            address = value.data_ptr()
            tensors.append(value)
            addresses.append(address)
            key += value.shape, value.stride(), value.dtype, value.get_device(), address & 15
        elif kind in _SCALARS:
            key.append(value)
        elif kind is PackedWeight:
            key += value.storage, value.dtype, value.transposed, value.in_fp8
            if not _read((value.packed, value.scales), key, tensors, addresses):
                return False
        elif isinstance(value, tuple) and _read(value, key, tensors, addresses):
            key.append(len(value))
        else:
            return False
    return True


def _repeat(found: Recorded, tensors: list[Any], addresses: list[int]) -> Any:
    """Allocate, launch the recorded kernels, and return the result."""
    active, launches, returned, workspace, result = found
    device = tensors[1].device
    for shape, strides, dtype in returned:
        made = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        tensors.append(made)
        addresses.append(made.data_ptr())
    if workspace:
        made = torch.empty(workspace, dtype=torch.uint8, device=device)
        tensors.append(made)
        addresses.append(made.data_ptr())
    stream = active.get_current_stream(tensors[1].get_device())
    for launch, sizes, settings, as_tuple, places, boxes, numbers, _ in launches:
        handles: list[Any] = [addresses[at] + further for at, further in places]
        for at, kind, encoded, box in boxes:
            key = handles[at], box.shape, box.strides
            parts = encoded.get(key)
            if parts is None:
                base = _at(handles[at], tensors[places[at][0]], box.base.dtype)
                parts = encode(box._replace(base=base), key, kind, encoded)
            handles[at : at + 1] = parts
        if as_tuple:
            launch(*sizes, stream, *settings, (*handles, *numbers))
        else:
            launch(*sizes, stream, *settings, *handles, *numbers)
    return _filled(result, tensors)


def _at(address: int, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of one element at an address in another tensor's storage."""
    memory = tensor.untyped_storage()
    further = (address - memory.data_ptr()) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(memory, further, (1,), (1,))


def _filled(result: Any, tensors: list[Any]) -> Any:
    """Return the pass's result with tensors in place of their numbers."""
    if result is None:
        return None
    if type(result) is int:
        return tensors[result]
    make, parts = result
    return make([_filled(part, tensors) for part in parts])
