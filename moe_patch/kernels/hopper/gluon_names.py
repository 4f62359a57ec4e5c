"""Gluon functions under one name each; Triton 3.8 and 3.9 renamed some of them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

_RENAMED_C = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))

if hasattr(tma, "async_load"):
    tma_load, tma_store, load_rows = tma.async_load, tma.async_store, async_copy.async_load
else:
    tma_load, tma_store = tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    load_rows = async_copy.async_copy_global_to_shared


@gluon.jit
def seen_as(buffer, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the same bytes of shared memory in another shape and layout."""
    if _RENAMED_C:
        return buffer.reinterpret(buffer.dtype, SHAPE, LAYOUT)
    else:
        return buffer._reinterpret(buffer.dtype, SHAPE, LAYOUT)


@gluon.jit
def cast_as(buffer, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the same bytes of shared memory with another dtype, shape and layout."""
    if _RENAMED_C:
        return buffer.reinterpret(DTYPE, SHAPE, LAYOUT)
    else:
        return buffer._reinterpret(DTYPE, SHAPE, LAYOUT)
