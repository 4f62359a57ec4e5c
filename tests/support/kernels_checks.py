"""Checks of the Triton experts against the fp64 reference: outputs and every gradient.

Runs natively on a GPU (``-m gpu``), and on a CPU in one process under Triton's interpreter. The
interpreter is right for fp32 and fp16 only, and has to be chosen before the kernels are imported.
Each case reports on its own.

In low precision our relative distance to fp64 is at most 1.5 times that of the same formulas
evaluated eagerly in the operands' dtype. In fp32 it is at most 1e-5.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from moe_patch.kernels.common.gemm_device import POINTERS, weight_operand  # noqa: E402
from moe_patch.kernels.common.tiles import Tile  # noqa: E402
from moe_patch.kernels.experts import dh, linear, up  # noqa: E402
from moe_patch.kernels.experts.experts import experts_forward  # noqa: E402
from moe_patch.kernels.plan.row_tiles import RowTiles  # noqa: E402
from moe_patch.ops.experts import definition as reference  # noqa: E402
from moe_patch.types import ExpertsBackward, ExpertsNeeds, Glu  # noqa: E402
from tests.support import interpreted  # noqa: E402
from tests.support.kernels_cases import (  # noqa: E402
    GPT_OSS,
    NAMES,
    SILU,
    SMALL,
    Case,
    Inputs,
    make_inputs,
    run_kernels,
    run_reference,
)
from tests.support.numerics import FP32, assert_bits, assert_close, bf16_rule  # noqa: E402


def check(case: Case, dtype: torch.dtype, device: str) -> None:
    """Output and gradients are within limits, finite, and keep their inputs' dtype and strides."""
    inputs = make_inputs(case, dtype, device)
    found, backward = run_kernels(inputs)
    exact = run_reference(inputs, torch.float64)
    eager = run_reference(inputs, dtype) if dtype != torch.float32 else None
    for name, expected in exact.items():
        ours = found[name]
        assert torch.isfinite(ours).all(), f"{name}: not finite"
        if name in inputs.tensors and name not in ("x", "weights"):
            assert ours.stride() == inputs.tensors[name].stride(), f"{name}: strides"
        assert ours.dtype == (dtype if name == "out" else inputs.tensors[name].dtype), name
        if eager is None:
            assert_close(ours, expected, FP32, name)
        else:
            bf16_rule(ours, eager[name].to(ours.dtype), expected, name)
    unused = [e for e in range(case.E) if not (inputs.ids_TK == e).any()]
    for name in ("w13", "w2", "b13", "b2", "lora13_A", "lora13_B", "lora2_A", "lora2_B"):
        if name in found and unused:
            assert (found[name][unused] == 0).all(), f"{name}: an expert without rows"
    if case.norms:
        check_norms(inputs, found["act_norm"], backward, 1e-4 if dtype == torch.float32 else 2e-2)


def check_norms(
    inputs: Inputs, act_norm_TK: Tensor, backward: ExpertsBackward, limit: float
) -> None:
    """Row norms agree with autograd on each row alone: one token with one expert."""
    T, K = inputs.ids_TK.shape
    zeros = torch.zeros(T, K, device=inputs.ids_TK.device, dtype=torch.float64)
    expected = {name: zeros.clone() for name in ("act", "out", "params", "lora")}
    wide = {name: tensor.double() for name, tensor in inputs.tensors.items()}
    for t, k in itertools.product(range(min(T, 8)), range(K)):
        if not 0 <= inputs.ids_TK[t, k] < inputs.case.E:
            continue
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in wide.items()}
        w, lora13, lora2 = inputs.call(leaves)
        one = torch.ones(1, 1, dtype=torch.float64, device=zeros.device)
        y_1D = reference.experts(
            leaves["x"][t : t + 1],
            inputs.ids_TK[t : t + 1, k : k + 1],
            one,
            w,
            inputs.case.glu,
            lora13,
            lora2,
        )
        names = [name for name in leaves if name not in ("x", "weights")]
        dy_1D = wide["weights"][t, k] * inputs.dout_TD[t : t + 1].double()
        grads = dict(
            zip(names, torch.autograd.grad(y_1D, [leaves[n] for n in names], dy_1D), strict=True)
        )
        sizes = {name: grad.norm() ** 2 for name, grad in grads.items()}
        expected["act"][t, k] = y_1D.norm()
        expected["out"][t, k] = dy_1D.norm()
        expected["params"][t, k] = sum(sizes[n] for n in names if not n.startswith("lora")) ** 0.5
        expected["lora"][t, k] = sum(sizes[n] for n in names if n.startswith("lora")) ** 0.5
    found = {
        "act": act_norm_TK,
        "out": backward.grad_norm_out_TK,
        "params": backward.grad_norm_params_TK,
    }
    if inputs.case.rank:
        found["lora"] = backward.grad_norm_lora_TK
    empty = (inputs.ids_TK < 0) | (inputs.ids_TK >= inputs.case.E)
    for name, norm_TK in found.items():
        assert norm_TK.dtype == torch.float32
        assert (norm_TK[empty] == 0).all(), f"{name}: norm in an empty slot"
        assert_close(norm_TK[:8], expected[name][:8], limit, f"{name} norm")


def check_needs(device: str) -> None:
    """A gradient computed alone equals that of the full call, and no other is returned."""
    inputs = make_inputs(replace(SMALL["lora"], E=3), torch.float32, device)
    everything, _ = run_kernels(inputs)
    for name in NAMES:
        found, backward = run_kernels(inputs, ExpertsNeeds(**{name: True}))
        assert_bits(found[name], everything[name], name)
        assert [n for n in backward._fields if getattr(backward, n) is not None] == [name]


def check_kept(device: str) -> None:
    """Backward recomputes tensors that forward did not keep, to the same bits."""
    inputs = make_inputs(replace(SMALL["lora"], E=3, norms=False), torch.float32, device)
    everything, _ = run_kernels(inputs)
    for save_h, save_u in ((False, False), (True, False), (False, True)):
        inputs.case = replace(inputs.case, save_h=save_h, save_u=save_u)
        for needs in (None, ExpertsNeeds(lora13_B=save_u, lora2_B=True)):
            found, backward = run_kernels(inputs, needs)
            for name in NAMES:
                if getattr(backward, name) is not None:
                    assert_bits(found[name], everything[name], f"{name} {save_h} {save_u}")


def check_decoding(device: str) -> None:
    """Rows alone that keep nothing get the bits of a batch that keeps tensors for backward.

    Decoding runs the former, training the latter. NumPy's product, which the interpreter uses, has
    bits that depend on a row's place; it is replaced by a sum in order.
    """
    with mock.patch.object(np, "matmul", _product_in_order):
        for name in ("silu", "lora", "gpt_oss"):
            # The order of two terms would change no bit.
            inputs = make_inputs(replace(SMALL[name], K=3), torch.float32, device)
            together = _forward(inputs, slice(None), keep=True)
            for rows in (slice(3, 4), slice(7, 12), slice(None)):
                alone = _forward(inputs, rows, keep=False)
                assert_bits(alone, together[rows], f"{name} {rows}")


def _product_in_order(a: np.ndarray, b: np.ndarray, dtype: Any = None) -> np.ndarray:
    return (a[:, :, None] * b).sum(1, dtype=dtype)


def _forward(inputs: Inputs, rows: slice, keep: bool) -> Tensor:
    w, lora13, lora2 = inputs.call(inputs.tensors)
    return experts_forward(
        inputs.tensors["x"][rows], inputs.ids_TK[rows], inputs.tensors["weights"][rows], w,
        inputs.case.glu, lora13, lora2, save_h=keep, save_u13=keep, save_u2=keep,
        batch_invariant=True,
    ).out_TD  # fmt: skip


def check_over_h(device: str) -> None:
    """Overwriting h with its gradient leaves all other bits equal, for every activation.

    A partial row tile reads rows of the next expert, which may already be gradients.
    """
    for name in ("silu", "lora", "gpt_oss", "ungated", "recompute"):
        inputs = make_inputs(replace(SMALL[name], E=3), torch.float32, device)
        (expected, _), (found, _) = run_kernels(inputs), run_kernels(inputs, overwrite_h=True)
        for result in expected:
            assert_bits(found[result], expected[result], f"{name} {result}")


def check_nan_rows(device: str) -> None:
    """A NaN row stays NaN and affects no other row; its empty slots have no gradient."""
    inputs = make_inputs(replace(SMALL["silu"], K=1), torch.float32, device)
    inputs.ids_TK[:] = torch.arange(13, device=device)[:, None] % 5
    clean, _ = run_kernels(inputs)
    inputs.tensors["x"][3] = float("nan")
    dirty, _ = run_kernels(inputs)
    others = [t for t in range(13) if t != 3]
    assert dirty["out"][3].isnan().all()
    assert_bits(dirty["out"][others], clean["out"][others], "out")
    assert_bits(dirty["x"][others], clean["x"][others], "x")
    same = [e for e in range(5) if e != 3]
    assert_bits(dirty["w2"][same], clean["w2"][same], "w2")
    inputs.ids_TK[3] = -1
    dropped, _ = run_kernels(inputs)
    assert all(torch.isfinite(tensor).all() for tensor in dropped.values())


def check_descriptors(device: str) -> None:
    """Operands through tensor descriptors give the results of pointers, for every storage."""
    ungated = Glu("relu", gated=False)
    for glu, transposed in itertools.product((SILU, GPT_OSS, ungated), (False, True)):
        check_described(Case(21, 2, 3, 40, 24, glu, transposed=transposed), device)


def check_described(case: Case, device: str) -> None:
    dtype, tile, glu = torch.float16, Tile(16, 32, 16, 4, 1), case.glu
    described = replace(tile, descriptors=True)
    inputs = make_inputs(case, dtype, device)
    w13, w2, x = (inputs.tensors[name] for name in ("w13", "w2", "x"))
    tiles = RowTiles(reference.build_plan(inputs.ids_TK, case.E))
    row_tiles, valid = tiles.rows(tile.m), int(tiles.plan.offsets_S[-1])
    h_NH = torch.randn(tiles.count, w13.shape[1], device=device, dtype=dtype)
    a_NF = torch.randn(tiles.count, case.F, device=device, dtype=dtype)
    weights_TK, dout_TD = inputs.tensors["weights"], inputs.dout_TD
    w13_T, w2_T = w13.transpose(1, 2), w2.transpose(1, 2)
    halves = 2 if glu is SILU else 1
    for weight, parts, run in [
        (w13, halves, lambda t: up.up(x, row_tiles, w13, None, glu, t)),
        (w2, 1, lambda t: (linear.grouped_linear(a_NF, row_tiles, w2, None, t),)),
        (w13_T, 1, lambda t: (linear.grouped_linear(h_NH, row_tiles, w13_T, None, t),)),
        (w2_T, 1, lambda t: dh.hidden_gradients(
            dout_TD, row_tiles, w2, weights_TK, h_NH, glu, t, dh=True, wa=True, partial=True)),
    ]:  # fmt: skip
        assert weight_operand(weight, tile, parts)[1] == POINTERS
        assert weight_operand(weight, described, parts)[1] != POINTERS
        for i, (a, b) in enumerate(zip(run(described), run(tile), strict=True)):
            assert_close(a[:valid], b[:valid], 1e-6, f"{glu.kind} {case.transposed} output {i}")


CASES = {
    **{
        f"{name}-{str(dtype)[6:]}": lambda device, case=case, dtype=dtype: check(
            case, dtype, device
        )
        for name, case in SMALL.items()
        for dtype in (torch.float32, torch.float16)
        if dtype == torch.float32 or name in ("silu", "gpt_oss", "lora")
    },
    "needs": check_needs,
    "kept": check_kept,
    "decoding": check_decoding,
    "inplace_h": check_over_h,
    "nan_rows": check_nan_rows,
    "descriptors": check_descriptors,
}


if __name__ == "__main__":
    interpreted.report(CASES)
