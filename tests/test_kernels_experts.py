"""The Triton experts: tests/kernels_cases.py under the interpreter and on a GPU, and every tile."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch import reference  # noqa: E402
from moe_patch.kernels import dh, dw, dw_hopper, rows, up  # noqa: E402
from moe_patch.kernels.device import device_of  # noqa: E402
from moe_patch.kernels.launch import RowTiles  # noqa: E402
from moe_patch.kernels.tiles import OPS, Tile, candidates, pick_tile  # noqa: E402
from tests import interpreted  # noqa: E402
from tests.kernels_cases import (  # noqa: E402
    CASES,
    LARGE,
    ROOT,
    SILU,
    Case,
    check,
    check_descriptors,
    check_nan_rows,
    check_needs,
    make_inputs,
    run_kernels,
)
from tests.numerics import assert_bits, assert_close  # noqa: E402


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What each case said under the interpreter: an empty string, or its failure."""
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        pytest.skip(f"the interpreter of triton {triton.__version__} stores histograms as int64")
    return interpreted.run(str(Path(__file__).with_name("kernels_cases.py")), timeout_s=400)


@pytest.mark.parametrize("case", CASES)
def test_interpreted(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""


def test_pick_tile_fits_and_names_what_does_not() -> None:
    limits = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
    for op, (capability, kib), dtype in itertools.product(
        OPS, limits.items(), (torch.bfloat16, torch.float32)
    ):
        for bucket in ("few", "some", "many"):
            tile = pick_tile(op, bucket, dtype, capability, kib * 1024)
            assert tile.shared_bytes(dtype.itemsize) <= kib * 1024
            assert capability >= (9, 0) or not tile.descriptors
            assert capability == (9, 0) or not tile.specialised
    with pytest.raises(ValueError, match="accepted: up, down"):
        pick_tile("sideways", "many", torch.bfloat16, (9, 0), 1 << 20)
    with pytest.raises(ValueError, match="fits 1024 bytes"):
        pick_tile("up", "many", torch.bfloat16, (9, 0), 1024)


@pytest.mark.slow
def test_default_tiles_compile() -> None:
    """The default tile of each hot GEMM compiles for every capability, fits and does not spill."""
    hot = [
        argument for op in ("up", "down", "dh", "dx", "dw2", "dw13") for argument in ("--op", op)
    ]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHONPATH": str(ROOT)
    }
    script = str(ROOT / "scripts" / "compile_tiles.py")
    result = subprocess.run(
        [sys.executable, script, "--default", "--no-lora", "--bucket", "many", "--dtype", "bf16", *hot],
        env=env, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


# Every case in bf16; the other dtypes take the same code and are compiled for fewer cases.
EVERY_DTYPE = ("silu", "gpt_oss", "lora", "tile_edges", "wide", "decode")
GPU_CASES = [(name, torch.bfloat16) for name in LARGE] + [
    (name, dtype) for name in EVERY_DTYPE for dtype in (torch.float16, torch.float32)
]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), GPU_CASES, ids=str)
def test_gpu(case: str, dtype: torch.dtype, poisoned_memory: None) -> None:
    check(LARGE[case], dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("check_one", [check_needs, check_nan_rows, check_descriptors])
def test_gpu_special(check_one, poisoned_memory: None) -> None:
    check_one("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["qwen3_like", "lora_16", "gpt_oss_like"])
def test_gpu_repeats_bit_for_bit(case: str, poisoned_memory: None) -> None:
    inputs = make_inputs(LARGE[case], torch.bfloat16, "cuda")
    first, _ = run_kernels(inputs)
    for _ in range(40):
        again, _ = run_kernels(inputs)
        for name in first:
            assert_bits(again[name], first[name], name)


def _all_tiles() -> list[tuple[str, Tile]]:
    return sorted(
        {
            (op, tile)
            for op in ("up", "down", "dh", "dx", "dw2", "dw13")
            for bucket in ("few", "some", "many")
            for capability in ((8, 0), (8, 6), (9, 0))
            for tile in candidates(op, bucket, torch.bfloat16, capability)
        },
        key=str,
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "tile"), _all_tiles(), ids=str)
def test_gpu_every_tile(op: str, tile: Tile, poisoned_memory: None) -> None:
    case = Case(900, 3, 7, 272, 136)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    device, tensors = device_of(inputs.ids_TK), inputs.tensors
    if tile.shared_bytes(2) > device.shared_memory:
        pytest.fail(f"{tile} does not fit {device}")
    plan = reference.build_plan(inputs.ids_TK, case.E)
    tiles, valid = RowTiles(plan), int(plan.offsets_S[-1])
    token_N = (plan.row_of_N[:valid] // case.K).long()
    e_N = inputs.ids_TK.reshape(-1)[plan.row_of_N[:valid].long()]
    h_NH = torch.randn(tiles.count, 2 * case.F, device="cuda", dtype=torch.bfloat16)
    a_NF = torch.randn(tiles.count, case.F, device="cuda", dtype=torch.bfloat16)
    x, w13, w2 = tensors["x"], tensors["w13"], tensors["w2"]
    wide = [t.double() for t in (x, w13, w2, h_NH[:valid], a_NF[:valid], inputs.dout_TD)]
    x64, w13_64, w2_64, h64, a64, dout64 = wide
    if op == "up":
        ours = up.up(x, tiles.rows(tile.m), w13, None, SILU, tile)[0][:valid]
        expected = torch.einsum("nd,nhd->nh", x64[token_N], w13_64[e_N])
    elif op == "down":
        ours = rows.grouped_linear(a_NF, tiles.rows(tile.m), w2, None, tile)[:valid]
        expected = torch.einsum("nf,ndf->nd", a64, w2_64[e_N])
    elif op == "dx":
        ours = rows.grouped_linear(h_NH, tiles.rows(tile.m), w13.transpose(1, 2), None, tile)[
            :valid
        ]
        expected = torch.einsum("nh,nhd->nd", h64, w13_64[e_N])
    elif op == "dh":
        found = dh.hidden_gradients(
            inputs.dout_TD, tiles.rows(tile.m), w2, tensors["weights"], h_NH, SILU, tile,
            dh=True, wa=True, partial=True,
        )  # fmt: skip
        da64 = torch.einsum("nd,ndf->nf", dout64[token_N], w2_64[e_N])
        leaf = h64.clone().requires_grad_()
        act64 = reference.gated_activation(leaf, SILU).double()
        weight_N1 = tensors["weights"].reshape(-1)[plan.row_of_N[:valid].long(), None].double()
        expected = torch.autograd.grad(act64, leaf, da64 * weight_N1)[0]
        assert_close(found.wa_NF[:valid], (weight_N1 * act64).detach(), 5e-3, "wa")
        assert_close(
            found.partial_NC[:valid].sum(1), (da64 * act64).sum(1).detach(), 5e-3, "partial"
        )
        ours = found.dh_NH[:valid]
    else:
        left, right = (inputs.dout_TD, a_NF) if op == "dw2" else (h_NH, x)
        gathers = {"gather_left": op == "dw2", "gather_right": op == "dw13"}
        like = w2 if op == "dw2" else w13
        if tile.specialised:
            assert dw_hopper.supported(left, right, like, **gathers)
        ours = dw.outer_sum(left, right, plan, like, tile, **gathers)
        left64, right64 = (dout64[token_N], a64) if op == "dw2" else (h64, x64[token_N])
        chosen = torch.nn.functional.one_hot(e_N, case.E).double()
        expected = torch.einsum("ne,no,ni->eoi", chosen, left64, right64)
    assert_close(ours, expected, 5e-3, op)
