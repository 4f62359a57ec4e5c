"""Triton routing against its definition, ``ops.routing.route``: ids exactly, NaN included.

Logits are small integers, so that every row has ties. Gradients are compared with autograd through
the definition in fp64. Runs natively on a GPU (``-m gpu``) and, on a CPU, under
Triton's interpreter, which is right for fp32 and fp16 only.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from moe_patch.ops import routing_op
from moe_patch.ops.routing import route, weights_at
from moe_patch.ops.routing_op import route as triton_route
from moe_patch.types import RouteSpec
from tests.support import interpreted
from tests.support.numerics import assert_bits, assert_close
from tests.support.routing_cases import BF16, F16, F32, INF, LIMITS, SPECS, in_fp64, inputs, strided
from tests.support.routing_checks import check_not_as_stored, check_without_dispatcher

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)


def check_spec(name: str, dtype: torch.dtype, device: str, T: int = 7) -> None:
    logits_TE, spec, bias_E = inputs(name, T, dtype, device)
    logits_TE.requires_grad_()
    expected = route(logits_TE.detach(), spec, bias_E)
    ours = triton_route(logits_TE, spec, bias_E)
    assert_bits(ours.ids_TK, expected.ids_TK, "ids")
    assert ours.weights_TK.dtype == expected.weights_TK.dtype
    assert ours.logits_TE is logits_TE
    # Both sides round scores to the same dtype, from exponentials that differ in the last bit.
    assert_close(ours.weights_TK, expected.weights_TK, 2 * LIMITS[ours.weights_TK.dtype], "weights")

    wide_TE = logits_TE.detach().double().requires_grad_()
    reference = route(wide_TE, in_fp64(spec), None if bias_E is None else bias_E.double())
    same_T = (reference.ids_TK == ours.ids_TK).all(-1)
    # Rounded scores may tie where fp64 does not.
    assert same_T.sum() >= (T if spec.fp32 else T // 2)
    dw_TK = torch.randn(ours.weights_TK.shape, device=device).to(ours.weights_TK.dtype)
    ours.weights_TK.backward(dw_TK)
    reference.weights_TK.backward(dw_TK.double())
    if name == "one_expert":
        assert (logits_TE.grad == 0).all()
    else:
        assert_close(logits_TE.grad[same_T], wide_TE.grad[same_T], LIMITS[dtype], "gradient")
    check_own_ids(logits_TE, spec, bias_E, dw_TK)


def check_own_ids(
    logits_TE: torch.Tensor, spec: RouteSpec, bias_E: torch.Tensor | None, dw_TK: torch.Tensor
) -> None:
    """Weights at the ids that route chose, and their gradient, have the bits of route's."""
    leaf_TE = logits_TE.detach().requires_grad_()
    expected = triton_route(leaf_TE, spec, bias_E)
    biased = bias_E is not None
    for ids_TK in (expected.ids_TK, expected.ids_TK.int().T.contiguous().T):
        ours_TK = routing_op.weights_at(leaf_TE, spec, ids_TK, biased)
        assert_bits(ours_TK, expected.weights_TK, "weights of the own ids")
        pair = [torch.autograd.grad(w, leaf_TE, dw_TK, retain_graph=True)[0]
                for w in (ours_TK, expected.weights_TK)]  # fmt: skip
        assert_bits(*pair, "gradient of the own ids")


def check_other_ids(name: str, dtype: torch.dtype, device: str, T: int = 7) -> None:
    """Weights at random ids match the definition in fp64, and so does their gradient."""
    logits_TE, spec, bias_E = inputs(name, T, dtype, device)
    ids_TK = torch.rand(logits_TE.shape, device=device).argsort(1)[:, : spec.top_k]
    wide_TE = logits_TE.double().requires_grad_()
    expected_TK = weights_at(wide_TE, in_fp64(spec), ids_TK)
    logits_TE.requires_grad_()
    ours_TK = routing_op.weights_at(logits_TE, spec, ids_TK, bias_E is not None)
    assert_close(ours_TK, expected_TK, 2 * LIMITS[ours_TK.dtype], "weights")
    dw_TK = torch.randn(ours_TK.shape, device=device).to(ours_TK.dtype)
    ours_TK.backward(dw_TK)
    expected_TK.backward(dw_TK.double())
    assert_close(logits_TE.grad, wide_TE.grad, LIMITS[dtype], "gradient")


def check_nan_rows(name: str, dtype: torch.dtype, device: str) -> None:
    logits_TE, spec, bias_E = inputs(name, 9, dtype, device)
    clean = triton_route(logits_TE, spec, bias_E)
    bad_TE = logits_TE.clone()
    bad_TE[1, -1] = float("nan")
    bad_TE[3, 0] = INF
    bad_TE[4] = -INF
    bad_TE[6, ::2] = -torch.tensor(float("nan"))
    bad_TE.requires_grad_()
    ours = triton_route(bad_TE, spec, bias_E)
    expected = route(bad_TE.detach(), spec, bias_E)
    assert_bits(ours.ids_TK, expected.ids_TK, "ids")
    assert torch.equal(ours.weights_TK.isnan(), expected.weights_TK.isnan())
    others = torch.tensor([0, 2, 5, 7, 8], device=device)
    assert_bits(ours.ids_TK[others], clean.ids_TK[others])
    assert_bits(ours.weights_TK[others], clean.weights_TK[others])
    again_TK = routing_op.weights_at(bad_TE, spec, ours.ids_TK, bias_E is not None)
    assert_bits(again_TK[others], ours.weights_TK[others])
    assert torch.equal(again_TK.isnan(), ours.weights_TK.isnan())
    ours.weights_TK.sum().backward()
    assert bad_TE.grad[others].isfinite().all()


def check_shared_scores(device: str) -> None:
    """Choose the lower id if different logits have equal scores, as in the definition."""
    for score, logits in (
        ("softmax", [-1e4, -2e4, 3e4, -3e4, 0.0, 1.0, -5e4, -4e4]),  # all but one underflow
        ("softmax", [-4e3, -1e3, 4e3, 3e3, 3e3, 3e3, 3e3, 3e3]),  # ties beyond the next in rank
        ("sigmoid", [20.0, 30.0, 25.0, 40.0, -3.0, 50.0, 60.0, 35.0]),  # saturated
        (
            "softmax",
            [0.0, 6e-8, -6e-8, 1.2e-7, 0.0, 8.0, 1.8e-7, -1.2e-7],
        ),  # lost beside the maximum
    ):
        row_TE = torch.tensor([logits, logits[::-1]], device=device).to(F16)
        spec = RouteSpec(4, score=score, renormalize=score == "softmax")
        expected = route(row_TE, spec)
        assert_bits(triton_route(row_TE, spec).ids_TK, expected.ids_TK, score)
        check_own_ids(row_TE, spec, None, torch.randn(2, 4, device=device))
        assert expected.ids_TK.tolist() != row_TE.argsort(descending=True)[:, :4].tolist()


def check_zeros(device: str) -> None:
    for dtype in (F32, F16):
        zero_TE = torch.zeros(3, 20, dtype=dtype, device=device)
        zero_TE[:, ::3] = -0.0
        for spec in (RouteSpec(6), RouteSpec(6, order="topk_score")):
            assert triton_route(zero_TE, spec).ids_TK.tolist() == [[0, 1, 2, 3, 4, 5]] * 3


def check_all_negative_and_large(device: str) -> None:
    logits_TE = torch.randint(-9, 1, (5, 64), device=device).float()
    for spec in (RouteSpec(8, renormalize=True), RouteSpec(8)):
        for dtype in (F32, F16):
            shifted = triton_route(logits_TE.to(dtype) - 50, spec)
            assert_bits(shifted.ids_TK, route(logits_TE, spec).ids_TK)
            assert_close(shifted.weights_TK, route(logits_TE, spec).weights_TK, 1e-5)
        large = triton_route(logits_TE * 1e4, spec)
        assert_bits(large.ids_TK, route(logits_TE * 1e4, spec).ids_TK)
        assert large.weights_TK.isfinite().all()


def check_strides(name: str, dtype: torch.dtype, device: str) -> None:
    """Logits and gradients of any strides agree with fp64 on contiguous copies."""
    logits_TE, spec, bias_E = inputs(name, 6, dtype, device)
    wide_bias = None if bias_E is None else bias_E.double()
    for layout, view in strided(logits_TE).items():
        leaf = view.contiguous().double().requires_grad_()
        expected = route(leaf, in_fp64(spec), wide_bias)
        view = view.detach().requires_grad_()
        assert not view.is_contiguous()
        ours = triton_route(view, spec, bias_E, ids_dtype=torch.int32)
        assert_bits(ours.ids_TK, expected.ids_TK.int(), layout)
        limit = LIMITS[ours.weights_TK.dtype]
        assert_close(ours.weights_TK, expected.weights_TK, 2 * limit, layout)
        T, K = ours.ids_TK.shape
        dw_TK = torch.randn(K, T, device=device).to(ours.weights_TK.dtype).T
        for gradient in (dw_TK, dw_TK[:1].expand(T, K)):
            (grad,) = torch.autograd.grad(ours.weights_TK, view, gradient, retain_graph=True)
            (wanted,) = torch.autograd.grad(
                expected.weights_TK, leaf, gradient.double(), retain_graph=True
            )
            assert wanted.abs().max() > 1e-4, "the comparison is empty"
            assert_close(grad, wanted, LIMITS[dtype], f"{layout}: gradient")


def check_one_number_as_gradient(device: str) -> None:
    """Accept a gradient whose strides are all zero, as a sum of the weights passes back."""
    for dtype in (F32, F16):
        logits_TE, spec, _ = inputs("olmoe", 6, dtype, device)
        leaf = logits_TE.double().requires_grad_()
        (3 * route(leaf, spec).weights_TK).sum().backward()
        logits_TE.requires_grad_()
        (3 * triton_route(logits_TE, spec).weights_TK).sum().backward()
        assert_close(logits_TE.grad, leaf.grad, LIMITS[dtype], "gradient")


def check_no_rows(device: str) -> None:
    logits_TE, spec, bias_E = inputs("deepseek_v3", 0, F32, device)
    logits_TE.requires_grad_()
    routing = triton_route(logits_TE, spec, bias_E)
    assert routing.ids_TK.shape == routing.weights_TK.shape == (0, spec.top_k)
    routing.weights_TK.sum().backward()
    assert logits_TE.grad.shape == logits_TE.shape


def check_invalid_ids(device: str) -> None:
    """Give slots with ids -1 or >= E no weight and no gradient in backward."""
    from moe_patch.kernels.routing.route import route_backward

    E, K = 12, 4
    logits_TE = torch.randn(5, E, device=device)
    ids_TK = torch.stack([torch.randperm(E, device=device)[:K] for _ in range(5)])
    ids_TK[0, 1], ids_TK[1, 0], ids_TK[2, 3], ids_TK[3] = -1, E, E + 7, -1
    dw_TK = torch.randn(5, K, device=device)
    valid_TK = (ids_TK >= 0) & (ids_TK < E)
    dw_TK[~valid_TK] = float("nan")
    for spec in (
        RouteSpec(K), RouteSpec(K, renormalize=True, eps=1e-6, scale=2.0),
        RouteSpec(K, score="sigmoid"), RouteSpec(K, order="topk_score"),
    ):  # fmt: skip
        leaf = logits_TE.double().requires_grad_()
        chosen_TK = leaf.gather(1, ids_TK.clamp(0, E - 1))
        if spec.order == "topk_score":
            v_TK = torch.softmax(chosen_TK.masked_fill(~valid_TK, -1e300), -1)
        elif spec.score == "softmax":
            v_TK = torch.softmax(leaf, -1).gather(1, ids_TK.clamp(0, E - 1))
        else:
            v_TK = torch.sigmoid(chosen_TK)
        v_TK = torch.where(valid_TK, v_TK, 0.0)
        if spec.renormalize:
            v_TK = spec.scale * v_TK / (v_TK.sum(-1, keepdim=True) + spec.eps)
        (v_TK * torch.where(valid_TK, dw_TK.double(), 0.0)).sum().backward()
        for ids in (ids_TK, ids_TK.int()):
            ours = route_backward(dw_TK, logits_TE, ids, spec)
            assert (ours[3] == 0).all()
            assert_close(ours, leaf.grad, 2e-6, f"{spec.score} {spec.order}")


def check_bias_gradient(device: str) -> None:
    """A trainable correction bias decides and gets no gradient."""
    logits_TE, spec, bias_E = inputs("deepseek_v3", 7, F32, device)
    bias_E.requires_grad_()
    assert not triton_route(logits_TE, spec, bias_E).weights_TK.requires_grad
    routing = triton_route(logits_TE.requires_grad_(), spec, bias_E)
    routing.weights_TK.sum().backward()
    assert bias_E.grad is None
    unbiased = triton_route(logits_TE, spec, torch.zeros_like(bias_E))
    assert not torch.equal(routing.ids_TK, unbiased.ids_TK)


CASES = {
    **{
        f"{name}-{str(dtype)[6:]}": partial(check_spec, name, dtype)
        for name in SPECS
        for dtype in (F32, F16)
    },
    **{f"nan-{name}": partial(check_nan_rows, name, F32) for name in SPECS if name != "one_expert"},
    **{
        f"nan16-{name}": partial(check_nan_rows, name, F16)
        for name in ("qwen3", "gpt_oss", "clamp")
    },
    **{
        f"T{T}-{name}": partial(check_spec, name, F32, T=T)
        for T in (1, 33)
        for name in ("mixtral", "deepseek_v3", "gpt_oss")
    },
    **{
        f"other_ids-{name}-{str(dtype)[6:]}": partial(check_other_ids, name, dtype)
        for name in ("qwen3", "mixtral", "gpt_oss", "deepseek_v3", "olmoe", "clamp", "raw")
        for dtype in (F32, F16)
    },
    "shared_scores": check_shared_scores,
    "zeros": check_zeros,
    "negative_and_large": check_all_negative_and_large,
    **{
        f"strides-{name}-{str(dtype)[6:]}": partial(check_strides, name, dtype)
        for name in ("qwen3", "deepseek_v3", "gpt_oss", "olmoe")
        for dtype in (F32, F16)
    },
    "one_number_as_gradient": check_one_number_as_gradient,
    "T301-deepseek_v3": partial(check_spec, "deepseek_v3", F32, T=301),
    "no_rows": check_no_rows,
    "invalid_ids": check_invalid_ids,
    "bias_gradient": check_bias_gradient,
    "without_dispatcher": check_without_dispatcher,
    "not_as_stored": check_not_as_stored,
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    return interpreted.run(__file__)


@pytest.mark.parametrize("case", CASES)
def test_interpreted(outcomes: dict[str, str], case: str) -> None:
    assert not outcomes[case], outcomes[case]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_gpu(case: str, poisoned_memory: None) -> None:
    CASES[case]("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_gpu_dtypes_at_real_sizes(name: str, dtype: torch.dtype, poisoned_memory: None) -> None:
    check_spec(name, dtype, "cuda", T=4099)


if __name__ == "__main__":
    interpreted.report(CASES, checked=True)
