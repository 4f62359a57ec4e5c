"""Product-key top-k: the definition against all P * P sums, and Triton against the definition.

Small integer logits make ties certain, also in the sums. Sums of random fp16 logits tie by
rounding, where pruning pairs by their rank would lose the lower id. Runs natively on a GPU
(``-m gpu``) and, on a CPU, under Triton's interpreter.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from moe_patch.errors import UnsupportedOptionError
from moe_patch.ops.product_key import product_key_reference, product_key_topk, product_key_triton
from tests.support import interpreted
from tests.support.numerics import assert_bits, assert_close, rel_err
from tests.support.routing_cases import WRONG_LOGITS

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
INF = float("inf")
# P, K; a comment says why.
SIZES = [
    (8, 4),
    (8, 8),  # every key of an axis is kept
    (16, 3),  # K not a power of two
    (6, 5),  # neither is P
    (3, 8),  # more slots than keys
    (2, 7),  # more slots than experts: the last are empty
    (1, 1),
    (2, 1),
    (33, 16),
    (300, 6),  # ids need more than 16 bits
]
# Ties are certain in each; the last is the largest of both.
LARGE = [(64, 16, F32), (64, 16, F16), (256, 32, F16), (1024, 64, F32)]
LIMITS = {F32: 2e-6, F16: 1e-3, BF16: 4e-3}


def keys(P: int, T: int, dtype: torch.dtype, device: str, integers: bool) -> tuple[Tensor, Tensor]:
    if integers:
        return tuple(torch.randint(-3, 4, (T, P), device=device).to(dtype) for _ in "xy")
    return tuple(torch.randn(T, P, device=device).to(dtype) for _ in "xy")


def check(
    P: int, K: int, dtype: torch.dtype, device: str,
    T: int = 5, integers: bool = True, score: str = "softmax", renormalize: bool = False,
) -> None:  # fmt: skip
    x_TP, y_TP = (t.requires_grad_() for t in keys(P, T, dtype, device, integers))
    if integers and P >= 64:
        sums = (x_TP.detach()[:2, :, None] + y_TP.detach()[:2, None, :]).flatten(1)
        best = sums.topk(K + 1).values
        assert (best[:, K - 1] == best[:, K]).any(), "no tie for the last place"
    options = {"score": score, "renormalize": renormalize}
    ours = product_key_triton(x_TP, y_TP, K, **options)
    expected = product_key_reference(x_TP.detach(), y_TP.detach(), K, **options)
    assert_bits(ours.ids_TK, expected.ids_TK, "ids")
    assert_close(ours.weights_TK, expected.weights_TK, 2 * LIMITS[dtype], "weights")
    assert ours.logits_TE.shape == (T, 0)

    dw_TK = torch.randn(T, K, device=device).to(dtype)
    ours.weights_TK.backward(dw_TK)
    wide = [t.detach().double().requires_grad_() for t in (x_TP, y_TP)]
    weights_on(ours.ids_TK, *wide, score).backward(dw_TK.double())
    for mine, ref in zip((x_TP, y_TP), wide, strict=True):
        if ref.grad.abs().max() < 1e-12:
            assert (mine.grad.abs() < 1e-6).all()
        else:
            assert_close(mine.grad, ref.grad, LIMITS[dtype], "gradient")


def weights_on(ids_TK: Tensor, x_TP: Tensor, y_TP: Tensor, score: str) -> Tensor:
    """Return differentiable weights of given ids, to check backward on the forward's own choice."""
    P, empty_TK = x_TP.shape[1], ids_TK < 0
    ids_TK = ids_TK.clamp(min=0)
    sum_TK = x_TP.gather(1, ids_TK // P) + y_TP.gather(1, ids_TK % P)
    if score == "softmax":
        sum_TK = torch.softmax(sum_TK.masked_fill(empty_TK, -1e300), -1)
    return sum_TK.masked_fill(empty_TK, 0.0)


def check_special_rows(device: str) -> None:
    """Confine masked keys, empty rows, NaN and Inf to their own rows."""
    for dtype in (F32, F16):
        x_TP, y_TP = keys(8, 8, dtype, device, True)
        clean = product_key_triton(x_TP, y_TP, 6)
        x_TP[0, :6] = -INF
        y_TP[1, 1:] = -INF
        x_TP[1, 3:] = -INF
        x_TP[2] = -INF
        x_TP[3, 4] = float("nan")
        y_TP[4, 0] = INF
        x_TP[5, 0], y_TP[5] = INF, -INF
        leaves = [t.requires_grad_() for t in (x_TP, y_TP)]
        ours = product_key_triton(*leaves, 6)
        expected = product_key_reference(x_TP.detach(), y_TP.detach(), 6)
        assert_bits(ours.ids_TK, expected.ids_TK)
        assert (ours.ids_TK[1] >= 0).tolist() == [True] * 3 + [False] * 3
        for t in (2, 5):
            assert ours.ids_TK[t].tolist() == [-1] * 6
            assert ours.weights_TK[t].tolist() == [0.0] * 6
        assert torch.equal(ours.weights_TK.isnan(), expected.weights_TK.isnan())
        assert ours.weights_TK[3].isnan().all()
        for t in (6, 7):
            assert_bits(ours.ids_TK[t], clean.ids_TK[t])
            assert_bits(ours.weights_TK[t], clean.weights_TK[t])
        ours.weights_TK.backward(torch.randn_like(ours.weights_TK))
        for leaf in leaves:
            assert (leaf.grad[[2, 5]] == 0).all()
            assert leaf.grad[[0, 1, 2, 5, 6, 7]].isfinite().all()


def check_overflow(device: str) -> None:
    """Treat an expert whose sum rounds to -inf as absent, and choose one that rounds to +inf."""
    x_TP = torch.tensor([[-6e4, -5e4, -6e4, -6e4]], device=device).to(F16)
    ours = product_key_triton(x_TP, x_TP.flip(1) * 0 - 1e4, 3)
    assert_bits(ours.ids_TK, product_key_reference(x_TP, x_TP.flip(1) * 0 - 1e4, 3).ids_TK)
    assert product_key_triton(x_TP, x_TP, 3).ids_TK.tolist() == [[-1, -1, -1]]


def check_rounding_ties(device: str) -> None:
    """Choose a pair outside (i + 1)(j + 1) <= K if rounding ties it at a lower id."""
    # fp16 has steps of two near 2048: 2048 + 0.5 and 2048 + 0.25 are both 2048.
    x_TP = torch.tensor([[2048.0, 2048.0, -9.0, -9.0]], device=device).to(F16)
    y_TP = torch.tensor([[0.125, 0.25, 0.5, 0.75]], device=device).to(F16)
    for K in (1, 2, 3, 4):
        expected = product_key_reference(x_TP, y_TP, K)
        assert_bits(product_key_triton(x_TP, y_TP, K).ids_TK, expected.ids_TK)
    assert expected.ids_TK.tolist() == [[0, 1, 2, 3]]


def check_strides(device: str) -> None:
    both_T2P = torch.randint(-3, 4, (2, 9, 8), device=device).float()
    expected = product_key_reference(both_T2P[0], both_T2P[1], 4)
    strided = both_T2P.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    ours = product_key_triton(strided[0], strided[1], 4)
    assert_bits(ours.ids_TK, expected.ids_TK)
    (2 * ours.weights_TK[:, :1]).sum().backward()
    plain = both_T2P.clone().requires_grad_()
    (2 * product_key_reference(plain[0], plain[1], 4).weights_TK[:, :1]).sum().backward()
    assert_close(strided.grad, plain.grad, 1e-5)


def check_empty(device: str) -> None:
    x_TP = torch.randn(0, 8, device=device, requires_grad=True)
    ours = product_key_triton(x_TP, x_TP, 3)
    assert ours.ids_TK.shape == ours.weights_TK.shape == (0, 3)
    ours.weights_TK.sum().backward()
    assert x_TP.grad.shape == (0, 8)


CASES = {
    **{f"P{P}_K{K}-{str(d)[6:]}": partial(check, P, K, d) for P, K in SIZES for d in (F32, F16)},
    **{
        f"random-P{P}_K{K}-{str(d)[6:]}": partial(check, P, K, d, integers=False, T=9)
        for P, K in ((32, 16), (16, 8))
        for d in (F32, F16)
    },
    **{f"large-P{P}_K{K}-{str(d)[6:]}": partial(check, P, K, d, T=2) for P, K, d in LARGE},
    "sums": partial(check, 16, 5, F32, score="none"),
    "sums16": partial(check, 16, 5, F16, score="none"),
    "renormalized": partial(check, 16, 5, F32, renormalize=True),
    "renormalized16": partial(check, 16, 5, F16, renormalize=True),
    "special_rows": check_special_rows,
    "overflow": check_overflow,
    "rounding_ties": check_rounding_ties,
    "strides": check_strides,
    "empty": check_empty,
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
    return interpreted.run(__file__)


@pytest.mark.parametrize("case", CASES)
def test_interpreted(outcomes: dict[str, str], case: str) -> None:
    assert not outcomes[case], outcomes[case]


def all_pairs(x: list[float], y: list[float], K: int) -> list[int]:
    """Return the best K of all P * P sums of one row, by (sum, id), as the two stages must."""
    P = len(x)
    ranked = sorted(range(P * P), key=lambda i: (-(x[i // P] + y[i % P]), i))
    return ranked[:K]


@pytest.mark.parametrize("K", [1, 3, 8, 20])
def test_the_definition_is_the_best_of_all_pairs(K: int) -> None:
    for P in (8, 5):
        x_TP, y_TP = (t.double() for t in keys(P, 30, F32, "cpu", True))
        found = product_key_topk(x_TP, y_TP, K).ids_TK.tolist()
        for t in range(30):
            assert found[t] == all_pairs(x_TP[t].tolist(), y_TP[t].tolist(), K)


def test_weights_are_what_doge_computes() -> None:
    """Match the steps of DogeCDMoE.forward, where no sums tie."""
    T, P, K = 12, 16, 6
    logits = torch.randn(2, T, P)
    (sx, sy), (ix, iy) = logits.topk(P, dim=-1)
    scores, at = (sx.unsqueeze(-1) + sy.unsqueeze(-2)).view(T, -1).topk(K, dim=-1)
    ids = (ix.unsqueeze(-1) * P + iy.unsqueeze(-2)).view(T, -1).gather(-1, at)
    ours = product_key_topk(logits[0], logits[1], K, renormalize=True)
    assert torch.equal(ours.ids_TK, ids)
    weights = torch.softmax(scores, -1)
    assert rel_err(ours.weights_TK, weights / weights.sum(-1, keepdim=True)) < 1e-6


def test_gradients_of_the_definition() -> None:
    x, y = (t.double().requires_grad_() for t in keys(6, 4, F32, "cpu", False))
    with torch.no_grad():
        x[0, 1] = -INF
        y[0, 2:] = -INF
    assert torch.autograd.gradcheck(
        lambda a, b: product_key_topk(a, b, 4, renormalize=True).weights_TK, (x[1:], y[1:])
    )
    product_key_topk(x, y, 20).weights_TK.square().sum().backward()
    assert x.grad.isfinite().all()
    assert y.grad.isfinite().all()


@pytest.mark.parametrize(
    ("x", "y", "options", "word"),
    [
        (torch.zeros(2, 4), torch.zeros(2, 5), {}, r"\(2, 5\)"),
        (torch.zeros(2, 4), torch.zeros(2, 4).half(), {}, "float16"),
        (torch.zeros(2, 4), torch.zeros(2, 4), {"top_k": 65}, "65"),
        (torch.zeros(2, 1025), torch.zeros(2, 1025), {}, "1025"),
        (torch.zeros(2, 4), torch.zeros(2, 4), {"score": "sigmoid"}, "sigmoid"),
    ],
)
def test_what_is_not_covered_is_refused(x: Tensor, y: Tensor, options: dict, word: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=word):
        product_key_topk(x, y, options.pop("top_k", 2), **options)


@pytest.mark.parametrize("wrong", WRONG_LOGITS, ids=str)
@pytest.mark.parametrize("function", [product_key_topk, product_key_reference])
def test_logits_that_are_no_matrix_of_numbers_are_refused(function, wrong: str) -> None:
    logits, good = WRONG_LOGITS[wrong], torch.zeros(2, 4)
    for name, pair in (("logits_x_TP", (logits, good)), ("logits_y_TP", (good, logits))):
        said = rf"{name} is {wrong}; accepted: a tensor \[tokens, keys\] of float64, float32"
        with pytest.raises(UnsupportedOptionError, match=said):
            function(*pair, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_gpu(case: str, poisoned_memory: None) -> None:
    CASES[case]("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize(("P", "K"), [(64, 16), (64, 64), (128, 32), (256, 32), (1024, 64)])
def test_gpu_dtypes_at_real_sizes(
    P: int, K: int, dtype: torch.dtype, poisoned_memory: None
) -> None:
    for integers in (True, False):
        check(P, K, dtype, "cuda", T=1025, integers=integers)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_gpu_repeats_are_bit_identical(dtype: torch.dtype, poisoned_memory: None) -> None:
    x_TP, y_TP = (t.requires_grad_() for t in keys(256, 8192, dtype, "cuda", True))
    first = None
    for _ in range(40):
        routing = product_key_triton(x_TP, y_TP, 32)
        grads = torch.autograd.grad(
            routing.weights_TK, (x_TP, y_TP), torch.ones_like(routing.weights_TK).cumsum(1)
        )
        found = (routing.ids_TK, routing.weights_TK, *grads)
        first = first or found
        for a, b in zip(first, found, strict=True):
            assert_bits(a, b)


if __name__ == "__main__":
    interpreted.report(CASES, checked=True)
