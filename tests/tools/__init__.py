"""Tests of self-tests and debugging."""
