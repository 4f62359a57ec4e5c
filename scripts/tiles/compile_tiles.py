"""Compile every kernel for every tile of the table, without a GPU, and check the results.

Each kernel must compile, and its shared memory must fit the smallest device of its capability. Hot
GEMMs must not spill registers, and kernels below 9.0 must not use tensor descriptors. No register
may be written while a matrix instruction may read it. The package's own launchers run over meta
tensors, under a driver that compiles for a chosen target and launches nothing.

    python scripts/tiles/compile_tiles.py                      the whole table, all capabilities
    python scripts/tiles/compile_tiles.py --capability 9.0 --default      one's defaults
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator

import torch
from compile_only import Usage, compiling_for
from compile_others import launch_fp8, launch_others, launch_packed

from moe_patch.kernels.common.tiles import OPS, Tile, candidates
from moe_patch.kernels.experts import dh, dw, factors, linear, up
from moe_patch.kernels.plan import plan
from moe_patch.kernels.plan.row_tiles import RowTiles
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
# A few registers saved once per tile, outside the depth loop, do not justify a smaller tile.
STACK_BYTES = 64
# Kernels that use no tile of the table.
UNTILED = {"packed": launch_packed, "others": launch_others, "fp8": launch_fp8}
LORA = ("up", "down", "dx", "dh")
HOT = ("up", "down", "dh", "dx", "dw2", "dw13")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Operands:
    """The tensors of one experts call, and a launch of each op over them."""

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        T: int,
        dtype: torch.dtype,
        device: str,
        glu: Glu,
        *,
        lora: bool = False,
    ) -> None:
        D, F, E, K = shape
        H, N, rank = 2 * F if glu.gated else F, T * K, 16

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, device=device, dtype=dtype)

        self.glu, self.shape, self.T = glu, shape, T
        ids_TK = torch.empty(T, K, device=device, dtype=torch.int64)
        if device != "meta":
            ids_TK = torch.rand(T, E, device=device).topk(K, dim=1).indices
        self.plan = plan.build_plan(ids_TK, E)
        self.tiles = RowTiles(self.plan)
        self.x_TD, self.h_NH = random(T, D), random(N, H)
        self.a_NF, self.u_NR = random(N, F), random(N, rank)
        self.w13, self.w2, self.factor = random(E, H, D), random(E, D, F), random(E, rank, D)
        self.weights_TK = torch.rand(T, K, device=device)
        # The low-rank term added to each product, by op.
        self.low_rank = {}
        if lora:
            outs = {"up": H, "down": D, "dx": D, "dh": F}
            self.low_rank = {op: (self.u_NR, random(E, O, rank)) for op, O in outs.items()}
            self.low_rank["dh"] = self.u_NR, random(E, rank, F)

    def launch(self, op: str, tile: Tile) -> None:
        """Launch ``op`` once with a forced tile."""
        low_rank = self.low_rank.get(op)
        x_TD, h_NH, a_NF = self.x_TD, self.h_NH, self.a_NF
        if op == "up":
            up.up(x_TD, self.tiles.rows(tile.m), self.w13, None, self.glu, tile, low_rank=low_rank)
        elif op == "down":
            linear.grouped_linear(
                a_NF, self.tiles.rows(tile.m), self.w2, None, tile, low_rank=low_rank
            )
        elif op == "dx":
            w_EDH = self.w13.transpose(1, 2)
            linear.grouped_linear(
                h_NH, self.tiles.rows(tile.m), w_EDH, None, tile, low_rank=low_rank
            )
        elif op == "dh":
            row_tiles = self.tiles.rows(tile.m)
            dh.hidden_gradients(
                x_TD, row_tiles, self.w2, self.weights_TK, h_NH, self.glu, tile,
                low_rank=low_rank, dh=True, wa=True, partial=True,
            )  # fmt: skip
        elif op == "dw13":
            dw.outer_sum(h_NH, x_TD, self.plan, self.w13, tile, gather_right=True)
        elif op == "dw2":
            dw.outer_sum(x_TD, a_NF, self.plan, self.w2, tile, gather_left=True)
        elif op == "thin":
            linear.grouped_linear(
                x_TD, self.tiles.rows(tile.m), self.factor, None, tile, gather=True
            )
        elif op == "thin_dw":
            dw.outer_sum(self.u_NR, x_TD, self.plan, self.factor, tile, gather_right=True)
        else:
            for source, gather in ((x_TD, True), (h_NH, False)):
                factor = self.factor.new_empty(self.factor.shape[0], source.shape[1], 16)
                factors.factor_backward(
                    source, self.plan, factor, self.u_NR, tile, alpha=1.0, gather=gather
                )

    def flops(self, op: str) -> int:
        """Return the floating-point operations of one launch of a hot op."""
        D, F, E, K = self.shape
        return 2 * self.T * K * D * F * (2 if op in ("up", "dx", "dw13") and self.glu.gated else 1)


def check(
    capability: tuple[int, int],
    dtype_name: str,
    op: str,
    bucket: str,
    lora: bool,
    *,
    default: bool,
) -> Iterator[tuple[str, Usage | None, str]]:
    """Compile one cell of the table; yield its name, its usage, and a complaint or ""."""
    dtype, limit = DTYPES[dtype_name], SHARED_MEMORY[capability]
    cell = (
        f"{capability[0]}.{capability[1]} {dtype_name} {bucket:5} {op:8}{' lora' if lora else ''}"
    )
    if op in UNTILED:
        tiles: list[Tile | None] = [None]
    else:
        tried = candidates(op, bucket, dtype, capability)
        tiles = [tile for tile in tried if tile.shared_bytes(dtype.itemsize) <= limit]
        tiles = tiles[:1] if default else tiles
    if not tiles:
        yield cell, None, f"no tile fits {limit} bytes"
    for tile in tiles:
        with compiling_for(capability, limit) as usages:
            if tile is None:
                UNTILED[op](dtype)
            else:
                operands = Operands(
                    (2048, 768, 128, 8), 4096, dtype, "meta", Glu("silu"), lora=lora
                )
                operands.tiles.rows(tile.m)
                usages.clear()
                operands.launch(op, tile)
        for usage in usages:
            yield f"{cell} {short(tile)}", usage, complaint(usage, capability, op)


def complaint(usage: Usage, capability: tuple[int, int], op: str) -> str:
    """Say what is wrong with a kernel, or return ""."""
    if usage.shared > SHARED_MEMORY[capability]:
        return f"more than {SHARED_MEMORY[capability]} bytes of shared memory"
    if usage.descriptors and capability < (9, 0):
        return "tensor descriptors below 9.0"
    if usage.overwritten:
        return f"overwrites what a product may still read: {usage.overwritten[0]}"
    if op in HOT and usage.stack > STACK_BYTES:
        return "spills"
    return ""


def short(tile: Tile | None) -> str:
    """Describe a tile in a few characters."""
    if tile is None:
        return ""
    flags = ("persistent", "descriptors", "flatten", "hopper")
    named = [flag for flag in flags if getattr(tile, flag)]
    size = f"{tile.m}x{tile.n}x{tile.k} warps={tile.warps} stages={tile.stages}"
    return " ".join([size, f"chunks={tile.chunks}", *named])


def cells(
    capabilities: list[tuple[int, int]], options: argparse.Namespace
) -> Iterator[tuple[tuple[int, int], str, str, str, bool]]:
    """Yield (capability, dtype, op, bucket, low-rank term or not), each list of tiles once."""
    seen = set()
    dtypes, ops = options.dtype or ("bf16", "fp32"), options.op or (*OPS, *UNTILED)
    buckets = options.bucket or ("many", "some", "few")
    for capability, dtype, op, bucket in itertools.product(capabilities, dtypes, ops, buckets):
        tiles = () if op in UNTILED else candidates(op, bucket, DTYPES[dtype], capability)
        if (capability, dtype, op, tiles) not in seen:
            seen.add((capability, dtype, op, tiles))
            yield capability, dtype, op, bucket, False
            if op in LORA and not options.no_lora:
                yield capability, dtype, op, bucket, True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", action="append", help="such as 9.0; default: all")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: bf16 and fp32")
    parser.add_argument("--op", action="append", choices=(*OPS, *UNTILED))
    parser.add_argument("--bucket", action="append", choices=("few", "some", "many"))
    parser.add_argument(
        "--default", action="store_true", help="only the tile that pick_tile takes first"
    )
    parser.add_argument("--no-lora", action="store_true", help="leave low-rank terms out")
    options = parser.parse_args()
    chosen = [tuple(map(int, text.split("."))) for text in options.capability or ()] or list(
        SHARED_MEMORY
    )
    complaints: list[str] = []
    taken: dict[tuple[int, int], list[Usage]] = {capability: [] for capability in chosen}
    for cell in cells(chosen, options):
        for what, usage, wrong in check(*cell, default=options.default):
            print(what, usage or "", wrong, flush=True)
            taken[cell[0]] += [usage] if usage else []
            complaints += [f"{what} {usage}: {wrong}"] if wrong else []
    for (major, minor), usages in taken.items():
        shared = max((usage.shared for usage in usages), default=0)
        stack = max((usage.stack for usage in usages), default=0)
        print(f"{major}.{minor}: {len(usages)} kernels, shared <= {shared}, stack <= {stack} bytes")
    print("\n".join(complaints) or "all tiles compile, fit and do not spill")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
