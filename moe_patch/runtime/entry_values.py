"""Values of a family entry's fields: constants, attribute paths, arguments and small tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moe_patch.errors import EntryMismatchError


@dataclass(frozen=True)
class Const:
    """A routing or activation parameter fixed for the family instead of read from the model."""

    value: Any


@dataclass(frozen=True)
class Arg:
    """A tensor that the block passes to the router as its positional argument ``index``.

    ``when`` is the path of a router attribute; the tensor is used if that is true. None means
    always.
    """

    index: int
    when: str | None = None


Source = str | Const


@dataclass(frozen=True)
class GluRule:
    """Source of a family's activation if the experts class overrides ``_apply_gate``.

    Attributes:
        kind: a kind of :class:`moe_patch.types.Glu`, or "act_fn" to follow ``experts.act_fn``.
        alpha, limit: attribute paths on the experts module, or Const.
        limit_first: the limit clamps gate and up before the activation, as in Glu. If False, the
            module's own code runs whenever the limit is finite (Step-3.7).
    """

    kind: str
    alpha: Source = Const(1.0)
    limit: Source = Const(float("inf"))
    limit_first: bool = True


@dataclass(frozen=True)
class Layout:
    """Weight layout of an experts class that transformers does not decorate with these flags.

    Attributes:
        has_gate: the up projection holds gate and up.
        has_bias: both projections have a bias.
        is_transposed: storage is [E, in, out].
        is_concatenated: gate and up are two halves, not interleaved.
        has_post_expert_norm: each expert's output is normalised before its routing weight.
        up: attribute path of the up projection; None means gate_up_proj, or up_proj without a gate.
        fused: the experts operator can read this storage. If False, only the family's own
            ``experts_forward`` can.
    """

    has_gate: bool = True
    has_bias: bool = False
    is_transposed: bool = False
    is_concatenated: bool = True
    has_post_expert_norm: bool = False
    up: str | None = None
    fused: bool = True

    @property
    def up_name(self) -> str:
        """Attribute path of the up projection's parameter."""
        return self.up or ("gate_up_proj" if self.has_gate else "up_proj")


def read(module: nn.Module, source: Source) -> Any:
    """Return the value of a Const or of an attribute path on ``module``; never a default.

    Raises:
        EntryMismatchError: the attribute is missing (names class, attribute, versions).
    """
    if isinstance(source, Const):
        return source.value
    value: Any = module
    for name in source.split("."):
        try:
            value = getattr(value, name)
        except AttributeError:
            import transformers

            raise EntryMismatchError(
                f"{type(module).__module__}.{type(module).__name__} has no attribute {source!r}: "
                "its family entry, which reads it, does not fit this class (transformers "
                f"{transformers.__version__}, torch {torch.__version__}); accepted: a release of "
                "transformers that the entry describes, or an entry that describes this one "
                "(register_family)"
            ) from None
    return value
