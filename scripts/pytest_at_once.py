"""A pytest plugin for runs that may be cut: each failure goes to a file when it happens.

``PYTHONPATH=scripts FAILURES=failed.txt python -m pytest -p pytest_at_once ..``; with workers, only
the process that collects their reports writes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def pytest_runtest_logreport(report: Any) -> None:
    """One phase of one test has ended."""
    if not report.failed or "PYTEST_XDIST_WORKER" in os.environ:
        return
    with Path(os.environ["FAILURES"]).open("a", encoding="utf-8") as file:
        file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext}\n\n")
