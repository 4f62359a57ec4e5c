"""Doge's block on the product-key kernels, at 4096 and 65536 experts, where ties are certain."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from moe_patch import patch_model, patch_report
from tests.support.numerics import assert_close
from tests.support.parity import run_block


@pytest.mark.parametrize("P", [64, 256])
def test_doge_with_certain_ties_is_transformers_with_ties_broken(P: int, device: str) -> None:
    """Forward and every gradient agree at 4096 and 65536 experts.

    The logits are small integers. transformers' block runs in fp64 on logits minus the id, scaled
    below any difference between sums. Its choice is then the lower id too.
    """
    doge = pytest.importorskip("transformers.models.doge")
    config = doge.DogeConfig(
        hidden_size=16, intermediate_size=8, num_experts=P * P, num_experts_per_tok=16, is_moe=True
    )
    block = doge.modeling_doge.DogeCDMoE(config).to(device)
    with torch.no_grad():
        weight_OD = block.router_gate.weight
        weight_OD.copy_(torch.randint(-1, 2, weight_OD.shape))
        for embed in (block.down_embed, block.up_embed):
            embed.weight.normal_()
    x_BTD = torch.randint(-1, 2, (1, 12, 16), device=device).float()
    theirs = copy.deepcopy(block).double()
    index_P = torch.arange(P, device=device, dtype=torch.float64)
    id_21P = 2.0**-40 * torch.stack([P * index_P, index_P])[:, None]
    theirs.router_gate.register_forward_hook(
        lambda _, __, out: (out.view(2, -1, P) - id_21P).view(out.shape)
    )
    model = patch_model(nn.ModuleList([block]))
    (row,) = patch_report(model)
    assert row.tier == "full"
    if device == "cuda":
        assert row.router_backend == "triton"
    mine, reference = run_block(block, x_BTD), run_block(theirs, x_BTD.double())
    sums = (mine["out.1"][0][:, :, None] + mine["out.1"][1][:, None, :]).flatten(1)
    best = sums.sort(dim=-1, descending=True).values
    assert (best[:, 15] == best[:, 16]).any(), "no tie for the last place"
    for name, value in reference.items():
        if name != "out.1":
            assert_close(mine[name], value, 1e-5, name)
