"""Tests of the patcher and its undo."""
