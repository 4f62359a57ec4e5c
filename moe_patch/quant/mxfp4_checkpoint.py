"""Use the experts of MXFP4 checkpoints (gpt-oss) as they are stored, while transformers loads them.

For a parameter ``P``, a checkpoint has ``P_blocks``, uint8 [E, out, in / 32, 16], and ``P_scales``,
uint8 [E, out, in / 32]. During loading they are parameters of these names, so that transformers
places them like all others. Afterwards they are combined into one packed parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError
from moe_patch.formats import mxfp4
from moe_patch.formats.packed import PackedWeight
from moe_patch.formats.tensor import QuantTensor, parameter
from moe_patch.patching.discover import FoundBlock
from moe_patch.quant import state
from moe_patch.quant.surgery import Projection, block_projections, expert_projections, put

Expected = list[tuple[Projection, torch.dtype, tuple[str, ...]]]


def expect(model: nn.Module) -> Expected:
    """Replace every projection by parameters in stored form, on the meta device.

    Raises:
        UnsupportedModelError: no MoE block, or experts that cannot be stored in MXFP4, by name.
    """
    found = [
        (one, one.stored.dtype, tuple(one.module._parameters)) for one in expert_projections(model)
    ]
    for one, *_ in found:
        E, out, inputs = _sizes(one)
        blocks = torch.empty(E, out, inputs // mxfp4.BLOCK, 16, dtype=torch.uint8, device="meta")
        scales = torch.empty(blocks.shape[:3], dtype=torch.uint8, device="meta")
        del one.module._parameters[one.name]
        for suffix, value in (("blocks", blocks), ("scales", scales)):
            stored = nn.Parameter(value, requires_grad=False)
            one.module.register_parameter(f"{one.name}_{suffix}", stored)
        # Otherwise transformers would look for the original parameter to initialise it.
        one.module._is_hf_initialized = True
    return found


def collect(expected: Expected) -> None:
    """Combine the loaded parts of each projection into one packed parameter.

    Raises:
        UnsupportedModelError: the checkpoint lacks a part.
    """
    for one, dtype, order in expected:
        blocks, scales = (_loaded(one, suffix) for suffix in ("blocks", "scales"))
        weight = PackedWeight("mxfp4", blocks.flatten(2), (scales,), dtype, one.transposed)
        state.put_back(one.module, one.name, parameter(QuantTensor(weight)), order)
        state.watch(one.module)


def fill_block(block: FoundBlock) -> None:
    """Replace the experts of one block by random ones in MXFP4, with a deviation of 0.02.

    Raises:
        UnsupportedModelError: experts that cannot be stored in MXFP4, by name.
    """
    for one in block_projections(block):
        E, out, inputs = _sizes(one)
        device, dtype = one.stored.device, one.stored.dtype
        packed = torch.randint(256, (E, out, inputs // 2), dtype=torch.uint8, device=device)
        # The values of e2m1 deviate by 2.9 from 0; a scale of 120 is 2^-7.
        scales = packed.new_full((E, out, inputs // mxfp4.BLOCK), 120)
        put([[one]], PackedWeight("mxfp4", packed, (scales,), dtype, one.transposed))


def _sizes(one: Projection) -> tuple[int, int, int]:
    """Return the experts, outputs and inputs of a projection."""
    E, rows, columns = one.stored.shape
    out, inputs = (columns, rows) if one.transposed else (rows, columns)
    if inputs % mxfp4.BLOCK:
        raise UnsupportedModelError(
            f"{one.where}: mxfp4 needs inputs of a multiple of {mxfp4.BLOCK}, found {inputs}"
        )
    return E, out, inputs


def _loaded(one: Projection, suffix: str) -> Tensor:
    stored = one.module._parameters.pop(f"{one.name}_{suffix}")
    # transformers marks what it has loaded; anything else is uninitialised memory.
    if not hasattr(stored, "_is_hf_initialized"):
        raise UnsupportedModelError(
            f"{one.where}: the checkpoint has no {one.where}_{suffix}, which mxfp4 experts need"
        )
    return stored.data
