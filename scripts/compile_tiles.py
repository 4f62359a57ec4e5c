"""Compile every kernel for every tile of the table, without a GPU, and check what comes out.

Asserts for each that it compiles, that its shared memory fits the smallest device of its capability
and that the hot GEMMs spill no registers. The package's own launchers run over meta tensors under a
driver that compiles for a chosen target and launches nothing.

    python scripts/compile_tiles.py                      the whole table, all capabilities
    python scripts/compile_tiles.py --capability 9.0 --default      default tiles of one capability
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel

from moe_patch.kernels import dh, dh_hopper, dw, rows, up
from moe_patch.kernels.device import Device
from moe_patch.kernels.launch import RowTiles
from moe_patch.kernels.plan import build_plan
from moe_patch.kernels.tiles import OPS, Tile, candidates
from moe_patch.types import Glu

KIB = 1024
SHARED_MEMORY = {
    (8, 0): 163 * KIB,
    (8, 6): 99 * KIB,
    (8, 9): 99 * KIB,
    (9, 0): 227 * KIB,
    (10, 0): 227 * KIB,
    (12, 0): 99 * KIB,
}
# Some registers saved once a tile, outside the loop over depth, are no spill worth a smaller tile.
STACK_BYTES = 64
HOT = ("up", "down", "dh", "dx", "dw2", "dw13")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Usage(NamedTuple):
    """What a compiled kernel takes of the machine."""

    name: str
    registers: int
    stack: int
    shared: int


class _NoLaunch:
    def __init__(self, src: object, metadata: object) -> None:
        pass

    def __call__(self, *args: object) -> None:
        pass


class _Utilities:
    @staticmethod
    def get_device_properties(device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30}

    @staticmethod
    def load_binary(
        name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024


@dataclass
class CompileOnly:
    """A Triton driver that compiles for ``target`` and launches nothing."""

    target: GPUTarget
    launcher_cls = _NoLaunch
    utils = _Utilities

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextlib.contextmanager
def compiling_for(capability: tuple[int, int], shared_memory: int) -> Iterator[list[Usage]]:
    """Kernels launched inside are compiled for ``capability`` only; yields what each takes."""
    usages: list[Usage] = []
    device = Device(capability, shared_memory, 132)
    initialise = CompiledKernel._init_handles

    def record(kernel: CompiledKernel) -> None:
        if kernel.module is None:
            usages.append(usage_of(kernel))
        initialise(kernel)

    triton.runtime.driver.set_active(
        CompileOnly(GPUTarget("cuda", capability[0] * 10 + capability[1], 32))
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("moe_patch.kernels.device.INTERPRETER", device))
        for module in (up, dh, dh_hopper):
            stack.enter_context(
                mock.patch.object(module, "approximate", lambda t: t.dtype.itemsize == 2)
            )
        stack.enter_context(mock.patch.object(CompiledKernel, "_init_handles", record))
        yield usages


def usage_of(kernel: CompiledKernel) -> Usage:
    """Registers and stack from the binary, shared memory from Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert found, report
    return Usage(kernel.name, int(found[1]), int(found[2]), kernel.metadata.shared)


class Operands:
    """The tensors of one experts call, and a launch of each op over them."""

    def __init__(
        self, shape: tuple[int, int, int, int], T: int, dtype: torch.dtype, device: str, glu: Glu
    ) -> None:
        D, F, E, K = shape
        H, N, rank = 2 * F if glu.gated else F, T * K, 16

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, device=device, dtype=dtype)

        self.glu, self.shape, self.T = glu, shape, T
        ids_TK = torch.empty(T, K, device=device, dtype=torch.int64)
        if device != "meta":
            ids_TK = torch.rand(T, E, device=device).topk(K, dim=1).indices
        self.plan = build_plan(ids_TK, E)
        self.tiles = RowTiles(self.plan)
        self.x_TD, self.h_NH, self.a_NF, self.u_NR = (
            random(T, D),
            random(N, H),
            random(N, F),
            random(N, rank),
        )
        self.w13, self.w2, self.factor = random(E, H, D), random(E, D, F), random(E, rank, D)
        self.weights_TK = torch.rand(T, K, device=device)

    def launch(self, op: str, tile: Tile) -> None:
        """One launch of ``op`` with a forced tile."""
        x_TD, h_NH, a_NF, plan = self.x_TD, self.h_NH, self.a_NF, self.plan
        if op == "up":
            up.up(x_TD, self.tiles.rows(tile.m), self.w13, None, self.glu, tile)
        elif op == "down":
            rows.grouped_linear(a_NF, self.tiles.rows(tile.m), self.w2, None, tile)
        elif op == "dx":
            rows.grouped_linear(h_NH, self.tiles.rows(tile.m), self.w13.transpose(1, 2), None, tile)
        elif op == "dh":
            row_tiles = self.tiles.rows(tile.m)
            dh.hidden_gradients(
                x_TD,
                row_tiles,
                self.w2,
                self.weights_TK,
                h_NH,
                self.glu,
                tile,
                dh=True,
                wa=True,
                partial=True,
            )
        elif op == "dw13":
            dw.outer_sum(h_NH, x_TD, plan, self.w13, tile, gather_right=True)
        elif op == "dw2":
            dw.outer_sum(x_TD, a_NF, plan, self.w2, tile, gather_left=True)
        elif op == "thin":
            rows.grouped_linear(x_TD, self.tiles.rows(tile.m), self.factor, None, tile, gather=True)
        else:
            dw.outer_sum(self.u_NR, x_TD, plan, self.factor, tile, gather_right=True)

    def flops(self, op: str) -> int:
        """Floating-point operations of one launch of a hot op."""
        D, F, E, K = self.shape
        return 2 * self.T * K * D * F * (2 if op in ("up", "dx", "dw13") and self.glu.gated else 1)


def check(
    capability: tuple[int, int], dtype_name: str, op: str, bucket: str, default: bool
) -> list[str]:
    """Compile one cell of the table; returns the complaints."""
    dtype, limit, complaints = DTYPES[dtype_name], SHARED_MEMORY[capability], []
    tried = candidates(op, bucket, dtype, capability)
    fitting = [tile for tile in tried if tile.shared_bytes(dtype.itemsize) <= limit]
    if not fitting:
        return [f"{capability} {op} {bucket} {dtype_name}: no tile fits {limit} bytes"]
    for tile in fitting[:1] if default else fitting:
        with compiling_for(capability, limit) as usages:
            Operands((2048, 768, 128, 8), 4096, dtype, "meta", Glu("silu")).launch(op, tile)
        for usage in usages:
            if "plan" in usage.name or not usage.name.startswith(
                ("_up", "_rows", "_dh", "_dw", "_specialised")
            ):
                continue
            print(
                f"{capability[0]}.{capability[1]} {dtype_name} {bucket:5} {op:8} {tile} {usage}",
                flush=True,
            )
            if usage.shared > limit:
                complaints.append(f"{capability} {tile}: {usage} takes more than {limit} bytes")
            if op in HOT and usage.stack > STACK_BYTES:
                complaints.append(f"{capability} {tile}: {usage} spills")
    return complaints


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", action="append", help="such as 9.0; default: all")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: bf16 and fp32")
    parser.add_argument("--op", action="append", choices=OPS)
    parser.add_argument("--bucket", action="append", choices=("few", "some", "many"))
    parser.add_argument(
        "--default", action="store_true", help="only the tile that pick_tile takes first"
    )
    options = parser.parse_args()
    chosen = [tuple(map(int, text.split("."))) for text in options.capability or ()] or list(
        SHARED_MEMORY
    )
    complaints, seen = [], set()
    for capability in chosen:
        for dtype in options.dtype or ("bf16", "fp32"):
            for op in options.op or OPS:
                for bucket in options.bucket or ("many", "some", "few"):
                    cell = (capability, dtype, candidates(op, bucket, DTYPES[dtype], capability))
                    if (op, cell) not in seen:
                        seen.add((op, cell))
                        complaints += check(capability, dtype, op, bucket, options.default)
    print("\n".join(complaints) or "all tiles compile, fit and do not spill")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
