"""How tests compare tensors. Relative to a norm, never an absolute tolerance; integers exactly.

    rel_err(a, b)                      norm(a - b) / norm(b), in fp64
    assert_close(a, b, limit)          rel_err at most limit, equal shapes
    assert_bits(a, b)                  equal bit for bit: dtype, shape, NaN payloads, signed zeros
    bf16_rule(ours, eager, ref)        our distance to fp64 is at most 1.5 times eager's
    assert_same_routing(ids, ...)      ids as sets and weights by id, where the choice is certain
    probe(t)                           a scalar that depends on every element of t
"""

from __future__ import annotations

import torch
from torch import Tensor

FP32 = 1e-5
FP64 = 1e-11


def rel_err(a: Tensor, b: Tensor) -> float:
    """norm(a - b) / norm(b) in fp64; 0 for equal zeros, inf for anything else over a zero b."""
    a64, b64 = a.detach().double(), b.detach().double()
    distance, size = torch.linalg.vector_norm(a64 - b64).item(), torch.linalg.vector_norm(b64).item()
    if size == 0.0:
        return 0.0 if distance == 0.0 else float("inf")
    return distance / size


def assert_close(a: Tensor, b: Tensor, limit: float, what: str = "") -> None:
    """Fails when shapes differ, the relative error is above ``limit``, or either holds NaN."""
    assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    error = rel_err(a, b)
    assert error <= limit, f"{what}: relative error {error:.2e}, limit {limit:.0e}"


def assert_bits(a: Tensor, b: Tensor, what: str = "") -> None:
    """Fails unless dtype, shape and every bit agree."""
    assert a.dtype == b.dtype, f"{what}: dtype {a.dtype}, expected {b.dtype}"
    assert a.shape == b.shape, f"{what}: shape {tuple(a.shape)}, expected {tuple(b.shape)}"
    as_bytes = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    different = int((as_bytes[0] != as_bytes[1]).sum())
    assert not different, f"{what}: {different} of {as_bytes[0].numel()} bytes differ"


def bf16_rule(ours: Tensor, eager: Tensor, ref: Tensor, what: str = "", factor: float = 1.5) -> None:
    """Low precision: our relative distance to an fp64 evaluation, at most ``factor`` times eager's.

    Args:
        ours, eager: the two low-precision results; must share dtype and shape.
        ref: the fp64 evaluation of the same low-precision weights and inputs.
    """
    assert ours.dtype == eager.dtype, f"{what}: dtype {ours.dtype}, transformers gives {eager.dtype}"
    assert ours.shape == eager.shape == ref.shape, f"{what}: {ours.shape}, {eager.shape}, {ref.shape}"
    mine, theirs = rel_err(ours, ref), rel_err(eager, ref)
    assert mine <= factor * theirs, f"{what}: {mine:.2e} from fp64, eager {theirs:.2e}, factor {factor}"


def dense_weights(ids_TK: Tensor, weights_TK: Tensor, num_experts: int) -> Tensor:
    """Weights by expert, [T, E] fp64, so that two routings compare whatever their slot order."""
    dense = torch.zeros(ids_TK.shape[0], num_experts, dtype=torch.float64, device=ids_TK.device)
    return dense.scatter(1, ids_TK, weights_TK.detach().double())


def assert_same_routing(
    ids_TK: Tensor, weights_TK: Tensor, ref_ids_TK: Tensor, ref_weights_TK: Tensor,
    choice_TE: Tensor, limit: float, what: str = "",
) -> None:  # fmt: skip
    """Two routings agree: ids as sets and weights by id, except rows tied at the k-th place.

    A tied row must still choose equal scores: the k-th and (k+1)-th choice scores are the same number
    there, so that which of them was taken cannot matter to the score.

    Args:
        choice_TE: the score that decides (bias added, groups masked), in the family's own dtype.
    """
    assert ids_TK.shape == ref_ids_TK.shape, f"{what}: ids {tuple(ids_TK.shape)}"
    E, K = choice_TE.shape[1], ids_TK.shape[1]
    same_T = (ids_TK.sort(-1).values == ref_ids_TK.sort(-1).values).all(-1)
    if K < E:
        top = choice_TE.detach().sort(-1, descending=True).values
        certain_T = top[:, K - 1] > top[:, K]
        wrong = int((certain_T & ~same_T).sum())
        assert not wrong, f"{what}: {wrong} of {len(same_T)} rows choose other experts without a tie"
    else:
        assert same_T.all(), what
    mine, theirs = (choice_TE.gather(1, ids).sort(-1).values for ids in (ids_TK, ref_ids_TK))
    assert torch.equal(mine, theirs), f"{what}: a tied row chose a lower score"
    dense = [dense_weights(i, w, E)[same_T] for i, w in ((ids_TK, weights_TK), (ref_ids_TK, ref_weights_TK))]
    assert_close(*dense, limit, f"{what} weights")


def probe(t: Tensor, seed: int = 3) -> Tensor:
    """A fixed random linear functional of t: its gradient is the same known tensor for any t."""
    generator = torch.Generator().manual_seed(seed)
    return (t * torch.randn(t.shape, generator=generator).to(t.device, t.dtype)).sum()
