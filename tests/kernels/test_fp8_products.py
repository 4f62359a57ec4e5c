"""Conditions under which experts are multiplied in FP8, and reasons against; no GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from torch.distributed.fsdp import fully_shard

from moe_patch import quantize_experts
from moe_patch.formats.packed import pack, packed_weights, plain_weights
from moe_patch.formats.shard import split
from moe_patch.formats.tensor import QuantTensor, packed_weight
from moe_patch.kernels.common import device, versions
from moe_patch.kernels.common.device import Device
from moe_patch.kernels.common.versions import Gates
from moe_patch.kernels.experts import fp8
from moe_patch.kernels.plan.row_tiles import RowTiles
from moe_patch.ops.experts.definition import build_plan
from moe_patch.patching.discover import discover
from moe_patch.patching.fp8_reason import decoded_reason
from moe_patch.runtime import fp8 as runtime
from moe_patch.runtime.fp8 import Copies, in_fp8
from moe_patch.types import ExpertWeights, Glu
from tests.support import tiny_models
from tests.support.numerics import assert_bits

BF16, SILU = torch.bfloat16, Glu("silu")
HOPPER = Device((9, 0), 227 << 10, 132)
E, D, F = 4, 256, 128


def weights(storage: str = "fp8") -> Any:
    made = (torch.randn(E, 2 * F, D), torch.randn(E, D, F))
    return ExpertWeights(*(pack(w.bfloat16(), storage, torch.device("cpu"), "w") for w in made))


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "gates", lambda: Gates(True, True, fp8=True))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"capability": (8, 9)}, "compute capability 9.0, found 8.9"),
        ({"capability": (10, 0)}, "compute capability 9.0, found 10.0"),
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


@pytest.mark.parametrize(
    ("gates", "why"),
    [
        (Gates(False, False), "need a Triton on which the Hopper kernels may run"),
        (Gates(True, False, "a hazard"), "stay off on triton"),
    ],
)
def test_a_triton_that_fails_the_scan_decodes_and_is_named(
    gates: Gates, why: str, on_hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "gates", lambda: gates)
    assert why in fp8.why_not_fp8((9, 0), BF16, (256, 256), SILU, biased=False, transposed=False)
    w = marked(weights(), "fp8")
    assert w.w13_EHD.in_fp8
    ids_TK = torch.arange(E).repeat(64)[:, None]
    tiles = RowTiles(build_plan(ids_TK, E), {128: torch.empty(1)})
    x_TD = torch.empty(len(ids_TK), D, dtype=BF16)
    assert fp8.fp8_products(tiles, x_TD, w, SILU, HOPPER) is None


def marked(w: Any, compute: str, copies: Copies | None = None) -> Any:
    return in_fp8(w, compute, copies, torch.empty(1, D, dtype=BF16), SILU)


def test_products_are_in_fp8_for_every_size_if_requested(known: None, on_hopper: None) -> None:
    def chosen(rows: int, w: Any, device: Device = HOPPER) -> bool:
        ids_TK = torch.arange(E).repeat(rows)[:, None]
        tiles = RowTiles(build_plan(ids_TK, E), {128: torch.empty(1)})
        x_TD = torch.empty(len(ids_TK), D, dtype=BF16)
        return fp8.fp8_products(tiles, x_TD, w, SILU, device) is not None

    w = marked(weights(), "fp8")
    assert [chosen(rows, w) for rows in (1, 64)] == [True, True]
    assert not chosen(1, weights())
    assert not chosen(1, marked(weights(), "decoded"))
    assert not chosen(1, w._replace(b2_ED=torch.empty(E, D)))
    assert not chosen(1, w, device=Device((8, 9), 99 << 10, 128))


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows on the CPU count as rows on a card on which FP8 products run."""
    monkeypatch.setattr(runtime, "_is_hopper", lambda *_: True)
    monkeypatch.setattr(runtime, "_runs", lambda *_: True)


def test_weights_and_copies_pass_through_the_operator(on_hopper: None) -> None:
    w = weights()
    found = marked(w, "fp8_copy", Copies())
    assert [each.w13_EHD.in_fp8 for each in (found, w)] == [True, False]
    assert not marked(weights("nf4"), "fp8").w13_EHD.in_fp8
    plain, scales, storage = plain_weights(found)
    again = packed_weights(plain, scales, storage, BF16)
    for mine, theirs in zip(again[:2], found[:2], strict=True):
        assert mine.in_fp8
        assert len(mine.scales) == 3
        values, copied_scales = mine.scales[1:]
        assert_bits(values, theirs.packed.mT.contiguous())
        assert_bits(copied_scales, theirs.scales[0].mT.contiguous())
        assert_bits(mine[1], theirs[1])


def test_a_copy_is_made_once_and_again_after_a_change(on_hopper: None) -> None:
    w, copies = weights(), Copies()

    def copy() -> Any:
        return marked(w, "fp8_copy", copies).w2_EDF.scales[1]

    first = copy()
    assert copy() is first
    w.w2_EDF.packed.copy_(w.w2_EDF.packed.flip(0))
    second = copy()
    assert_bits(second, w.w2_EDF.packed.mT.contiguous())
    w = w._replace(w2_EDF=replace(w.w2_EDF, packed=w.w2_EDF.packed.clone()))
    assert copy() is not second


def test_no_copy_is_made_where_experts_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """On other devices, and on a Hopper card for experts that FP8 products do not support."""
    w, copies = weights(), Copies()
    assert marked(w, "fp8_copy", copies) is w
    monkeypatch.setattr(runtime, "_is_hopper", lambda *_: True)
    monkeypatch.setattr(runtime, "_runs", lambda *_: False)
    assert len(marked(weights(), "fp8_copy", copies).w13_EHD.scales) == 1
    assert not any(copy for *_, copy in copies.made.values())
    assert len(marked(weights(), "fp8", copies).w13_EHD.scales) == 1


def test_compiled_code_uses_a_copy_of_this_very_weight_or_makes_one() -> None:
    w, copies = weights().w13_EHD, Copies()
    again = replace(w, packed=w.packed.clone())

    @torch.compile(backend="eager", fullgraph=True)
    def values(one: Any) -> Any:
        return copies.of("w13_EHD", one, lambda: True)[0]

    assert_bits(values(w), w.packed.mT.contiguous())
    assert not copies.made
    kept, _ = copies.of("w13_EHD", w, lambda: True)
    assert values(w).data_ptr() == kept.data_ptr()
    again.packed.copy_(w.packed.flip(0))
    assert_bits(values(again), again.packed.mT.contiguous())


def test_weights_that_fsdp2_gathers_have_no_copy(
    known: None, on_hopper: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Each rank would keep the copies of every layer: backward decodes, and the report says so.

    Other cards than Hopper's decode, and the report names them.
    """
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    model = quantize_experts(tiny_models.build("qwen3_moe", **sizes), "fp8")
    experts: Any = tiny_models.blocks(model.bfloat16())[0][1].experts
    (part,) = split(experts.gate_up_proj.weight, 8, QuantTensor)
    outputs, metadata = part.fsdp_pre_all_gather(SimpleNamespace(size=lambda: 8))
    gathered, _ = part.fsdp_post_all_gather(outputs, metadata, torch.bfloat16)
    for weight, scales in ((experts.gate_up_proj, 3), (gathered, 1)):
        w: Any = ExpertWeights(packed_weight(weight), packed_weight(weight))
        assert len(marked(w, "fp8_copy", Copies()).w2_EDF.scales) == scales
    monkeypatch.setattr(device, "_cuda_device", lambda index: HOPPER)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    (found, *_) = discover(model)

    def reason(compute: str) -> str:
        return decoded_reason(experts, found.spec, SILU, "triton", torch.device("cuda"), compute)

    assert reason("fp8_copy") == ""
    for other in ((8, 9), (10, 0), (12, 0)):
        card = Device(other, 99 << 10, 132)
        monkeypatch.setattr(device, "_cuda_device", lambda index, card=card: card)
        said = "compute='fp8_copy' has no effect: FP8 products need compute capability 9.0, found "
        assert reason("fp8_copy") == said + ".".join(map(str, other))
    monkeypatch.setattr(device, "_cuda_device", lambda index: HOPPER)
    with monkeypatch.context() as patched:
        patched.setattr(versions, "gates", lambda: Gates(True, False, "a hazard"))
        assert "stay off on triton" in reason("fp8")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        fully_shard(model)
        assert reason("fp8_copy").startswith("backward is decoded: FSDP2 gathers")
        assert reason("fp8") == ""
    finally:
        torch.distributed.destroy_process_group()
