"""Tests of frameworks."""
