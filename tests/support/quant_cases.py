"""Cases of the Triton experts on packed weights, with the bits of the kernels on plain weights.

Runs natively on a GPU (``-m gpu``), and on a CPU under Triton's interpreter (interpreted.py).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from moe_patch.formats.packed import PackedWeight, pack
from moe_patch.kernels.common.tiles import Tile
from moe_patch.kernels.experts import call
from moe_patch.kernels.experts.linear import grouped_linear
from moe_patch.kernels.packed.dequant import dequantize_into
from moe_patch.kernels.packed.linear import packed_linear
from moe_patch.kernels.packed.parts import PackedParts
from moe_patch.kernels.plan.row_tiles import RowTiles
from moe_patch.ops.experts import definition as reference
from moe_patch.types import ExpertsNeeds
from tests.support import interpreted
from tests.support.kernels_cases import (
    GPT_OSS,
    NAMES,
    Case,
    Inputs,
    make_inputs,
    run_kernels,
    run_reference,
)
from tests.support.numerics import assert_bits, assert_close, bf16_rule, rel_err

FROZEN = ("w13", "w2", "b13", "b2")
SMALL = {
    "lora": Case(4, 2, 5, 64, 64, rank=2, norms=True, bias=True),
    "gpt_oss": Case(4, 2, 5, 64, 64, GPT_OSS, rank=3, bias=True, transposed=True),
    "recompute": Case(3, 1, 3, 64, 64, rank=2, save_h=False),
    "sparse": Case(6, 2, 12, 64, 64, ids="sparse"),
    "all_empty": Case(2, 1, 3, 64, 64, ids="empty", rank=2, norms=True),
    "no_tokens": Case(0, 2, 3, 64, 64, rank=2),
}
LARGE = {
    "plain": Case(130, 2, 5, 128, 64),
    "qwen3_like": Case(1000, 8, 128, 256, 192, rank=16),
    "tall": Case(3000, 2, 12, 512, 320, rank=16, norms=True),
    "one_takes_all": Case(2000, 1, 8, 128, 64, ids="one", rank=8),
    "gpt_oss_like": Case(600, 4, 32, 320, 128, GPT_OSS, rank=16, bias=True, transposed=True),
    "decode": Case(3, 8, 64, 512, 256, rank=16),
}


def packed_like(stored: torch.Tensor, storage: str) -> PackedWeight:
    """Return a packed weight [E, rows, columns]; in read-only mxfp4, a random one of that shape."""
    if storage != "mxfp4":
        return pack(stored, storage, stored.device, "w")
    E, rows, columns = stored.shape
    random = partial(torch.randint, device=stored.device)
    values = random(0, 256, (E, rows, columns // 2)).to(torch.uint8)
    scales = random(122, 126, (E, rows, columns // 32)).to(torch.uint8)
    return PackedWeight(storage, values, (scales,), stored.dtype)


def pack_inputs(inputs: Inputs, storage: str) -> Inputs:
    """Return the same call with both projections packed."""
    packed: dict[str, Any] = {}
    for name in ("w13", "w2"):
        weight = inputs.tensors[name]
        stored = weight.transpose(1, 2) if inputs.case.transposed else weight
        one = packed_like(stored, storage)
        packed[name] = one.transpose(1, 2) if inputs.case.transposed else one
    return replace(inputs, tensors=inputs.tensors | packed)


def plain_inputs(inputs: Inputs) -> Inputs:
    """Return a packed call with the plain weights that it represents."""
    plain = {}
    for name in ("w13", "w2"):
        packed: Any = inputs.tensors[name]
        stored = packed.stored_experts(0, packed.shape[0])
        plain[name] = stored.transpose(1, 2) if packed.transposed else stored
    return replace(inputs, tensors=inputs.tensors | plain)


def wanted_gradients(packed: Inputs) -> tuple[list[str], ExpertsNeeds]:
    """Return all gradients but those of frozen weights: their names, and the kernels' flags."""
    wanted = [name for name in NAMES if name in packed.tensors and name not in FROZEN]
    return wanted, ExpertsNeeds(**dict.fromkeys(wanted, True), norms=packed.case.norms)


def check_close(case: Case, storage: str, dtype: torch.dtype, device: str) -> None:
    """Stay as close to fp64 as the dequantised weights, evaluated eagerly or by plain kernels.

    With few tokens, eager's distance is a matter of luck; the plain kernels share our luck.
    tests/support/kernels_checks.py holds their distance to eager's.
    """
    packed = pack_inputs(make_inputs(case, dtype, device), storage)
    wanted, needs = wanted_gradients(packed)
    found, _ = run_kernels(packed, needs)
    plain = plain_inputs(packed)
    exact, eager = run_reference(plain, torch.float64), run_reference(plain, dtype)
    kernels, _ = run_kernels(plain, needs)
    for name in ("out", *wanted):
        assert torch.isfinite(found[name]).all(), name
        allowed = [eager[name].to(found[name].dtype), kernels[name]]
        further = max(allowed, key=lambda one: rel_err(one, exact[name]))
        bf16_rule(found[name], further, exact[name], name)
    again, _ = run_kernels(packed, needs)
    for name in ("out", *wanted):
        assert_bits(again[name], found[name], name)


def check(case: Case, storage: str, dtype: torch.dtype, device: str) -> None:
    """Output and gradients, except those of weights, agree bit for bit through the buffer."""
    packed = pack_inputs(make_inputs(case, dtype, device), storage)
    wanted, needs = wanted_gradients(packed)
    found, gradients = run_kernels(packed, needs)
    expected, plain_gradients = run_kernels(plain_inputs(packed), needs)
    for name in ("out", *wanted):
        assert torch.isfinite(found[name]).all(), name
        assert case.T == 0 or case.ids == "empty" or expected[name].any(), f"{name} is zero"
        assert_bits(found[name], expected[name], name)
    if case.norms:
        assert_bits(found["act_norm"], expected["act_norm"])
        for name in ("grad_norm_out_TK", "grad_norm_params_TK", "grad_norm_lora_TK"):
            assert_bits(getattr(gradients, name), getattr(plain_gradients, name), name)


def check_dequantised(device: str) -> None:
    """The kernel's weights equal torch's, and experts without rows are neither read nor written."""
    shapes = [
        ("nf4", (5, 24, 192)),
        ("nf4", (4, 3, 64)),
        ("fp8", (5, 200, 136)),
        ("fp8", (3, 4, 7)),
        ("mxfp4", (5, 24, 96)),
        ("mxfp4", (3, 1, 32)),
    ]
    for (storage, shape), dtype in itertools.product(shapes, (torch.float32, torch.float16)):
        w = packed_like(torch.randn(shape, device=device), storage).to(dtype)
        counts = torch.ones(shape[0], dtype=torch.int32, device=device)
        counts[1] = 0
        offsets_S = torch.cat([counts.new_zeros(1), counts.cumsum(0).to(torch.int32)])
        for first, count in ((0, shape[0]), (1, 2)):
            buffer = torch.full((count, *shape[1:]), float("nan"), dtype=dtype, device=device)
            dequantize_into(buffer, w, offsets_S, first)
            for i in range(count):
                if first + i == 1:
                    assert buffer[i].isnan().all()
                else:
                    assert_bits(buffer[i], w.stored_experts(first + i, first + i + 1)[0])


def check_every_byte(device: str) -> None:
    """Decode all 256 values of e4m3, by Triton's type or from bytes, depending on capability."""
    values = torch.arange(256, device=device).to(torch.uint8).repeat(2, 128, 1)
    scales = torch.rand(2, 1, 2, device=device)
    w = PackedWeight("fp8", values.view(torch.float8_e4m3fn), (scales,), torch.float32)
    buffer = torch.zeros(2, 128, 256, device=device)
    offsets_S = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
    dequantize_into(buffer, w, offsets_S, 0)
    expected = w.stored_experts(0, 2)
    assert torch.equal(buffer.isnan(), expected.isnan())
    assert_bits(buffer.nan_to_num(), expected.nan_to_num())


def check_every_byte_in_front_of_a_product(device: str) -> None:
    """Decode all values of e4m3 for a product, by the rows of a unit matrix."""
    numbers = torch.arange(256, device=device).to(torch.uint8)
    numbers[numbers & 0x7F == 0x7F] = 0  # NaN times zero would be in every sum
    expected = numbers.view(torch.float8_e4m3fn).to(torch.float16)
    for turned in (False, True):
        shape = (1, 128, 256) if turned else (1, 256, 128)
        values = numbers.expand(shape) if turned else numbers[:, None].expand(shape)
        scales = torch.ones(1, *(size // 128 for size in shape[1:]), device=device)
        stored = values.contiguous().view(torch.float8_e4m3fn)
        w = PackedWeight("fp8", stored, (scales,), torch.float16)
        ids_TK = torch.zeros(128, 1, dtype=torch.int64, device=device)
        tiles = RowTiles(reference.build_plan(ids_TK, 1))
        unit = torch.eye(128, dtype=torch.float16, device=device)
        tile = Tile(64, 128, 64, 4, 1)
        found = packed_linear(unit, tiles.rows(64), w.transpose(1, 2) if turned else w, None, tile)
        assert torch.equal(found, expected.expand(128, 256)), f"turned {turned}"


def check_every_mxfp4(device: str) -> None:
    """All values under all scales but that of NaN, in fp32 and where it holds them."""
    values = torch.arange(256, device=device).to(torch.uint8).repeat(255, 1, 1)
    scales = torch.arange(255, device=device).to(torch.uint8).view(255, 1, 1).repeat(1, 1, 16)
    offsets_S = torch.arange(256, dtype=torch.int32, device=device)
    for dtype, some in ((torch.float32, slice(0, 252)), (torch.float16, slice(114, 139))):
        w = PackedWeight("mxfp4", values, (scales,), dtype)
        buffer = torch.zeros(255, 1, 512, dtype=dtype, device=device)
        dequantize_into(buffer, w, offsets_S, 0)
        assert_bits(buffer[some], w.stored_experts(0, 255)[some])


def check_packed_linear(device: str) -> None:
    """Decoding in front of the product agrees with the product of dequantised weights."""
    for storage, turned, rank in itertools.product(("nf4", "fp8"), (False, True), (0, 3)):
        E, O, I, T, K = 3, 192, 128, 25, 2
        stored = (
            torch.randn(E, I, O, device=device) if turned else torch.randn(E, O, I, device=device)
        )
        w = pack(stored * I**-0.5, storage, torch.device(device), "w").to(torch.float16)
        plain = w.stored_experts(0, E)
        if turned:
            w, plain = w.transpose(1, 2), plain.transpose(1, 2)
        ids_TK = torch.where(torch.rand(T, K, device=device) < 0.4, 0, 2)
        ids_TK[0] = -1
        tiles = RowTiles(reference.build_plan(ids_TK, E))
        inputs = torch.randn(T * K, I, device=device).half()
        bias = torch.randn(E, O, device=device).half()
        low_rank = None
        if rank:
            factor = torch.randn(E, O, rank, device=device).half()
            low_rank = torch.randn(T * K, rank, device=device).half(), factor
        found = packed_linear(
            inputs, tiles.rows(32), w, bias, Tile(32, 128, 64, 4, 1), low_rank=low_rank
        )
        expected = grouped_linear(
            inputs, tiles.rows(16), plain, bias, Tile(16, 64, 32, 4, 1), low_rank=low_rank
        )
        valid = int(tiles.plan.offsets_S[-1])
        assert_close(found[:valid], expected[:valid], 1e-3, f"{storage} {turned} {rank}")


def check_untouched(device: str) -> None:
    """NaN in the scales of experts without rows reaches no result."""
    inputs = pack_inputs(make_inputs(SMALL["sparse"], torch.float32, device), "fp8")
    expected, _ = run_kernels(inputs, ExpertsNeeds(x=True, weights=True))
    for name in ("w13", "w2"):
        packed: Any = inputs.tensors[name]
        packed.scales[0][1:-1] = float("nan")
    found, _ = run_kernels(inputs, ExpertsNeeds(x=True, weights=True))
    for name in ("out", "x", "weights"):
        assert_bits(found[name], expected[name], name)


def check_buffer(device: str) -> None:
    """Decode half of the experts at a time (rounded up to four), a quarter of large ones."""
    inputs = pack_inputs(make_inputs(Case(3, 1, 33, 64, 64), torch.float32, device), "nf4")
    sizes: list[int] = []
    whole = PackedParts.parts

    def parts(self: PackedParts, w: PackedWeight) -> Any:
        storages = set()
        for part in whole(self, w):
            sizes.append(part.w_EOI.shape[0])
            storages.add(part.w_EOI.untyped_storage().data_ptr())
            yield part
        assert len(storages) == 1

    PackedParts.parts = parts  # type: ignore[method-assign]
    try:
        run_kernels(inputs, ExpertsNeeds(x=True))
    finally:
        PackedParts.parts = whole  # type: ignore[method-assign]
    assert sizes == [20, 13] * 4
    plan = reference.build_plan(torch.zeros(3, 1, dtype=torch.int64), 128)
    parts_of_128 = PackedParts(RowTiles(plan), torch.bfloat16)
    assert parts_of_128.size_for(1536, 2048) == 64
    assert parts_of_128.size_for(2816, 4096) == 32


def check_decoding(case: Case, storage: str, device: str) -> None:
    """Run the whole call with every product decoding its weight, as on a Hopper card."""
    tile = Tile(32, 128, 64, 4, 1)
    with mock.patch.object(call, "decoding_tile", return_value=tile):
        check_close(case, storage, torch.float16, device)


INTERPRETED = (
    ("lora", "nf4", torch.float32),
    ("gpt_oss", "fp8", torch.float16),
    ("no_tokens", "fp8", torch.float32),
    ("all_empty", "nf4", torch.float32),
    ("gpt_oss", "mxfp4", torch.float32),
    ("sparse", "mxfp4", torch.float16),
)
CASES: dict[str, Callable[[str], None]] = {
    **{
        f"{name}-{storage}-{str(dtype)[6:]}": partial(check, SMALL[name], storage, dtype)
        for name, storage, dtype in INTERPRETED
    },
    "decoding-nf4": partial(check_decoding, SMALL["gpt_oss"], "nf4"),
    "decoding-fp8": partial(check_decoding, SMALL["recompute"], "fp8"),
    "dequantised": check_dequantised,
    "every_byte": check_every_byte,
    "every_byte_in_front_of_a_product": check_every_byte_in_front_of_a_product,
    "every_mxfp4": check_every_mxfp4,
    "packed_linear": check_packed_linear,
    "untouched": check_untouched,
    "buffer": check_buffer,
}


if __name__ == "__main__":
    interpreted.report(CASES)
