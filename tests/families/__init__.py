"""Tests of family entries."""
