"""Operators: tensors in, tensors out, under autograd, without modules."""
