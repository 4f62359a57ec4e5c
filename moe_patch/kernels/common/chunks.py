"""Sizes of the chunks of tokens in which a long context runs; see kernels/experts/chunked.py."""

from __future__ import annotations

from typing import NamedTuple

# Columns of y and of the rows of dx that exist at a time: two column tiles of the products.
COLUMNS = 512
# Bytes of a chunk's a and y under ``chunk_tokens="auto"``, and its least number of tokens.
_AUTO_BYTES, _AUTO_TOKENS = 896 << 20, 32768
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


def auto_chunk(top_k: int, hidden: int, width: int, itemsize: int) -> int:
    """Return the tokens whose a and y, in :data:`COLUMNS`, take 896 MiB, but at least 32,768."""
    each = top_k * (width + min(hidden, COLUMNS)) * itemsize
    return max(_AUTO_TOKENS, _AUTO_BYTES // each)
