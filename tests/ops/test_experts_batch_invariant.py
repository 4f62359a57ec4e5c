"""``batch_invariant``: named refusals where it cannot hold, and on a GPU equal bits for any T."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_patch import PatchConfig, UnsupportedOptionError, patch_model, patch_report
from moe_patch.ops.backend import choose_backend
from moe_patch.ops.routing_op import route_impl
from moe_patch.types import Glu, RouteSpec
from tests.support import tiny_models
from tests.support.experts_cases import Case as TorchCase
from tests.support.experts_cases import make_inputs as torch_inputs
from tests.support.experts_cases import ours
from tests.support.numerics import assert_bits
from tests.support.tiny_models import blocks


def test_torch_refuses_by_name() -> None:
    case = TorchCase()
    with pytest.raises(UnsupportedOptionError, match="batch_invariant=True cannot hold: requested"):
        ours(case, torch_inputs(case), batch_invariant=True)
    for dtype in (torch.float32, torch.float64):
        with pytest.raises(
            UnsupportedOptionError, match="by the number of rows; accepted: experts"
        ):
            choose_backend("auto", torch.device("cpu"), dtype, batch_invariant=True)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [("qwen3_moe", "no Triton kernels on cpu"), ("doge", "torch's own products")],
)
def test_patch_model_refuses_what_runs_on_torch(model_type, why) -> None:
    model = tiny_models.build(model_type)
    with pytest.raises(UnsupportedOptionError, match=why):
        patch_model(model, batch_invariant=True)
    with pytest.warns(UserWarning, match=why):
        patch_model(model, batch_invariant=True, strict=False)
    assert {row.tier for row in patch_report(model)} == {"refused"}


def test_ties_of_torch_cannot_be_invariant() -> None:
    assert PatchConfig(batch_invariant=True).ties == "lower"
    with pytest.raises(UnsupportedOptionError, match="needs ties='lower'"):
        PatchConfig(batch_invariant=True, ties="torch")


# Sizes of a call, and the tokens that are run again: one alone, a few in another order, many.
# Without the option their tiles differ from those of the full call.
T, K, E = 1200, 4, 12
AGAIN = {
    "one": [611],
    "few": [700, 3, 41],
    "some": list(range(60)),
    "half": list(range(0, T, 2)),
    "turned": None,
}


def check_tokens_alone(dtype: torch.dtype, **options) -> None:
    from moe_patch.kernels.common.tiles import rows_bucket
    from tests.support.kernels_cases import Case, Inputs, make_inputs, run_kernels

    assert len({rows_bucket(t * K, E) for t in (1, 60, T)}) == 3
    case = Case(T, K, E, 272, 136, **options)
    full = make_inputs(case, dtype, "cuda")
    expected, _ = run_kernels(full, batch_invariant=True)
    for again in AGAIN.values():
        rows = torch.arange(T - 1, -1, -1) if again is None else torch.tensor(again)
        rows = rows.to("cuda")
        per_token = {name: full.tensors[name][rows] for name in ("x", "weights")}
        part = Inputs(
            replace(case, T=len(rows)), full.ids_TK[rows], full.tensors | per_token,
            full.dout_TD[rows],
        )  # fmt: skip
        found, _ = run_kernels(part, batch_invariant=True)
        for name in ("out", "x", "weights"):
            assert_bits(found[name], expected[name][rows], f"{name} of {len(rows)} tokens")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gpu_tokens_alone(dtype: torch.dtype, poisoned_memory: None) -> None:
    check_tokens_alone(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"rank": 16},
        {"rank": 5, "bias": True},
        {"glu": Glu("swiglu_oai", interleaved=True, alpha=1.7, limit=7.0), "transposed": True},
        {"glu": Glu("relu2", gated=False), "save_h": False},
    ],
    ids=["lora", "lora_bias", "gpt_oss", "recompute"],
)
def test_gpu_tokens_alone_with_options(options: dict, poisoned_memory: None) -> None:
    check_tokens_alone(torch.bfloat16, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_gpu_router_and_experts_of_a_model(model_type) -> None:
    """Equal router logits give equal bits in any batch, from routing to the output."""
    model = patch_model(
        tiny_models.build(model_type, dtype=torch.bfloat16).to("cuda").eval(), batch_invariant=True
    )
    assert {row.experts_backend for row in patch_report(model)} == {"triton"}
    _, block = blocks(model)[0]
    x_TD = torch.randn(700, tiny_models.SIZES["hidden_size"], device="cuda", dtype=torch.bfloat16)
    ids_TK = torch.rand(700, 8, device="cuda").argsort(-1)[:, :2]
    weights_TK = torch.rand(700, 2, device="cuda", dtype=torch.bfloat16)

    def run(rows: Tensor) -> Tensor:
        return block.experts(x_TD[rows], ids_TK[rows], weights_TK[rows])

    everything = run(torch.arange(700, device="cuda"))
    for t in (0, 5, 699):
        assert_bits(run(torch.tensor([t], device="cuda"))[0], everything[t], str(t))


def test_routing_on_torch_refuses_by_name() -> None:
    impl = route_impl("auto", batch_invariant=True)
    with pytest.raises(UnsupportedOptionError, match="no Triton kernels on cpu"):
        impl(torch.zeros(2, 8), RouteSpec(2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("E", "spec"),
    [
        (64, RouteSpec(8)),
        (128, RouteSpec(8, renormalize=True)),
        (60, RouteSpec(4, score="sigmoid", groups=4, top_groups=2, renormalize=True, eps=1e-20)),
        (32, RouteSpec(4, order="topk_score", fp32=False)),
    ],
    ids=["olmoe", "qwen3", "groups", "gpt_oss"],
)
def test_gpu_routing_of_tokens_alone(E, spec, dtype) -> None:
    impl = route_impl("triton", batch_invariant=True)
    logits_TE = torch.randn(700, E, device="cuda", dtype=dtype)
    grad_TK = torch.randn(700, spec.top_k, device="cuda")

    def run(rows: Tensor) -> tuple[Tensor, ...]:
        logits = logits_TE[rows].requires_grad_()
        routing = impl(logits, spec)
        grad = grad_TK[rows].to(routing.weights_TK.dtype)
        return (
            routing.ids_TK,
            routing.weights_TK,
            *torch.autograd.grad(routing.weights_TK, logits, grad),
        )

    everything = run(torch.arange(700))
    for rows in ([0], [699], [3, 8], list(range(5)), list(range(0, 700, 9))):
        for part, whole in zip(run(torch.tensor(rows)), everything, strict=True):
            assert_bits(part, whole[rows], str(len(rows)))
    with pytest.raises(UnsupportedOptionError, match="routing with 600 experts"):
        impl(torch.zeros(2, 600, device="cuda"), RouteSpec(2))
