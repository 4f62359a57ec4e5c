"""Tests of the commands for after training: merge, export, verify."""
