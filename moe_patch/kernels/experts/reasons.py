"""Reasons, for the report, why a block cannot use the best kernels or tiles of its device."""

from __future__ import annotations

import torch

from moe_patch.formats.packed import STORAGES
from moe_patch.kernels.common.tiles import BUCKETS, OPS, Tile, candidates
from moe_patch.kernels.common.versions import gates
from moe_patch.types import Glu


def portable_reason(
    capability: tuple[int, int],
    dtype: torch.dtype,
    shape: tuple[int, int],
    glu: Glu,
    *,
    transposed: bool,
) -> str:
    """Return which products use the portable kernels on a Hopper card and why; "" if none.

    The alignment of a call's operands, which also matters, is not checked here.

    Args:
        capability: compute capability of the device; "" is returned for any other than (9, 0).
        dtype: dtype of the products.
        shape: (H, D) of the up projection.
        glu: the activation.
        transposed: the weights are stored as [E, in, out].
    """
    if capability != (9, 0):
        return ""
    if dtype.itemsize != 2:
        return f"portable kernels: those for Hopper take bf16 and fp16, found {dtype}"
    H, D = shape
    F = H // 2 if glu.gated else H
    if not gates().hopper:
        return gates().reason
    if D % 8 or F % 8:
        return (
            f"portable kernels: those for Hopper take sizes of multiples of 8, found hidden size "
            f"{D}, expert width {F}"
        )
    if transposed:
        return (
            "portable kernels for up and dh: those for Hopper take weights stored "
            "[experts, out, in]"
        )
    if not glu.gated or glu.interleaved:
        return "portable kernels for up and dh: those for Hopper take gate and up side by side"
    return ""


def decoding_reason(capability: tuple[int, int], storage: str) -> str:
    """Return why packed weights are never decoded in front of their product on Hopper, or "".

    Args:
        capability: compute capability of the device.
        storage: storage of the weights; "" if they are plain.
    """
    if capability != (9, 0) or storage not in STORAGES:
        return ""
    found = gates()
    return found.reason if found.hopper and not found.in_front else ""


def smaller_tiles_reason(
    dtype: torch.dtype, capability: tuple[int, int], shared_memory: int
) -> str:
    """Return which products have only a smaller tile than their first choice, or none; "" if none.

    Args:
        dtype: dtype of the products.
        capability, shared_memory: properties of the device, as for
            :func:`moe_patch.kernels.common.tiles.pick_tile`.
    """

    def fits(tile: Tile) -> bool:
        return tile.shared_bytes(dtype.itemsize) <= shared_memory

    smaller, none = [], []
    for op in OPS:
        tables = [candidates(op, bucket, dtype, capability) for bucket in BUCKETS]
        if not all(any(map(fits, table)) for table in tables):
            none.append(op)
        elif not all(fits(table[0]) for table in tables):
            smaller.append(op)
    found = f"in {shared_memory} bytes of shared memory"
    parts = [f"smaller tiles for {', '.join(smaller)} {found}"] if smaller else []
    parts += [f"no tile for {', '.join(none)} {found}; use backend='torch'"] if none else []
    return "; ".join(parts)
