"""Operands under the quickened interpreter (quick_interpreter.py) against torch.

One kernel mixes blocks, scalars and numbers of all kinds, twice: the second run uses what the first
one left to remember. What Triton refuses stays refused afterwards.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

import triton
import triton.language as tl

from tests.support import interpreted
from tests.support.numerics import assert_bits

M, N = 4, 8


@triton.jit
def _mixed_kernel(x_ptr, i_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    place = m * N + n
    x = tl.load(x_ptr + place)
    i = tl.load(i_ptr + n)
    one = tl.load(i_ptr)
    out_ptr += place
    size = M * N
    tl.store(out_ptr, 2 - x)
    tl.store(out_ptr + size, x - 2)
    tl.store(out_ptr + 2 * size, 1 / (x * 0.0))
    tl.store(out_ptr + 3 * size, 1 / (x * -0.0))
    tl.store(out_ptr + 4 * size, x + i)
    tl.store(out_ptr + 5 * size, i * one + m)
    tl.store(out_ptr + 6 * size, (x.to(tl.float16) * 2.5).to(tl.float32))
    tl.store(out_ptr + 7 * size, (i > 2) & (m < 3))
    tl.store(out_ptr + 8 * size, tl.where(x < 0, 1.5, m + 0 * n))
    tl.store(out_ptr + 9 * size, i / 4 + (5 % (m + 1)))


@triton.jit
def _refused_kernel(x_ptr, KIND: tl.constexpr):
    short, long = tl.arange(0, 4), tl.arange(0, 8)
    if KIND == "shapes":
        short + long
    elif KIND == "fraction":
        x_ptr + 1.5
    elif KIND == "pointers":
        x_ptr + x_ptr
    else:
        x_ptr + short * 1.0


def check_mixed(device: str) -> None:
    x, i = torch.randn(M, N, device=device), torch.arange(N, device=device, dtype=torch.int32)
    i[0] = 3
    m = torch.arange(M, device=device)[:, None]
    expected = [
        2 - x, x - 2, 1 / (x * 0.0), 1 / (x * -0.0), x + i, i * 3 + m, (x.half() * 2.5).float(),
        (i > 2) & (m < 3), torch.where(x < 0, 1.5, m.float()), i / 4 + 5 % (m + 1),
    ]  # fmt: skip
    for _ in range(2):
        out = torch.empty(len(expected), M, N, device=device)
        _mixed_kernel[(1,)](x, i, out, M, N)
        for number, (found, wanted) in enumerate(zip(out, expected, strict=True)):
            assert_bits(found, wanted.float().expand(M, N).contiguous(), f"result {number}")


def check_refused(device: str) -> None:
    check_mixed(device)
    x: Tensor = torch.zeros(8, device=device)
    for kind in ("shapes", "fraction", "pointers", "block of fractions"):
        for _ in range(2):
            with pytest.raises(Exception, match="ncompatible|cannot add pointers|invalid operands"):
                _refused_kernel[(1,)](x, kind)


CASES = {"mixed": check_mixed, "refused": check_refused}


@pytest.mark.parametrize("case", CASES)
def test_interpreted(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""


if __name__ == "__main__":
    interpreted.report(CASES)
