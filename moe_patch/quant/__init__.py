"""Experts stored in 4 or 8 bits: loading, quantising in place, state dicts and memory use."""
