"""Finding out where a loss spike comes from: transformers' own forward beside ours.

    unpatched.py  reference(model): a `with` in which every patched block runs transformers' forward
    probe.py      READ FIRST for the options shadow_check and debug_nan: what a patched call meets
    shadow.py     one block's live call once more on both paths, without changing the step
    nan_file.py   the call of the first block with a non-finite output, in a safetensors file
    replay.py     replay_file(path): such a file on both paths; `python -m moe_patch replay FILE`

Nothing is imported here: patching needs probe.py, and replay.py needs patching.
"""
