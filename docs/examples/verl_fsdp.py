"""`model.external_lib=verl_fsdp` of verl's trainers: the FSDP engine's model, patched."""

from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from moe_patch import patch_model, patch_report

with_adapters = FSDPEngine._build_lora_module


def patched(engine, module):
    model = patch_model(with_adapters(engine, module))  # before FSDP wraps it
    return print("moe_patch:", patch_report(model).summary()) or model


FSDPEngine._build_lora_module = patched
