"""NF4 and FP8 storage: bits against bitsandbytes and against the formulas, one value at a time."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from moe_patch import UnsupportedModelError
from moe_patch.formats import nf4
from moe_patch.formats.packed import check_packable, pack
from moe_patch.quant import memory, state
from tests.support.numerics import assert_bits, rel_err

CPU = torch.device("cpu")
# Result of bitsandbytes 0.50.2 for golden_weight(): quantize_4bit(.., "nf4", compress_statistics).
GOLDEN_PACKED = (
    "03ae16c039e16c039e16c039e15cf39e15cf28e15bf28e15bf28d15bf27d14bf27d04bf27d04ae27d04ae16d03ae16"
    "c039e16c039e16c039e15cf39e15cf28e15bf28e15bf28d14bf27d04bf27d04af27d04ae17d03ae16d03ae16c039e1"
    "6c039e16c039e15cf38e15cf28e15bf28d15bf28d14bf27d14bf27d04ae27d04ae16d03ae16c039e16c039e16c039e"
    "15cf39e15cf28e15bf28e15bf28d15bf27d14b7777777777777777777777777777777777777777777777777777777777"
    "77777715bf28e15bf28d14bf27d04bf27d04af27d04ae17d03ae16d03ae16c039e16c039e16c039e15cf38e15cf28e15"
    "bf28d15bf28d14bf27d14bf27d04ae27d04ae1"
)
GOLDEN_ABSMAX = "2aceff2ace112ace"
GOLDEN_NESTED, GOLDEN_OFFSET = 2.7724609375, 2.1025390625
GOLDEN_DEQUANTISED = "a3f2740ec94ea594f408ead9397ec54d96098dc096f2c0496ec252e3453c44ac"


def golden_weight() -> torch.Tensor:
    """Return bf16 [1, 4, 128] made from integers: blocks of three magnitudes, one of zeros."""
    n = torch.arange(4 * 128)
    weight = ((n * 73 + 11) % 257 - 128).float() / 64 * ((n // 64) % 3 + 0.5)
    weight = weight.view(1, 4, 128)
    weight[0, 2, 64:] = 0
    return weight.bfloat16()


def test_nf4_is_what_bitsandbytes_stores_and_reads() -> None:
    found = pack(golden_weight(), "nf4", CPU, "golden")
    absmax, nested, _, offset, _ = found.scales
    assert bytes(found.packed.view(-1).tolist()).hex() == GOLDEN_PACKED
    assert bytes(absmax.tolist()).hex() == GOLDEN_ABSMAX
    assert (nested.tolist(), offset.item()) == ([GOLDEN_NESTED], GOLDEN_OFFSET)
    plain = found.stored_experts(0, 1).view(torch.int16).numpy().tobytes()
    assert hashlib.sha256(plain).hexdigest() == GOLDEN_DEQUANTISED


def test_nf4_levels_do_not_depend_on_where_they_are_first_asked_for() -> None:
    nf4._dynamic_levels.cache_clear()
    with torch.device("meta"):
        code = nf4.dynamic_code()
    assert (code.device, len(code), code[-1].item()) == (CPU, 256, 1.0)


def test_nothing_of_a_fake_mode_stays_behind() -> None:
    """Keep no tensor beside the weights, neither of a fake mode nor of a CUDA graph."""
    weight = torch.randn(1, 2, 64)
    found = pack(weight, "nf4", CPU, "w")
    before = found.stored_experts(0, 1)
    nf4._dynamic_levels.cache_clear()
    with FakeTensorMode() as mode:
        faked = replace(
            found,
            packed=mode.from_tensor(found.packed),
            scales=tuple(map(mode.from_tensor, found.scales)),
        )
        assert faked.stored_experts(0, 1).shape == weight.shape
        with pytest.raises(DataDependentOutputException):
            nf4.dynamic_code()
    assert_bits(found.stored_experts(0, 1), before)
    assert_bits(pack(weight, "nf4", CPU, "w").packed, found.packed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_nf4_against_the_installed_bitsandbytes(dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes: optional")
    weight = (torch.randn(3, 40, 128) * 0.02).to(dtype)
    weight[1, 3, :64] = 0
    packed, quant_state = functional.quantize_4bit(
        weight, quant_type="nf4", compress_statistics=True
    )
    found = pack(weight, "nf4", CPU, "weight")
    assert_bits(found.packed.view(-1), packed.view(-1))
    theirs = quant_state.absmax, quant_state.state2.absmax, quant_state.state2.code
    for mine, expected in zip(
        found.scales, (*theirs, quant_state.offset, quant_state.code), strict=True
    ):
        assert_bits(mine, expected)
    assert_bits(found.stored_experts(0, 3), functional.dequantize_4bit(packed, quant_state))
    entries = state.to_tensors(found, "w")
    theirs_read = functional.QuantState.from_dict(
        {name.removeprefix("w."): t for name, t in entries.items() if name != "w"}, device=CPU
    )
    assert_bits(
        functional.dequantize_4bit(entries["w"].view(-1, 1), theirs_read),
        found.stored_experts(0, 3),
    )


def test_the_dynamic_code_of_scales() -> None:
    code = nf4.dynamic_code()
    assert code.shape == (256,)
    assert (code.diff() > 0).all()
    assert code[-1] == 1.0
    assert 0.0 in code
    assert -1.0 not in code
    assert (code[code < 0].flip(0) == -code[(code > 0) & (code < 1)]).all()


def test_nf4_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(3, 8, 192)
    whole = pack(weight, "nf4", CPU, "w")
    monkeypatch.setattr(nf4, "_PIECE", 256)
    parts = pack(weight, "nf4", CPU, "w")
    assert_bits(parts.packed, whole.packed)
    for mine, expected in zip(parts.scales, whole.scales, strict=True):
        assert_bits(mine, expected)


def test_nf4_one_value_at_a_time() -> None:
    weight = torch.randn(2, 3, 128)
    found = pack(weight, "nf4", CPU, "w")
    absmax, nested, code, offset, _ = found.scales
    plain = found.stored_experts(0, 2).view(-1)
    for i in range(0, weight.numel(), 37):
        byte = int(found.packed.view(-1)[i // 2])
        level = nf4.LEVELS[byte >> 4 if i % 2 == 0 else byte & 15]
        scale = code[int(absmax[i // 64])] * nested[i // 64 // 256] + offset
        assert plain[i] == torch.tensor(level) * scale
        step = max(b - a for a, b in zip(nf4.LEVELS, nf4.LEVELS[1:], strict=False))
        assert abs(plain[i] - weight.view(-1)[i]) <= (step / 2 + 0.02) * scale


@pytest.mark.parametrize("shape", [(2, 128, 256), (3, 200, 300), (1, 5, 7)], ids=str)
def test_fp8_has_one_scale_per_block_of_128(shape: tuple[int, int, int]) -> None:
    weight = torch.randn(shape) * torch.tensor([10.0, 0.1]).repeat(200)[: shape[1], None]
    found = pack(weight, "fp8", CPU, "w")
    (scales,) = found.scales
    plain = found.stored_experts(0, shape[0])
    for e in range(shape[0]):
        for r in range(0, shape[1], 128):
            for c in range(0, shape[2], 128):
                block = (e, slice(r, r + 128), slice(c, c + 128))
                scale = scales[e, r // 128, c // 128]
                assert scale == weight[block].abs().max() / 448
                assert_bits(plain[block], found.packed[block].float() * scale)
                # Half a step: 2^-4 of a normal value, 2^-10 below the smallest of them.
                half_step = (weight[block].abs() / 16).clamp(min=scale.item() / 1024)
                assert ((plain[block] - weight[block]).abs() <= 1.001 * half_step).all()


@pytest.mark.parametrize("storage", ["nf4", "fp8"])
def test_a_packed_weight_is_seen_from_both_sides(storage: str) -> None:
    weight = torch.randn(3, 64, 128)
    found = pack(weight, storage, CPU, "w")
    plain = found.stored_experts(0, 3)
    assert rel_err(plain, weight) < 0.1
    assert found.shape == (3, 64, 128)
    assert found.transpose(1, 2).shape == (3, 128, 64)
    assert_bits(found[1], plain[1])
    assert_bits(found.transpose(1, 2)[2], plain[2].T)
    assert_bits(found.to(torch.bfloat16)[0], plain[0].bfloat16())
    assert_bits(found.stored_experts(1, 3), plain[1:])
    assert found.nbytes() == memory.packed_bytes((3, 64, 128), storage)


@pytest.mark.parametrize(
    ("storage", "bits", "limit"), [("nf4", 4.127, 0.30), ("fp8", 8.002, 0.53)], ids=str
)
def test_memory_of_a_large_weight(storage: str, bits: float, limit: float) -> None:
    shape = (128, 1536, 2048)
    assert memory.bits_per_value(storage) == pytest.approx(bits, abs=1e-3)
    taken = memory.packed_bytes(shape, storage) / (128 * 1536 * 2048 * 2)
    assert taken <= limit
    assert taken == pytest.approx(memory.bits_per_value(storage) / 16, rel=1e-4)


@pytest.mark.parametrize(
    ("weight", "storage", "said"),
    [
        (torch.zeros(2, 4, 96), "nf4", "multiple of 64"),
        (torch.zeros(4, 64), "nf4", "2-D"),
        (torch.zeros(2, 4, 64, dtype=torch.uint8), "fp8", "uint8"),
        (torch.zeros(2, 4, 64).to(torch.float8_e4m3fn), "nf4", "float8_e4m3fn"),
        (torch.zeros(2, 4, 64), "int3", "unknown storage 'int3'"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(
    weight: torch.Tensor, storage: str, said: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"layer\.up.*{said}"):
        check_packable(weight, storage, "layer.up")
