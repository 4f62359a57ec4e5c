"""Tied expert parameters: group those that share memory, and refuse ties to other parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError
from moe_patch.formats.tensor import QuantTensor


class Held(Protocol):
    """A parameter together with the module that holds it."""

    @property
    def module(self) -> Any: ...

    @property
    def name(self) -> str: ...

    @property
    def where(self) -> str: ...

    @property
    def stored(self) -> Tensor: ...


One = TypeVar("One", bound=Held)


def tied(held: Iterable[One]) -> list[list[list[One]]]:
    """Group holders by the memory of their parameter, and within a group by the parameter.

    Several parameters share memory if a user assigned the ``data`` of one to another.
    """
    groups: dict[tuple, dict[int, list[One]]] = {}
    for one in held:
        groups.setdefault(_memory(one.stored), {}).setdefault(id(one.stored), []).append(one)
    return [list(parameters.values()) for parameters in groups.values()]


def refuse_outside(model: nn.Module, todo: Iterable[Held]) -> None:
    """Refuse a parameter that is also held by a module outside ``todo``: the tie would be lost.

    Raises:
        UnsupportedModelError: the message names both holders.
    """
    holders: dict[tuple, list[Held]] = {}
    for one in todo:
        holders.setdefault(_memory(one.stored), []).append(one)
    for path, module in model.named_modules():
        for name, other in module._parameters.items():
            if other is None or (group := holders.get(_memory(other))) is None:
                continue
            if any(one.module is module and one.name == name for one in group):
                continue
            raise UnsupportedModelError(
                f"{group[0].where}: cannot be quantised: it is tied to {path}.{name} "
                f"({type(module).__name__}), which would not be quantised; accepted: tied experts "
                "that are quantised together (see include and exclude), or a separate copy for "
                "each"
            )


def _memory(tensor: Tensor) -> tuple:
    """Return a key that is equal only for tensors that are the same view of the same memory."""
    inner = tensor.packed if isinstance(tensor, QuantTensor) else tensor.data
    if type(inner) is not Tensor or inner.is_meta or not inner.numel():
        return (id(tensor),)
    layout = inner.data_ptr(), inner.device, tuple(inner.shape), inner.stride(), inner.dtype
    return (*layout, isinstance(tensor, QuantTensor) and tensor.columns_first)
