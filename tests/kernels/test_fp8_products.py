"""Conditions under which experts are multiplied in FP8, and reasons against; no GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch.formats.packed import pack, packed_weights, plain_weights
from moe_patch.kernels.common.device import Device
from moe_patch.kernels.experts import fp8
from moe_patch.kernels.plan.row_tiles import RowTiles
from moe_patch.ops.experts.definition import build_plan
from moe_patch.runtime.fp8 import Copies, in_fp8
from moe_patch.types import ExpertWeights, Glu
from tests.support.numerics import assert_bits

BF16, SILU = torch.bfloat16, Glu("silu")
HOPPER = Device((9, 0), 227 << 10, 132)
E, D, F = 4, 256, 128


def weights(storage: str = "fp8") -> Any:
    made = (torch.randn(E, 2 * F, D), torch.randn(E, D, F))
    return ExpertWeights(*(pack(w.bfloat16(), storage, torch.device("cpu"), "w") for w in made))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "known_triton", lambda: True)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"capability": (8, 9)}, "compute capability 9.0, found 8.9"),
        ({"capability": (12, 0)}, "compute capability 9.0, found 12.0"),
        ({"dtype": torch.float32}, "take bf16 and fp16, found torch.float32"),
        ({"shape": (256, 192)}, "multiples of 128, found 192 and 128"),
        ({"shape": (384, 256)}, "multiples of 128, found 256 and 192"),
        ({"glu": Glu("silu", interleaved=True)}, "gate and up in halves"),
        ({"glu": Glu("relu2", gated=False)}, "gate and up in halves"),
        ({"biased": True}, "no biases"),
        ({"transposed": True}, "[E, out, in] storage"),
    ],
)
def test_reasons(known: None, changes: dict[str, Any], why: str) -> None:
    usual = {
        "capability": (9, 0), "dtype": BF16, "shape": (256, 256), "glu": SILU, "biased": False,
        "transposed": False,
    }  # fmt: skip
    found = fp8.why_not_fp8(**usual | changes)
    assert why in found
    assert bool(why) == bool(found)


def test_a_triton_that_fails_the_gate_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "known_triton", lambda: False)
    why = fp8.why_not_fp8((9, 0), BF16, (256, 256), SILU, biased=False, transposed=False)
    assert "need a Triton" in why


def test_products_are_in_fp8_for_every_size_if_requested(known: None) -> None:
    def chosen(rows: int, w: Any, device: Device = HOPPER) -> bool:
        ids_TK = torch.arange(E).repeat(rows)[:, None]
        tiles = RowTiles(build_plan(ids_TK, E), {128: torch.empty(1)})
        x_TD = torch.empty(len(ids_TK), D, dtype=BF16)
        return fp8.fp8_products(tiles, x_TD, w, SILU, device) is not None

    w = in_fp8(weights(), "fp8", None)
    assert [chosen(rows, w) for rows in (1, 64)] == [True, True]
    assert not chosen(1, weights())
    assert not chosen(1, in_fp8(weights(), "decoded", None))
    assert not chosen(1, w._replace(b2_ED=torch.empty(E, D)))
    assert not chosen(1, w, device=Device((8, 9), 99 << 10, 128))


def test_weights_and_copies_pass_through_the_operator() -> None:
    w, copies = weights(), Copies()
    marked = in_fp8(w, "fp8_copy", copies)
    assert [each.w13_EHD.in_fp8 for each in (marked, w)] == [True, False]
    assert not in_fp8(weights("nf4"), "fp8", None).w13_EHD.in_fp8
    plain, scales, storage = plain_weights(marked)
    found = packed_weights(plain, scales, storage, BF16)
    for mine, theirs in zip(found[:2], marked[:2], strict=True):
        assert mine.in_fp8
        assert len(mine.scales) == 3
        values, copied_scales = mine.scales[1:]
        assert_bits(values, theirs.packed.mT.contiguous())
        assert_bits(copied_scales, theirs.scales[0].mT.contiguous())
        assert_bits(mine[1], theirs[1])


def test_a_copy_is_made_once_and_again_after_a_change() -> None:
    w, copies = weights(), Copies()

    def copy() -> Any:
        return in_fp8(w, "fp8_copy", copies).w2_EDF.scales[1]

    first = copy()
    assert copy() is first
    w.w2_EDF.packed.copy_(w.w2_EDF.packed.flip(0))
    second = copy()
    assert_bits(second, w.w2_EDF.packed.mT.contiguous())
    w = w._replace(w2_EDF=replace(w.w2_EDF, packed=w.w2_EDF.packed.clone()))
    assert copy() is not second
