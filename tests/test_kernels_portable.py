"""What the report says of the kernels on a Hopper card is what the launchers decide there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
import triton

import moe_patch.report
from moe_patch import PatchStateError, patch_model, patch_report, unpatch_model
from moe_patch.backend import BackendChoice
from moe_patch.kernels import device, dh_hopper, dw_hopper, rows_hopper, up_hopper
from moe_patch.kernels.device import Device
from moe_patch.kernels.launch import Rows
from moe_patch.kernels.portable import portable_reason
from moe_patch.types import Glu, Plan
from tests import tiny_models
from tests.adapters import DOWN, UP, adapt, lora_config

ROOT = Path(__file__).parents[1]
SILU, HOPPER, BF16 = Glu("silu"), (9, 0), torch.bfloat16
GPT_OSS = Glu("swiglu_oai", interleaved=True)
EVERY = {"up", "down", "dx", "dh", "dw13", "dw2"}
# D, F, activation, stored [E, in, out]? -> the products that the specialised kernels take.
LAYERS = {
    "usual": (64, 32, SILU, False, EVERY, ""),
    "transposed": (64, 32, SILU, True, {"down", "dx"}, "stored [experts, out, in]"),
    "gpt_oss": (64, 32, GPT_OSS, True, {"down", "dx"}, "stored [experts, out, in]"),
    "interleaved": (64, 32, GPT_OSS, False, EVERY - {"up", "dh"}, "gate and up side by side"),
    "ungated": (64, 32, Glu("relu2", gated=False), False, EVERY - {"up", "dh"}, "side by side"),
    "odd": (60, 36, SILU, False, set(), "hidden size 60, expert width 36"),
}


@pytest.fixture
def hopper() -> Iterator[None]:
    card = Device(HOPPER, 227 << 10, 132)
    with (
        mock.patch("moe_patch.kernels.device.INTERPRETER", card),
        mock.patch.object(triton, "__version__", "3.6.0+git9844da95"),
    ):
        yield


def taken(
    D: int,
    F: int,
    glu: Glu,
    transposed: bool,
    dtype: torch.dtype = BF16,
    ranks: tuple[int, int] = (0, 0),
) -> set[str]:
    """The products for which the launchers take the specialised kernels."""
    E, T, K = 4, 16, 2
    N, H = T * K, 2 * F if glu.gated else F

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    w13 = empty(E, D, H).mT if transposed else empty(E, H, D)
    w2 = empty(E, F, D).mT if transposed else empty(E, D, F)
    x, h, a, index = empty(T, D), empty(N, H), empty(N, F), torch.empty(0, dtype=torch.int32)
    rows = Rows(Plan(index, index, index), up_hopper.BM, index, 4, N, K)
    outer, (R13, R2) = dw_hopper.supported, ranks
    # What each product adds, by the side its rank comes from: u B13, u B2, p A13, q A2.
    added = {
        "up": (empty(N, R13), empty(E, H, R13)) if R13 else None,
        "down": (empty(N, R2), empty(E, D, R2)) if R2 else None,
        "dx": (empty(N, R13), empty(E, R13, D).mT) if R13 else None,
        "dh": (empty(N, R2), empty(E, R2, F)) if R2 else None,
    }
    found = {
        "up": up_hopper.supported(x, rows, w13, glu, added["up"]),
        "down": rows_hopper.supported(a, rows, w2, added["down"]),
        "dx": rows_hopper.supported(h, rows, w13.mT, added["dx"]),
        "dh": dh_hopper.supported(x, rows, w2, h, glu, added["dh"]),
        "dw13": outer(h, x, w13, gather_left=False, gather_right=True),
        "dw2": outer(x, a, w2, gather_left=True, gather_right=False),
    }
    return {op for op, specialised in found.items() if specialised}


@pytest.mark.parametrize("layer", LAYERS)
def test_the_reason_is_what_the_launchers_decide(layer: str, hopper: None) -> None:
    D, F, glu, transposed, expected, said = LAYERS[layer]
    assert taken(D, F, glu, transposed) == expected
    shape = (2 * F if glu.gated else F, D)
    reason = portable_reason(HOPPER, BF16, shape, glu, transposed=transposed)
    assert said in reason
    assert bool(said) == bool(reason)
    for capability in ((8, 0), (10, 0)):
        assert portable_reason(capability, BF16, shape, glu, transposed=transposed) == ""
    assert taken(D, F, glu, transposed, torch.float32) == set()
    reason = portable_reason(HOPPER, torch.float32, shape, glu, transposed=transposed)
    assert reason.endswith("take bf16 and fp16, found torch.float32")


@pytest.mark.parametrize(
    ("ranks", "left"),
    [
        ((16, 8), set()),
        ((12, 0), {"up", "dx"}),
        ((0, 3), {"down", "dh"}),
        ((8, 20), {"down", "dh"}),
        ((17, 1), {"up", "dx", "down", "dh"}),
    ],
    ids=str,
)
def test_an_odd_rank_is_named(ranks: tuple[int, int], left: set[str], hopper: None) -> None:
    assert EVERY - taken(64, 32, SILU, False, ranks=ranks) == left
    reason = portable_reason(HOPPER, BF16, (64, 64), SILU, transposed=False, ranks=ranks)
    for rank, products in zip(ranks, ("up and dx", "down and dh"), strict=True):
        said = f"for {products}: those for Hopper take ranks of multiples of 8, found {rank}"
        assert (said in reason) == set(products.split(" and ")).issubset(left)
    assert bool(reason) == bool(left)


def test_numbers_of_hip_are_not_taken_for_those_of_cuda(monkeypatch) -> None:
    mi200 = SimpleNamespace(
        major=9, minor=0, shared_memory_per_block_optin=64 << 10, multi_processor_count=104
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: mi200)
    found = device._cuda_device.__wrapped__(0)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert (found.capability, device._cuda_device.__wrapped__(0).capability) == (HOPPER, (8, 0))
    monkeypatch.setattr(device, "INTERPRETER", object())
    monkeypatch.setattr(device, "device_of", lambda _: found)
    assert not device.approximate(torch.empty(0, dtype=BF16))


def test_a_kernel_that_a_capture_finds_unloaded_is_named() -> None:
    said = "Triton Error [CUDA]: operation not permitted when stream is capturing"
    with (
        pytest.raises(PatchStateError, match="warmup") as raised,
        device.on_device_of(torch.ones(1)),
    ):
        raise RuntimeError(said)
    assert said in str(raised.value.__cause__)
    with pytest.raises(RuntimeError, match="^other$"), device.on_device_of(torch.ones(1)):
        raise RuntimeError("other")


@pytest.mark.parametrize(
    ("version", "known"), [("3.6.1.post1", True), ("3.7.0", False), ("3.60.0", False)]
)
def test_another_triton_is_named(version: str, known: bool, hopper: None, monkeypatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    reason = portable_reason(HOPPER, BF16, (64, 64), SILU, transposed=False)
    assert ("" if known else f"take triton 3.6, found {version}") in reason
    assert bool(reason) != known
    assert taken(64, 32, SILU, False) == (EVERY if known else set())


WITHOUT_GLUON = """
import sys
import triton
triton.__version__ = "9.9.0"
sys.modules["triton.experimental"] = None
import moe_patch.kernels.experts
found = [name for name in sys.modules if name.startswith("moe_patch") and "hopper" in name]
sys.exit(f"imported: {found}" if found else 0)
"""


def test_another_triton_needs_no_gluon() -> None:
    """Its names change between releases: the portable kernels have to import without it."""
    command = [sys.executable, "-W", "ignore", "-c", WITHOUT_GLUON]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_report_names_the_portable_kernels(hopper: None, monkeypatch) -> None:
    model = patch_model(tiny_models.build("qwen3_moe", moe_intermediate_size=20).bfloat16())
    monkeypatch.setattr(moe_patch.report, "choose_backend", lambda *_: BackendChoice("triton", ""))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER)
    for row in patch_report(model, torch.device("cuda")):
        assert "expert width 20" in row.reason
    assert all(row.reason == "" for row in patch_report(model))
    for row in patch_report(model.float(), torch.device("cuda")):
        assert row.reason.endswith("found torch.float32")


def test_the_report_adds_up_the_ranks_of_active_adapters(hopper: None, monkeypatch) -> None:
    monkeypatch.setattr(moe_patch.report, "choose_backend", lambda *_: BackendChoice("triton", ""))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: HOPPER)
    model = adapt(tiny_models.build("qwen3_moe").bfloat16(), lora_config([UP, DOWN], r=4))
    other = lora_config([UP, DOWN], r=12, rank_pattern={r".*\.down_proj": 5})
    model.add_adapter("more", other)
    patch_model(model)

    def reason() -> str:
        (found,) = {row.reason for row in patch_report(model, torch.device("cuda"))}
        return found

    assert reason().count("found 4") == 2
    model.base_model.set_adapter(["default", "more"])
    assert reason().endswith(
        "for down and dh: those for Hopper take ranks of multiples of 8, found 9"
    )
    assert "up and dx" not in reason(), "4 + 12 make a whole rank"
    with model.disable_adapter():
        assert reason() == ""
    unpatch_model(model)
    patch_model(model, fuse_lora="off")
    assert reason() == ""
