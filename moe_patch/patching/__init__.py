"""The code that runs once, in ``patch_model``: find blocks, check them, bind forwards.

    patch.py          READ FIRST. patch_model and unpatch_model: all steps in their order
    discover.py       find the MoE blocks of a model
    resolve.py        decide which blocks can be patched, and say why others cannot
    entry_fit.py      check that a class of transformers fits its family entry
    window.py         the oldest releases of transformers and PEFT
    checks.py         the self-check of every kind of block
    selfcheck.py      compare a block's router and experts with transformers
    blockcheck.py     compare whole blocks, where more than router and experts is bound
    fp8_check.py      compare FP8 products with those of decoded weights
    checkable.py      why a block cannot be compared
    bindings.py       the forwards to bind in a block, and those of other libraries
    offload.py        experts in host memory
    data_parallel.py  experts that DistributedDataParallel leaves to each rank
    merging.py        refuse PEFT's merges that packed or offloaded experts cannot take
    by_name.py        ``experts_implementation="moe_patch"``, without a patch
    report.py         patch_report: one row per block
    backends.py       the report's backends, and why they are not the usual ones
    fp8_reason.py     why experts are decoded although FP8 products were requested
    lora_targets.py   arguments for PEFT
    lora_ranks.py     ranks for a budget of parameters

Nothing is imported here.
"""
