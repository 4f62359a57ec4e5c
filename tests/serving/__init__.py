"""Tests of what comes after training: merge, export, verify."""
