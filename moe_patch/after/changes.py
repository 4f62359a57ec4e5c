"""What an adapter does to one parameter: PEFT's own merge, run on values that are handed to it.

The adapted model lies on the meta device. A wrapper is copied with a base layer that holds the
values at hand, and merges into that; so every kind of layer and every release gives its own result.
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
        value: of the file.
        in_place: the base's own parameter is written (embeddings that PEFT saves beside their
            adapter); else it is one of ``modules_to_save``, a parameter of its own from then on.
    """

    value: Tensor
    in_place: bool = False

    def apply(self, weight: Tensor) -> Tensor:
        """The new value in the dtype and on the device of the old one."""
        return self.value.to(weight.device, weight.dtype)


@dataclass(frozen=True)
class Added:
    """A parameter that one of PEFT's layers adapts.

    Attributes:
        wrapper: PEFT's layer.
        parameter: the name of the parameter in the layer that is wrapped.
        experts: how many experts the parameter stacks; 1 for all others.
        adapter: the adapter's name.
    """

    wrapper: Any
    parameter: str
    experts: int = 1
    adapter: str = "default"

    @property
    def is_transposed(self) -> bool:
        """Whether a stacked parameter is [E, in, out], as transformers marks the module."""
        base = self.wrapper.get_base_layer()
        return hasattr(base, "is_transposed") and bool(base.is_transposed)

    def apply(self, weight: Tensor) -> Tensor:
        """The parameter with the adapter merged into it.

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
        """The sum's second term for some experts of a stacked parameter, fp32 [n, ..]."""
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
        """Give the copy the factors of some experts; B has ranks outside and experts inside."""
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
    """A copy whose parameters and children can be replaced without touching the module's."""
    made = copy.copy(module)
    made._parameters = dict(module._parameters)
    made._modules = dict(module._modules)
    return made
