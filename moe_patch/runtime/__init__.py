"""The code that runs in every forward of a patched model.

    forward.py        READ FIRST. The forwards that are bound to routers, experts and blocks
    module_patch.py   the record of one patched module, and how a forward is bound
    spec.py           FamilySpec, the type of a family's entry
    entry_values.py   the values that an entry's fields may have
    experts.py        read the weights of an experts module, and run them
    described.py      layout and activation, read from an experts module
    adapters.py       low-rank factors of PEFT adapters
    peft_release.py   differences between releases of PEFT
    modules.py        properties of modules and tensors
    fp8.py            products in FP8
    offload.py        experts in host memory
    lanes.py          the device memory that holds two blocks' weights
    transfers.py      copies from host memory
    taps.py           recording of one layer
    row_norms.py      per-row norms where an experts module runs its own code
    compare.py        comparison with transformers, and its limits

Nothing is imported here.
"""
