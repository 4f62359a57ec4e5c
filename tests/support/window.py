"""Cases and skips of tests in the window of releases (scripts/matrix.py)."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from typing import Any

import pytest
from packaging.version import Version

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


def _since(package: str, release: str, lacking: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test, or a case, on releases of a package that lack something."""
    installed = importlib.metadata.version(package)
    older = Version(installed) < Version(release)
    why = f"{package} {installed} has no {lacking}; {release} has"
    return pytest.mark.skipif(older, reason=why)


def _before(package: str, release: str, lacking: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test from the release on that refuses what it needs."""
    installed = importlib.metadata.version(package)
    later = Version(installed) >= Version(release)
    return pytest.mark.skipif(later, reason=f"{package} {installed} refuses {lacking}")


second_wrapper = _before("peft", "0.19", "a second adapter around a parameter's first")
second_adapter = _since("peft", "0.20", "second adapter with target_parameters")
swapped_factors = _since("peft", "0.19", "factors of [E, out, in], which the benchmarks set")
single_expert = _since("peft", "0.19", "adapter on a single expert")
old_names = _since("peft", "0.19", "rewriting of experts' old names as targets")
factors_in_forward = _since("peft", "0.21", "parametrization that keeps the factors in a forward")
sharded_loading = _since("transformers", "5.13", "sizes of meshes in DistributedConfig")
expert_adapters = _since("transformers", "5.17", "gradients of routing weights summed over ranks")
sums_in_fp32 = _since("transformers", "5.16", "balance loss whose sums are in fp32")
resumed_ddp_cpu = _since("transformers", "5.18", "optimizer loaded by DDP on a CPU")
kimi = _since("transformers", "5.13", "Kimi-K2.5")
