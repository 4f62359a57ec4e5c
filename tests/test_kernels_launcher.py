"""Kernels launched directly get what Triton would give them; see tests/offline_launches.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)


@pytest.fixture(scope="module")
def launches() -> dict:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("offline_launches.py"))],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_the_same_compiled_kernels_with_the_same_arguments(launches: dict) -> None:
    """Aligned and not, decode and training, with factors and without."""
    assert launches["different"] == []


def test_known_releases_are_launched_directly_and_others_are_not(launches: dict) -> None:
    import triton

    from moe_patch.kernels.launcher import TRITON_VERSIONS

    known = triton.__version__.startswith(tuple(f"{version}." for version in TRITON_VERSIONS))
    assert (launches["direct"] > 0) == known
    if known:
        assert "_up_kernel" in launches["unhooked"]


def test_a_hook_is_called_for_every_kernel(launches: dict) -> None:
    assert launches["hooked"]
