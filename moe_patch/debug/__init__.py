"""Find the cause of a loss spike by comparing our forward with transformers' own.

    unpatched.py  reference(model): a `with` in which every patched block runs transformers' forward
    probe.py      READ FIRST for shadow_check and debug_nan: what happens in a probed call
    shadow.py     run one block's live call again on both paths, without changing the step
    nan_file.py   save the call of the first block with a non-finite output in a safetensors file

``tools/replay.py`` runs such a file on both paths (`moe-patch replay FILE`).
"""
