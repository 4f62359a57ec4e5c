"""The code that runs in every forward of a patched model."""
