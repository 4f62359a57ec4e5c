"""The benchmark behind ``scripts/bench.py``: ops and peers as data, one row format, one runner.

Read first ``rows`` (the records), ``spec`` (the types of an op and an implementation), ``ops/`` and
``impls/``. Then read ``measure`` (how to measure), ``child`` and ``runner`` (where to run).
"""
