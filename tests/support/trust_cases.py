"""A Triton that no table lists, and decisions about it, for the tests of trust."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import triton

from moe_patch.kernels.common import versions
from moe_patch.kernels.common.versions import Gates, gates
from moe_patch.tools import trust as trust_module
from moe_patch.tools import trust_checks
from moe_patch.tools.trust import SEARCHED

HAZARD = ("line 5: mov.b32 %r5, 0; writes %r5",)


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pretend a Triton that the table lacks, with an empty cache folder and nothing decided yet."""
    monkeypatch.setattr(versions, "_GATES", {})
    monkeypatch.setattr(triton, "__version__", "9.9.1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def decided_anew() -> Gates:
    """Decide again, as another process would; the warning, if any, gives the reason."""
    versions.decide_again()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = gates()
        assert gates() is found
    assert [str(each.message) for each in caught] == [f"moe_patch: {found.reason}"] * bool(
        found.reason
    )
    return found


@contextmanager
def _found(scanned: dict[str, list[str]]) -> Iterator[dict[str, list[str]]]:
    yield scanned


def pretend_card(
    monkeypatch: pytest.MonkeyPatch,
    hazards: dict[str, tuple[str, ...]] | None = None,
    hopper: Callable[[], float] = lambda: 0.5,
    in_front: Callable[[], float] = lambda: 0.5,
    fp8: Callable[[], float] = lambda: 0.5,
    unseen: str = "",
) -> None:
    """Pretend a Hopper card, results of its kernels and findings in their code."""
    code: dict[str, list[str]] = {name: [] for name in SEARCHED - {unseen}}
    code |= {name: list(lines) for name, lines in (hazards or {}).items()}
    groups = [
        [("experts", hopper)], [(f"nf4 {trust_checks.IN_FRONT}", in_front)],
        [(f"experts {trust_checks.IN_FP8}", fp8)],
    ]  # fmt: skip
    monkeypatch.setattr(trust_module, "_card", lambda device: (torch.device("cpu"), "a card"))
    monkeypatch.setattr(trust_module, "groups_of", lambda device: iter(groups))
    monkeypatch.setattr(trust_module, "searching", lambda: _found(code))
