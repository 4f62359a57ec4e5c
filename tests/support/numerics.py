"""Comparison of tensors: relative to a norm, never by an absolute tolerance; integers exactly.

rel_err(a, b)                      norm(a - b) / norm(b), in fp64
assert_close(a, b, limit)          rel_err at most limit, equal shapes
assert_bits(a, b)                  equal bit for bit: dtype, shape, NaN payloads, signed zeros
bf16_rule(ours, eager, ref)        our distance to fp64 is at most 1.5 times eager's
assert_same_choice(ids, ref_ids)   the same experts per row, as sets; ties by score
dense_weights(ids, w, E)           weights by expert, whatever the slot order
probe(t)                           a scalar that depends on every element of t
"""

from __future__ import annotations

import torch
from torch import Tensor

FP32 = 1e-5
FP64 = 1e-11
# Some families cast to fp32 whatever the model's dtype, also inside an fp64 reference.
FP32_INSIDE = 1e-6


def rel_err(a: Tensor, b: Tensor) -> float:
    """Return norm(a - b) / norm(b) in fp64; 0 for equal zeros, inf for other a over a zero b."""
    a64, b64 = a.detach().double(), b.detach().double()
    distance, size = (
        torch.linalg.vector_norm(a64 - b64).item(),
        torch.linalg.vector_norm(b64).item(),
    )
    if size == 0.0:
        return 0.0 if distance == 0.0 else float("inf")
    return distance / size


def assert_close(a: Tensor, b: Tensor, limit: float, what: str = "") -> None:
    """Fail if shapes differ, the relative error exceeds ``limit``, or either tensor holds NaN."""
    assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    error = rel_err(a, b)
    assert error <= limit, f"{what}: relative error {error:.2e}, limit {limit:.0e}"


def assert_bits(a: Tensor, b: Tensor, what: str = "") -> None:
    """Fail unless dtype, shape and every bit agree."""
    assert a.dtype == b.dtype, f"{what}: dtype {a.dtype}, expected {b.dtype}"
    assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    different = int((as_bytes[0] != as_bytes[1]).sum())
    assert not different, f"{what}: {different} of {as_bytes[0].numel()} bytes differ"


def bf16_rule(
    ours: Tensor, eager: Tensor, ref: Tensor, what: str = "", factor: float = 1.5
) -> None:
    """Fail if our relative distance to an fp64 evaluation exceeds ``factor`` times eager's.

    FP32_INSIDE is added for results that never leave fp32, where eager's distance may be zero.

    Args:
        ours, eager: the two low-precision results; must share dtype and shape.
        ref: the fp64 evaluation of the same low-precision weights and inputs.
    """
    assert ours.dtype == eager.dtype, (
        f"{what}: dtype {ours.dtype}, transformers gives {eager.dtype}"
    )
    assert ours.shape == eager.shape == ref.shape, (
        f"{what}: {ours.shape}, {eager.shape}, {ref.shape}"
    )
    mine, theirs = rel_err(ours, ref), rel_err(eager, ref)
    assert mine <= factor * theirs + FP32_INSIDE, (
        f"{what}: {mine:.2e} from fp64, eager {theirs:.2e}, factor {factor}"
    )


def dense_weights(ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> Tensor:
    """Return weights by expert, [T, E] fp64, to compare routings whatever their slot order."""
    dense = torch.zeros(ids_TK.shape[0], num_experts, dtype=torch.float64, device=ids_TK.device)
    return dense.scatter(1, ids_TK, weights_TK.detach().double())


def assert_same_choice(
    ids_TK: Tensor, ref_ids_TK: Tensor, choice_TE: Tensor | None = None
) -> Tensor:
    """Two routers choose the same experts, as sets, except in rows tied at the k-th place.

    A tied row must still choose equal scores, so that no better expert was passed over.

    Args:
        choice_TE: the score that decides (bias added); None where no row may be tied.

    Returns:
        which rows chose the same experts, bool [T].
    """
    assert ids_TK.shape == ref_ids_TK.shape
    same_T = (ids_TK.sort(-1).values == ref_ids_TK.sort(-1).values).all(-1)
    if choice_TE is None:
        assert same_T.all(), f"{int((~same_T).sum())} of {len(same_T)} rows choose other experts"
        return same_T
    mine, theirs = (choice_TE.gather(1, ids).sort(-1).values for ids in (ids_TK, ref_ids_TK))
    wrong = int((mine != theirs).any(-1).sum())
    assert not wrong, f"{wrong} of {len(same_T)} rows choose experts of other scores"
    return same_T


def probe(t: Tensor, seed: int = 3) -> Tensor:
    """A fixed random linear functional of t: its gradient is the same known tensor for any t."""
    generator = torch.Generator().manual_seed(seed)
    return (t * torch.randn(t.shape, generator=generator).to(t.device, t.dtype)).sum()
