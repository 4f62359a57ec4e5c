"""Tests of adapters on experts."""
