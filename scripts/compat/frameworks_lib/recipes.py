"""Recipes per framework: its packages, and the command of each mode, unpatched and patched."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEPS = 20
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = {"qwen3_moe": ["q_proj", "v_proj"], "deepseek_v3": ["q_b_proj", "o_proj"]}
RATE = {"sft": 0.01, "dpo": 0.002, "grpo": 0.005, "full": 0.003}
RUN = ["python", "-m", "moe_patch", "run", "--"]


@dataclass(frozen=True)
class Framework:
    """One released framework.

    Attributes:
        package: its name on PyPI, with the version.
        python: the interpreter it needs.
        modes: that are run.
        command: (folder, name of the run, family, mode, patched) -> the command; writes its files.
        more: further requirements of the environment.
        alone: install ``package`` after ``more``, without its own requirements.
        env: variables that the commands run with.
        note: what a reader of the row has to know.
    """

    package: str
    python: str
    modes: tuple[str, ...]
    command: Callable[[Path, str, str, str, bool], list[str]]
    more: tuple[str, ...] = ()
    alone: bool = False
    env: tuple[tuple[str, str], ...] = ()
    note: str = ""


def trl(folder: Path, name: str, family: str, mode: str, patched: bool) -> list[str]:
    """``trl sft``, ``dpo`` or ``grpo``; patched by ``moe-patch run``.

    Mode ``two`` is SFT in two processes of accelerate's launcher.
    """
    script = "sft" if mode in ("full", "two") else mode
    config: dict[str, Any] = {
        "model_name_or_path": "tiny", "dtype": "float32", "attn_implementation": "eager",
        "dataset_name": script, "output_dir": name, "per_device_train_batch_size": 2,
        "max_steps": STEPS, "learning_rate": RATE.get(mode, RATE[script]),
        "lr_scheduler_type": "constant",
        "logging_steps": 1, "save_steps": STEPS, "bf16": False, "use_cpu": True,
        "gradient_checkpointing": False, "report_to": "none", "disable_tqdm": True, "seed": 42,
    }  # fmt: skip
    if mode != "full":
        config |= {
            "use_peft": True, "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0,
            "lora_target_modules": ATTENTION[family], "lora_target_parameters": EXPERTS,
        }  # fmt: skip
    if script == "grpo":
        config |= {
            "reward_funcs": ["rewards.even"], "num_generations": 2, "max_completion_length": 16,
            "beta": 0.04,
        }  # fmt: skip
    else:
        config["max_length"] = 256
    _write(folder / f"{name}.yaml", config)
    command = ["trl", script, "--config", f"{name}.yaml"]
    if mode == "two":
        config_file = Path(__file__).parents[2] / "configs/accelerate/ddp_cpu.yaml"
        launch = ["accelerate", "launch", "--config_file", str(config_file)]
        command = ["-m", "trl.scripts.sft", *command[2:]]
        return [*launch, *RUN[1:], *command] if patched else [*launch, *command]
    return [*RUN, *command] if patched else command


def axolotl(folder: Path, name: str, family: str, mode: str, patched: bool) -> list[str]:
    """``axolotl train`` or ``merge-lora``; patched by the plugin."""
    config: dict[str, Any] = {
        "base_model": "tiny", "tokenizer_config": "tiny",
        "datasets": [{
            "path": "sft/train.jsonl", "ds_type": "json", "type": "chat_template",
            "field_messages": "messages",
        }],
        "chat_template": "tokenizer_default", "dataset_prepared_path": "prepared",
        "val_set_size": 0, "output_dir": name, "sequence_len": 256, "micro_batch_size": 2,
        "gradient_accumulation_steps": 1, "max_steps": STEPS, "learning_rate": RATE["sft"],
        "optimizer": "adamw_torch", "lr_scheduler": "constant", "gradient_checkpointing": False,
        "bf16": False, "fp16": False, "tf32": False, "attn_implementation": "eager",
        "logging_steps": 1, "save_steps": STEPS // 2, "seed": 42, "use_tensorboard": False,
        "save_first_step": False,
        # axolotl makes adapters before it sets the seed, so two unpatched runs would differ.
        "plugins": ["seed_plugin.SeedPlugin"],
    }  # fmt: skip
    (folder / "seed_plugin.py").write_text(
        "import torch\nfrom axolotl.integrations.base import BasePlugin\n\n\n"
        "class SeedPlugin(BasePlugin):\n"
        "    def pre_lora_load(self, cfg, model):\n        torch.manual_seed(0)\n"
    )
    if mode == "full":
        config["learning_rate"] = RATE["full"]
    else:
        config |= {
            "adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.0,
            "lora_target_modules": ATTENTION[family], "lora_target_parameters": EXPERTS,
        }  # fmt: skip
    if family == "deepseek_v3":
        # axolotl 0.19's own LoRA kernels, on by default, do not support this attention.
        config |= {f"lora_{part}_kernel": False for part in ("qkv", "o", "mlp")}
    if mode.startswith("qlora"):
        # In fp32 all the same, so that the losses can be compared.
        config |= {"adapter": "qlora", "load_in_4bit": True}
        config["quantize_moe_experts"] = mode == "qlora_experts"
    if mode.startswith("merge"):
        method = "memory_efficient" if mode == "merge_files" else "legacy"
        config |= {"lora_model_dir": "lora_patched", "merge_method": method}
    if mode == "resume":
        config |= {
            "resume_from_checkpoint": f"{name.replace('resume', 'lora')}/checkpoint-{STEPS // 2}"
        }
    if patched:
        config["plugins"].append("moe_patch.MoePatchPlugin")
    _write(folder / f"{name}.yaml", config)
    if mode.startswith("merge"):
        return ["axolotl", "merge-lora", f"{name}.yaml"]
    return ["axolotl", "train", f"{name}.yaml", "--launcher", "python"]


def swift(folder: Path, name: str, family: str, mode: str, patched: bool) -> list[str]:
    """Return the command of ``swift sft``; the package's plugin file patches it."""
    values: dict[str, Any] = {
        "model": "tiny", "model_type": family, "template": "qwen3", "dataset": "sft/train.jsonl",
        "torch_dtype": "float32", "bf16": "false", "fp16": "false", "attn_impl": "eager",
        "use_cpu": "true", "max_length": 256, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1, "max_steps": STEPS,
        "learning_rate": RATE["full" if mode == "full" else "sft"],
        "lr_scheduler_type": "constant", "warmup_ratio": 0, "logging_steps": 1,
        "save_steps": STEPS, "split_dataset_ratio": 0, "gradient_checkpointing": "false",
        "report_to": "none", "seed": 42, "data_seed": 42, "dataset_num_proc": 1,
        "dataloader_num_workers": 0, "load_from_cache_file": "false", "output_dir": name,
        "add_version": "false", "tuner_type": "full" if mode == "full" else "lora",
    }  # fmt: skip
    if mode != "full":
        values |= {
            "lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0, "target_modules": ATTENTION[family],
            "target_parameters": EXPERTS,
        }  # fmt: skip
    if patched:
        values |= {"external_plugins": PLUGIN, "callbacks": "moe_patch"}
    parts = [(f"--{k}", v if isinstance(v, list) else [str(v)]) for k, v in values.items()]
    return ["swift", "sft", *(part for flag, value in parts for part in (flag, *value))]


PLUGIN = ""  # set by the caller: the plugin's file in the package


def _write(path: Path, config: dict[str, Any]) -> None:
    """Write JSON, which is also YAML."""
    path.write_text(json.dumps(config, indent=1))


AXOLOTL = ("lora", "resume", "full", "qlora", "qlora_experts", "merge", "merge_files")
FRAMEWORKS = {
    "trl": Framework("trl==1.16.0", "3.11", ("sft", "dpo", "grpo", "full", "two"), trl, ("peft",)),
    "axolotl": Framework("axolotl==0.19.0", "3.11", AXOLOTL, axolotl),
    "axolotl21": Framework("axolotl==0.21.0", "3.12", AXOLOTL, axolotl),
    "swift": Framework(
        "ms-swift==4.6.0", "3.11", ("lora", "full"), swift, ("transformers==5.19.*", "peft==0.20.0")
    ),
}
