"""Portable kernels of the experts, and the forward and backward that select kernels.

    experts.py      READ FIRST. Forward and backward, kernel by kernel
    chunked.py      the same for long contexts, some tokens at a time
    alone.py        a forward in chunks that no backward follows
    call.py         one call: operands, tiles, and which kernel runs each product
    steps.py        the intermediate results that a backward needs
    up.py           up projection and activation
    linear.py       grouped product
    reduce.py       sums over a token's experts and over an expert's rows
    carried.py      such sums where rows were computed with another chunk
    dh.py           gradient through the down projection and the activation
    dh_epilogue.py  the last part of dh.py as a kernel of its own
    dw.py           weight gradients
    factors.py      low-rank factors
    norms.py        per-row norms
    groups.py       products with the experts' own code between them
    fp8.py          products in FP8
    reasons.py      why a block cannot use the best kernels of its device, for the report

Nothing is imported here.
"""
