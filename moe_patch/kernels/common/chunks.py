"""Sizes of the chunks of tokens in which a long context runs; see kernels/experts/chunked.py."""

from __future__ import annotations

from typing import NamedTuple

# Columns of y that exist at a time in training: at least one column tile of the products where
# memory is scarce, and two elsewhere. More if they fit where outputs of later chunks will be.
LEAST, COLUMNS = 256, 512
# Most bytes of what exists for one chunk at a time under ``chunk_tokens="auto"``. That is a and y
# of a call that keeps nothing, has packed experts, or keeps h. In a backward that recomputes h, it
# is h and w a. Gradients of weights are allocated later, which leaves more.
ALONE, PACKED, KEPT, RECOMPUTED, TRAINED = "alone", "packed", "kept", "recomputed", "trained"
_AUTO_BYTES = {
    ALONE: 848 << 20, PACKED: 896 << 20, KEPT: 1376 << 20, RECOMPUTED: 1856 << 20,
    TRAINED: 3104 << 20,
}  # fmt: skip
# The least number of tokens of a chunk.
_AUTO_TOKENS = 32768
# Starts of chunks are multiples of this, so that all slices have 16-byte alignment.
_ALIGNED = 8


class Chunk(NamedTuple):
    """One chunk: its tokens, and its rows among those of all chunks."""

    tokens: slice
    rows: slice


class Cut(NamedTuple):
    """Chunks of a call that keeps nothing, see :func:`tapered`.

    A chunk has as many tokens as a ``share`` of those left before ``end``, in whole steps. But it
    has at least ``late`` and at most ``size``.
    """

    chunks: list[Chunk]
    end: int
    size: int
    late: int
    share: int
    step: int


def _most(chunk: int) -> int:
    return chunk if chunk < _ALIGNED else chunk // _ALIGNED * _ALIGNED


def chunk_count(tokens: int, chunk: int) -> int:
    """Return the least number of chunks of at most ``chunk`` tokens, rounded down to eights."""
    return (tokens + _most(chunk) - 1) // _most(chunk)


def chunks(tokens: int, top_k: int, chunk: int) -> list[Chunk]:
    """Cut tokens into :func:`chunk_count` chunks of nearly equal size."""
    size = -(-tokens // chunk_count(tokens, chunk))
    size = min(_most(chunk), -(-size // _ALIGNED) * _ALIGNED)
    bounds = [(t, min(t + size, tokens)) for t in range(0, tokens, size)]
    return [Chunk(slice(a, b), slice(a * top_k, b * top_k)) for a, b in bounds]


def tapered(
    tokens: int, top_k: int, chunk: int, hidden: int, width: int, columns: int, extra: int
) -> Cut:
    """Cut tokens into chunks of at most ``chunk``, which have fewer tokens the fewer are left.

    While a of a chunk fits where outputs of later chunks will be, only y needs memory of its own.
    Later, a chunk has so many tokens that both take as much as y does of ``chunk`` tokens.

    Args:
        tokens, top_k: T and K.
        chunk: the most tokens of a chunk.
        hidden, width: columns of x and a.
        columns: columns of y that exist at a time.
        extra: the most rows of other tokens in a chunk.
    """
    size, late = _most(chunk), _most(max(1, chunk * columns // (width + columns)))
    step = _ALIGNED if chunk >= _ALIGNED else 1
    # t tokens have t K + extra rows of a, and leave room for (left - t) D values.
    share, room = 1 - (-top_k * width // hidden), tokens + (-extra * width // hidden)
    starts = [0]
    while starts[-1] < tokens:
        early = (room - starts[-1]) // (share * step) * step
        starts.append(starts[-1] + min(size, max(late, early)))
    starts[-1] = tokens
    found = [
        Chunk(slice(first, end), slice(first * top_k, end * top_k))
        for first, end in zip(starts, starts[1:], strict=False)
    ]
    return Cut(found, room, size, late, share, step)


def half_columns(hidden: int) -> int:
    """Return half of the columns of y, in whole column tiles of :data:`LEAST`.

    Each range of columns reads a again, which takes bandwidth and power.
    """
    return min(hidden, -(-hidden // (2 * LEAST)) * LEAST)


def forward_columns(count: int, top_k: int, hidden: int, least: int, freed: int = 0) -> int:
    """Return the columns of y that exist at a time in a forward that backward follows.

    They may take as much as backward holds besides: the gradient of x, and ``freed`` columns of a
    chunk's rows.

    Args:
        count: number of chunks.
        top_k: K.
        hidden: D.
        least: columns that exist in any case.
        freed: H if backward makes h anew.
    """
    fit = (count * hidden // top_k + freed) // LEAST * LEAST
    return min(hidden, max(least, fit))


def auto_chunk(use: str, top_k: int, sizes: tuple[int, int, int], itemsize: int) -> int:
    """Return the tokens of a chunk under ``chunk_tokens="auto"``, at least 32,768.

    Args:
        use: :data:`ALONE`, :data:`PACKED`, :data:`KEPT`, :data:`RECOMPUTED` or :data:`TRAINED`.
        top_k: K.
        sizes: columns of x, h and a.
        itemsize: bytes of a value.
    """
    hidden, up, width = sizes
    if use == ALONE:
        # That is y; where a has no other place, a chunk has fewer tokens (:func:`tapered`).
        columns = half_columns(hidden)
    elif use in (RECOMPUTED, TRAINED):
        columns = width + up
    else:
        columns = width + min(hidden, LEAST if use == KEPT else COLUMNS)
    return max(_AUTO_TOKENS, _AUTO_BYTES[use] // (top_k * columns * itemsize))
