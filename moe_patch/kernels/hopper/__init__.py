"""Hopper kernels in Gluon; each has the name of its portable counterpart in ``experts``."""
