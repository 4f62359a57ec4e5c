"""Run a test file's CASES under Triton's CPU interpreter, all in one process of their own.

The interpreter has to be chosen before the kernels are imported, so not in the test session itself.
A test file has ``CASES: dict[str, Callable[[str], None]]``; each case takes a device. The file
calls :func:`report` when run as a program, and asserts case by case on the result of :func:`run`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.limits import HANG_S

ROOT = Path(__file__).parents[2]


def run(file: str) -> dict[str, str]:
    """Run ``file`` and return the outcome of each case: an empty string, or the failure."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", file],
        env=env, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


def skip_without_histogram() -> None:
    """Skip tests of plans before Triton 3.6, whose interpreter has an int64 histogram."""
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
        pytest.skip(f"the interpreter of triton {triton.__version__} stores histograms as int64")


def _quicken(checked: bool) -> None:
    """Skip the parts of the interpreter that take most of its time and show nothing here.

    Unchanged, the interpreter

    - replaces Triton's language by its own at every call of a function, where once is enough;
    - makes a table of dtypes for every tensor;
    - calls the function of a reduction for every single element;
    - computes each integer sum and product once more in int64, to detect an overflow.
    """
    from triton.runtime import interpreter

    if not checked:
        builder = interpreter.interpreter_builder
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    interpreter.ReduceOps.generic_reduce = _reduce_slices
    if not hasattr(interpreter, "_LangPatchScope"):  # before 3.6
        return
    replace = interpreter._patch_lang
    modules = (interpreter.tl, interpreter.tl.core)
    replaced: set[frozenset[int]] = set()
    # Keep the globals alive, so that no other dict can get the id of one.
    known: dict[int, dict[str, Any]] = {}

    def replace_once(fn: Any) -> Any:
        if id(fn.__globals__) not in known:
            known[id(fn.__globals__)] = fn.__globals__
            values = fn.__globals__.values()
            seen = frozenset(id(v) for v in values if any(v is m for m in modules))
            if seen not in replaced:
                replaced.add(seen)
                replace(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = replace_once


def _remembered(np_dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Cache a function of a Triton dtype by the name of its scalar."""
    found: dict[str, Any] = {}

    def remembered(tt_dtype: Any) -> Any:
        scalar = tt_dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = np_dtype_of(scalar)
        return found[scalar.name]

    return remembered


def _reduce_slices(reduction: Any, inputs: tuple) -> list[Any]:
    """Reduce as ReduceOps.generic_reduce does, in the same order, over whole slices at once."""
    whole = reduction.axis is None
    parts, axis = reduction.unravel(inputs, reduction.axis)
    shape = parts[0].handle.data.shape

    def slices(index: int) -> tuple:
        return tuple(
            reduction.to_tensor(np.take(part.handle.data, index, axis), part.dtype)
            for part in parts
        )

    found = slices(0)
    for index in range(1, shape[axis]):
        combined = reduction.combine_fn.fn(*found, *slices(index))
        found = combined if isinstance(combined, tuple) else (combined,)
    results = []
    for one, part in zip(found, parts, strict=True):
        data = one.handle.data.reshape(shape[:axis] + shape[axis + 1 :])
        if reduction.keep_dims:
            kept = inputs[0].handle.data.ndim
            data = data.reshape((1,) * kept) if whole else np.expand_dims(data, axis)
        results.append(reduction.to_tensor(data if data.ndim else data.item(), part.dtype))
    return results


def report(
    cases: Mapping[str, Callable[[str], None]], row_block: int = 32, checked: bool = False
) -> None:
    """Run every case on the CPU with poisoned memory and print the outcomes as one line of JSON.

    Args:
        cases: by name.
        row_block: rows that the plan sorts at a time; changes no result. The number used on a GPU
            takes the interpreter two seconds a plan.
        checked: check integers for overflow, which costs half of the time. Set it for kernels that
            pack several numbers into one.
    """
    from moe_patch.kernels.plan import plan

    _quicken(checked)
    plan.ROW_BLOCK = row_block
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    said = {}
    for name, check in cases.items():
        torch.manual_seed(0)
        try:
            check("cpu")
            said[name] = ""
        except Exception:
            said[name] = traceback.format_exc(limit=-3)
    print(json.dumps(said))
