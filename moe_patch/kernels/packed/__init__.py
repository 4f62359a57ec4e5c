"""Kernels that read packed weights."""
