"""Number formats of stored weights (NF4, FP8 and MXFP4), and tensors that hold them."""
