"""The alignment of tokens to experts."""
