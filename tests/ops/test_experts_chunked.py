"""The experts in chunks of tokens: the Triton backend on a CPU, and the operator's view of it.

The reference of values is autograd in fp64, that of bits a call with all tokens at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch.kernels.common.chunks import (
    ALONE,
    KEPT,
    PACKED,
    RECOMPUTED,
    TRAINED,
    auto_chunk,
    chunk_count,
    chunks,
    forward_columns,
    half_columns,
    tapered,
)
from moe_patch.ops.experts import op
from moe_patch.ops.experts.long_context import chunks_of
from moe_patch.ops.experts.op import Signals
from moe_patch.ops.experts.schema import encode_options
from moe_patch.types import ExpertWeights, Glu
from tests.ops.test_experts_triton import exactly, kept_bytes, operands, run, triton_anywhere
from tests.support import interpreted
from tests.support.kernels_cases import GPT_OSS, Case, make_inputs
from tests.support.numerics import FP32, assert_bits, assert_close

F32, F16 = torch.float32, torch.float16
BY_TOKEN = {"out", "x", "weights"}


def same(found: Tensor, whole: Tensor, what: str) -> None:
    """Compare bits on a card; NumPy's products depend on a row's place among others."""
    if found.is_cuda:
        assert_bits(found, whole, what)
    else:
        assert_close(found, whole, 1e-6, what)


def check(case: Case, chunk: int, device: str) -> None:
    """Equal bits by token, fp32 sums over tokens, equal bits when recomputed or repeated."""
    inputs = make_inputs(case, F32, device)
    tensors = {n: t.requires_grad_() for n, t in inputs.tensors.items()}
    whole, expected = run(inputs, tensors), exactly(inputs, tensors)
    found = run(inputs, tensors, chunk_tokens=chunk)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(found[name], value, FP32, name)
        assert found[name].stride() == whole[name].stride(), name
    for name in BY_TOKEN:
        same(found[name], whole[name], name)
    again = run(inputs, tensors, chunk_tokens=chunk, recompute=True)
    for name, value in found.items():
        if name in ("w13", "w2"):
            assert_close(again[name], value, FP32, f"{name} recomputed")
        else:
            same(again[name], value, f"{name} recomputed")


def check_signals(device: str) -> None:
    """Record the norms of a call with all tokens, bit for bit."""
    inputs = make_inputs(Case(9, 2, 3, 24, 16, rank=4, bias=True), F32, device)
    tensors = {n: t.requires_grad_() for n, t in inputs.tensors.items()}
    recorded = []
    for chunk in (0, 5):
        signals = Signals(torch.empty(3, 9, 2, device=device))
        run(inputs, tensors, chunk_tokens=chunk, signals=signals)
        recorded.append((signals.act_norm_TK, signals.grads_3TK))
    for whole, found in zip(*recorded, strict=True):
        same(found, whole, "norms")


def check_kept(device: str) -> None:
    """Keep what a call with all tokens keeps, and the offsets of each chunk's plan."""
    case = Case(20, 2, 3, 24, 16, rank=4)
    inputs = make_inputs(case, F16, device)
    tensors = {n: t.requires_grad_() for n, t in inputs.tensors.items()}
    for recompute in (False, True):
        whole = kept_bytes(inputs, tensors, recompute=recompute)
        found = kept_bytes(inputs, tensors, recompute=recompute, chunk_tokens=8)
        assert found == whole + 2 * 4 * (case.E + 1)


@contextlib.contextmanager
def small_auto(alone: int, kept: int) -> Iterator[None]:
    """Let "auto" take chunks of these numbers of tokens."""
    from moe_patch.kernels.common import chunks as sizes
    from moe_patch.ops.experts import long_context

    found = {ALONE: alone, KEPT: kept}
    with (
        mock.patch.object(long_context, "AUTO_FROM", 0),
        mock.patch.object(sizes, "auto_chunk", lambda use, **_: found[use]),
    ):
        yield


def check_alone(case: Case, chunks: tuple[int, ...], device: str) -> None:
    """Compute the output of all tokens at once, where each expert's rows fill tiles or do not."""
    inputs = make_inputs(case, F32, device)
    t, (w, lora13, lora2) = inputs.tensors, operands(inputs.tensors)
    found = {}
    for chunk in (0, *chunks):
        with triton_anywhere(), torch.no_grad():
            found[chunk] = op.experts_mlp(
                t["x"], inputs.ids_TK, t["weights"], w, case.glu,
                lora13=lora13, lora2=lora2, backend="triton", chunk_tokens=chunk,
            )  # fmt: skip
        same(found[chunk], found[0], f"chunks of {chunk}")


def check_checkpoints(device: str) -> None:
    """Keep no h in the first forward of either kind of checkpoint, and compute the same bits.

    Its chunks are smaller, so it drops a plan of another shape.
    """
    from moe_patch.kernels.experts import chunked

    inputs = make_inputs(Case(9, 2, 3, 24, 16, rank=4), F32, device)
    tensors = {n: t.requires_grad_() for n, t in inputs.tensors.items()}
    expected = run(inputs, tensors, chunk_tokens=5)
    w, lora13, lora2 = operands(tensors)

    def forward(x_TD: Tensor) -> Tensor:
        return op.experts_mlp(
            x_TD, inputs.ids_TK, tensors["weights"], w, inputs.case.glu,
            lora13=lora13, lora2=lora2, backend="triton", chunk_tokens="auto",
        )  # fmt: skip

    for reentrant in (False, True):
        with (
            triton_anywhere(),
            small_auto(2, 5),
            mock.patch.object(chunked, "experts_forward", wraps=chunked.experts_forward) as spy,
        ):
            out_TD = checkpoint(forward, tensors["x"], use_reentrant=reentrant)
            same(out_TD, expected["out"], "out")
            out_TD.backward(inputs.dout_TD)
        kwargs = [call.kwargs for call in spy.call_args_list]
        assert [(k["save_h"], k["chunk"]) for k in kwargs] == [(False, 2), (True, 5)]
        for name, tensor in tensors.items():
            assert_bits(tensor.grad, expected[name], f"{name} reentrant={reentrant}")
            tensor.grad = None


def check_fake(device: str) -> None:
    """Give compilers the shapes of what runs."""
    inputs = make_inputs(Case(9, 2, 3, 24, 16), F32, device)
    t, glu = inputs.tensors, inputs.case.glu
    options = encode_options(glu, "triton", False, "", 5)
    scalars = 1.0, 1.0, glu.alpha, glu.limit, options
    args = (t["x"], inputs.ids_TK, t["weights"], t["w13"], t["w2"], *(None,) * 6, *scalars)
    args = (*args, [True, False, False, False], None, [])
    torch.library.opcheck(
        torch.ops.moe_patch.experts.default, args, test_utils=("test_faketensor", "test_schema")
    )


CASES = {
    "plain": partial(check, Case(9, 2, 3, 40, 24), 4),
    "oai_bias": partial(check, Case(9, 2, 3, 40, 16, GPT_OSS, bias=True, transposed=True), 4),
    "lora": partial(check, Case(9, 2, 3, 40, 24, rank=4, bias=True), 8),
    "peft": partial(check, Case(17, 2, 3, 24, 16, Glu("gelu"), rank=3, strides="peft"), 12),
    "ungated_odd": partial(check, Case(5, 2, 3, 33, 17, Glu("relu2", gated=False)), 2),
    "one_expert": partial(check, Case(12, 2, 3, 16, 16, ids="one"), 5),
    "empty_slots_only": partial(check, Case(6, 2, 3, 16, 16, ids="empty", rank=2), 3),
    # Tiles have 16 rows under the interpreter: an expert has more or fewer of them in a chunk.
    "alone": partial(check_alone, Case(60, 2, 3, 40, 24, rank=4, bias=True), (30, 9)),
    "alone_ungated": partial(check_alone, Case(20, 3, 8, 17, 9, Glu("relu2", gated=False)), (7,)),
    "alone_empty": partial(check_alone, Case(12, 2, 3, 16, 16, ids="empty"), (5,)),
    "signals": check_signals,
    "kept": check_kept,
    "checkpoints": check_checkpoints,
    "fake": check_fake,
}


@pytest.mark.parametrize("case", CASES)
def test_interpreted(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_card(case: str) -> None:
    CASES[case]("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("trained", ["all", "factors"])
def test_bits_of_bf16_on_a_card(trained: str) -> None:
    """Chunks take the tiles of all rows, on Hopper its kernels, whatever their own size."""
    case = Case(1500, 8, 32, 1280, 256, rank=16)
    inputs = make_inputs(case, torch.bfloat16, "cuda")
    tensors = {
        n: t.requires_grad_(trained == "all" or n in BY_TOKEN or n.startswith("lora"))
        for n, t in inputs.tensors.items()
    }
    whole = run(inputs, tensors)
    for chunk in (700, 48):
        found = run(inputs, tensors, chunk_tokens=chunk)
        again = run(inputs, tensors, chunk_tokens=chunk, recompute=True)
        for name, value in found.items():
            if name not in ("w13", "w2"):
                assert_bits(again[name], value, f"{name} recomputed")
            assert_close(again[name], whole[name], 4e-3, f"{name} recomputed")
            if name in BY_TOKEN:
                assert_bits(value, whole[name], name)
            else:
                assert_close(value, whole[name], 4e-3, name)
    w, lora13, lora2 = operands(tensors)
    with torch.no_grad(), small_auto(48, 48):
        out_TD = op.experts_mlp(
            tensors["x"], inputs.ids_TK, tensors["weights"], w, case.glu,
            lora13=lora13, lora2=lora2, backend="triton", chunk_tokens="auto",
        )  # fmt: skip
    assert_bits(out_TD, whole["out"], "out without gradients")


@pytest.mark.parametrize("tokens", [1, 7, 17, 262144])
@pytest.mark.parametrize("chunk", [1, 3, 17, 45875])
def test_chunks_cover_all_tokens(tokens: int, chunk: int) -> None:
    if tokens * 4 > chunk * 1000:
        pytest.skip("too many chunks to list")
    found = chunks(tokens, 3, chunk)
    assert len(found) == chunk_count(tokens, chunk)
    assert [t for part in found for t in range(tokens)[part.tokens]] == list(range(tokens))
    for part in found:
        assert chunk < 8 or part.tokens.start % 8 == 0
        assert part.tokens.stop - part.tokens.start <= chunk
        assert (part.rows.start, part.rows.stop) == (3 * part.tokens.start, 3 * part.tokens.stop)


def test_tokens_of_a_chunk() -> None:
    """Only the Triton backend has chunks; "auto" counts what a chunk of this use holds."""
    w = ExpertWeights(*(torch.empty(s, device="meta") for s in ((4, 96, 64), (4, 64, 48))))
    ids_TK = torch.empty(7, 2, dtype=torch.int64, device="meta")

    def found(chunk: int | str, tokens: int = 7, backend: str = "triton", **use: bool) -> object:
        x_TD = torch.empty(tokens, 64, dtype=torch.bfloat16, device="meta")
        use = {"graph": False, "recompute": False} | use
        return chunks_of(chunk, backend, x_TD, ids_TK, w, **use)

    assert [found(10), found(10, backend="torch"), found(0)] == [(10, 10), (0, 0), (0, 0)]
    assert found("auto") == found("auto", 65536) == found("auto", 65537, "torch") == (0, 0)
    alone, many = (848 << 20) // (2 * 64 * 2), 65537
    assert found("auto", many) == found("auto", many, recompute=True) == (alone, alone)
    assert found("auto", many, graph=True) == ((1376 << 20) // (2 * (48 + 64) * 2), alone)
    again = {"graph": True, "recompute": True}
    assert found("auto", many, **again) == ((1856 << 20) // (2 * (48 + 96) * 2), alone)
    for tensor, most in zip(w[:2], (1856, 3104), strict=True):
        tensor.requires_grad_()
        assert found("auto", many, **again) == ((most << 20) // (2 * (48 + 96) * 2), alone)
    # Numbers of chunks of Qwen3-30B-A3B's experts.
    own = partial(auto_chunk, top_k=8, sizes=(2048, 1536, 768), itemsize=2)
    alone = own(ALONE)
    counts = [chunk_count(262144, own(use)) for use in (PACKED, KEPT, RECOMPUTED, TRAINED)]
    assert counts == [6, 3, 5, 3]
    own = partial(forward_columns, top_k=8, hidden=2048)
    assert [own(3, least=256), own(3, least=512, freed=1536), own(2, least=256)] == [768, 2048, 512]
    # Later chunks have a beside y, in the memory of y of earlier ones.
    cut = tapered(262144, 8, alone, 2048, 768, half_columns(2048), extra=128 * 127)
    found = [part.tokens.stop - part.tokens.start for part in cut.chunks]
    assert found == [54272, 50440, 37832, 31008, 31008, 31008, 26576]
    assert auto_chunk(ALONE, 2, (6144, 65536, 32768), 2) == (848 << 20) // (2 * 3072 * 2)
    assert auto_chunk(ALONE, 16, (6144, 65536, 32768), 2) == 32768


if __name__ == "__main__":
    with (
        mock.patch("moe_patch.kernels.experts.call.COLUMNS", 32),
        mock.patch("moe_patch.kernels.experts.call.LEAST", 16),
        # NumPy's products depend on the columns too, so all forwards take the same ones.
        mock.patch("moe_patch.kernels.common.chunks.LEAST", 16),
        mock.patch("moe_patch.kernels.experts.alone.LEAST", 16),
        mock.patch("moe_patch.kernels.experts.chunked.LEAST", 16),
        mock.patch("moe_patch.kernels.experts.chunked.COLUMNS", 16),
    ):
        interpreted.report(CASES)
