"""Search for tiles offline: time the candidates of each hot GEMM and cuBLAS's batched product.

This never runs inside training: winners are copied by hand into
``moe_patch/kernels/common/tiles.py``. Candidates are first compiled in parallel, without the GPU,
and then timed one after the other.

    python scripts/tiles/tune_tiles.py --shape qwen3_30b --tokens 32768 --op up down
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))
from compile_tiles import HOT, Operands, compiling_for

from moe_patch.kernels.common.tiles import Tile
from moe_patch.types import Glu

# name: (D, F, E, K)
SHAPES = {
    "qwen3_30b": (2048, 768, 128, 8),
    "olmoe": (2048, 1024, 64, 8),
    "mixtral": (4096, 14336, 8, 2),
    "glm45_air": (4096, 1408, 128, 8),
    "dsv3_e64": (7168, 2048, 64, 8),
}


def search_space(op: str) -> Iterator[Tile]:
    """Yield Hopper tiles worth timing for an op: the specialised kernel's, then the plain one's."""
    if op in ("dw2", "dw13"):
        for group in (1, 4, 8, 16):
            yield Tile(128, 256, 32, 8, 8, hopper=True, group=group)
        for m, n, k, stages in [(128, 256, 32, 8), (128, 256, 64, 4), (256, 128, 32, 6)]:
            yield Tile(m, n, k, 8, stages)
    elif op == "dh":
        for group in (4, 8, 16):
            yield Tile(128, 128, 64, 8, 4, descriptors=True, hopper=True, group=group)
        for n, warps, chunks, stages in [
            (128, 8, 2, 4),
            (128, 8, 4, 3),
            (256, 8, 4, 3),
            (128, 4, 4, 3),
        ]:
            yield Tile(128, n, 64, warps, stages, descriptors=True, chunks=chunks)
    else:
        for group in (4, 8, 16):
            yield Tile(128, 256, 64, 8, 3, descriptors=True, hopper=True, group=group)
        for n, stages in [(256, 3), (256, 4), (128, 4)]:
            plain = Tile(128, n, 64, 8, stages, descriptors=True)
            yield plain
            yield replace(plain, persistent=True)
            if op != "up":
                yield replace(plain, persistent=True, flatten=True)


def compile_one(job: tuple[str, str, Tile]) -> str | None:
    """Compile one candidate into Triton's cache; return an error message or None."""
    op, shape, tile = job
    with compiling_for((9, 0), 227 * 1024):
        try:
            Operands(SHAPES[shape], 4096, torch.bfloat16, "meta", Glu("silu")).launch(op, tile)
        except (triton.CompilationError, RuntimeError) as error:
            return f"{op} {tile}: {str(error)[-200:]}"
    return None


def milliseconds(run) -> float:
    """Return the median device time with a cold L2."""
    return triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median")


def ceiling(operands: Operands, op: str) -> float:
    """Return TFLOP/s of cuBLAS's batched product with the same work, equal rows per expert."""
    D, F, E, K = operands.shape
    n = operands.T * K // E
    H = F if op in ("down", "dh", "dw2") else 2 * F
    sizes = {
        "up": (n, D, H),
        "down": (n, F, D),
        "dh": (n, D, F),
        "dx": (n, H, D),
        "dw2": (D, n, F),
        "dw13": (H, n, D),
    }
    m, k, o = sizes[op]
    left = torch.randn(E, m, k, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(E, o, k, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    return operands.flops(op) / milliseconds(lambda: torch.bmm(left, right)) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["qwen3_30b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[32768])
    parser.add_argument("--op", nargs="+", choices=HOT, default=list(HOT))
    parser.add_argument("--jobs", type=int, default=multiprocessing.cpu_count())
    options = parser.parse_args()
    jobs = [
        (op, shape, tile)
        for shape in options.shape
        for op in options.op
        for tile in search_space(op)
    ]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        for complaint in pool.imap_unordered(compile_one, jobs):
            if complaint:
                print(complaint, flush=True)
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    for shape in options.shape:
        for T in options.tokens:
            operands = Operands(SHAPES[shape], T, torch.bfloat16, "cuda", Glu("silu"))
            for op in options.op:
                print(
                    json.dumps(
                        {"shape": shape, "T": T, "op": op, "bmm": round(ceiling(operands, op))}
                    )
                )
                for tile in search_space(op):
                    try:
                        ms = milliseconds(partial(operands.launch, op, tile))
                    except triton.runtime.errors.OutOfResources as error:
                        print(op, tile, error)
                        continue
                    rate = round(operands.flops(op) / ms / 1e9)
                    print(f"  {rate:5} TFLOP/s {ms:.3f} ms {op} {tile}", flush=True)


if __name__ == "__main__":
    main()
