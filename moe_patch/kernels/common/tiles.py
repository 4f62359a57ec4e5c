"""Tile sizes of the grouped GEMMs: a table and pure functions. Nothing is tuned at run time.

A tile depends on the device's capability and shared memory, the dtype of the operands, and the mean
number of rows per expert. It never depends on the device's name. In scripts/tiles,
``tune_tiles.py`` searches candidates offline, and ``compile_tiles.py`` checks that every entry
compiles and fits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

OPS = ("up", "down", "dh", "dx", "dw2", "dw13", "thin", "thin_dw", "factor_bwd")
BUCKETS = ("few", "some", "many")  # see rows_bucket


@dataclass(frozen=True)
class Tile:
    """Tile of one grouped GEMM.

    Attributes:
        m, n, k: rows, columns and depth of one step. In "up" with a gate, n counts gate and up
            columns together. In weight gradients, m and n are rows and columns of the gradient, and
            k is the number of token rows per step.
        warps: warps per program.
        stages: depth of the load pipeline.
        persistent: launch one program per multiprocessor, each of which loops over tiles.
        descriptors: load weights by tensor descriptors if their storage allows (sm90 and up).
        flatten: fuse the loop over tiles with the loop over depth.
        hopper: use the warp-specialised Hopper kernel of the op if the operands allow.
        chunks: column chunks of an epilogue that would otherwise spill: 1, 2 or 4.
        group: row tiles that share a pass over the columns (for the L2 cache).
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    persistent: bool = False
    descriptors: bool = False
    flatten: bool = False
    group: int = 8
    chunks: int = 1
    hopper: bool = False

    def shared_bytes(self, itemsize: int) -> int:
        """Return the shared memory of the load pipeline, a lower bound of the kernel's use."""
        return self.stages * self.k * (self.m + self.n) * itemsize


def rows_bucket(rows: int, num_experts: int) -> str:
    """Return the size class by mean rows per expert: "few" (decode), "some" or "many"."""
    mean = rows / max(num_experts, 1)
    return "few" if mean <= 12 else "some" if mean <= 64 else "many"


# Under the interpreter only the arithmetic matters; small tiles keep it fast.
_INTERPRETER = {op: (Tile(16, 32, 16, 1, 1),) for op in OPS}

# fp32 runs on CUDA cores, because TF32 is less precise. Registers limit the tile.
_FP32 = {op: (Tile(64, 64, 16, 4, 2, chunks=2),) for op in OPS} | {
    "dw2": (Tile(64, 64, 16, 4, 1),),
    "dw13": (Tile(64, 64, 16, 4, 1),),
    "thin": (Tile(64, 16, 32, 4, 2),),
    "thin_dw": (Tile(16, 64, 32, 4, 2),),
    "factor_bwd": (Tile(16, 64, 32, 4, 2),),
}

# Ampere, Ada and consumer Blackwell: mma.sync, 99 or 163 KB.
_SM80 = {
    "many": {
        "up": (Tile(128, 128, 64, 8, 3), Tile(128, 128, 32, 8, 3)),
        "down": (Tile(128, 128, 64, 8, 3), Tile(128, 128, 32, 8, 3)),
        "dx": (Tile(128, 128, 64, 8, 3), Tile(128, 128, 32, 8, 3)),
        "dh": (Tile(128, 64, 64, 8, 3),),
        "dw2": (Tile(128, 128, 32, 8, 4), Tile(128, 128, 32, 8, 3)),
        "dw13": (Tile(128, 128, 32, 8, 4), Tile(128, 128, 32, 8, 3)),
    },
    "some": {
        "up": (Tile(64, 128, 64, 4, 3),),
        "down": (Tile(64, 128, 64, 4, 3),),
        "dx": (Tile(64, 128, 64, 4, 3),),
        "dh": (Tile(64, 64, 64, 4, 3),),
        "dw2": (Tile(128, 128, 32, 8, 3),),
        "dw13": (Tile(128, 128, 32, 8, 3),),
    },
    "few": {
        "up": (Tile(16, 64, 128, 4, 3),),
        "down": (Tile(16, 64, 128, 4, 3),),
        "dx": (Tile(16, 64, 128, 4, 3),),
        "dh": (Tile(16, 64, 128, 4, 3),),
        "dw2": (Tile(64, 128, 16, 4, 3),),
        "dw13": (Tile(64, 128, 16, 4, 3),),
    },
}
_THIN = {
    "thin": (Tile(128, 16, 64, 4, 4), Tile(64, 16, 64, 4, 3)),
    "thin_dw": (Tile(16, 128, 64, 4, 4), Tile(16, 128, 32, 4, 3)),
    "factor_bwd": (Tile(16, 128, 64, 4, 4), Tile(16, 128, 32, 4, 3)),
}
_THIN_SM90 = _THIN | {
    "thin_dw": (Tile(16, 128, 128, 4, 3),),
    "factor_bwd": (Tile(16, 512, 64, 8, 3),),
}

_SM90_ROWS = Tile(128, 256, 64, 8, 3, persistent=True, descriptors=True, flatten=True, hopper=True)
# Hopper and data-centre Blackwell: wgmma or tcgen05, 227 KB, tensor descriptors. "many" was tuned
# with tune_tiles.py on an H100, for the sizes of five models and 4096 to 32768 tokens.
_SM90 = {
    "many": {
        "up": (Tile(128, 256, 64, 8, 4, descriptors=True, hopper=True),),
        "down": (_SM90_ROWS,),
        "dx": (replace(_SM90_ROWS, hopper=False),),
        "dh": (Tile(128, 128, 64, 8, 4, descriptors=True, chunks=2, hopper=True),),
        "dw2": (Tile(128, 256, 32, 8, 8, group=4, hopper=True),),
        "dw13": (Tile(256, 128, 32, 8, 6, hopper=True),),
    },
    "some": {
        "up": (Tile(64, 256, 64, 4, 3, persistent=True, descriptors=True),),
        "down": (Tile(64, 256, 64, 4, 3, persistent=True, descriptors=True),),
        "dx": (Tile(64, 256, 64, 4, 3, persistent=True, descriptors=True),),
        "dh": (Tile(64, 128, 64, 4, 3, descriptors=True, chunks=4),),
        "dw2": (Tile(128, 256, 32, 8, 8, group=4, hopper=True),),
        "dw13": (Tile(256, 128, 32, 8, 6, hopper=True),),
    },
    "few": {
        "up": (Tile(16, 64, 128, 4, 4),),
        "down": (Tile(16, 64, 128, 4, 4),),
        "dx": (Tile(16, 64, 128, 4, 4),),
        "dh": (Tile(16, 64, 128, 4, 4),),
        "dw2": (Tile(64, 128, 16, 4, 4),),
        "dw13": (Tile(64, 128, 16, 4, 4),),
    },
}


def candidates(
    op: str, bucket: str, dtype: torch.dtype, capability: tuple[int, int]
) -> tuple[Tile, ...]:
    """Return the tiles of an op in order of preference, not yet checked against shared memory.

    Args:
        op: one of :data:`OPS`.
        bucket: size class from :func:`rows_bucket`.
        dtype: dtype of the operands: bf16, fp16 or fp32.
        capability: compute capability of the device; (0, 0) for the interpreter.
    """
    if op not in OPS:
        raise ValueError(f"op is {op!r}; accepted: {', '.join(OPS)}")
    if capability == (0, 0):
        return _INTERPRETER[op]
    if dtype == torch.float32:
        return _FP32[op]
    if op in _THIN:
        return (_THIN_SM90 if capability[0] in (9, 10) else _THIN)[op]
    if capability[0] == 9:
        return _SM90[bucket][op]
    if capability[0] == 10:
        chunks = 4 if op == "dh" and bucket != "few" else 1
        return tuple(replace(t, hopper=False, chunks=chunks) for t in _SM90[bucket][op])
    return _SM80[bucket][op]


@functools.cache
def resized(tile: Tile, **changes: int | bool) -> Tile:
    """Return the tile with some fields changed."""
    return replace(tile, **changes)  # type: ignore[arg-type]


@functools.cache
def pick_tile(
    op: str, bucket: str, dtype: torch.dtype, capability: tuple[int, int], shared_memory: int
) -> Tile:
    """Return the first candidate that fits into the device's shared memory.

    Args:
        op, bucket, dtype, capability: see :func:`candidates`.
        shared_memory: bytes of shared memory that one block can opt in to.

    Raises:
        ValueError: no candidate fits.
    """
    tried = candidates(op, bucket, dtype, capability)
    for tile in tried:
        if tile.shared_bytes(dtype.itemsize) <= shared_memory:
            return tile
    raise ValueError(
        f"no {op} tile for {dtype} fits {shared_memory} bytes of shared memory; tried {tried}"
    )
