"""Quantisation of a checkpoint, read from its config, and how its experts are handled."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from moe_patch.errors import UnsupportedModelError
from moe_patch.formats import fp8

UNNAMED = "a method without a name"
_READ = f"16 or 32 bits, FP8 in blocks of {fp8.BLOCK} x {fp8.BLOCK}, MXFP4"


class Stored(NamedTuple):
    """Quantisation of a checkpoint.

    Attributes:
        method: name of the method in transformers.
        is_read: experts of such a checkpoint can be patched.
        is_known: the installed transformers can load it.
        said: one line for the user on how the experts are handled.
    """

    method: str
    is_read: bool
    is_known: bool
    said: str


def stored_method(config: Any) -> str | None:
    """Return the quantisation method of a checkpoint by its config; None if not quantised."""
    found = quantisation(config)
    return None if found is None else _method(found)


def stored(config: Any) -> Stored | None:
    """Return the quantisation of a checkpoint by its transformers config.

    Returns:
        None if the checkpoint is not quantised.
    """
    found = quantisation(config)
    if found is None:
        return None
    method = _method(found)
    if not _is_known(method):
        return Stored(method, False, False, _said_of_unknown(method))
    if method == "bitsandbytes":
        bits = 8 if found.get("load_in_8bit") else 4
        said = (
            f"Linear modules are packed in {bits} bits; experts that the files hold in 16 or 32 "
            "bits are patched, packed ones are refused once they are loaded"
        )
        return Stored(method, True, True, said)
    blocks = found.get("weight_block_size", (fp8.BLOCK, fp8.BLOCK))
    if method == "mxfp4" or (method == "fp8" and list(blocks or ()) == [fp8.BLOCK] * 2):
        said = f"load_quantized(MODEL, {method!r}) takes the experts as they are stored"
        return Stored(method, True, True, said)
    scales = f" with scales for blocks of {blocks}" if method == "fp8" else ""
    said = (
        f"moe_patch does not read experts packed with {method}{scales}; accepted: {_READ}; use the "
        "model's checkpoint in 16 bits, or let transformers dequantise this one while loading, if "
        "the method supports that"
    )
    return Stored(method, False, True, said)


def refuse_unknown(config: Any, what: str) -> None:
    """Refuse a checkpoint whose quantisation transformers would skip with a warning.

    Args:
        config: config of the checkpoint.
        what: beginning of the error, such as "MODEL 'x'".

    Raises:
        UnsupportedModelError: packed experts would keep random values.
    """
    found = stored(config)
    if found is not None and not found.is_known:
        raise UnsupportedModelError(f"{what}: {found.said}")


def quantisation(config: Any) -> Mapping[str, Any] | None:
    """Return the quantization_config as a mapping; like transformers, also try the text config.

    Returns:
        None if the checkpoint is not quantised.
    """
    for one in (config, config.get_text_config(decoder=True)):
        found = one.quantization_config if hasattr(one, "quantization_config") else None
        if found is not None:
            return found if isinstance(found, dict) else found.to_dict()
    return None


def _method(found: Mapping[str, Any]) -> str:
    # Old bitsandbytes configs name no method; transformers recognises them by these two flags.
    if found.get("load_in_4bit") or found.get("load_in_8bit"):
        return "bitsandbytes"
    method = found.get("quant_method") or UNNAMED
    return str(method.value if isinstance(method, Enum) else method)


def _is_known(method: str) -> bool:
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    return method == "bitsandbytes" or method in AUTO_QUANTIZATION_CONFIG_MAPPING


def _said_of_unknown(method: str) -> str:
    import transformers

    named = method if method == UNNAMED else repr(method)
    return (
        f"transformers {transformers.__version__} does not support quantisation by {named}; it "
        "skips an unknown method, which leaves packed experts at random values; accepted: "
        f"{_READ}; if the weights are not packed, delete quantization_config from config.json"
    )
