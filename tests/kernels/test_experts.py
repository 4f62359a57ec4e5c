"""The Triton experts: tests/support/kernels_checks.py, interpreted and on a GPU, and every tile."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch.kernels.common.device import device_of
from moe_patch.kernels.common.tiles import OPS, Tile, candidates, pick_tile
from moe_patch.kernels.experts import dh, dw, factors, linear, up
from moe_patch.kernels.hopper import dh as hopper_dh
from moe_patch.kernels.hopper import dw as hopper_dw
from moe_patch.kernels.hopper import linear as hopper_linear
from moe_patch.kernels.hopper import up as hopper_up
from moe_patch.kernels.plan.row_tiles import RowTiles
from moe_patch.ops.experts import definition as reference
from tests.support import SUPPORT, interpreted
from tests.support.kernels_cases import LARGE, SILU, Case, make_inputs, run_kernels
from tests.support.kernels_checks import (
    CASES,
    ROOT,
    check,
    check_descriptors,
    check_nan_rows,
    check_needs,
    check_over_h,
)
from tests.support.limits import HANG_S
from tests.support.numerics import FP32, assert_bits, assert_close


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """Outcome of each case under the interpreter: an empty string, or the failure."""
    interpreted.skip_without_histogram()
    return interpreted.run(str(SUPPORT / "kernels_checks.py"))


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
            assert capability == (9, 0) or not tile.hopper
    with pytest.raises(ValueError, match="accepted: up, down"):
        pick_tile("sideways", "many", torch.bfloat16, (9, 0), 1 << 20)
    with pytest.raises(ValueError, match="fits 1024 bytes"):
        pick_tile("up", "many", torch.bfloat16, (9, 0), 1024)


@pytest.mark.slow
def test_default_tiles_compile() -> None:
    """The default tile of each hot GEMM compiles for every capability, fits and does not spill.

    No tile, packed experts' included, writes registers that a matrix instruction may still read.
    """
    hot = [
        argument
        for op in ("up", "down", "dh", "dx", "dw2", "dw13", "packed")
        for argument in ("--op", op)
    ]
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHONPATH": str(ROOT)
    }
    script = str(ROOT / "scripts" / "tiles" / "compile_tiles.py")
    result = subprocess.run(
        [sys.executable, script, "--default", "--no-lora", "--bucket=many", "--dtype=bf16", *hot],
        env=env, capture_output=True, text=True, timeout=HANG_S, check=False,
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
@pytest.mark.parametrize(
    "check_one", [check_needs, check_nan_rows, check_descriptors, check_over_h]
)
def test_gpu_special(check_one, poisoned_memory: None) -> None:
    check_one("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["qwen3_like", "lora_16", "gpt_oss_like"])
def test_gpu_repeats_bit_for_bit(case: str, poisoned_memory: None) -> None:
    inputs = make_inputs(LARGE[case], torch.bfloat16, "cuda")
    first, _ = run_kernels(inputs)
    for i in range(40):
        again, _ = run_kernels(inputs, overwrite_h=i % 2 == 1)
        for name in first:
            assert_bits(again[name], first[name], name)


def _all_tiles() -> list[tuple[str, Tile, torch.dtype]]:
    """Return the tiles of every op and capability, with and without the Hopper kernels."""
    return sorted(
        {
            (op, chosen, dtype)
            for op in OPS
            for bucket in ("few", "some", "many")
            for capability in ((8, 0), (8, 6), (9, 0), (10, 0))
            for dtype in (torch.bfloat16, torch.float32)
            for tile in candidates(op, bucket, dtype, capability)
            for chosen in (tile, replace(tile, hopper=False))
        },
        key=str,
    )


# The launcher of an op's warp-specialised kernel, where it is called from.
SPECIALISED = {
    "up": (hopper_up, "up"),
    "down": (hopper_linear, "grouped_linear"),
    "dx": (hopper_linear, "grouped_linear"),
    "dh": (hopper_dh, "hidden_gradients"),
    "dw2": (hopper_dw, "outer_sum"),
    "dw13": (hopper_dw, "outer_sum"),
}


class Rows:
    """Rows of one call in plan order: the operands, and those that exist in fp64."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        inputs = make_inputs(case, dtype, "cuda")
        self.case, self.tensors, self.dout_TD = case, inputs.tensors, inputs.dout_TD
        self.plan = reference.build_plan(inputs.ids_TK, case.E)
        self.tiles, self.valid = RowTiles(self.plan), int(self.plan.offsets_S[-1])
        row_n = self.plan.row_of_N[: self.valid].long()
        self.token_n, self.e_n = row_n // case.K, inputs.ids_TK.reshape(-1)[row_n]
        self.weight_n1 = self.tensors["weights"].reshape(-1)[row_n, None].double()
        self.h_NH, self.a_NF, self.u_NR = (
            torch.randn(self.tiles.count, width, device="cuda", dtype=dtype)
            for width in (2 * case.F, case.F, case.rank)
        )
        self.h64, self.a64 = self.h_NH[: self.valid].double(), self.a_NF[: self.valid].double()
        self.x64, self.dout64 = self.tensors["x"].double(), self.dout_TD.double()

    def grouped(self, rows_nI: Tensor, w_EOI: Tensor) -> Tensor:
        """Return W_e in_n in fp64."""
        return torch.einsum("ni,noi->no", rows_nI, w_EOI.double()[self.e_n])

    def run(self, op: str, tile: Tile) -> dict[str, tuple[Tensor, Tensor]]:
        """Return our result and that in fp64, by name."""
        w13, w2, x = (self.tensors[name] for name in ("w13", "w2", "x"))
        row_tiles, n = self.tiles.rows(tile.m), slice(self.valid)
        if op == "up":
            h_NH, a_NF = up.up(x, row_tiles, w13, None, SILU, tile)
            a64 = reference.gated_activation(h_NH[n], SILU).double()
            return {"h": (h_NH[n], self.grouped(self.x64[self.token_n], w13)), "a": (a_NF[n], a64)}
        if op == "down":
            ours = linear.grouped_linear(self.a_NF, row_tiles, w2, None, tile)
            return {"y": (ours[n], self.grouped(self.a64, w2))}
        if op == "dx":
            ours = linear.grouped_linear(self.h_NH, row_tiles, w13.mT, None, tile)
            return {"dx": (ours[n], self.grouped(self.h64, w13.mT))}
        if op == "dh":
            return self._run_dh(tile)
        if op == "thin":
            factor = self.tensors["lora13_A"]
            ours = linear.grouped_linear(x, row_tiles, factor, None, tile, gather=True, alpha=0.5)
            return {"u": (ours[n], 0.5 * self.grouped(self.x64[self.token_n], factor))}
        if op == "factor_bwd":
            return self._run_factor_bwd(tile)
        return self._run_outer(op, tile)

    def _run_outer(self, op: str, tile: Tile) -> dict[str, tuple[Tensor, Tensor]]:
        left, right, like = {
            "dw2": (self.dout_TD, self.a_NF, self.tensors["w2"]),
            "dw13": (self.h_NH, self.tensors["x"], self.tensors["w13"]),
            "thin_dw": (self.u_NR, self.tensors["x"], self.tensors["lora13_A"]),
        }[op]
        gathers = {"gather_left": op == "dw2", "gather_right": op != "dw2"}
        ours = dw.outer_sum(left, right, self.plan, like, tile, **gathers)
        sides = [
            side.double()[self.token_n] if gathered else side[: self.valid].double()
            for side, gathered in zip((left, right), gathers.values(), strict=True)
        ]
        chosen = torch.nn.functional.one_hot(self.e_n, self.case.E).double()
        return {op: (ours, torch.einsum("ne,no,ni->eoi", chosen, *sides))}

    def _run_factor_bwd(self, tile: Tile) -> dict[str, tuple[Tensor, Tensor]]:
        found, chosen = {}, torch.nn.functional.one_hot(self.e_n, self.case.E).double()
        u64 = self.u_NR[: self.valid].double()
        for name, source, source64, gather in (
            ("lora2_B", self.dout_TD, self.dout64[self.token_n], True),
            ("lora13_B", self.h_NH, self.h64, False),
        ):
            b_EOR = self.tensors[name]
            passed_NR, grad_EOR = factors.factor_backward(
                source, self.plan, b_EOR, self.u_NR, tile, alpha=0.5, gather=gather
            )
            passed64 = 0.5 * self.grouped(source64, b_EOR.mT)
            grad64 = torch.einsum("ne,no,nr->eor", chosen, source64, u64)
            found |= {
                f"{name} passed": (passed_NR[: self.valid], passed64),
                f"{name} gradient": (grad_EOR, grad64),
            }
        return found

    def _run_dh(self, tile: Tile) -> dict[str, tuple[Tensor, Tensor]]:
        found = dh.hidden_gradients(
            self.dout_TD, self.tiles.rows(tile.m), self.tensors["w2"], self.tensors["weights"],
            self.h_NH, SILU, tile, dh=True, wa=True, partial=True,
        )  # fmt: skip
        da64 = self.grouped(self.dout64[self.token_n], self.tensors["w2"].mT)
        leaf = self.h64.clone().requires_grad_()
        act64 = reference.gated_activation(leaf, SILU).double()
        (dh64,) = torch.autograd.grad(act64, leaf, da64 * self.weight_n1)
        act64, n = act64.detach(), slice(self.valid)
        return {
            "dh": (found.dh_NH[n], dh64),
            "wa": (found.wa_NF[n], self.weight_n1 * act64),
            "partial": (found.partial_NC[n].sum(1), (da64 * act64).sum(1)),
        }


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "tile", "dtype"), _all_tiles(), ids=str)
def test_gpu_every_tile(
    op: str, tile: Tile, dtype: torch.dtype, poisoned_memory: None, monkeypatch
) -> None:
    data = Rows(Case(900, 3, 7, 272, 136, rank=16), dtype)
    device = device_of(data.dout_TD)
    if tile.shared_bytes(dtype.itemsize) > device.shared_memory:
        pytest.fail(f"{tile} does not fit {device}")
    ran = []
    if op in SPECIALISED:
        module, name = SPECIALISED[op]
        specialised = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **k: ran.append(1) or specialised(*a, **k))
    limit = FP32 if dtype == torch.float32 else 5e-3
    for result, (ours, expected) in data.run(op, tile).items():
        assert_close(ours, expected, limit, result)
    assert bool(ran) == (tile.hopper and device.capability == (9, 0))
