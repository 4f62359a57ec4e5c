"""The one limit of time in the tests: it ends what hangs, and no test fails on a slow machine."""

# The slowest call that it guards takes about a minute on two idle cores.
HANG_S = 3600.0
