"""What tests do in the window of releases (scripts/matrix.py): cases to run, and releases' limits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

# One for every way in which a family's classes changed within the window, and the LoRA tests' own.
FAMILIES = frozenset(
    {"dbrx", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "gpt_oss",
     "granitemoe", "hunyuan_v1_moe", "jamba", "longcat_flash", "minimax_m2", "mixtral", "olmoe",
     "qwen2_moe", "qwen3_moe"}
)  # fmt: skip


def some(names: Iterable[str]) -> list[Any]:
    """Return names of recipes as parameters; those in FAMILIES are marked for scripts/matrix.py.

    In every combination of releases a test with these parameters runs for the marked ones alone.
    """
    marks = {True: [pytest.mark.versions], False: []}
    return [pytest.param(name, marks=marks[name in FAMILIES]) for name in names]
