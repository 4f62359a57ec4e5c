"""Parts that every kernel uses: launcher, device, versions, tiles, activations."""
