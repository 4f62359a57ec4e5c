"""Recipes of frameworks that need a file of the user's: LLaMA-Factory, OpenRLHF, verl."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from frameworks_lib.recipes import ATTENTION, EXPERTS, RATE, STEPS, Framework

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
VERL_CPU = Path(__file__).with_name("verl_cpu.py")
BY_NAME = Path(__file__).with_name("openrlhf_by_name.py")
LLAMAFACTORY = "llamafactory==0.9.5"
LLAMAFACTORY_NEEDS = (
    "datasets==4.0.0", "av<=16.0.0", "einops", "fastapi", "fire", "matplotlib", "modelscope",
    "omegaconf", "pandas", "protobuf", "scipy", "sentencepiece", "sse-starlette", "tiktoken",
    "tyro<0.9.0", "uvicorn", "torchdata<=0.11.0",
    "accelerate==1.11.0", "trl==0.24.0",
)  # fmt: skip
STUB = "torchaudio is an empty module: its wheels need CUDA"


def llamafactory(folder: Path, name: str, family: str, mode: str, patched: bool) -> list[str]:
    """``llamafactory-cli train`` as docs/examples/llamafactory_train.py runs it."""
    config: dict[str, Any] = {
        "model_name_or_path": "tiny", "stage": "sft", "do_train": True, "dataset": "tiny",
        "dataset_dir": ".", "template": "qwen", "cutoff_len": 256, "output_dir": name,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_steps": STEPS,
        "learning_rate": RATE["sft"], "lr_scheduler_type": "constant", "logging_steps": 1,
        "save_steps": STEPS, "seed": 42, "bf16": False, "fp16": False, "flash_attn": "disabled",
        "use_cpu": True, "disable_gradient_checkpointing": True, "report_to": "none",
        "preprocessing_num_workers": 1, "finetuning_type": "lora", "lora_rank": 4,
        "lora_alpha": 8, "lora_dropout": 0.0, "lora_target": ",".join(ATTENTION[family]),
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(json.dumps(config, indent=1))
    tags = {"role_tag": "role", "content_tag": "content"}
    tags |= {"user_tag": "user", "assistant_tag": "assistant"}
    data = {"file_name": "sft/train.jsonl", "formatting": "sharegpt", "tags": tags}
    data["columns"] = {"messages": "messages"}
    (folder / "dataset_info.json").write_text(json.dumps({"tiny": data}))
    (folder / "torchaudio.py").write_text("")
    script = EXAMPLES / "llamafactory_train.py"
    if not patched:
        text = script.read_text().replace("callbacks=[MoePatchCallback()]", "")
        script = folder / "plain.py"
        script.write_text(text)
    return ["python", str(script), f"{name}.yaml"]


def openrlhf(folder: Path, name: str, family: str, mode: str, patched: bool) -> list[str]:
    """OpenRLHF's Actor, whose ``experts_implementation`` goes to ``from_pretrained``."""
    shutil.copy(BY_NAME, folder)
    if patched:
        return ["python", str(EXAMPLES / "by_name.py"), "-m", BY_NAME.stem, name, "moe_patch"]
    return ["python", BY_NAME.name, name, "eager"]


def verl(folder: Path, name: str, family: str, mode: str, patched: bool) -> list[str]:
    """The SFT trainer of verl, with the FSDP engine and adapters on experts."""
    for source in (EXAMPLES / "verl_fsdp.py", VERL_CPU):
        shutil.copy(source, folder)
    quoted = ",".join(EXPERTS)
    values = {
        "data.train_files": "sft.parquet", "data.train_batch_size": 2,
        "data.micro_batch_size_per_gpu": 2, "data.use_dynamic_bsz": False, "data.max_length": 256,
        "data.num_workers": 0, "model.path": "tiny", "model.use_remove_padding": False,
        "+model.override_config.attn_implementation": "eager",
        "model.enable_gradient_checkpointing": False, "model.lora_rank": 4, "model.lora_alpha": 8,
        "model.target_modules": f"[{','.join(ATTENTION[family])}]",
        "+model.target_parameters": f"[{quoted}]", "engine.strategy": "fsdp2",
        "engine.use_torch_compile": False,
        "+engine.mixed_precision": "{param_dtype:fp32,reduce_dtype:fp32}",
        "optim.lr": RATE["sft"], "optim.lr_scheduler_type": "constant",
        "optim.lr_warmup_steps_ratio": 0, "trainer.total_training_steps": STEPS,
        "trainer.total_epochs": 1, "trainer.logger": "[file]", "trainer.project_name": name,
        "trainer.experiment_name": "log", "trainer.default_local_dir": name,
        "trainer.device": "cpu", "trainer.resume_mode": "disable", "trainer.save_freq": STEPS,
    }  # fmt: skip
    if patched:
        values["model.external_lib"] = "verl_fsdp"
    launch = ["torchrun", "--standalone", "--nproc_per_node=1", "-m", "verl.trainer.sft_trainer"]
    return [*launch, *(f"{key}={value}" for key, value in values.items())]


FRAMEWORKS = {
    "llamafactory": Framework(
        LLAMAFACTORY, "3.11", ("lora",), llamafactory,
        (*LLAMAFACTORY_NEEDS, "transformers==5.6.0", "peft==0.18.1"),
        alone=True, note=STUB,
    ),
    "llamafactory516": Framework(
        LLAMAFACTORY, "3.11", ("lora",), llamafactory,
        (*LLAMAFACTORY_NEEDS, "transformers==5.16.1", "peft==0.20.0"),
        alone=True, env=(("DISABLE_VERSION_CHECK", "1"),),
        note=f"against its pin of transformers; {STUB}",
    ),
    "openrlhf": Framework(
        "openrlhf==0.11.2", "3.11", ("by_name",), openrlhf,
        ("transformers==5.15.0", "peft", "accelerate", "datasets", "tqdm"), alone=True,
        note="its Actor in a loop of 20 steps, flash-attn and deepspeed stubbed",
    ),
    "verl": Framework(
        "verl==0.9.1", "3.11", ("lora",), verl, ("uvicorn", "fastapi", "cachetools", "orjson"),
        env=(
            ("VERL_PLATFORM", "cpu"), ("VERL_ENGINE_DEVICE", "cuda"),
            ("VERL_USE_EXTERNAL_MODULES", "verl_cpu"),
        ),
        note="FSDP engine on gloo; verl has no platform for a CPU: frameworks_lib/verl_cpu.py",
    ),
}  # fmt: skip
