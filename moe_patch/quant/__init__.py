"""Experts stored in 4 or 8 bits: formats, the parameter that holds them, module surgery."""
