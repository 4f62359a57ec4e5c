"""Tests of patched models beside torch's and accelerate's features."""
