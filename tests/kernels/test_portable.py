"""The report on a Hopper card names the kernels that the launchers choose there."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
import triton

import moe_patch.patching.report
from moe_patch import PatchStateError, patch_model, patch_report
from moe_patch.kernels.common import device, versions
from moe_patch.kernels.common.device import Device
from moe_patch.kernels.common.tiles import OPS, Tile, pick_tile
from moe_patch.kernels.experts import dh, dw, linear, up
from moe_patch.kernels.experts.reasons import portable_reason, smaller_tiles_reason
from moe_patch.kernels.hopper import dh as hopper_dh
from moe_patch.kernels.hopper import dw as hopper_dw
from moe_patch.kernels.hopper import linear as hopper_linear
from moe_patch.kernels.hopper import up as hopper_up
from moe_patch.kernels.plan.row_tiles import RowTiling
from moe_patch.ops.backend import BackendChoice
from moe_patch.types import Glu, Plan
from tests.support import tiny_models

SILU, HOPPER, BF16 = Glu("silu"), (9, 0), torch.bfloat16
GPT_OSS = Glu("swiglu_oai", interleaved=True)
EVERY = {"up", "down", "dx", "dh", "dw13", "dw2"}
# D, F, activation, stored [E, in, out]? -> the products that the specialised kernels take.
LAYERS = {
    "usual": (64, 32, SILU, False, EVERY, ""),
    "transposed": (64, 32, SILU, True, EVERY - {"up", "dh"}, "stored [experts, out, in]"),
    "gpt_oss": (64, 32, GPT_OSS, True, EVERY - {"up", "dh"}, "stored [experts, out, in]"),
    "interleaved": (64, 32, GPT_OSS, False, EVERY - {"up", "dh"}, "gate and up side by side"),
    "ungated": (64, 32, Glu("relu2", gated=False), False, EVERY - {"up", "dh"}, "side by side"),
    "odd": (60, 36, SILU, False, set(), "hidden size 60, expert width 36"),
}


# Releases, by the state of their Hopper kernels in the table.
TESTED, UNTESTED = (
    [name for name, found in versions.TRITON_VERSIONS.items() if found.hopper is hopper]
    for hopper in (True, False)
)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Pretend a Hopper card and a Triton that its kernels support, whatever is installed."""
    card = Device(HOPPER, 227 << 10, 132)
    monkeypatch.setattr(versions, "_GATES", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # no marker of this machine's user
    # Not by mock: tests set the version again, and the last change has to be undone first.
    monkeypatch.setattr(triton, "__version__", "3.6.0+git9844da95")
    with mock.patch("moe_patch.kernels.common.device.INTERPRETER", card):
        yield


def taken(
    D: int,
    F: int,
    glu: Glu,
    transposed: bool,
    dtype: torch.dtype = BF16,
) -> set[str]:
    """Return the products for which the launchers use the specialised kernels."""
    E, T, K = 4, 16, 2
    N, H = T * K, 2 * F if glu.gated else F

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    w13 = empty(E, D, H).mT if transposed else empty(E, H, D)
    w2 = empty(E, F, D).mT if transposed else empty(E, D, F)
    x, h, a, index = empty(T, D), empty(N, H), empty(N, F), torch.empty((T, K), dtype=torch.int32)
    tiles = RowTiling(Plan(index, index, index), hopper_up.BM, index, 4, N, K)
    found = {
        "up": hopper_up.supported(x, tiles, w13, glu, None),
        "down": hopper_linear.supported(a, tiles, w2, None),
        "dx": hopper_linear.supported(h, tiles, w13.mT, None),
        "dh": hopper_dh.supported(x, tiles, w2, h, glu, None),
    }
    tile = Tile(128, 256, 32, 8, 6, hopper=True)
    for op, sides, gathers in (
        ("dw13", (h, x, w13), {"gather_right": True}),
        ("dw2", (x, a, w2), {"gather_left": True}),
    ):
        left, right, like = sides
        with (
            mock.patch.object(dw, "_launch"),
            mock.patch.object(hopper_dw, "outer_sum") as specialised,
        ):
            dw.outer_sum(left, right, tiles.plan, like, tile, **gathers)
        found[op] = specialised.called
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


@pytest.mark.parametrize("rank", [1, 4, 8, 12, 17])
def test_any_rank_reaches_the_specialised_kernels(rank: int, hopper: None, monkeypatch) -> None:
    """Pad the rank with zeros to a multiple of 8, which changes no product."""
    E, T, K, D, F = 4, 256, 2, 64, 32
    N, H = T * K, 2 * F
    index = torch.empty(0, dtype=torch.int32)
    rows_of_call = RowTiling(Plan(index, index, index), hopper_up.BM, index, 4, N, K)
    tile = Tile(hopper_up.BM, 128, 64, 8, 3, hopper=True)
    taken = {}

    def note(op: str, at: int):
        return lambda *operands: taken.update({op: operands[at]})

    monkeypatch.setattr(hopper_up, "up", note("up", 7))
    monkeypatch.setattr(hopper_dh, "hidden_gradients", note("dh", 7))
    monkeypatch.setattr(hopper_linear, "grouped_linear", note("rows", 5))

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size).to(BF16)

    def check(op: str, low_rank: tuple[torch.Tensor, torch.Tensor], product: str) -> None:
        found = taken.pop(op)
        assert found[0].shape == (N, -(-rank // 8) * 8)
        assert (found[1] is low_rank[1]) == (rank % 8 == 0), "a copy where none is needed"
        ours, given = (torch.einsum(product, *(t.double() for t in p)) for p in (found, low_rank))
        assert torch.equal(ours, given)

    x, h, a, u = random(T, D), random(N, H), random(N, F), random(N, rank)
    w13, w2, b13, a2 = random(E, H, D), random(E, D, F), random(E, H, rank), random(E, rank, F)
    up.up(x, rows_of_call, w13, None, SILU, tile, low_rank=(u, b13))
    check("up", (u, b13), "nr,eor->eno")
    # In down and in dx a weight and its factor have the same layout.
    for weight, factor in (
        (w2, random(E, D, rank)),
        (random(E, F, D).mT, random(E, rank, D).mT),
    ):
        linear.grouped_linear(a, rows_of_call, weight, None, tile, low_rank=(u, factor))
        check("rows", (u, factor), "nr,eor->eno")
    dh.hidden_gradients(
        x, rows_of_call, w2, random(T, K), h, SILU, tile, low_rank=(u, a2), dh=True, wa=True,
        partial=True,
    )  # fmt: skip
    check("dh", (u, a2), "nr,erf->enf")


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
    ("version", "known"),
    [
        (f"{TESTED[0]}.1.post1", True),
        *((f"{each}.1", False) for each in UNTESTED),
        ("3.60.0", False),
    ],
)
@pytest.mark.filterwarnings("ignore:moe_patch. portable kernels")
def test_another_triton_is_named(version: str, known: bool, hopper: None, monkeypatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    reason = portable_reason(HOPPER, BF16, (64, 64), SILU, transposed=False)
    assert ("" if known else f"take triton {', '.join(TESTED)}, found {version};") in reason
    assert known or "`moe-patch selftest --trust`" in reason
    assert bool(reason) != known
    assert taken(64, 32, SILU, False) == (EVERY if known else set())


def test_an_unknown_triton_warns_once_and_not_on_other_cards(hopper: None, monkeypatch) -> None:
    monkeypatch.setattr(triton, "__version__", "9.1.0")
    for capability in ((8, 0), (10, 0), (12, 0)):
        portable_reason(capability, BF16, (64, 64), SILU, transposed=False)
    assert "9.1.0" not in versions._GATES
    with pytest.warns(UserWarning, match="moe_patch: portable kernels.* found 9.1.0; .*--trust"):
        assert taken(64, 32, SILU, False) == set()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert taken(64, 32, SILU, False) == set()
        assert portable_reason(HOPPER, BF16, (64, 64), SILU, transposed=False)


@pytest.mark.filterwarnings("ignore:moe_patch. portable kernels")
def test_a_release_without_direct_launches_gets_the_hopper_kernels(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        versions.TRITON_VERSIONS, "3.77", versions.Tested(hopper=True, direct=False)
    )
    monkeypatch.setitem(
        versions.TRITON_VERSIONS, "3.78", versions.Tested(hopper=False, direct=True)
    )
    monkeypatch.setattr(triton, "__version__", "3.77.0")
    assert taken(64, 32, SILU, False) == EVERY
    monkeypatch.setattr(triton, "__version__", "3.78.0")
    assert taken(64, 32, SILU, False) == set()
    reason = portable_reason(HOPPER, BF16, (64, 64), SILU, transposed=False)
    assert f"take triton {', '.join(TESTED)}, 3.77, found 3.78.0;" in reason


def test_a_triton_without_gluon_is_named(hopper: None, monkeypatch) -> None:
    """Name missing Gluon on a trusted release; decoding packed weights in front needs none."""
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    for name in [each for each in sys.modules if each.startswith("triton.experimental.gluon.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(UserWarning, match="portable kernels: .* need Gluon, which .* lacks"):
        assert taken(64, 32, SILU, False) == set()
    reason = portable_reason(HOPPER, BF16, (64, 64), SILU, transposed=False)
    assert "triton.experimental.gluon" in reason
    assert versions.gates().in_front


LIMITS = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_a_tile_that_does_not_fit_is_named(dtype: torch.dtype) -> None:
    """Name each op whose tile changes for lack of shared memory; no known card lacks it."""
    for capability, kib in LIMITS.items():
        assert smaller_tiles_reason(dtype, capability, kib << 10) == ""
    for kib in (96, 64, 48, 16, 1):
        said = smaller_tiles_reason(dtype, (8, 0), kib << 10)
        changed, none = set(), set()
        for op in OPS:
            for bucket in ("few", "some", "many"):
                usual = pick_tile(op, bucket, dtype, (8, 0), 163 << 10)
                try:
                    if pick_tile(op, bucket, dtype, (8, 0), kib << 10) != usual:
                        changed.add(op)
                except ValueError:
                    none.add(op)
        named = dict.fromkeys(("smaller tiles", "no tile"), "")
        named |= {part.split(" for ")[0]: part for part in said.split("; ") if " for " in part}
        for sentence, ops in (("smaller tiles", changed - none), ("no tile", none)):
            listed = named[sentence].partition(" for ")[2].partition(" in ")[0]
            assert set(filter(None, listed.split(", "))) == ops, (kib, said)
            assert not ops or f"{kib << 10} bytes" in named[sentence]


def test_the_report_names_the_portable_kernels(hopper: None, monkeypatch) -> None:
    model = patch_model(tiny_models.build("qwen3_moe", moe_intermediate_size=20).bfloat16())
    monkeypatch.setattr(
        moe_patch.patching.report, "choose_backend", lambda *_: BackendChoice("triton", "")
    )
    cards = {0: Device(HOPPER, 227 << 10, 132), 1: Device((8, 0), 48 << 10, 100)}
    monkeypatch.setattr(device, "_cuda_device", cards.get)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for row in patch_report(model, torch.device("cuda")):
        assert "expert width 20" in row.reason
        assert "tile" not in row.reason
    for row in patch_report(model, torch.device("cuda:1")):
        assert row.reason == smaller_tiles_reason(BF16, (8, 0), 48 << 10) != ""
    assert all(row.reason == "" for row in patch_report(model))
    for row in patch_report(model.float(), torch.device("cuda")):
        assert row.reason.endswith("found torch.float32")
