"""Build tokenizer, model, adapters and Trainer arguments of a TrainConfig; fail early here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME

from moe_patch.config import PatchConfig
from moe_patch.errors import MoePatchError, UnsupportedOptionError, first_line
from moe_patch.quant.loading import load_quantized
from moe_patch.quant.stored import refuse_unknown
from moe_patch.quant.surgery import quantize_experts
from moe_patch.schema import check_known, check_mapping
from moe_patch.signals.losses import GRADIENTS, TARGETS
from moe_patch.tools.base_identity import check_base, find_base
from moe_patch.tools.model_files import ADAPTER, refuse_other_kind
from moe_patch.train import liger
from moe_patch.train.config import ModelConfig, TokenizerConfig, TrainConfig
from moe_patch.train.data import train_tokenizer
from moe_patch.train.router_losses import RouterLossConfig
from moe_patch.train.smk import SmkConfig

# Keys of the file's top level; a second value here would contradict them.
TOP_LEVEL = ("output_dir", "seed")
TRAINING_DEFAULTS: dict[str, Any] = {
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
}


# Exceptions of transformers for broken files, and for values that its config classes do not check.
# Such values are unknown activations or attentions, and sizes that are zero or do not divide.
BUILD_ERRORS = (
    ArithmeticError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    ValueError,
    SafetensorError,
    StrictDataclassError,
    UnpicklingError,
)
# TrainingArguments accepts any number; optimizer and loader would refuse it only minutes later.
LEAST = {
    "learning_rate": 0,
    "weight_decay": 0,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
}


def one_line(error: BaseException) -> str:
    """Return the first line of an error's text, for a one-line message."""
    line = first_line(error)
    # The text of a KeyError is only the key.
    return f"no {line} is known" if isinstance(error, KeyError) and error.args else line


def check_options(config: TrainConfig) -> None:
    """Check the options for other libraries, without building anything.

    Raises:
        UnsupportedOptionError: an unknown key, a wrong type, or a model path that holds something
            else (names it).
    """
    if config.model.path is not None:
        refuse_other_kind(config.model.path, "model:")
    PatchConfig.parse(config.moe_patch)
    twice = set(TOP_LEVEL) & set(config.training)
    if twice:
        raise UnsupportedOptionError(f"training.{min(twice)}: set it at the top level of the file")
    check_mapping("training", config.training, TrainingArguments)
    if config.lora is not None:
        check_mapping("lora", config.lora, LoraConfig)
    if config.router_losses is not None:
        check_mapping("router_losses", config.router_losses, RouterLossConfig)
        RouterLossConfig(**config.router_losses)
    if config.smk is not None:
        check_mapping("smk", config.smk, SmkConfig)
        smk = SmkConfig(**config.smk)
        check_known("smk.target is", smk.target, TARGETS)
        check_known("smk.gradient is", smk.gradient, GRADIENTS)
    model_type = config.model.model_type
    if model_type is not None:
        check_known("model.model_type is", model_type, CONFIG_MAPPING.keys())
        cls = CONFIG_MAPPING[model_type]
        # attribute_map holds alternative names of fields, such as num_local_experts. Many attention
        # layers read head_dim although their config class does not declare it.
        accepted = {f.name for f in dataclasses.fields(cls)} | {*cls.attribute_map, "head_dim"}
        for key in config.model.overrides:
            check_known(f"model ({model_type}): unknown key", key, accepted)


def training_arguments(config: TrainConfig, folder: Path, **overrides: Any) -> TrainingArguments:
    """Make TrainingArguments that write below ``folder``.

    Raises:
        UnsupportedOptionError: the Trainer or this library refuses a value.
        UnsupportedModelError: see :func:`_check_checkpoint`.
    """
    values = {**TRAINING_DEFAULTS, **config.training, **overrides}
    values |= liger.ARGUMENTS if config.liger else {}
    try:
        args = TrainingArguments(output_dir=str(folder), seed=config.seed, **values)
    except (ImportError, TypeError, ValueError) as error:
        raise UnsupportedOptionError(f"training: {one_line(error)}") from error
    for key, least in LEAST.items():
        if not (found := getattr(args, key)) >= least:
            raise UnsupportedOptionError(f"training.{key} is {found}; at least {least}")
    seed = args.data_seed
    if seed is not None and not 0 <= seed < 2**63:  # the sampler adds the epoch, in 64 bits
        raise UnsupportedOptionError(f"training.data_seed is {seed}; accepted: 0 to {2**63 - 1}")
    if args.resume_from_checkpoint is not None:
        _check_checkpoint(Path(args.resume_from_checkpoint), config)
    if args.n_gpu > 1:
        # The Trainer would use nn.DataParallel, whose replicas share bound methods.
        raise UnsupportedOptionError(
            f"{args.n_gpu} GPUs are visible to one process: start one process per GPU (torchrun "
            f"--nproc-per-node {args.n_gpu} -m moe_patch train ...), or set CUDA_VISIBLE_DEVICES"
        )
    return args


def _check_checkpoint(checkpoint: Path, config: TrainConfig) -> None:
    """Refuse what is no checkpoint, or one of adapters on another base.

    Raises:
        UnsupportedOptionError: it is no checkpoint.
        UnsupportedModelError: its adapters are of another base than the file's model.
    """
    if not checkpoint.is_dir():
        raise UnsupportedOptionError(
            f"training.resume_from_checkpoint is {str(checkpoint)!r}; no such folder"
        )
    if not (checkpoint / TRAINER_STATE_NAME).is_file():
        raise UnsupportedOptionError(
            f"training.resume_from_checkpoint: {checkpoint} has no {TRAINER_STATE_NAME}; "
            "accepted: a checkpoint-N folder of an earlier run (training.save_strategy)"
        )
    base = None if config.model.path is None else find_base(config.model.path)
    if base is not None and (checkpoint / ADAPTER).is_file():
        check_base(checkpoint, base)


def build_tokenizer(tokenizer: TokenizerConfig, texts: list[str]) -> Any:
    """Make the tokenizer that the config names. Raises UnsupportedOptionError."""
    if tokenizer.source == "train":
        return train_tokenizer(texts, tokenizer.vocab_size)
    try:
        return AutoTokenizer.from_pretrained(tokenizer.source)
    except (OSError, ValueError) as error:
        raise UnsupportedOptionError(
            f"tokenizer: cannot load {tokenizer.source!r}: {one_line(error)}"
        ) from error


def home_of(config: TrainConfig, device: torch.device) -> torch.device:
    """Return where to build: the device that trains, or the CPU if experts stay in host memory."""
    options = PatchConfig.parse(config.moe_patch)
    away = options is not None and options.offload_experts
    return torch.device("cpu") if away else device


def build_base(
    model: ModelConfig,
    tokenizer: Any,
    seed: int,
    storage: str | None = None,
    device: torch.device | str = "cpu",
    pack_on: torch.device | str | None = None,
) -> Any:
    """Make the model without adapters, in training mode; equal arguments give equal weights.

    It is on the CPU. With ``storage`` ("nf4", "fp8", "mxfp4") it is on ``device`` instead, and its
    experts are packed while they are read, on ``pack_on`` (None: there too).

    Raises:
        UnsupportedOptionError: it cannot be built or loaded, or its vocabulary is too small.
        UnsupportedModelError: its experts cannot be stored so, or the checkpoint's storage is
            unknown to transformers.
    """
    set_seed(seed)
    kwargs: dict[str, Any] = {"dtype": "auto" if model.dtype == "auto" else _dtype(model.dtype)}
    if model.attn_implementation is not None:
        kwargs["attn_implementation"] = model.attn_implementation
    if model.path is not None:
        # Otherwise transformers prompts on the terminal. A model with its own code is refused.
        kwargs["trust_remote_code"] = False
    try:
        if model.path is not None and storage is not None:
            base = load_quantized(model.path, storage, device=device, pack_on=pack_on, **kwargs)
        elif model.path is not None:
            base = _load(model.path, kwargs)
        else:
            end = tokenizer.eos_token_id
            defaults = {"vocab_size": len(tokenizer), "eos_token_id": end, "bos_token_id": None}
            hf_config = AutoConfig.for_model(model.model_type, **{**defaults, **model.overrides})
            base = AutoModelForCausalLM.from_config(hf_config, **kwargs)
            if storage is not None:
                base = quantize_experts(base, storage, device=device, pack_on=pack_on)
                base = base.to(device)
    except MoePatchError:
        raise
    except BUILD_ERRORS as error:
        what = model.path or model.model_type
        raise UnsupportedOptionError(f"model: cannot make {what!r}: {one_line(error)}") from error
    rows = base.get_input_embeddings().num_embeddings  # under ZeRO-3 the weight itself is empty
    if rows < len(tokenizer):
        raise UnsupportedOptionError(
            f"model: its vocabulary of {rows} is smaller than the tokenizer's of {len(tokenizer)}"
        )
    return base.train()


def _load(path: str, options: dict[str, Any]) -> Any:
    """Load a checkpoint's model; refuse it if its files would leave a weight at random values."""
    hub = {"trust_remote_code": options["trust_remote_code"]}
    refuse_unknown(AutoConfig.from_pretrained(path, **hub), f"model: {path!r}")
    base, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedOptionError(
            f"model: {path!r}: {len(missing)} weights are not in its files and would be random, "
            f"{missing[0]} first; accepted: a whole checkpoint of {type(base).__name__}"
        )
    return base


def _dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
