"""Plans of chunks with full tiles: every row is computed once, and found again where it is kept.

Runs natively on a GPU (``-m gpu``) and, on a CPU, in one process under Triton's interpreter.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch.kernels.common.chunks import tapered
from moe_patch.kernels.experts.carried import carry, combine_carried
from moe_patch.kernels.experts.reduce import combine
from moe_patch.kernels.plan.full_tiles import FullTiles
from moe_patch.kernels.plan.plan import build_plan
from moe_patch.types import Plan
from tests.support import interpreted
from tests.support.numerics import assert_bits

D = 8


def experts_of(plan: Plan) -> torch.Tensor:
    """Return the expert of each slot; E for an unused one."""
    N = plan.row_of_N.shape[0]
    slots = torch.arange(N, device=plan.offsets_S.device)
    return torch.bucketize(slots, plan.offsets_S[1:].long(), right=True)


def check(T: int, K: int, E: int, chunk: int, block_m: int, device: str) -> None:
    """Sum the rows of every token as a call with all rows does; make no tile that is not full."""
    torch.manual_seed(T)
    ids_TK = torch.randint(-1, E + 1, (T, K), device=device)
    ids_TK[: T // 3] %= 2  # the first expert has most of its rows in the first chunks
    whole, cut = build_plan(ids_TK, E), tapered(T, K, chunk, D, 4, D, E * (block_m - 1))
    full = FullTiles(whole, ids_TK, cut, block_m)
    rows_ND, weights_TK = torch.randn(T * K, D, device=device), torch.rand(T, K, device=device)
    expected = combine(rows_ND, whole, weights_TK)
    carried, found = torch.full((E * block_m, D), torch.nan, device=device), []
    computed = torch.zeros(T * K, dtype=torch.int64, device=device)
    for number, part in enumerate(cut.chunks):
        plan = full.plan(number)
        row_of_N, e = plan.row_of_N.long(), experts_of(plan)
        used = e < E
        assert (row_of_N[~used] == -1).all()
        assert torch.equal(ids_TK.view(-1)[row_of_N[used]], e[used])
        computed[row_of_N[used]] += 1
        # An expert computes full tiles, or all rows that it has left.
        done = torch.bincount(ids_TK.view(-1)[computed > 0], minlength=E)
        partly = done % block_m != 0
        assert torch.equal(done[partly], whole.offsets_S.diff().long()[partly])
        # Slots of a plan with all rows in place of a product's results.
        y_ND = torch.full((row_of_N.shape[0], D), torch.nan, device=device)
        y_ND[used] = rows_ND[whole.slot_of_TK.view(-1)[row_of_N[used]].long()]
        out_TD = torch.empty(part.tokens.stop - part.tokens.start, D, device=device)
        combine_carried(y_ND, carried, plan, weights_TK[part.tokens], out_TD)
        carry(y_ND, full, number, carried)
        found.append(out_TD)
    assert_bits(torch.cat(found), expected, "sums")
    valid = (ids_TK >= 0) & (ids_TK < E)
    assert torch.equal(computed, valid.view(-1).long())


CASES = {
    "taper": partial(check, 50, 2, 3, 16, 4),
    "rare": partial(check, 37, 3, 17, 8, 8),  # some experts begin no tile in a chunk
    "two": partial(check, 40, 2, 4, 40, 16),
    "one_row": partial(check, 9, 2, 3, 2, 1),
    "more_chunks": partial(check, 100, 1, 7, 24, 16),
}


@pytest.mark.parametrize("case", CASES)
def test_interpreted(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_card(case: str) -> None:
    CASES[case]("cuda")


@pytest.mark.gpu
def test_many_rows_on_a_card() -> None:
    check(20000, 8, 128, 5000, 128, "cuda")


@pytest.mark.parametrize("tokens", [1, 7, 17, 1000, 262144])
@pytest.mark.parametrize("chunk", [1, 3, 17, 55296])
def test_tapered_chunks_cover_all_tokens(tokens: int, chunk: int) -> None:
    if tokens > chunk * 1000:
        pytest.skip("too many chunks to list")
    cut = tapered(tokens, 3, chunk, 64, 24, 32, extra=40)
    assert [t for part in cut.chunks for t in range(tokens)[part.tokens]] == list(range(tokens))
    beside = max(1, chunk * 32 // 56)  # tokens whose a takes memory beside y
    for part in cut.chunks:
        size, left = part.tokens.stop - part.tokens.start, tokens - part.tokens.stop
        assert 0 < size <= chunk
        assert size <= beside or (size * 3 + 40) * 24 <= left * 64
        assert chunk < 8 or part.tokens.start % 8 == 0
        assert (part.rows.start, part.rows.stop) == (3 * part.tokens.start, 3 * part.tokens.stop)


if __name__ == "__main__":
    interpreted.report(CASES)
