"""Sizes of the chunks of tokens in which a long context runs; see kernels/experts/chunked.py."""

from __future__ import annotations

from typing import NamedTuple

# Columns of y and of the rows of dx that exist at a time: two column tiles of the products.
COLUMNS = 512
# What exists for one chunk at a time under ``chunk_tokens="auto"``, and the most bytes of it:
# a and y of a call that keeps nothing, and of one that keeps h; h and w a of a backward that
# recomputes h. If that also trains the weights, their 16-bit gradients are not allocated yet.
ALONE, KEPT, RECOMPUTED, TRAINED = "alone", "kept", "recomputed", "trained"
_AUTO_BYTES = {
    ALONE: 896 << 20, KEPT: 1280 << 20, RECOMPUTED: 1856 << 20, TRAINED: 3104 << 20,
}  # fmt: skip
# The least number of tokens of a chunk.
_AUTO_TOKENS = 32768
# Starts of chunks are multiples of this, so that all slices have 16-byte alignment.
_ALIGNED = 8


class Chunk(NamedTuple):
    """One chunk: its tokens, and its rows among those of all chunks."""

    tokens: slice
    rows: slice


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


def unequal_chunks(tokens: int, top_k: int, chunk: int, hidden: int, width: int) -> list[Chunk]:
    """Cut tokens into chunks in the memory of one with ``chunk`` tokens, the first ones larger.

    Outputs of later tokens are not written yet. A chunk whose y fits there needs memory only for a.

    Args:
        tokens, top_k: T and K.
        chunk: tokens whose a and y take the memory.
        hidden, width: columns of x and a.
    """
    y, a = top_k * min(hidden, COLUMNS), top_k * width
    bounds, start = [], 0
    while start < tokens:
        rest = tokens - start
        lent = min(chunk * (a + y) // a, rest * hidden // (y + hidden))
        end = start + min(_most(max(chunk, lent)), rest)
        bounds.append((start, end))
        start = end
    return [Chunk(slice(a, b), slice(a * top_k, b * top_k)) for a, b in bounds]


def auto_chunk(use: str, top_k: int, sizes: tuple[int, int, int], itemsize: int) -> int:
    """Return the tokens of a chunk under ``chunk_tokens="auto"``, at least 32,768.

    Args:
        use: :data:`ALONE`, :data:`KEPT`, :data:`RECOMPUTED` or :data:`TRAINED`.
        top_k: K.
        sizes: columns of x, h and a.
        itemsize: bytes of a value.
    """
    hidden, up, width = sizes
    columns = width + (min(hidden, COLUMNS) if use in (ALONE, KEPT) else up)
    return max(_AUTO_TOKENS, _AUTO_BYTES[use] // (top_k * columns * itemsize))
