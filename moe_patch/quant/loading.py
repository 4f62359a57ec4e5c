"""Load a checkpoint and quantise its experts one projection at a time, as they are read."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.formats import fp8
from moe_patch.formats.packed import READABLE
from moe_patch.formats.tensor import QuantTensor
from moe_patch.quant import fp8_loading, packed_checkpoint, saving
from moe_patch.quant.elsewhere import build_elsewhere, is_elsewhere
from moe_patch.quant.quantizer import quantization_config
from moe_patch.quant.stored import refuse_unknown, stored_method
from moe_patch.quant.surgery import quantize_experts
from moe_patch.schema import check_choice

logger = logging.getLogger("moe_patch")

# Arguments of from_pretrained that load_quantized sets itself -> what to do instead.
_OWN = {
    "device_map": "accepted: device, one for the whole model",
    "distributed_config": "transformers would give each rank a part of the 16-bit weights, whose "
    "quantisation depends on the other parts; accepted: load whole, then fully_shard or accelerate;"
    " expert parallelism takes experts in 16 bits (moe_patch.expert_parallel)",
    "quantization_config": "to store the other weights in 4 bits as well, load with bitsandbytes' "
    "config and call quantize_experts(model, ...) on the result",
}
# Arguments of from_pretrained that locate a config and control which code may run to read it.
_HUB_OPTIONS = (
    "cache_dir", "code_revision", "force_download", "local_files_only", "proxies", "revision",
    "subfolder", "token", "trust_remote_code",
)  # fmt: skip


def load_quantized(
    path: str,
    storage: str,
    *,
    device: torch.device | str = "cpu",
    pack_on: torch.device | str | None = None,
    model_class: Any = None,
    **options: Any,
) -> Any:
    """Run ``from_pretrained`` with the experts in 4 or 8 bits from the start.

    transformers reads and merges one projection at a time. It is quantised and freed before the
    next one, so no device ever holds more than one layer's experts in 16 bits.

    A checkpoint with experts in FP8 (storage "fp8") or MXFP4 (gpt-oss, storage "mxfp4") is used as
    it is. The same holds for NF4 experts that ``save_pretrained`` wrote. If no device supports FP8,
    transformers dequantises the other weights of an FP8 checkpoint, but not its experts. Only if
    these have other blocks than 128 x 128 are they quantised again, with a warning.

    Under FSDP with ``cpu_ram_efficient_loading`` only the first process of a machine reads the
    checkpoint. In the others all parameters are on the meta device, until accelerate sends them.

    Args:
        path: a local folder or hub id.
        storage: "nf4", "fp8" or "mxfp4".
        device: device of the model.
        pack_on: device that packs 16-bit experts; None is ``device``. With the CPU as ``device``
            and a card here, the experts are packed on the card and kept in host memory.
        model_class: class with ``from_pretrained``; None means ``AutoModelForCausalLM``.
        options: further arguments of ``from_pretrained`` (``dtype``, ``attn_implementation``, ..).

    Raises:
        UnsupportedOptionError: unknown storage, or an option that this function sets itself.
        UnsupportedModelError: as :func:`quantize_experts`; or the checkpoint is quantised in
            another way, or in a way that the installed transformers does not support.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

    _check_options(storage, options)
    own = model_class or AutoModelForCausalLM
    config = options.get("config")
    hub = {name: options[name] for name in _HUB_OPTIONS if name in options}
    packed = None
    if config is None:
        about, _ = PreTrainedConfig.get_config_dict(path, **hub)
        if packed_checkpoint.is_packed_checkpoint(about):
            packed = about
            config = packed_checkpoint.read_config(path, about, storage)
        else:
            config = AutoConfig.from_pretrained(path, **hub)
    if packed is None:
        refuse_unknown(config, path)
        _check_stored(path, stored_method(config), storage)
    if is_elsewhere():
        return build_elsewhere(own, config, storage, options)
    if packed is not None:
        return _load_packed(path, packed, config, model_class, str(device), options)
    load = functools.partial(own.from_pretrained, path, device_map=str(device))
    return _load(path, config, storage, pack_on, load, options)


def _load(
    path: str,
    config: Any,
    storage: str,
    pack_on: torch.device | str | None,
    load: Callable[..., Any],
    options: dict[str, Any],
) -> Any:
    """Load a checkpoint of transformers, and pack its experts or take them as they are."""
    stored = stored_method(config)
    if stored == "fp8":
        options["config"] = fp8_loading.with_quantizer(config)
        model = load(**options)
        _warn_of_plain_experts(path, model)
        return quantize_experts(model, storage)
    if stored == "mxfp4":
        # transformers' own quantizer would dequantise, or pack for kernels that have no backward.
        options["config"] = copy.deepcopy(config)
        del options["config"].quantization_config
    model = load(quantization_config=quantization_config(storage, pack_on=pack_on), **options)
    saving.guard_saving(model)
    return model


def _load_packed(
    path: str, about: dict[str, Any], config: Any, model_class: Any, device: str, options: Any
) -> Any:
    """A model whose packed experts ``save_pretrained`` wrote, bit for bit.

    Raises:
        UnsupportedModelError: the files are of another model than the config.
        UnsupportedOptionError: one of them is missing or broken.
    """
    import transformers

    hub = {name: options.pop(name) for name in _HUB_OPTIONS if name in options}
    tensors = packed_checkpoint.read_tensors(path, hub)
    own = model_class
    if own is None or not issubclass(own, transformers.PreTrainedModel):
        own = getattr(transformers, about["architectures"][0])
    shapes = packed_checkpoint.shapes(about["experts"], tensors)
    method = quantization_config(about["storage"], packed=shapes)
    model, info = own.from_pretrained(
        None, config=config, state_dict=tensors, quantization_config=method,
        device_map=device, output_loading_info=True, **options,
    )  # fmt: skip
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedModelError(
            f"{path}: {missing[0]} and {len(missing) - 1} more weights are not in its files; "
            "accepted: a whole checkpoint"
        )
    saving.guard_saving(model)
    return model


def _check_options(storage: str, options: dict[str, Any]) -> None:
    check_choice("load_quantized: storage", storage, READABLE)
    for name, instead in _OWN.items():
        if name in options:
            raise UnsupportedOptionError(f"load_quantized sets {name} itself; {instead}")


def _warn_of_plain_experts(path: str, model: Any) -> None:
    """Warn if transformers dequantised all experts of a checkpoint, which are quantised again."""
    from transformers.integrations.finegrained_fp8 import FP8Experts

    kept = any(isinstance(module, FP8Experts) for module in model.modules())
    if not kept and not any(isinstance(one, QuantTensor) for one in model.parameters()):
        logger.warning(
            "moe_patch: %s: transformers has dequantised this FP8 checkpoint, because there is no "
            "device of compute capability 8.9 or more, and moe_patch does not read its experts as "
            "they are stored (blocks other than %d x %d, or shared by gate and up, or transformers "
            "before 5.21); they are quantised again, with a second rounding",
            path,
            fp8.BLOCK,
            fp8.BLOCK,
        )


def _check_stored(path: str, stored: str | None, storage: str) -> None:
    if (stored or storage) != storage or (storage == "mxfp4") != (stored == "mxfp4"):
        raise UnsupportedModelError(
            f"{path}: the checkpoint is {f'quantised with {stored}' if stored else 'not quantised'}"
            f", requested storage: {storage}; accepted: 'fp8' for an FP8 checkpoint, 'mxfp4' for "
            "an MXFP4 one, 'nf4' or 'fp8' for one in 16 bits"
        )
