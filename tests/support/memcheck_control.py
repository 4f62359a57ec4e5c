"""A kernel that leaves its tensor: what scripts/tiles/memcheck.sh has to find.

python tests/support/memcheck_control.py read|write
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def copy_four(source_ptr, out_ptr, source_shift, out_shift):
    """Copy four elements, from a shift on each side."""
    offsets = tl.arange(0, 4)
    tl.store(out_ptr + out_shift + offsets, tl.load(source_ptr + source_shift + offsets))


if __name__ == "__main__":
    stray = {"read": (1, 0), "write": (0, 1)}[sys.argv[1]]
    tensors = torch.zeros(4, device="cuda"), torch.empty(4, device="cuda")
    copy_four[(1,)](*tensors, *stray)
    torch.cuda.synchronize()
