"""Triton kernels. They know nothing of autograd, modules, transformers or peft.

Imported only where the backend resolves to triton: ``import moe_patch`` works without the package.
"""
