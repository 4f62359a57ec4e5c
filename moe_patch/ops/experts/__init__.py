"""The experts operator. Read ops/experts/definition.py first."""
