"""Code shared by all kernels: launcher, device, versions, tiles and activations."""
