"""Sizes of the chunks of tokens in which a long context runs; see kernels/experts/chunked.py."""

from __future__ import annotations

from typing import NamedTuple

# Columns of y that exist at a time: at least one column tile of the products where memory is
# scarce, and two elsewhere. More if they fit where outputs of later chunks will be.
LEAST, COLUMNS = 256, 512
# Most bytes of what exists for one chunk at a time under ``chunk_tokens="auto"``. That is a and y
# of a call that keeps nothing or has packed experts, and of one that keeps h. In a backward that
# recomputes h, it is h and w a. Gradients of weights are allocated later, which leaves more.
ALONE, KEPT, RECOMPUTED, TRAINED = "alone", "kept", "recomputed", "trained"
_AUTO_BYTES = {
    ALONE: 896 << 20, KEPT: 1376 << 20, RECOMPUTED: 1856 << 20, TRAINED: 3104 << 20,
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


def auto_chunk(use: str, top_k: int, sizes: tuple[int, int, int], itemsize: int) -> int:
    """Return the tokens of a chunk under ``chunk_tokens="auto"``, at least 32,768.

    Args:
        use: :data:`ALONE`, :data:`KEPT`, :data:`RECOMPUTED` or :data:`TRAINED`.
        top_k: K.
        sizes: columns of x, h and a.
        itemsize: bytes of a value.
    """
    hidden, up, width = sizes
    y = min(hidden, LEAST if use == KEPT else COLUMNS)
    columns = width + (up if use in (RECOMPUTED, TRAINED) else y)
    return max(_AUTO_TOKENS, _AUTO_BYTES[use] // (top_k * columns * itemsize))
