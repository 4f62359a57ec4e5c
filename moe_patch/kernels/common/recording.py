"""Record what a pass allocates, launches and returns (see kernels/common/repeat.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver

from moe_patch.kernels.common.device import cdiv
from moe_patch.kernels.common.launcher import Box
from moe_patch.kernels.common.notes import NOTES, Launch

_ALLOCATES = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
_APART = 512  # bytes: the alignment of torch's allocator, and the most that a kernel relies on


class Again(NamedTuple):
    """One launch without its tensors.

    Attributes:
        launch: the C function.
        sizes, settings, as_tuple: its arguments before the kernel's own, and how to pass the rest.
        places: for each operand, the number of the tensor that holds it, and the offset in bytes.
        boxes: for each tensor descriptor, last first, the operand's index and its encoding.
        numbers: the other arguments.
        kernel: a reference that keeps the compiled kernel loaded.
    """

    launch: Callable[..., None]
    sizes: tuple[int, ...]
    settings: tuple
    as_tuple: bool
    places: tuple[tuple[int, int], ...]
    boxes: tuple[tuple[int, Any, dict, Box], ...]
    numbers: tuple
    kernel: object


class Recorded(NamedTuple):
    """A recorded pass. Numbers name its tensors: arguments from 1 on, results, the workspace.

    Attributes:
        driver: Triton's driver that the kernels were compiled for.
        launches: the launches in order.
        returned: shape, strides and dtype of each result to allocate.
        workspace: bytes for all other allocations.
        result: the returned tuples, with numbers in place of tensors.
    """

    driver: Any
    launches: tuple[Again, ...]
    returned: tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
    workspace: int
    result: Any


class _OtherError(Exception):
    """The pass contains something that cannot be replayed."""


class Recording(TorchDispatchMode):
    """A dispatch mode that records one call of a pass.

    Args:
        arguments: the tensors passed in, from index 1 on.
    """

    def __init__(self, arguments: list[Any]) -> None:
        super().__init__()
        self.arguments = arguments
        self.launches: list[Any] = []
        # Each tensor with the number of launches before it. The list keeps addresses unique.
        self.created: list[tuple[Tensor, int]] = []
        self.returned: list[Tensor] = []
        self.places: dict[int, tuple[int, int]] = {0: (0, 0)}  # by address
        self.others = False

    def __enter__(self) -> Recording:
        NOTES.launches = self.launches
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        NOTES.launches = None
        super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _ALLOCATES:
            self.created.append((made, len(self.launches)))
        elif not all(_is_view(each.alias_info) for each in func._schema.returns):
            self.others = True
        return made

    def of(self, result: Any) -> Recorded | None:
        """Return the recorded pass, given its ``result``; None if it cannot be replayed."""
        if self.others or None in self.launches:
            return None
        try:
            self._place_arguments()
            numbered = self._numbered(result)
            workspace = self._lay_out()
            launches = tuple(self._again(launch) for launch in self.launches)
        except _OtherError:
            return None
        returned = tuple((each.shape, each.stride(), each.dtype) for each in self.returned)
        return Recorded(driver.active, launches, returned, workspace, numbered)

    def _place_arguments(self) -> None:
        for number, tensor in enumerate(self.arguments[1:], 1):
            address = tensor.data_ptr()
            if address and address in self.places:
                raise _OtherError
            self.places.setdefault(address, (number, 0))

    def _numbered(self, result: Any) -> Any:
        """Return ``result`` with numbers in place of tensors."""
        if result is None:
            return None
        if isinstance(result, tuple):
            make = getattr(result, "_make", tuple)
            return make, [self._numbered(each) for each in result]
        known = [*self.arguments, *self.returned]
        for number, tensor in enumerate(known):
            if tensor is result:
                return number
        address = result.data_ptr()
        if (address and address in self.places) or not any(
            each.data_ptr() == address and each.numel() == result.numel()
            for each, _ in self.created
        ):
            raise _OtherError
        self.returned.append(result)
        self.places.setdefault(address, (len(known), 0))
        return len(known)

    def _lay_out(self) -> int:
        """Place temporaries in the workspace, reusing space by lifetime; return its bytes."""
        last = {
            _base(operand).data_ptr(): at
            for at, launch in enumerate(self.launches)
            for operand in launch.operands
        }
        workspace, size = len(self.arguments) + len(self.returned), 0
        held: list[tuple[int, int, int]] = []
        for tensor, born in self.created:
            address = tensor.data_ptr()
            if address in self.places or address not in last:
                continue
            held = sorted(each for each in held if each[2] >= born)
            begin, room = 0, cdiv(tensor.untyped_storage().nbytes(), _APART) * _APART
            for first, end, _ in held:
                if begin + room <= first:
                    break
                begin = max(begin, end)
            held.append((begin, begin + room, last[address]))
            self.places[address] = workspace, begin
            size = max(size, begin + room)
        return size

    def _again(self, launch: Launch) -> Again:
        compiled, sizes, operands, numbers = launch
        return Again(
            compiled.launch, sizes, compiled.settings, compiled.as_tuple,
            tuple(self._place(operand) for operand in operands),
            tuple(
                (at, kind, encoded, _bare(operands[at]))
                for at, kind, encoded in compiled.described
            ),
            (*numbers, *compiled.tail), compiled.kernel,
        )  # fmt: skip

    def _place(self, operand: Any) -> tuple[int, int]:
        base = _base(operand)
        if base.data_ptr() not in self.places:
            raise _OtherError
        number, begin = self.places[base.data_ptr()]
        if isinstance(operand, Box):
            begin += operand.first * base.dtype.itemsize
        return number, begin


def _is_view(alias: Any) -> bool:
    return alias is not None and not alias.is_write


def _base(operand: Any) -> Tensor:
    return operand.base if isinstance(operand, Box) else operand


def _bare(box: Box) -> Box:
    """Return a box with an empty tensor of the same dtype."""
    return box._replace(base=torch.empty(0, dtype=box.base.dtype, device="meta"), first=0)
