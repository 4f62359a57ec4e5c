"""The YAML file of a training run, as frozen and checked dataclasses.

    model: PATH_OR_HUB_ID | {path: ..., dtype: ...} | {model_type: ..., <config overrides>}
    tokenizer: PATH_OR_HUB_ID | train | {source: ..., vocab_size: ...}     default: the model's
    data: python-stdlib-docstrings | FILE.txt | FILE.jsonl | DATASETS_ID | {source: ..., ...}
    lora: arguments of peft.LoraConfig                                     absent: full fine-tuning
    training: arguments of transformers.TrainingArguments
    adapter_dtype: float32 | bfloat16, of the adapters' weights            default: float32
    quantize_experts: nf4 | fp8 | mxfp4, frozen experts under adapters     default: unchanged
    quantize_linear, quantize_embedding: nf4, frozen, by bitsandbytes      default: unchanged
    moe_patch: true | false | options of moe_patch.PatchConfig             default: true
    router_losses: {load_balance: 0.01, z: 0.001}, added to the loss       default: none
    smk: {target: delta_sc, weight: 0.1}, options of train.smk.SmkConfig   default: none
    liger: true | false, Liger's kernels around the MoE blocks             default: false
    compare_unpatched: true | false | number of steps                      default: false
    seed: 0
    output_dir: FOLDER                                                     required
    tiny: true | false                                                     default: false
    tiny_values: with ``tiny``, each key replaces the file's own; `training` is merged

Relative paths are relative to the working directory. A leading ``~``, ``$NAME`` and ``${NAME}`` are
expanded in paths; a variable that is not set is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_patch.errors import UnsupportedOptionError
from moe_patch.formats.packed import READABLE
from moe_patch.schema import check_choice, check_known, check_mapping, check_type
from moe_patch.train.paths import expand_paths
from moe_patch.train.text_file import parse_yaml, read_text

DTYPES = ("float32", "bfloat16", "float16", "auto")
SIZE_KEYS = ("tiny", "tiny_values")
MODEL_KEYS = ("path", "model_type", "dtype", "attn_implementation")


@dataclass(frozen=True)
class ModelConfig:
    """The model's source: exactly one of ``path`` and ``model_type``.

    Attributes:
        path: a local folder or a hub id for ``from_pretrained``.
        model_type: a transformers model type, built with random weights from ``overrides``.
        dtype: dtype of the weights; "auto" (only with ``path``) is the checkpoint's own.
        attn_implementation: passed on to transformers.
        overrides: arguments of the model type's config class.
    """

    path: str | None = None
    model_type: str | None = None
    dtype: str = "float32"
    attn_implementation: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenizerConfig:
    """``source``: a path, a hub id, or "train" (byte-level BPE of ``vocab_size`` on the data)."""

    source: str
    vocab_size: int = 2048


@dataclass(frozen=True)
class DataConfig:
    """The text, and how it is cut.

    Attributes:
        source: "python-stdlib-docstrings", a text, JSONL or JSON file, or an id for `datasets`.
        text_field: the field of a JSONL line or of a datasets row that holds the text.
        subset: configuration name of a datasets id.
        split: split of a datasets id.
        block_size: tokens per training example; texts are joined by the end token and cut.
    """

    source: str
    text_field: str = "text"
    subset: str | None = None
    split: str = "train"
    block_size: int = 128


@dataclass(frozen=True)
class TrainConfig:
    """One training run; see the head of this module."""

    model: ModelConfig
    tokenizer: TokenizerConfig
    data: DataConfig
    output_dir: str
    lora: dict[str, Any] | None = None
    adapter_dtype: str = "float32"
    quantize_experts: str | None = None
    quantize_linear: str | None = None
    quantize_embedding: str | None = None
    training: dict[str, Any] = field(default_factory=dict)
    moe_patch: bool | dict[str, Any] = True
    router_losses: dict[str, Any] | None = None
    smk: dict[str, Any] | None = None
    liger: bool = False
    compare_unpatched: bool | int = False
    seed: int = 0


def load_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """Read and check a YAML file.

    Args:
        path: the file.
        overrides: dotted key -> value that overrides the file's ({"training.max_steps": 3}) and,
            with ``tiny``, the tiny values.

    Raises:
        UnsupportedOptionError: the file is missing or wrong; one line says where.
    """
    text = read_text(path, "cannot read the configuration")
    node = parse_yaml(text, str(path))
    if not isinstance(node, dict):
        raise UnsupportedOptionError(f"{path}: expected a mapping, found {type(node).__name__}")
    given = dict(overrides or {})
    size = {key: given.pop(key) for key in list(given) if key.split(".")[0] in SIZE_KEYS}
    for dotted, value in size.items():
        _put(node, dotted, value)
    sized = _sized(node, str(path))
    for dotted, value in given.items():
        _put(sized, dotted, value)
    return make_config(sized, str(path))


def make_config(node: Mapping[str, Any], where: str = "config") -> TrainConfig:
    """Check a YAML node and make a TrainConfig of it. Raises UnsupportedOptionError."""
    node = expand_paths(_sized(node, where), where)
    shape = {**node}
    for key in ("model", "tokenizer", "data"):
        shape.pop(key, None)
    check_mapping(where, shape, TrainConfig)
    for key in ("model", "data", "output_dir"):
        if node.get(key) is None:
            also = " (or --output-dir)" if key == "output_dir" else ""
            raise UnsupportedOptionError(f"{where}: the key {key!r} is missing{also}")
    model = _model(node["model"], f"{where}: model")
    tokenizer = _tokenizer(node.get("tokenizer"), model, where)
    data = _named(node["data"], DataConfig, f"{where}: data")
    if data.block_size < 2:
        raise UnsupportedOptionError(f"{where}: data.block_size is {data.block_size}; at least 2")
    seed = node.get("seed", 0)
    if not 0 <= seed < 2**32:  # numpy's range, which set_seed needs
        raise UnsupportedOptionError(f"{where}: seed is {seed}; accepted: 0 to {2**32 - 1}")
    compare = node.get("compare_unpatched", False)
    if compare is not True and compare is not False and compare < 1:
        raise UnsupportedOptionError(f"{where}: compare_unpatched is {compare}; at least 1 step")
    _check_patched(shape, compare is not False, where)
    _check_adapters(shape, model, where)
    training = dict(shape.pop("training", None) or {})
    return TrainConfig(model=model, tokenizer=tokenizer, data=data, training=training, **shape)


def _tokenizer(node: Any, model: ModelConfig, where: str) -> TokenizerConfig:
    """Return the tokenizer that the file names, else that of the model's path."""
    if node is not None:
        return _named(node, TokenizerConfig, f"{where}: tokenizer")
    if model.path is None:
        raise UnsupportedOptionError(
            f"{where}: a model built from a config has no tokenizer; "
            "add `tokenizer: train` or a path or hub id"
        )
    return TokenizerConfig(model.path)


def _check_patched(node: Mapping[str, Any], compares: bool, where: str) -> None:
    """Refuse keys that need a patched model beside keys that leave it unpatched."""
    options = node.get("moe_patch")
    unpatched = options is False
    offloads = isinstance(options, Mapping) and options.get("offload_experts") is True
    if offloads and node.get("lora") is None:
        raise UnsupportedOptionError(
            f"{where}: moe_patch.offload_experts freezes the experts, and the optimizer of full "
            "fine-tuning needs them; accepted: `lora`, or offload_experts: false"
        )
    if node.get("smk") is not None and (compares or unpatched):
        raise UnsupportedOptionError(
            f"{where}: smk needs the records of a patched model; accepted: moe_patch on, and "
            "compare_unpatched: false"
        )
    if (storage := node.get("quantize_experts")) is not None:
        check_known(f"{where}: quantize_experts", storage, READABLE)
        if node.get("lora") is None or unpatched:
            raise UnsupportedOptionError(
                f"{where}: quantize_experts freezes the experts, which only patched models run; "
                "it needs `lora` and not `moe_patch: false`"
            )


def _check_adapters(node: Mapping[str, Any], model: ModelConfig, where: str) -> None:
    """Refuse keys about adapters or frozen weights where the file has neither."""
    dtype = node.get("adapter_dtype", "float32")
    check_choice(f"{where}: adapter_dtype", dtype, DTYPES[:2])
    if dtype == "bfloat16" and (node.get("lora") is None or model.dtype != "bfloat16"):
        raise UnsupportedOptionError(
            f"{where}: adapter_dtype: bfloat16 needs `lora` and model.dtype: bfloat16"
        )
    for key in ("quantize_linear", "quantize_embedding"):
        if node.get(key) is not None:
            check_choice(f"{where}: {key}", node[key], ("nf4",))
            if node.get("lora") is None:
                raise UnsupportedOptionError(f"{where}: {key} freezes weights; it needs `lora`")


def _sized(node: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Apply ``tiny_values`` if ``tiny`` is true; return the node without the two keys."""
    tiny, values = node.get("tiny", False), node.get("tiny_values", {})
    check_type(f"{where}: tiny", tiny, bool)
    check_type(f"{where}: tiny_values", values, dict)
    accepted = (*TrainConfig.__dataclass_fields__, *SIZE_KEYS)
    for key in node:
        check_known(f"{where}: unknown key", key, accepted)
    for key in values:
        check_known(f"{where}: tiny_values: unknown key", key, TrainConfig.__dataclass_fields__)
    if tiny and not values:
        raise UnsupportedOptionError(f"{where}: tiny is true, but there are no tiny_values")
    own = {key: value for key, value in node.items() if key not in SIZE_KEYS}
    if not tiny:
        return own
    training = [own.get("training", {}), values.get("training", {})]
    for name, part in zip(("training", "tiny_values.training"), training, strict=True):
        check_type(f"{where}: {name}", part, dict)
    return {**own, **values, "training": training[0] | training[1]}


def _named(node: Any, cls: Any, where: str) -> Any:
    """Make a dataclass from a mapping, or from a string that is its ``source``."""
    if isinstance(node, str):
        return cls(node)
    check_mapping(where, node, cls)
    if "source" not in node:
        raise UnsupportedOptionError(f"{where}: the key 'source' is missing")
    return cls(**node)


def _model(node: Any, where: str) -> ModelConfig:
    if isinstance(node, str):
        return ModelConfig(path=node)
    if not isinstance(node, Mapping):
        raise UnsupportedOptionError(f"{where} is {node!r}; expected a path, hub id or mapping")
    overrides = {key: value for key, value in node.items() if key not in MODEL_KEYS}
    own = {key: value for key, value in node.items() if key in MODEL_KEYS}
    check_mapping(where, own, ModelConfig)
    if ("path" in own) == ("model_type" in own):
        raise UnsupportedOptionError(f"{where}: give exactly one of 'path' and 'model_type'")
    if "path" in own and overrides:
        accepted = set(MODEL_KEYS) - {"model_type"}
        check_known(f"{where} (with 'path'): unknown key", next(iter(overrides)), accepted)
    dtypes = DTYPES if "path" in own else DTYPES[:-1]
    check_choice(f"{where}.dtype", own.get("dtype", "float32"), dtypes)
    return ModelConfig(**own, overrides=overrides)


def _put(node: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = dotted.split(".")
    for key in parents:
        child = node.setdefault(key, {})
        if child is True:  # true means the default options
            child = node[key] = {}
        check_type(f"{dotted}: {key}", child, dict)
        node = child
    node[last] = value
