"""PEFT adapters on a model that transformers has distributed over ranks by experts.

model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(...))
model = patch_model(attach_adapter(model, LoraConfig(...)))

Each rank holds the factors of its own experts, as DTensors beside transformers' DTensor weights.
Without expert parallelism the functions do what PEFT's do.
"""

from moe_patch.expert_parallel.attach import attach_adapter, load_adapter, shard_adapters
from moe_patch.expert_parallel.gradients import clip_gradients

__all__ = ["attach_adapter", "clip_gradients", "load_adapter", "shard_adapters"]
