"""A pytest plugin for scripts/compat.py: names every test before the first one runs."""

from __future__ import annotations

from typing import Any


def pytest_collection_finish(session: Any) -> None:
    """One line for each test, by which an interrupted run is told from a finished one."""
    for item in session.items:
        print(f"\nCOLLECTED {item.nodeid}", end="")
