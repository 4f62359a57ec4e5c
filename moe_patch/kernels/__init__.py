"""Triton kernels. They do not depend on autograd, modules, transformers or peft.

Imported only if the backend resolves to triton: ``import moe_patch`` works without that package.
"""
