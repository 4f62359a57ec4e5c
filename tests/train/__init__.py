"""Tests of the training command."""
