"""Attach the adapters that a training file describes, and refuse targets that do not exist."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import set_seed

from moe_patch.errors import UnsupportedOptionError
from moe_patch.schema import nearest
from moe_patch.train.build import one_line


def add_adapters(base: Any, lora: dict[str, Any] | None, seed: int, dtype: str = "float32") -> Any:
    """Return ``base`` itself without ``lora``, else a PeftModel around it.

    Args:
        base: the model without adapters.
        lora: arguments of ``peft.LoraConfig``.
        seed: of the adapters' random values.
        dtype: "float32" casts 16-bit factors to fp32 as PEFT does; "bfloat16" makes them bf16.

    Raises:
        UnsupportedOptionError: PEFT refuses the arguments, or a target does not exist.
    """
    if lora is None:
        return base
    set_seed(seed)
    paths = [name for name, _ in base.named_modules()]
    modules = {name.rpartition(".")[2] for name in paths} - {""}
    parameters = {name.rpartition(".")[2] for name, _ in base.named_parameters()}
    try:
        model = get_peft_model(
            base,
            LoraConfig(**{"task_type": "CAUSAL_LM", **lora}),
            autocast_adapter_dtype=dtype == "float32",
        )
    except (TypeError, ValueError) as error:
        raise UnsupportedOptionError(f"lora: {one_line(error)}") from error
    if dtype == "bfloat16":
        cast_adapters(model, torch.bfloat16)
    # Use PEFT's final lists, where old names of experts' modules have become parameters.
    config, tuner = model.peft_config["default"], model.base_model
    _check_targets("target_modules", config.target_modules, tuner.targeted_module_names, modules)
    _check_targets(
        "target_parameters", config.target_parameters, tuner.targeted_parameter_names, parameters
    )
    for key in ("modules_to_save", "exclude_modules"):
        _check_targets(key, lora.get(key), paths, modules)
    return model


def cast_adapters(model: Any, dtype: torch.dtype) -> None:
    """Cast the trained adapters of a PeftModel, one tensor at a time.

    Older releases of PEFT make fp32 factors where the base layer's weight is in 4 bits.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def _check_targets(key: str, targets: Any, found: list[str], names: set[str]) -> None:
    """Refuse a missing target: PEFT needs only one match of a list and silently skips the rest."""
    for target in sorted(targets) if isinstance(targets, (list, set)) else ():
        if not any(name == target or name.endswith(f".{target}") for name in found):
            near = nearest(target.rpartition(".")[2], names)
            hint = f"; did you mean {near!r}?" if near not in (None, target) else ""
            raise UnsupportedOptionError(f"lora.{key}: {target!r} is nowhere{hint}")
