"""Operators on tensors, with autograd. They use no modules."""
