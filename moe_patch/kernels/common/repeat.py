"""Repeats a pass: what the host works out between two launches is worked out once.

A pass is a function that allocates, launches, and returns what it allocated. For the same shapes,
strides, dtypes, alignment and options it launches the same kernels with the same numbers on other
addresses. The first call with such a key compiles, the second is recorded, and later ones fill in
addresses. What is not returned lies in one workspace, in the room of what is not needed any more.

A pass that does something else (a product of torch's, a launch that Triton makes itself, arguments
in the same memory) stays as it is, call by call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from moe_patch.kernels.common.device import cdiv, device_of, is_current
from moe_patch.kernels.common.launcher import NOTES, Box, Launch, encode, hooked
from moe_patch.kernels.common.versions import decided
from moe_patch.types import ExpertsNeeds, Glu

Pass = TypeVar("Pass", bound=Callable[..., Any])

# More of them keep the card busy for longer than the host takes, and a recording holds all it made.
_MOST_TOKENS = 4096
# Keys kept of each pass: a number of tokens adds one for each kind of layer.
_MOST_KEYS = 256
_SCALARS = {bool, int, float, str, type(None), torch.dtype, ExpertsNeeds, Glu}
_EMPTY = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
_APART = 512  # bytes, as torch's allocator places tensors: no kernel counts on more
_SEEN, _REFUSED = "seen", "refused"


class _Again(NamedTuple):
    """One launch. ``boxes``: of each tensor descriptor, the last first, what encoding it takes.

    ``places`` has of each operand which tensor it begins in, and how many bytes further on.
    """

    launch: Callable[..., None]
    sizes: tuple[int, ...]
    settings: tuple
    as_tuple: bool
    places: tuple[tuple[int, int], ...]
    boxes: tuple[tuple[int, Any, dict, Box], ...]
    numbers: tuple
    kernel: object


class _Recorded(NamedTuple):
    """A pass for one key. Tensors are numbered: arguments from 1 on, what is returned, workspace.

    Attributes:
        driver: Triton's, for which it was compiled.
        launches: in their order.
        returned: shape, strides and dtype of each tensor to allocate.
        workspace: bytes for all others.
        result: the numbers of tensors, in the tuples that are returned.
    """

    driver: object
    launches: tuple[_Again, ...]
    returned: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    workspace: int
    result: Any


def repeated(function: Pass) -> Pass:
    """Record a pass at its second call with a key, and repeat it from then on.

    Its first argument is a tensor by tokens. Arguments are tensors, scalars, and tuples of them;
    with others it is called as it is. Nothing of it may depend on a tensor's values.
    """
    kept: dict[Hashable, Any] = {}

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        first = args[0]
        key: list[Any] = [device_of(first), decided(), *options]
        tensors: list[Any] = [None]
        if (
            not 0 < first.shape[0] <= _MOST_TOKENS
            or not is_current(first)
            or not _read((*args, *options.values()), key, tensors)
            or hooked()
        ):
            return function(*args, **options)
        known = tuple(key)
        found = kept.get(known)
        if type(found) is _Recorded and found.driver is driver.active:
            return _repeat(found, tensors)
        if found is _REFUSED:
            return function(*args, **options)
        if found is None:
            if len(kept) >= _MOST_KEYS:
                kept.clear()
            kept[known] = _SEEN
            return function(*args, **options)
        with _Recording(tensors) as recording:
            result = function(*args, **options)
        kept[known] = recording.finished(result)
        return result

    run.kept = kept  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


def _read(values: Iterable[Any], key: list[Any], tensors: list[Any]) -> bool:
    """Add what tells arguments apart, their addresses left out; False for an unknown kind."""
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            tensors.append(value)
            key += value.shape, value.stride(), value.dtype, value.get_device()
            key.append(value.data_ptr() & 15)
        elif kind in _SCALARS:
            key.append(value)
        elif not isinstance(value, tuple) or not _read(value, key, tensors):
            return False
        else:
            key.append(len(value))
    return True


def _repeat(found: _Recorded, tensors: list[Any]) -> Any:
    """Allocate, launch and return."""
    active, launches, returned, workspace, result = found
    device = tensors[1].device
    for shape, strides, dtype in returned:
        tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
    if workspace:
        tensors.append(torch.empty(workspace, dtype=torch.uint8, device=device))
    addresses = [0]
    for tensor in tensors[1:]:
        addresses.append(tensor.data_ptr())
    stream = active.get_current_stream(tensors[1].get_device())  # type: ignore[attr-defined]
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
    """One element at an address in a tensor's memory."""
    memory = tensor.untyped_storage()
    further = (address - memory.data_ptr()) // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(memory, further, (1,), (1,))


def _filled(result: Any, tensors: list[Any]) -> Any:
    """The tensors in the tuples that a pass returns."""
    if result is None:
        return None
    if type(result) is int:
        return tensors[result]
    make, parts = result
    return make([_filled(part, tensors) for part in parts])


class _OtherError(Exception):
    """A pass does more than to allocate and to launch."""


class _Recording(TorchDispatchMode):
    """Notes what a pass allocates and launches, and whether it does something else."""

    def __init__(self, arguments: list[Any]) -> None:
        super().__init__()
        self.arguments = arguments
        self.launches: list[Launch | None] = []
        # With the launches made before; held, so that no address comes back.
        self.created: list[tuple[Tensor, int]] = []
        self.others = False

    def __enter__(self) -> _Recording:
        NOTES.launches = self.launches
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        NOTES.launches = None
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _EMPTY:
            self.created.append((made, len(self.launches)))
        elif not all(
            each.alias_info is not None and not each.alias_info.is_write
            for each in func._schema.returns
        ):
            self.others = True
        return made

    def finished(self, result: Any) -> _Recorded | str:
        """The pass, from what it returned."""
        if self.others or None in self.launches:
            return _REFUSED
        try:
            return self._numbered(result)
        except _OtherError:
            return _REFUSED

    def _numbered(self, result: Any) -> _Recorded:
        places: dict[int, tuple[int, int]] = {0: (0, 0)}  # by address
        for at, tensor in enumerate(self.arguments[1:], 1):
            address = tensor.data_ptr()
            if address and address in places:
                raise _OtherError
            places.setdefault(address, (at, 0))
        returned: dict[int, tuple[int, Tensor]] = {}  # by identity
        shown = self._shown(result, places, returned)
        workspace = self._laid_out(places, len(self.arguments) + len(returned))
        return _Recorded(
            driver.active,
            tuple(_again(launch, places) for launch in self.launches if launch is not None),
            tuple((each.shape, each.stride(), each.dtype) for _, each in returned.values()),
            workspace,
            shown,
        )

    def _shown(
        self,
        result: Any,
        places: dict[int, tuple[int, int]],
        returned: dict[int, tuple[int, Tensor]],
    ) -> Any:
        """What :func:`_filled` takes for ``result``; numbers the tensors in it."""
        if result is None:
            return None
        if isinstance(result, tuple):
            make = getattr(result, "_make", tuple)
            return make, [self._shown(each, places, returned) for each in result]
        for at, tensor in enumerate(self.arguments):
            if tensor is result:
                return at
        if id(result) not in returned:
            address, at = result.data_ptr(), len(self.arguments) + len(returned)
            whole = [t for t, _ in self.created if t.data_ptr() == address]
            if address in places and address or not any(t.numel() == result.numel() for t in whole):
                raise _OtherError
            returned[id(result)] = at, result
            places.setdefault(address, (at, 0))
        return returned[id(result)][0]

    def _laid_out(self, places: dict[int, tuple[int, int]], workspace: int) -> int:
        """Place all that is not returned, where nothing lies that is still needed; the bytes."""
        last = {}
        for at, launch in enumerate(self.launches):
            assert launch is not None
            last.update({_base(operand).data_ptr(): at for operand in launch.operands})
        held: list[tuple[int, int, int]] = []
        size = 0
        for tensor, born in self.created:
            address = tensor.data_ptr()
            if address in places or address not in last:
                continue
            held = sorted(each for each in held if each[2] >= born)
            begin, bytes_ = 0, cdiv(tensor.untyped_storage().nbytes(), _APART) * _APART
            for first, end, _ in held:
                if begin + bytes_ <= first:
                    break
                begin = max(begin, end)
            held.append((begin, begin + bytes_, last[address]))
            places[address] = workspace, begin
            size = max(size, begin + bytes_)
        return size


def _base(operand: Any) -> Tensor:
    return operand.base if isinstance(operand, Box) else operand


def _again(launch: Launch, places: dict[int, tuple[int, int]]) -> _Again:
    """A launch without its tensors."""
    compiled, sizes, operands, numbers = launch
    found = []
    for operand in operands:
        base, further = _base(operand), 0
        if isinstance(operand, Box):
            further = operand.first * base.dtype.itemsize
        if base.data_ptr() not in places:
            raise _OtherError
        at, begin = places[base.data_ptr()]
        found.append((at, begin + further))
    boxes = tuple(
        (at, kind, encoded, _bare(operands[at])) for at, kind, encoded in compiled.described
    )
    assert compiled.launch is not None
    return _Again(
        compiled.launch, sizes, compiled.settings, compiled.as_tuple, tuple(found), boxes,
        (*numbers, *compiled.tail), compiled.kernel,
    )  # fmt: skip


def _bare(box: Box) -> Box:
    """A box without its tensor, whose dtype it keeps."""
    return box._replace(base=torch.empty(0, dtype=box.base.dtype, device="meta"), first=0)
