"""Make a model from a command-line argument: a hub id, a folder, or a folder with a config."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_patch.cli.limits import check_fits, cpu_memory_named
from moe_patch.cli.output import quiet_libraries
from moe_patch.errors import (
    MoePatchError,
    UnsupportedModelError,
    UnsupportedOptionError,
    first_line,
)
from moe_patch.patching.discover import discover
from moe_patch.runtime.spec import read
from moe_patch.tools.model_files import refuse_other_kind

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json")


@contextmanager
def explained(what: str, kind: type[MoePatchError] = UnsupportedOptionError) -> Iterator[None]:
    """Turn errors of other libraries into one-line errors of ours that begin with ``what``.

    Raises:
        kind: replaces errors of other libraries; ours, and running out of memory, pass through.
        OutOfMemoryError: the CPU's allocator, which raises a plain RuntimeError, has no memory.
    """
    try:
        with cpu_memory_named():
            yield
    except (MoePatchError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # any type is possible: SafetensorError, IndexError, pickle errors
        raise kind(f"{what}: {_one_line(error)}") from error


def add_model(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the argument MODEL and the options that say how to make it."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if optional else None,
        help="hub id, folder, or a folder that holds only config.json",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights")
    parser.add_argument("--device", help="cuda, cuda:1, cpu; default: cuda if available")


def device_of(args: argparse.Namespace) -> torch.device:
    """Return the device that the options name.

    Raises:
        UnsupportedOptionError: there is no such device here, or nothing can run on it.
    """
    if args.device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "meta":
        raise UnsupportedOptionError("--device meta: nothing runs there; accepted: cuda, cpu, ...")
    try:
        device = torch.device(args.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UnsupportedOptionError(
            f"--device {args.device}: {_one_line(error)}; without the option: cuda if available, "
            "else cpu"
        ) from error
    return device


@quiet_libraries()
def load_config(name: str) -> Any:
    """Load the config of a hub id or folder, without weights and without running its code.

    Raises:
        UnsupportedOptionError: no config is found under that name, or it is of another kind.
    """
    from transformers import AutoConfig

    refuse_other_kind(name, "MODEL")
    with explained(
        f"MODEL {name!r} is no folder with a config.json that transformers knows, and no hub id "
        "that can be reached"
    ):
        try:
            # Without this argument transformers prompts on the terminal and waits.
            return AutoConfig.from_pretrained(name, trust_remote_code=False)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            raise UnsupportedModelError(
                f"MODEL {name!r} needs code of its own repository, which this command does not "
                "run; accepted: models that are part of the installed transformers"
            ) from error


def dtype_of(config: Any) -> torch.dtype:
    """Return the checkpoint's own dtype, or bfloat16 if the config names none."""
    return config.dtype or config.get_text_config().dtype or torch.bfloat16


def has_weights(name: str) -> bool:
    """Return whether there are weights to load, from a folder or from a hub id."""
    folder = Path(name)
    return not folder.is_dir() or any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES)


# Causal-LM classes list a config of several towers with its text tower, not the whole model.
AUTO = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel")
AUTO_OF_TOWERS = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM", *AUTO)


def model_class(config: Any) -> Any:
    """Return the class that the config's architectures name, else the class registered for it.

    Raises:
        UnsupportedModelError: transformers has no such class.
    """
    import transformers

    for architecture in config.architectures or ():
        if hasattr(transformers, architecture):
            return getattr(transformers, architecture)
    whole = config.get_text_config() is config
    for name in AUTO if whole else AUTO_OF_TOWERS:
        mapping = getattr(transformers, name)._model_mapping if hasattr(transformers, name) else {}
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, (list, tuple)) else found
    return _class_beside(config)


def _is_model(value: Any) -> bool:
    from transformers import PreTrainedModel

    return isinstance(value, type) and issubclass(value, PreTrainedModel)


def _class_beside(config: Any) -> Any:
    """Return a model class of the config's folder, for text towers that no auto class lists."""
    import transformers

    module_name = type(config).__module__.replace(".configuration_", ".modeling_")
    found: list[Any] = []
    if importlib.util.find_spec(module_name) is not None:
        classes: dict[str, Any] = vars(importlib.import_module(module_name))
        found = [
            cls
            for name, cls in classes.items()
            if _is_model(cls)
            and cls.config_class is type(config)
            and not name.endswith("PreTrainedModel")
        ]
    if not found:
        raise UnsupportedModelError(
            f"{type(config).__name__}: transformers {transformers.__version__} has no model for it"
        )
    return max(found, key=lambda cls: "ForCausalLM" in cls.__name__)


@quiet_libraries()
def build(config: Any, dtype: torch.dtype, device: str | torch.device, **options: Any) -> Any:
    """Build the config's model with new weights in eval mode; on "meta" without weights.

    On "meta" no attention runs, so eager replaces an implementation that this machine may lack.

    Raises:
        UnsupportedOptionError: no model can be built from the config's values.
    """
    cls = model_class(config)
    if str(device) == "meta":
        options = {"attn_implementation": "eager", **options}
    with explained(f"MODEL: cannot make {cls.__name__}"), torch.device(device):
        return cls._from_config(config, dtype=dtype, **options).eval()


@quiet_libraries()
def load(name: str, config: Any, dtype: torch.dtype, device: torch.device, **options: Any) -> Any:
    """Load the model with its weights, in eval mode.

    Raises:
        UnsupportedOptionError: the weights cannot be loaded, or do not match the config.
        UnsupportedModelError: they are quantised in a way that transformers does not support.
    """
    from moe_patch.quant.stored import refuse_unknown

    refuse_unknown(config, f"MODEL {name!r}")
    cls = model_class(config)
    with explained(f"MODEL: cannot load {name!r}"):
        # Request mismatches: transformers' own error points to a report that is not shown.
        model, info = cls.from_pretrained(
            name, config=config, dtype=dtype, ignore_mismatched_sizes=True,
            output_loading_info=True, **options,
        )  # fmt: skip
        _refuse_other_weights(name, info)
        return model.to(device).eval()


def _refuse_other_weights(name: str, info: dict[str, Any]) -> None:
    """Refuse a checkpoint that lacks weights of the config's model: they would be random."""
    for key, found, wanted in sorted(info["mismatched_keys"]):
        raise UnsupportedOptionError(
            f"MODEL: {name!r}: {key} is {tuple(found)} in the file, {tuple(wanted)} in config.json"
        )
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedOptionError(
            f"MODEL: {name!r}: {len(missing)} weights of the config's model are not in its files, "
            f"{missing[0]} first; --random uses none of them"
        )


@quiet_libraries()
def with_adapters(model: Any, rank: int) -> Any:
    """Freeze the model and add adapters to everything that lora_targets names.

    Raises:
        UnsupportedOptionError: PEFT refuses the rank or the model.
    """
    from peft import LoraConfig, get_peft_model

    from moe_patch.patching.lora_targets import lora_targets

    # PEFT makes the adapters of a "meta" model on the CPU, in fp32.
    check_fits(f"--lora {rank}", 4 * rank, "a column of one factor", torch.device("cpu"))
    with explained(f"--lora {rank}"):
        return get_peft_model(model, LoraConfig(r=rank, **lora_targets(model)))


def shorten(config: Any, layers: int) -> None:
    """Keep the first ``layers`` layers in the config, and cut the values listed per layer.

    Raises:
        UnsupportedOptionError: the config has no such number of layers.
    """
    text = config.get_text_config()
    there = getattr(text, "num_hidden_layers", None)
    if there is None or not 1 <= layers <= there:
        raise UnsupportedOptionError(f"--layers {layers}: the model has {there}")
    for key, value in vars(text).items():
        if isinstance(value, list) and len(value) == there:
            setattr(text, key, value[:layers])
    text.num_hidden_layers = layers


def perturb(model: nn.Module, seed: int) -> None:
    """Fill routers and experts with values of about one, so that differences become visible.

    In a new model of transformers, experts hardly change the residual stream and routers are near
    ties. Correction biases are zero, and hash tables map every token to expert 0.
    """
    generator = torch.Generator().manual_seed(seed)

    def fill(tensor: torch.Tensor, std: float) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)

    with torch.no_grad():
        for block in discover(model):
            routers = [module for _, module in block.routers]
            if block.spec.chooses_in_block:  # its router is any module that makes logits
                routers.append(getattr(block.block, block.spec.router_attr))
            for module in [*routers, *(experts for _, experts in block.experts)]:
                for tensor in module.parameters():
                    fill(tensor, tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 0.1)
            for chooser, spec in block.choosers:
                if isinstance(spec.bias, str):
                    fill(read(chooser, spec.bias), 0.1)
            for _, router in block.routers:
                for table in router.buffers():
                    if not table.is_floating_point() and table.dim() == 2:
                        scores = torch.rand(len(table), len(router.weight), generator=generator)
                        table.copy_(scores.argsort(-1)[:, : table.shape[1]])


def _one_line(error: BaseException) -> str:
    line, kind = first_line(error), type(error).__name__
    # A single word, such as a KeyError's, means nothing without its type.
    return line if " " in line or line == kind else f"{kind} {line}"
