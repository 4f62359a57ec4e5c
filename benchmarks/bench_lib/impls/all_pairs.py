"""Select product keys the direct way: K rounds of max, argmax and mask over all P * P sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# The fastest numbers of warps per token on an H100, by P.
WARPS = {64: 4, 128: 8, 256: 32}


@triton.jit
def _all_pairs_kernel(x_ptr, y_ptr, ids_ptr, sums_ptr, P: tl.constexpr, K: tl.constexpr):
    """Grid (T,): one token, all its sums in registers."""
    t = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, P)
    x = tl.load(x_ptr + t * P + p).to(tl.float32)
    y = tl.load(y_ptr + t * P + p).to(tl.float32)
    sums = tl.reshape(x[:, None] + y[None, :], (P * P,))
    n = tl.arange(0, P * P)
    for k in range(K):
        best, at = tl.max(sums, axis=0, return_indices=True)
        tl.store(ids_ptr + t * K + k, at)
        tl.store(sums_ptr + t * K + k, best)
        sums = tl.where(n == at, float("-inf"), sums)


def all_pairs_loop(x_TP: Tensor, y_TP: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return int64 ids and the sums, of contiguous logits; P must be a power of two."""
    T, P = x_TP.shape
    ids_TK = torch.empty(T, top_k, dtype=torch.int64, device=x_TP.device)
    sums_TK = torch.empty(T, top_k, dtype=x_TP.dtype, device=x_TP.device)
    _all_pairs_kernel[(T,)](x_TP, y_TP, ids_TK, sums_TK, P, top_k, num_warps=WARPS.get(P, 8))
    return ids_TK, sums_TK
