"""The Triton experts on packed weights, under the interpreter and on a GPU (quant_cases.py)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch.formats.packed import READABLE, pack
from moe_patch.kernels.common.device import Device
from moe_patch.kernels.common.versions import Gates
from moe_patch.kernels.experts import call
from moe_patch.kernels.packed import linear as packed_linear
from tests.support import SUPPORT, interpreted
from tests.support.kernels_cases import make_inputs, run_kernels
from tests.support.numerics import assert_bits
from tests.support.quant_cases import (
    CASES,
    LARGE,
    SMALL,
    check,
    check_buffer,
    check_close,
    check_dequantised,
    check_every_byte,
    check_every_byte_in_front_of_a_product,
    check_every_mxfp4,
    check_packed_linear,
    check_untouched,
    pack_inputs,
    packed_like,
    wanted_gradients,
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Outcome of each case under the interpreter: an empty string, or the failure."""
    interpreted.skip_without_histogram()
    return interpreted.run(str(SUPPORT / "quant_cases.py"))


@pytest.mark.parametrize("case", CASES)
def test_interpreted(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""


def test_hopper_decodes_in_front_of_the_product_while_experts_have_few_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packed_linear, "gates", lambda: Gates(hopper=False, in_front=True))
    hopper, ampere = Device((9, 0), 227 << 10, 132), Device((8, 0), 163 << 10, 108)

    def chosen(storage: str, rows: int, device: Device, dtype: torch.dtype) -> bool:
        w = pack(torch.randn(4, 128, 192), storage, torch.device("cpu"), "w").to(dtype)
        return packed_linear.decoding_tile(w, dtype, device, 4 * rows) is not None

    bf16 = torch.bfloat16
    assert [chosen("nf4", rows, hopper, bf16) for rows in (0, 1, 256, 512)] == [True] * 3 + [False]
    assert [chosen("fp8", rows, hopper, bf16) for rows in (1, 512, 1024)] == [True] * 2 + [False]
    assert not chosen("nf4", 1, ampere, bf16)
    assert not chosen("nf4", 1, hopper, torch.float32)
    mxfp4 = packed_like(torch.randn(4, 128, 192), "mxfp4")
    assert packed_linear.decoding_tile(mxfp4, bf16, hopper, 4) is None
    odd = pack(torch.randn(4, 32, 64), "nf4", torch.device("cpu"), "w")
    assert packed_linear.decoding_tile(odd, bf16, hopper, 4) is None
    monkeypatch.setattr(packed_linear, "gates", lambda: Gates(hopper=True, in_front=False))
    assert not chosen("nf4", 1, hopper, bf16)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["nf4", "fp8"])
@pytest.mark.parametrize("case", SMALL | LARGE)
def test_decoding_in_front_of_the_product_is_close_to_fp64(
    case: str, storage: str, poisoned_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "_MOST_ROWS", {"nf4": 1000, "fp8": 1000})
    check_close((SMALL | LARGE)[case], storage, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["nf4", "fp8"])
@pytest.mark.parametrize("case", ["tall", "one_takes_all", "decode"])
def test_decoding_repeats_bit_for_bit(
    case: str, storage: str, poisoned_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "_MOST_ROWS", {"nf4": 1000, "fp8": 1000})
    packed = pack_inputs(make_inputs(LARGE[case], torch.bfloat16, "cuda"), storage)
    wanted, needs = wanted_gradients(packed)
    first, _ = run_kernels(packed, needs)
    for _ in range(100):
        again, _ = run_kernels(packed, needs)
        for name in ("out", *wanted):
            assert_bits(again[name], first[name], name)


@pytest.mark.gpu
@pytest.mark.parametrize("storage", READABLE)
@pytest.mark.parametrize("case", SMALL | LARGE)
def test_through_the_buffer_the_bits_of_the_plain_kernels(
    case: str, storage: str, poisoned_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "decoding_tile", lambda *_: None)
    check((SMALL | LARGE)[case], storage, torch.bfloat16, "cuda")


@pytest.mark.gpu
def test_parts(poisoned_memory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    check_dequantised("cuda")
    check_every_byte("cuda")
    check_every_byte_in_front_of_a_product("cuda")
    check_every_mxfp4("cuda")
    check_untouched("cuda")
    check_packed_linear("cuda")
    monkeypatch.setattr(call, "decoding_tile", lambda *_: None)
    check_buffer("cuda")
