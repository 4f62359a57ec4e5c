"""The contestants, one module each. They are run, never copied from; peers may be absent.

A module here imports torch and the benchmark only; what it measures is imported in ``build``.
"""
