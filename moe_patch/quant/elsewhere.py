"""Models whose weights another process has loaded: packed experts without memory.

With FSDP's ``cpu_ram_efficient_loading`` the first process of a machine reads the checkpoint and
sends every parameter to the others. They need the same model on the meta device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.formats import fp8, mxfp4, nf4
from moe_patch.formats.packed import FORMATS, PackedWeight
from moe_patch.formats.tensor import QuantTensor, parameter
from moe_patch.quant import saving, state
from moe_patch.quant.sharded_state import rank0_only
from moe_patch.quant.surgery import expert_projections
from moe_patch.runtime.modules import is_sharded


def is_elsewhere() -> bool:
    """Return whether another process of this machine loads the weights for this one."""
    if not rank0_only():
        return False
    return torch.distributed.get_node_local_rank(torch.distributed.get_rank()) != 0


def build_elsewhere(model_class: Any, config: Any, storage: str, options: dict[str, Any]) -> Any:
    """Return a model with all parameters on the meta device and experts in a storage.

    Buffers that no state dict has are computed, as transformers does for such a process.

    Raises:
        UnsupportedOptionError: the dtype is known only from the checkpoint's files.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    dtype = options.get("dtype", "auto")
    dtype = config.dtype if dtype == "auto" else dtype
    if dtype is None:
        raise UnsupportedOptionError(
            "load_quantized: config.json names no dtype, and this process does not read the "
            "weights; accepted: dtype, such as dtype='bfloat16'"
        )
    options = {**options, "dtype": dtype, "config": config}
    if not hasattr(model_class, "config_class"):  # an auto class: find the class of the config
        with torch.device("meta"):
            model_class = type(model_class.from_config(config))
    with _no_report():
        model = model_class.from_pretrained(None, state_dict={}, **options)
    _forget_zeros(model)
    for one in list(expert_projections(model)):
        weight = on_meta(one.stored, storage, one.transposed)
        one.module.register_parameter(one.name, parameter(QuantTensor(weight)))
        state.watch(one.module)
    saving.guard_saving(model)
    model.register_state_dict_pre_hook(_refuse_meta_adapters)
    return model


def _forget_zeros(model: nn.Module) -> None:
    """Move parameters to the meta device; transformers before 5.23 fills them with zeros.

    Nothing has written to these zeros on the CPU, so that the system has given them no memory.
    """
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and not value.is_meta:
                if id(value) not in moved:
                    moved[id(value)] = nn.Parameter(value.to("meta"), value.requires_grad)
                module._parameters[name] = moved[id(value)]


def materialise_adapters(model: nn.Module) -> None:
    """Give trained parameters on the meta device memory on the CPU; their values come later.

    accelerate finds the parameters of an optimiser by their addresses, which meta tensors lack.
    Call this after PEFT has added adapters and before an optimiser is made.
    """
    for module in model.modules():
        for name, value in module._parameters.items():
            if value is not None and value.requires_grad and value.is_meta:
                made = nn.Parameter(torch.empty_like(value, device="cpu"))
                module._parameters[name] = made


def _refuse_meta_adapters(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Refuse to send a model whose optimiser could not be matched with its parameters.

    Raises:
        UnsupportedModelError: a trained parameter is on the meta device, before sharding.
    """
    for name, value in module.named_parameters():
        if value.requires_grad and value.is_meta and not is_sharded(value):
            raise UnsupportedModelError(
                f"{name} is trained, but on the meta device, because this process does not load "
                "the weights; accelerate could not match it with the optimiser; call "
                "moe_patch.quant.elsewhere.materialise_adapters(model) after adding adapters and "
                "before making the optimiser"
            )


def on_meta(weight: torch.Tensor, storage: str, transposed: bool) -> PackedWeight:
    """Return the packed form of a weight [E, rows, columns] as stored, without memory."""
    E, rows, columns = weight.shape
    if storage == "mxfp4" and transposed:  # bytes lie along the inputs
        rows, columns = columns, rows
    empty = torch.empty(0, device="meta")
    packed = empty.new_empty((E, rows, columns // FORMATS[storage].per_element), dtype=torch.uint8)
    whole = PackedWeight(storage, packed, (), weight.dtype, storage == "mxfp4" and transposed)
    if storage == "fp8":
        blocks = (E, -(-rows // fp8.BLOCK), -(-columns // fp8.BLOCK))
        values = packed.view(fp8.DTYPE)
        return replace(whole, packed=values, scales=(empty.new_empty(blocks),))
    if storage == "mxfp4":
        scales = packed.new_empty((E, rows, columns // mxfp4.BLOCK))
        return replace(whole, scales=(scales,))
    count = E * rows * columns // nf4.BLOCK
    nested = empty.new_empty(-(-count // nf4.NESTED_BLOCK))
    others = (empty.new_empty(shape) for shape in ((256,), (), (16,)))
    return replace(whole, scales=(packed.new_empty(count), nested, *others))


@contextmanager
def _no_report() -> Iterator[None]:
    """Keep transformers from reporting every weight as missing."""
    from transformers.utils import logging as theirs

    verbosity = theirs.get_verbosity()
    theirs.set_verbosity_error()
    try:
        yield
    finally:
        theirs.set_verbosity(verbosity)
