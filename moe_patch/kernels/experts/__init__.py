"""The portable expert kernels, and the forward and backward that choose kernels."""
