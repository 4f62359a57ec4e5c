"""Decisions of the operator for long contexts: tokens of a chunk, and if h and u are kept.

The first forward of a checkpoint drops all that autograd saves, so it needs neither.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_patch.formats.packed import PackedWeight
from moe_patch.ops.experts.schema import alone_options
from moe_patch.types import ExpertWeights

# Up to this number of tokens, "auto" runs all at once in eager mode: chunks would cost 1 to 7%.
AUTO_FROM = 65536
_DROPS = "torch.utils.checkpoint", "_checkpoint_hook.__init__.<locals>.pack_hook"


def chunks_of(
    chunk_tokens: int | str,
    backend: str,
    x_TD: Tensor,
    ids_TK: Tensor,
    w: ExpertWeights,
    *,
    graph: bool,
    recompute: bool,
) -> tuple[int, int]:
    """Return the most tokens of a chunk, and of one if the call keeps nothing.

    Both are 0 if all tokens run at once, as on the torch backend. "auto" looks at the number of
    tokens only in eager mode, because compilers would guard it.

    Args:
        chunk_tokens: as in ``experts_mlp``.
        backend: "torch" or "triton".
        x_TD, ids_TK, w: operands.
        graph: autograd records the call.
        recompute: as in ``experts_mlp``.
    """
    if backend != "triton":
        return 0, 0
    if chunk_tokens != "auto":
        return int(chunk_tokens), int(chunk_tokens)
    if not torch.compiler.is_compiling() and x_TD.shape[0] <= AUTO_FROM:
        return 0, 0
    from moe_patch.kernels.common import chunks

    sizes = x_TD.shape[1], w.w13_EHD.shape[1], w.w2_EDF.shape[2]
    own = functools.partial(
        chunks.auto_chunk, top_k=ids_TK.shape[1], sizes=sizes, itemsize=x_TD.element_size()
    )
    # Packed experts hold all columns of y.
    packed = isinstance(w.w13_EHD, PackedWeight)
    alone = own(chunks.PACKED if packed else chunks.ALONE)
    if not graph or packed:
        return alone, alone
    if not recompute:
        return own(chunks.KEPT), alone
    trained = w.w13_EHD.requires_grad and w.w2_EDF.requires_grad
    return own(chunks.TRAINED if trained else chunks.RECOMPUTED), alone


@functools.cache
def _hooks_on_top() -> Callable[[bool], Any]:
    """Return torch's private function for the innermost hooks on saved tensors.

    If this release lacks it, no checkpoint is recognised. That costs memory only.
    """
    return getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


def drops_rows(tokens: int, chunk: int) -> bool:
    """Return whether a call in chunks need not keep h and u, because nothing saved is kept."""
    return 0 < chunk < tokens and saved_is_dropped()


def saved_is_dropped() -> bool:
    """Return whether ``torch.utils.checkpoint`` drops what autograd saves now, and reads its shape.

    True in the first forward without ``use_reentrant``. With it, that forward has no gradients.
    """
    hooks = _hooks_on_top()(False)
    return hooks is not None and (hooks[0].__module__, hooks[0].__qualname__) == _DROPS


def without_saved(
    run: Callable[..., Any], call: Any, x_TD: Tensor, ids_TK: Tensor, *others: Any
) -> tuple[Tensor, ...]:
    """Return what ``run`` does, with stand-ins for the tensors that autograd would save.

    Args:
        run: the operator's function.
        call: its other arguments (``Call`` in autograd.py).
        x_TD, ids_TK, others: the routing weights and the tensors of weights and factors.
    """
    scalars = *call.scalars[:-1], alone_options(call.scalars[-1], call.alone)
    nothing = call._replace(keep=[False, False, False, call.keep[3]], scalars=scalars)
    out, *plan, h, u13, u2, norms = run(*nothing.arguments(x_TD, ids_TK, *others))
    factors = others[1]
    widths = call.width, _rank_of(factors[4]), _rank_of(factors[6])
    rows = _stand_ins((h, u13, u2), call.keep, ids_TK.numel(), widths)
    return out, *_plan_stand_ins(plan[2], ids_TK.shape, call.chunk), *rows, norms


def _plan_stand_ins(offsets_S: Tensor, shape: Sequence[int], chunk: int) -> list[Tensor]:
    """Return tensors on one value in the shapes of a plan in chunks, from one chunk's offsets."""
    from moe_patch.kernels.common.chunks import chunk_count

    (T, K), one = shape, offsets_S.new_empty(1)
    plans = chunk_count(T, chunk) * offsets_S.shape[0]
    return [one.expand(T * K), one.expand(T, K), one.expand(plans)]


def _rank_of(a_ERI: Tensor | None) -> int:
    """Return R; 0 without a factor."""
    return 0 if a_ERI is None else a_ERI.shape[1]


def _stand_ins(
    empty: Sequence[Tensor], kept: Sequence[bool], rows: int, widths: Sequence[int]
) -> Iterator[Tensor]:
    """Yield tensors on one value in place of those that would be ``kept``, and the empty others."""
    for tensor, keep, width in zip(empty, kept, widths, strict=False):
        yield tensor.new_empty(1).expand(rows, width) if keep else tensor
