"""python trl_sft.py MODEL DATA.jsonl: TRL's SFTTrainer with adapters on experts, patched."""

import sys

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from moe_patch.integrations.trainer import MoePatchCallback

rows = load_dataset("json", data_files=sys.argv[2], split="train")
lora = LoraConfig(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
patch = [MoePatchCallback()]
SFTTrainer(sys.argv[1], SFTConfig("out"), None, rows, peft_config=lora, callbacks=patch).train()
