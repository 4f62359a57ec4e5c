"""Compare FP8 products with products of decoded weights at patch time, on random rows."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch.config import PatchConfig
from moe_patch.errors import UnsupportedModelError
from moe_patch.formats.shard import cut
from moe_patch.ops.backend import choose_backend
from moe_patch.ops.experts.op import experts_mlp
from moe_patch.patching.discover import FoundBlock
from moe_patch.patching.fp8_reason import decoded_reason
from moe_patch.patching.selfcheck import EXPERTS, TOKENS, sandbox
from moe_patch.runtime.compare import FP8_LIMIT
from moe_patch.runtime.described import layout_of, read_glu
from moe_patch.runtime.experts import read_tensors, stored_weight
from moe_patch.runtime.fp8 import DECODED, Copies, in_fp8
from moe_patch.types import Glu

PASSED = "FP8 products passed"
_NAMES = "output", "hidden-state gradient", "routing-weight gradient"


def check_fp8(found: FoundBlock, config: PatchConfig) -> str:
    """Return :data:`PASSED`, or "" if the block's experts are decoded anyway.

    Raises:
        UnsupportedModelError: a result is too far from that of decoded weights.
    """
    if config.compute == DECODED:
        return ""
    compared = False
    for path, experts in found.experts:
        weight = stored_weight(experts, found.spec)
        backend = choose_backend(config.backend, weight.device, weight.dtype).name
        glu = read_glu(experts, found.spec)
        why = decoded_reason(experts, found.spec, glu, backend, weight.device, config.compute)
        if glu is not None and not why:
            with sandbox(found):
                _compare(path, experts, found, glu, config)
            compared = True
    return PASSED if compared else ""


def _compare(
    path: str, experts: nn.Module, found: FoundBlock, glu: Glu, config: PatchConfig
) -> None:
    layout = layout_of(experts, found.spec)
    dtype = stored_weight(experts, found.spec).dtype
    w: Any = read_tensors(experts, layout, dtype, config.fuse_lora).weights
    few = min(EXPERTS, w.w13_EHD.shape[0])
    w = w._replace(w13_EHD=cut(w.w13_EHD, 0, few), w2_EDF=cut(w.w2_EDF, 0, few))
    device, D = w.w13_EHD.device, w.w13_EHD.shape[2]
    ids_TK = torch.rand(TOKENS, few, device=device).argsort(-1)[:, :2].contiguous()
    x_TD = torch.randn(TOKENS, D, device=device, dtype=dtype).requires_grad_()
    weights_TK = torch.rand(ids_TK.shape, device=device).to(dtype).requires_grad_()
    grad_TD = torch.randn(TOKENS, D, device=device, dtype=dtype)
    run = functools.partial(experts_mlp, x_TD, ids_TK, weights_TK, glu=glu, backend=config.backend)

    def results(compute: str) -> tuple[Tensor, ...]:
        out_TD = run(w=in_fp8(w, compute, Copies(), x_TD, glu, config.backend))
        return out_TD.detach(), *torch.autograd.grad(out_TD, (x_TD, weights_TK), grad_TD)

    for name, mine, decoded in zip(_NAMES, results(config.compute), results(DECODED), strict=True):
        size = decoded.double().norm()
        if not size.isfinite():  # The weights hold NaN or Inf, which no limit fits.
            return
        error = ((mine.double() - decoded.double()).norm() / size.clamp(min=1e-300)).item()
        if not error <= FP8_LIMIT:
            raise UnsupportedModelError(
                f"{path}: self-check: with compute={config.compute!r} the experts' {name} differs "
                f"from that of decoded weights by {error:.2e} (relative), limit {FP8_LIMIT:.0e}; "
                "report this with the model's config; compute='decoded' decodes the experts"
            )
