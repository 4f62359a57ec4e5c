"""Train from one YAML file: Trainer + PEFT + accelerate, patched, with checks at the end.

``python -m moe_patch train CONFIG.yaml`` calls ``config.load_config`` and ``run.run``. Nothing here
is imported by ``import moe_patch``.
"""
