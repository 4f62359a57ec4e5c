"""Helpers that several folders of tests share."""

from pathlib import Path

# The folder of these helpers; some are run as programs of their own.
SUPPORT = Path(__file__).parent
