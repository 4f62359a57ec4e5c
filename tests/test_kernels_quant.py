"""The Triton experts on packed weights: tests/quant_cases.py under the interpreter and on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch.kernels import call, rows_packed
from tests import interpreted
from tests.quant_cases import (
    CASES,
    LARGE,
    SMALL,
    check,
    check_buffer,
    check_close,
    check_dequantised,
    check_every_byte,
    check_packed_linear,
    check_untouched,
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What each case said under the interpreter: an empty string, or its failure."""
    interpreted.skip_without_histogram()
    return interpreted.run(str(Path(__file__).with_name("quant_cases.py")), timeout_s=400)


@pytest.mark.parametrize("case", CASES)
def test_interpreted(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["nf4", "fp8"])
@pytest.mark.parametrize("case", SMALL | LARGE)
def test_decoding_in_front_of_the_product_is_close_to_fp64(
    case: str, storage: str, poisoned_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_packed, "_MOST_ROWS", 1000)
    check_close((SMALL | LARGE)[case], storage, torch.bfloat16, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["nf4", "fp8"])
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
    check_untouched("cuda")
    check_packed_linear("cuda")
    monkeypatch.setattr(call, "decoding_tile", lambda *_: None)
    check_buffer("cuda")
