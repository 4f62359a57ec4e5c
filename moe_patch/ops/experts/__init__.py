"""The experts operator.

    definition.py      READ FIRST. The experts in plain torch; everything else follows it
    op.py              experts_mlp, which every other package calls
    autograd.py        the operators of forward and backward
    schema.py          implementations and fakes of the operators
    torch_backend.py   forward and backward in torch
    grouped.py         grouped products in torch
    activations.py     activations in torch, with their derivatives
    rows.py            tokens to rows and back, in torch
    composed.py        the experts in steps, around a module's own activation
    long_context.py    decisions about chunks of tokens
    fp8_definition.py  the experts in FP8, in plain torch
    flops.py           formulas for torch's FLOP counter

Nothing is imported here.
"""
