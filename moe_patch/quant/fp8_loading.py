"""Read the experts of an FP8 checkpoint as they are stored, where transformers would dequantise.

On a device that does not compute in FP8, transformers dequantises the whole checkpoint. The
quantizer of this module lets it do so for all weights except those of experts. While the files are
read, every expert parameter ``P`` is replaced by two: ``P`` in e4m3 and ``P_scale_inv`` in fp32.
transformers fills both, and afterwards they are combined into one packed parameter.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_patch.errors import UnsupportedModelError
from moe_patch.formats import fp8
from moe_patch.formats.packed import PackedWeight
from moe_patch.formats.tensor import QuantTensor, parameter
from moe_patch.quant import state
from moe_patch.quant.sharded_state import rank0_only
from moe_patch.quant.stored import quantisation
from moe_patch.quant.surgery import Projection, expert_projections

_METHOD = "moe_patch_fp8"
_SCALES = "scale_inv"


class Stored(NamedTuple):
    """A projection whose parts are not loaded yet, and its dtype in the model."""

    projection: Projection
    dtype: torch.dtype


def with_quantizer(config: Any) -> Any:
    """Return a copy of an FP8 checkpoint's config that makes ``from_pretrained`` use this module.

    If one process loads the weights for others, it dequantises all but experts on every device.
    The others build a model without transformers' FP8 Linear modules.

    Args:
        config: transformers config with a quantization_config of FP8, its own or its text config's.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    if _METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        _register()
    made = copy.deepcopy(config)
    made.quantization_config = {**(quantisation(config) or {}), "quant_method": _METHOD}
    if rank0_only():
        made.quantization_config["dequantize"] = True
    return made


def can_keep_experts() -> bool:
    """Return whether transformers may dequantise a part of a checkpoint (5.21 or later).

    Older releases dequantise every FP8 weight in front of other conversions.
    """
    from transformers.quantizers.base import HfQuantizer

    return "model" in inspect.signature(HfQuantizer.update_weight_conversions).parameters


def _register() -> None:
    """Register config and quantizer under our name; nothing else in transformers changes."""
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
    from transformers.utils.quantization_config import FineGrainedFP8Config, QuantizationMethod

    class StoredFP8Config(FineGrainedFP8Config):
        """Config of an FP8 checkpoint."""

    class StoredFP8Quantizer(FineGrainedFP8HfQuantizer):
        """transformers' quantizer, which here keeps experts as stored if it dequantises."""

        waiting: Any = ()

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            # transformers copies a conversion, and with it this quantizer, for every weight.
            return self

        def validate_environment(self, *args: Any, **kwargs: Any) -> None:
            super().validate_environment(*args, **kwargs)
            # Our name has led to this class. The loaded model must name transformers' method.
            self.quantization_config.quant_method = QuantizationMethod.FP8

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            super()._process_model_before_weight_loading(model, **kwargs)
            if self.quantization_config.dequantize and can_keep_experts():
                about = self.quantization_config.to_dict()
                self.waiting = expect(model, about, self.modules_to_not_convert)

        def update_weight_conversions(self, *args: Any) -> list[Any]:
            # The conversions; from transformers 5.21 on also the model.
            found: list[Any] = super().update_weight_conversions(*args)
            if self.waiting:
                _copy_once(found)
            return found

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            collect(self.waiting)
            return super()._process_model_after_weight_loading(model, **kwargs)

    register_quantization_config(_METHOD)(StoredFP8Config)
    register_quantizer(_METHOD)(StoredFP8Quantizer)


def expect(model: nn.Module, about: dict[str, Any], plain: list[str] | None) -> list[Stored]:
    """Replace the expert parameters that a checkpoint stores in FP8 by their parts, on meta.

    Args:
        model: an empty transformers model.
        about: the checkpoint's quantization_config.
        plain: patterns of the modules that the checkpoint does not store in FP8.

    Returns:
        An empty list if the experts are stored in another way than this library packs them.

    Raises:
        UnsupportedModelError: no MoE block, or a block whose experts cannot be quantised.
    """
    found = list(_in_fp8(model, plain))
    blocks = list(about.get("weight_block_size") or ())
    ordinary = {"activation_scheme": "dynamic", "scale_fmt": "float", "expert_dtype": "fp8"}
    usual = all(about.get(key, value) == value for key, value in ordinary.items())
    # transformers' conversion is the same for all layers, so take all experts or none.
    if not usual or blocks != [fp8.BLOCK] * 2 or not all(map(_is_cut_at_blocks, found)):
        return []
    waiting = [Stored(one, one.stored.dtype) for one in found]
    for one in found:
        E, rows, columns = one.stored.shape
        shapes = _scales_shape(E, rows, columns)
        values = torch.empty(E, rows, columns, dtype=fp8.DTYPE, device="meta")
        scales = torch.empty(shapes, dtype=torch.float32, device="meta")
        for name, value in ((one.name, values), (f"{one.name}_{_SCALES}", scales)):
            one.module.register_parameter(name, nn.Parameter(value, requires_grad=False))
        # Otherwise transformers would give random values to missing parts, which hides them.
        one.module._is_hf_initialized = True
    return waiting


def collect(waiting: list[Stored]) -> None:
    """Combine the loaded parts into one packed parameter each.

    Raises:
        UnsupportedModelError: the checkpoint lacks a part.
    """
    for one, dtype in waiting:
        values, scales = (_loaded(one, suffix) for suffix in ("", f"_{_SCALES}"))
        weight = PackedWeight("fp8", values.contiguous(), (scales.contiguous(),), dtype)
        one.module.register_parameter(one.name, parameter(QuantTensor(weight)))
        state.watch(one.module)


def _copy_once(conversions: list[Any]) -> None:
    """Let conversions that stack experts and concatenate gate and up copy each value only once."""
    from transformers.core_model_loading import ConversionOps

    class StackAndConcatenate(ConversionOps):
        """Stack of the experts of each pattern, with the patterns side by side along axis 1."""

        def convert(
            self,
            input_dict: dict[str, list[Tensor]],
            source_patterns: list[str],
            target_patterns: list[str],
            **_: Any,
        ) -> dict[str, Tensor]:
            experts = list(zip(*(input_dict[one] for one in source_patterns), strict=True))
            rows = [len(one) for one in experts[0]]
            first = experts[0][0]
            shape = (len(experts), sum(rows), *first.shape[1:])
            made = torch.empty(shape, dtype=first.dtype, device=first.device)
            for target, parts in zip(made, experts, strict=True):
                for place, part in zip(target.split(rows), parts, strict=True):
                    place.copy_(part)
            return {target_patterns[0]: made}

    for one in conversions:
        operations = one.operations if hasattr(one, "operations") else []
        kinds = [type(each).__name__ for each in operations]
        if kinds == ["MergeModulelist", "Concatenate"] and operations[1].dim == 1:
            one.operations = [StackAndConcatenate()]


def _in_fp8(model: nn.Module, plain: list[str] | None) -> Iterator[Projection]:
    from transformers.quantizers.quantizers_utils import should_convert_module

    for one in expert_projections(model):
        if should_convert_module(one.path, plain):
            yield one


def _is_cut_at_blocks(one: Projection) -> bool:
    """Return whether gate and up, which checkpoints store apart, share no block of scales."""
    rows = one.stored.shape[1]
    return not one.transposed and (one.name == "down_proj" or rows % (2 * fp8.BLOCK) == 0)


def _scales_shape(experts: int, rows: int, columns: int) -> tuple[int, int, int]:
    return experts, -(-rows // fp8.BLOCK), -(-columns // fp8.BLOCK)


def _loaded(one: Projection, suffix: str) -> Tensor:
    stored = one.module._parameters.pop(f"{one.name}{suffix}")
    # transformers marks what it has loaded; anything else is uninitialised memory.
    if not hasattr(stored, "_is_hf_initialized"):
        raise UnsupportedModelError(
            f"{one.where}: the checkpoint has no FP8 {'scales' if suffix else 'values'} for it; "
            "accepted: a complete checkpoint of the model that its config describes"
        )
    return stored.data
