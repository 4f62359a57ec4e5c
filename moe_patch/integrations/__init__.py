"""Switches for other training stacks.

    transformers.py  the name ``moe_patch`` for transformers' ``experts_implementation``
    trainer.py       MoePatchCallback for Hugging Face Trainer
    checkpoints.py   the part of that callback that concerns checkpoints
    axolotl.py       the axolotl plugin
    ms_swift/        the ms-swift plugin
    trl_replay.py    replay_rollouts for TRL's GRPOTrainer
    trl_engines.py   the routing that TRL's engines return
    commands.py      ``moe-patch run``: another library's command, patched
    announce.py      the line that says what was patched

Only the command line imports from here; each module imports its host library.
"""
