"""Every ordinary router in bf16 against transformers: the choice bit for bit, dtypes, weights.

With ``ties="torch"`` both sides pass the same numbers to the same torch.topk. The chosen experts
are then equal in every row exactly where the deciding scores are equal in every bit.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moe_patch import supported_model_types
from moe_patch.families import lookup
from moe_patch.runtime.spec import Arg, FamilySpec
from tests.support import tiny_models
from tests.support.numerics import assert_bits, assert_close, dense_weights
from tests.support.parity import theirs

T = 64
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 5e-3}


def routers(name: str, dtype: torch.dtype = torch.bfloat16) -> list[tuple[nn.Module, FamilySpec]]:
    """Return one router of each class that runs the common router forward, with its entry."""
    model = tiny_models.build(name, dtype)
    found = {type(m): (m, lookup(m)) for m in model.modules()}
    return [
        (module, entry[0])
        for module, entry in found.values()
        if entry and entry[1] == "router" and entry[0].routing and not entry[0].router_forward
    ]


TIERS = supported_model_types()
ORDINARY = [name for name in tiny_models.patchable() if name not in (
    # refused, or with a router of their own code (tests/families/test_irregular_families.py)
    "dbrx", "doge", "inkling", "jetmoe", "llama4", "nllb_moe", "phimoe", "switch_transformers",
    "vitpose_backbone", "zaya",
) and TIERS[tiny_models.config(name).model_type] == "full"]  # fmt: skip


@pytest.mark.routers
@pytest.mark.parametrize("name", ORDINARY)
def test_router_in_bf16(name):
    found = routers(name)
    assert found, "no router that the common forward serves"
    for router, spec in found:
        x, args = states(router, spec, torch.bfloat16), bias_of(router, spec)
        with torch.no_grad():
            mine, reference = ours(router, spec, x, args), theirs(router, x, *args)
        compare(*(_ids_last(outputs, spec) for outputs in (mine, reference)))


@pytest.mark.parametrize("name", ORDINARY)
def test_logits_under_autocast(name):
    """Logits agree bit for bit with fp32 weights under bf16 autocast, as in mixed precision.

    From logits to scores, transformers uses the dtype that autocast left. We use fp32 if
    transformers does so without autocast.
    """
    for router, spec in routers(name, torch.float32):
        x, args = states(router, spec, torch.float32), bias_of(router, spec)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            mine, reference = ours(router, spec, x, args), theirs(router, x, *args)
        assert_bits(mine[0], reference[0], "logits")


def states(router: nn.Module, spec: FamilySpec, dtype: torch.dtype) -> Tensor:
    width = next(p for p in router.parameters() if p.dim() == 2).shape[1]
    x = torch.randn(T, width, generator=torch.Generator().manual_seed(6)).to(dtype)
    return x.view(2, T // 2, width) if spec.router_input_3d else x


def ours(
    router: nn.Module, spec: FamilySpec, x: Tensor, args: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    routing = spec.route(router, x, args, ties="torch")
    if spec.returns is not None:
        return spec.returns(router, routing)
    if spec.ids_first:
        return routing.logits_TE, routing.ids_TK, routing.weights_TK
    return routing.logits_TE, routing.weights_TK, routing.ids_TK


def bias_of(router: nn.Module, spec: FamilySpec) -> tuple[Tensor, ...]:
    if not isinstance(spec.bias, Arg):
        return ()
    size = next(p for p in router.parameters() if p.dim() == 2).shape[0]
    return (tiny_models.mixed_bias(size, torch.Generator().manual_seed(7)),)


def _ids_last(outputs: tuple[Tensor, ...], spec: FamilySpec) -> tuple[Tensor, ...]:
    return (outputs[0], *outputs[:0:-1]) if spec.ids_first else outputs


def compare(mine: tuple[Tensor, ...], reference: tuple[Tensor, ...]) -> None:
    logits, weights, ids = mine
    assert_bits(logits, reference[0], "logits")
    assert weights.dtype == reference[1].dtype
    assert torch.equal(ids.sort(-1).values, reference[2].sort(-1).values), "other experts chosen"
    dense = [dense_weights(i, w, logits.shape[1]) for i, w in ((ids, weights), reference[2:0:-1])]
    assert_close(*dense, LIMITS[weights.dtype], "weights")
