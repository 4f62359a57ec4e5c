"""The experts operator on the Triton backend, on a CPU: autograd, ranks, dtypes, memory.

The kernels run under Triton's interpreter behind the operator that models call. On a GPU,
test_experts_gpu.py and tests/lora/test_dtypes.py test the same. The reference is autograd in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch.ops.experts import definition as reference
from moe_patch.ops.experts.op import experts_mlp
from moe_patch.types import ExpertWeights, Glu, Lora
from tests.support import interpreted
from tests.support.kernels_cases import GPT_OSS, SILU, Case, Inputs, make_inputs
from tests.support.numerics import FP32, assert_bits, assert_close

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LORA = {"up": ("lora13_A", "lora13_B"), "down": ("lora2_A", "lora2_B")}


@contextmanager
def triton_anywhere() -> Iterator[None]:
    """Let the operator take the Triton backend on a CPU, as it does on a card."""
    with mock.patch("moe_patch.ops.backend.why_not_triton", return_value=None):
        yield


def run(inputs: Inputs, tensors: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
    """Return the operator's output and every gradient, by name."""
    w, lora13, lora2 = operands(tensors)
    with triton_anywhere():
        out_TD = experts_mlp(
            tensors["x"], inputs.ids_TK, tensors["weights"], w, inputs.case.glu,
            lora13=lora13, lora2=lora2, backend="triton", **options,
        )  # fmt: skip
        wanted = {name: t for name, t in tensors.items() if t.requires_grad}
        grads = torch.autograd.grad(out_TD, list(wanted.values()), inputs.dout_TD.to(out_TD.dtype))
    return {"out": out_TD.detach()} | dict(zip(wanted, grads, strict=True))


def exactly(inputs: Inputs, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return output and every gradient in fp64, by the definition."""
    leaves = {name: t.detach().double().requires_grad_() for name, t in tensors.items()}
    w, lora13, lora2 = operands(leaves)
    out_TD = reference.experts(
        leaves["x"], inputs.ids_TK, leaves["weights"], w, inputs.case.glu, lora13, lora2
    )
    grads = torch.autograd.grad(out_TD, list(leaves.values()), inputs.dout_TD.double())
    return {"out": out_TD.detach()} | dict(zip(leaves, grads, strict=True))


def operands(tensors: dict[str, Tensor]) -> tuple[ExpertWeights, Lora | None, Lora | None]:
    up, down = (
        Lora(*(tensors[name] for name in names), scaling) if names[0] in tensors else None
        for names, scaling in zip(LORA.values(), (0.5, 2.0), strict=True)
    )
    w = ExpertWeights(tensors["w13"], tensors["w2"], tensors.get("b13"), tensors.get("b2"))
    return w, up, down


def check(case: Case, device: str, only: str = "", recompute: bool = True) -> None:
    """Check fp32 results, and equal bits under recompute; only side ``only`` has factors."""
    inputs = make_inputs(case, F32, device)
    left_out = [name for side, names in LORA.items() if only and side != only for name in names]
    tensors = {n: t.requires_grad_() for n, t in inputs.tensors.items() if n not in left_out}
    found, expected = run(inputs, tensors), exactly(inputs, tensors)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value, FP32, name)
    again = run(inputs, tensors, recompute=True) if recompute else found
    for name, value in found.items():
        assert_bits(again[name], value, f"{name} recomputed")


def check_dtypes(base: torch.dtype, factors: torch.dtype, device: str) -> None:
    """Cast factors of another dtype for the products, and their gradients back."""
    inputs = make_inputs(Case(9, 2, 3, 24, 16, rank=4, bias=True), base, device)
    tensors = {
        n: (t.to(factors) if n.startswith("lora") else t).requires_grad_()
        for n, t in inputs.tensors.items()
    }
    found, expected = run(inputs, tensors), exactly(inputs, tensors)
    for name, value in expected.items():
        dtype = base if name == "out" else tensors[name].dtype
        assert found[name].dtype == dtype, name
        assert_close(found[name], value, 3e-3, name)


def check_frozen_base(device: str) -> None:
    """Train adapters alone or inputs alone: equal bits, and no gradient of the experts."""
    inputs = make_inputs(Case(9, 2, 3, 24, 16, rank=4, bias=True), F32, device)
    everything = run(inputs, {n: t.requires_grad_() for n, t in inputs.tensors.items()})
    for wanted in ((*LORA["up"], *LORA["down"]), ("x", "weights")):
        leaves = {n: t.detach().requires_grad_(n in wanted) for n, t in inputs.tensors.items()}
        from moe_patch.kernels.experts import experts

        with mock.patch.object(experts, "outer_sum", side_effect=AssertionError("dense dW")):
            found = run(inputs, leaves)
        assert found.keys() == {"out", *wanted}
        for name, value in found.items():
            assert_bits(value, everything[name], name)


def kept_bytes(inputs: Inputs, tensors: dict[str, Tensor], **options: object) -> int:
    """Return the bytes that autograd holds after a forward, operands excluded."""
    known = {t.untyped_storage().data_ptr() for t in (*tensors.values(), inputs.ids_TK)}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    w, lora13, lora2 = operands(tensors)
    with triton_anywhere(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out_TD = experts_mlp(
            tensors["x"], inputs.ids_TK, tensors["weights"], w, inputs.case.glu,
            lora13=lora13, lora2=lora2, backend="triton", **options,
        )  # fmt: skip
    assert out_TD.requires_grad
    held.pop(0, None)
    return sum(held.values())


def check_kept(glu: Glu, rank: int, device: str) -> None:
    """Keep h, rank-sized rows and at most 16 bytes a row of metadata; recompute keeps the last."""
    T, K, F = 40, 2, 24
    case = Case(T, K, 5, 40, F, glu, rank=rank, transposed=glu is GPT_OSS, bias=glu is GPT_OSS)
    inputs = make_inputs(case, F16, device)
    tensors = {n: t.requires_grad_() for n, t in inputs.tensors.items()}
    N = T * K
    h = N * (2 * F if glu.gated else F) * 2
    rows = h + 2 * N * rank * 2
    assert rows <= kept_bytes(inputs, tensors) <= rows + 16 * N
    assert 0 < kept_bytes(inputs, tensors, recompute=True) <= 16 * N


CASES = {
    **{f"rank_{r}": partial(check, Case(6, 2, 3, 24, 16, rank=r)) for r in (1, 17, 256)},
    "rank_256_gpt_oss": partial(
        check, Case(6, 2, 3, 24, 16, GPT_OSS, rank=256, transposed=True, bias=True)
    ),
    **{f"{side}_alone": partial(check, Case(6, 2, 3, 24, 16, rank=3), only=side) for side in LORA},
    "every_expert": partial(check, Case(4, 3, 3, 24, 16)),
    "experts_512": partial(check, Case(3, 2, 512, 16, 8), recompute=False),
    **{
        f"dtypes_{str(base)[6:]}_{str(factors)[6:]}": partial(check_dtypes, base, factors)
        for base, factors in ((F16, F32), (F32, F16), (F32, BF16))
    },
    "frozen_base": check_frozen_base,
    **{
        f"kept_{name}_{rank}": partial(check_kept, glu, rank)
        for name, glu, rank in (
            ("silu", SILU, 0), ("silu", SILU, 4), ("gpt_oss", GPT_OSS, 4),
            ("ungated", Glu("relu2", gated=False), 0),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_interpreted(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""


if __name__ == "__main__":
    interpreted.report(CASES)
