"""The contestants, one module each. They are run, never copied from; peers may be absent.

A module here imports only torch and the benchmark; ``build`` imports the code that it measures.
"""
