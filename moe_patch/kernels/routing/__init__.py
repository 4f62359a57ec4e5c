"""Kernels of routers, router losses and product keys."""
