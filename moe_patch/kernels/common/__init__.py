"""Code shared by all kernels.

    launcher.py     READ FIRST for launches: Launcher, in place of Triton's own
    repeat.py       record the launches of a pass, and replay them
    recording.py    what a recorded pass consists of
    notes.py        the launches of a pass that is being recorded
    cache.py        compile where Triton's cache cannot be written
    device.py       properties of a device
    versions.py     the releases of Triton, and what was tested on each
    trusted.py      releases that the user has tested
    tiles.py        tile sizes
    chunks.py       sizes of the chunks of a long context
    gemm_device.py  device functions of the grouped products
    glu.py          device functions of the activations
    e4m3_scale.py   device functions of FP8 scales
    activation.py   the activation as a kernel of its own

Nothing is imported here.
"""
