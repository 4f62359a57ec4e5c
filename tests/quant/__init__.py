"""Tests of packed experts."""
