"""RoutingTrace: the experts that every token used in every layer, in memory and in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_patch import tensor_file
from moe_patch.errors import UnsupportedOptionError

FORMAT = "moe_patch routing 1"


@dataclass(frozen=True)
class RoutingTrace:
    """The experts that each token used in each layer (L layers).

    Attributes:
        ids_TLK: integer expert ids. A negative id leaves the token to the router in that layer
            (padding, truncated prompts).
        weights_TLK: the routing function's weights, or None to leave them to the gate.
        paths: the layers' block paths, in model order; empty if an engine does not provide them.
        experts: E; 0 if unknown.
    """

    ids_TLK: Tensor
    weights_TLK: Tensor | None = None
    paths: tuple[str, ...] = ()
    experts: int = 0

    def __post_init__(self) -> None:
        shape = tuple(self.ids_TLK.shape)
        if len(shape) != 3 or self.ids_TLK.dtype.is_floating_point:
            raise UnsupportedOptionError(
                f"routing trace: ids are {shape} {self.ids_TLK.dtype}; accepted: integers, tokens "
                "x layers x K"
            )
        if self.paths and len(self.paths) != shape[1]:
            raise UnsupportedOptionError(
                f"routing trace: {shape[1]} layers of ids and {len(self.paths)} paths"
            )
        if self.weights_TLK is not None and tuple(self.weights_TLK.shape) != shape:
            raise UnsupportedOptionError(
                f"routing trace: weights are {tuple(self.weights_TLK.shape)}, ids are {shape}"
            )

    @classmethod
    def from_rows(
        cls,
        ids: Any,
        mask: Any,
        weights: Any = None,
        paths: Sequence[str] = (),
        experts: int = 0,
    ) -> RoutingTrace:
        """Make a trace for a padded batch from rows of the tokens that ``mask`` selects.

        Arguments are tensors, or whatever torch.as_tensor accepts (engines return NumPy arrays).

        Args:
            ids: [rows, L, K] of any integer type, in the order of the selected tokens.
            mask: bool [batch, sequence] of the forward to come; the router decides for tokens that
                are False.
            weights: [rows, L, K] or None.
            paths, experts: as the attributes.

        Raises:
            UnsupportedOptionError: the mask selects another number of tokens than there are rows,
                or the shape of the weights differs from that of the ids.
        """
        ids = torch.as_tensor(ids)
        if not ids.dtype.is_signed:  # engines may return uint8, which has no -1
            ids = ids.to(torch.int32)
        weights = None if weights is None else torch.as_tensor(weights)
        if weights is not None and weights.shape != ids.shape:
            raise UnsupportedOptionError(
                f"routing trace: weights are {tuple(weights.shape)}, ids are {tuple(ids.shape)}"
            )
        chosen_T = torch.as_tensor(mask).reshape(-1).bool()
        if int(chosen_T.sum()) != ids.shape[0]:
            raise UnsupportedOptionError(
                f"routing trace: the mask selects {int(chosen_T.sum())} tokens, ids have "
                f"{ids.shape[0]} rows; accepted: one row per selected token"
            )
        chosen_T = chosen_T.to(ids.device)
        full = ids.new_full((chosen_T.shape[0], *ids.shape[1:]), -1)
        full[chosen_T] = ids
        full_weights = None
        if weights is not None:
            full_weights = weights.new_zeros(full.shape)
            full_weights[chosen_T] = weights
        return cls(full, full_weights, tuple(paths), experts)

    def rows(self, mask: Any) -> tuple[Tensor, Tensor | None]:
        """Return ids and weights of the tokens in ``mask`` [batch, sequence], [rows, L, K]."""
        chosen_T = torch.as_tensor(mask).reshape(-1).bool()
        if chosen_T.shape[0] != self.ids_TLK.shape[0]:
            raise UnsupportedOptionError(
                f"routing trace: the mask covers {chosen_T.shape[0]} tokens, the trace has "
                f"{self.ids_TLK.shape[0]}"
            )
        chosen_T = chosen_T.to(self.ids_TLK.device)
        weights = self.weights_TLK
        return self.ids_TLK[chosen_T], None if weights is None else weights[chosen_T]

    def save(self, file: str | Path) -> None:
        """Write a safetensors file; ids are int16 if E allows."""
        small = self.experts and self.experts <= torch.iinfo(torch.int16).max
        tensors = {"ids": self.ids_TLK.to(torch.int16 if small else torch.int32)}
        if self.weights_TLK is not None:
            tensors["weights"] = self.weights_TLK
        about = {"experts": str(self.experts), "paths": json.dumps(self.paths)}
        tensor_file.write(file, FORMAT, tensors, about)

    @classmethod
    def load(cls, file: str | Path) -> RoutingTrace:
        """Read a file that :meth:`save` wrote.

        Raises:
            UnsupportedOptionError: there is no such file, or it is of another kind.
        """
        tensors, about = tensor_file.read(file, FORMAT, "RoutingTrace.save")
        ids, weights = tensors["ids"], tensors.get("weights")
        return cls(ids, weights, tuple(json.loads(about["paths"])), int(about["experts"]))
