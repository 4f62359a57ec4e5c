"""The benchmark behind ``scripts/bench.py``: ops and peers as data, one row format, one runner.

Read in this order: ``rows`` (what is recorded), ``spec`` (what an op and an implementation are),
``ops/`` (the ops), ``impls/`` (who takes part), ``measure`` (how), ``child`` and ``runner``
(where).
"""
