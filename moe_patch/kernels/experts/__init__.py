"""Portable kernels of the experts, and the forward and backward that select kernels."""
