"""Quantizer by which transformers' loader packs experts, one projection at a time, as it reads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_patch.errors import UnsupportedModelError
from moe_patch.formats.packed import check_packable
from moe_patch.formats.tensor import QuantTensor, parameter
from moe_patch.quant import memory, mxfp4_checkpoint, packed_checkpoint, state
from moe_patch.quant.surgery import expert_projections, pack_at

_METHOD = "moe_patch_experts"


def quantization_config(storage: str, packed: Any = None, pack_on: Any = None) -> Any:
    """Return a quantization_config for ``from_pretrained``; register its quantizer (idempotent).

    Args:
        storage: "nf4", "fp8" or "mxfp4".
        packed: shapes and dtypes of the packed parameters of a checkpoint that holds them, or None.
        pack_on: device that packs 16-bit weights; None is their own.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    if _METHOD not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        _register()
    return AUTO_QUANTIZATION_CONFIG_MAPPING[_METHOD](storage, packed, pack_on)


def _register() -> None:
    """Register config and quantizer under our name; nothing else in transformers changes."""
    from transformers.quantizers.auto import register_quantization_config, register_quantizer

    register_quantization_config(_METHOD)(_config_class())
    register_quantizer(_METHOD)(_quantizer_class(_operation_class()))


def _config_class() -> type:
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class ExpertsQuantConfig(QuantizationConfigMixin):
        """Storage of the experts; attributes as the arguments of :func:`quantization_config`."""

        def __init__(
            self, storage: str, packed: Any, pack_on: Any, quant_method: str = _METHOD
        ) -> None:
            self.storage, self.packed, self.pack_on = storage, packed, pack_on
            self.quant_method = quant_method

    return ExpertsQuantConfig


def _operation_class() -> type:
    from transformers.core_model_loading import ConversionOps

    class QuantizeExperts(ConversionOps):
        """Conversion of a merged projection to its packed parameter."""

        def __init__(self, storage: str, pack_on: Any) -> None:
            self.storage, self.pack_on = storage, pack_on

        def convert(self, input_dict: dict[str, Any], *, model: Any, **_: Any) -> dict[str, Tensor]:
            packed = {}
            for name, value in input_dict.items():
                weight = value[0] if isinstance(value, list) else value
                own = pack_at(weight, self.storage, self.pack_on, weight.device, name)
                packed[name] = parameter(QuantTensor(own))
                state.watch(model.get_submodule(name.rpartition(".")[0]))
            return packed

    return QuantizeExperts


def _quantizer_class(operation: type) -> type:
    from transformers.quantizers.base import HfQuantizer

    class ExpertsQuantizer(HfQuantizer):
        """Quantizer that tells transformers' loader which parameters to pack as they are read."""

        shapes: dict[str, tuple[int, ...]] = {}
        expected: Any = ()
        waiting: Any = ()

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
            if self.quantization_config.packed is not None:
                self.waiting = packed_checkpoint.expect(model, self.quantization_config.packed)
                return model
            if self.quantization_config.storage == "mxfp4":
                self.expected = mxfp4_checkpoint.expect(model)
                return model
            projections = list(expert_projections(model))
            for one in projections:
                check_packable(one.stored, self.quantization_config.storage, one.where)
            self.shapes = {one.where: tuple(one.stored.shape) for one in projections}
            return model

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
            # To other libraries, the model is a normal one with frozen experts.
            self.remove_quantization_config(model)
            mxfp4_checkpoint.collect(self.expected)
            packed_checkpoint.collect(self.waiting)
            for name, shape in self.shapes.items():
                _check_loaded(name, model.get_parameter(name), shape)
            return model

        def param_needs_quantization(self, model: Any, param_name: str, **_: Any) -> bool:
            return param_name in self.shapes

        def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
            if param_name not in self.shapes:
                return param.element_size()
            return memory.bits_per_value(self.quantization_config.storage) / 8

        def get_quantize_ops(self) -> Any:
            own = self.quantization_config
            return operation(own.storage, own.pack_on)

        def is_serializable(self) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return True

    return ExpertsQuantizer


def _check_loaded(name: str, found: Tensor, shape: tuple[int, ...]) -> None:
    """Check a loaded weight; transformers checks shapes only for its own conversions.

    Raises:
        UnsupportedModelError: the checkpoint lacks the weight or a part of it, or its size differs.
    """
    if not isinstance(found, QuantTensor):
        raise UnsupportedModelError(
            f"{name}: the checkpoint has no such weight; accepted: a complete checkpoint of the "
            "model that its config describes"
        )
    if tuple(found.shape) != shape:
        raise UnsupportedModelError(
            f"{name}: the checkpoint has shape {tuple(found.shape)}, the config requires {shape}; "
            "accepted: a complete checkpoint of the model that its config describes (are experts "
            "missing?)"
        )
