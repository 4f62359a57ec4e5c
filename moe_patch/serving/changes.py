"""Changes that an adapter makes to one parameter, computed by PEFT's own merge on given values.

The adapted model is on the meta device. To merge, copy PEFT's wrapper, give the copy a base layer
with the values, and call its merge. Thus the result is PEFT's for each kind of layer and release.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Replaced:
    """A parameter whose value the adapter's file holds.

    Attributes:
        value: the value in the file.
        in_place: True if the value replaces the base's own parameter, as for embeddings that PEFT
            saves beside their adapter. False for ``modules_to_save``: the parameter is then untied.
    """

    value: Tensor
    in_place: bool = False

    def apply(self, weight: Tensor) -> Tensor:
        """Return the new value with the dtype and device of the old one."""
        return self.value.to(weight.device, weight.dtype)


@dataclass(frozen=True)
class Added:
    """A parameter that is adapted by one of PEFT's layers.

    Attributes:
        wrapper: PEFT's layer.
        parameter: the name of the parameter in the wrapped layer.
        experts: number of experts stacked in the parameter; 1 if it is not stacked.
        adapter: the adapter's name.
    """

    wrapper: Any
    parameter: str
    experts: int = 1
    adapter: str = "default"

    @property
    def is_transposed(self) -> bool:
        """Return whether transformers marks the module's stacked parameters as [E, in, out]."""
        base = self.wrapper.get_base_layer()
        return hasattr(base, "is_transposed") and bool(base.is_transposed)

    def apply(self, weight: Tensor) -> Tensor:
        """Return the parameter with the adapter merged into it.

        Args:
            weight: fp32, the whole parameter; may be overwritten.
        """
        wrapper = self._around(weight)
        if self.experts > 1:
            self._take(wrapper, slice(0, self.experts), weight.device)
        wrapper.merge()
        merged: Tensor = wrapper.get_base_layer()._parameters[self.parameter].data
        return merged

    def delta(self, experts: slice, device: torch.device) -> Tensor:
        """Return scaling * B * A for some experts of a stacked parameter, fp32 [n, ..]."""
        wrapper = self._around(torch.empty(0, device=device))
        self._take(wrapper, experts, device)
        found: Tensor = wrapper.get_delta_weight(self.adapter)
        return found.detach()

    def _around(self, weight: Tensor) -> Any:
        base = _copied(self.wrapper.get_base_layer())
        base._parameters[self.parameter] = nn.Parameter(weight, requires_grad=False)
        wrapper: Any = _copied(self.wrapper)
        wrapper._modules["base_layer"] = base
        wrapper.merged_adapters = []
        return wrapper

    def _take(self, wrapper: Any, experts: slice, device: torch.device) -> None:
        """Give the copy the factors of some experts; columns of B are [rank, expert], row-major."""
        E, r = self.experts, self.wrapper.r[self.adapter]
        a, b = (layers[self.adapter].weight.detach() for layers in (wrapper.lora_A, wrapper.lora_B))
        wrapper.num_experts = experts.stop - experts.start
        a_some = a[experts.start * r : experts.stop * r]
        b_some = b.view(-1, r, E)[..., experts].flatten(1)
        for name, value in (("lora_A", a_some), ("lora_B", b_some)):
            layer = nn.Linear(1, 1, bias=False, device="meta")
            value = value.to(device=device, dtype=torch.float32)
            layer.weight = nn.Parameter(value, requires_grad=False)
            wrapper._modules[name] = nn.ModuleDict({self.adapter: layer})


Change = Added | Replaced


def _copied(module: nn.Module) -> nn.Module:
    """Return a shallow copy; replacing its parameters or children leaves the module unchanged."""
    made = copy.copy(module)
    made._parameters = dict(module._parameters)
    made._modules = dict(module._modules)
    return made
