"""Save the call of the first block with a non-finite output in a safetensors file.

    input, ids, weights      the experts' arguments: [T, D], [T, K], [T, K]; or a block's one input
    parameters.NAME          the module's own parameters and buffers
    lhs.I.NAME, rhs.I.NAME   low-rank factors passed with the call, by adapter and parameter

The metadata hold the block's path, its class, its config, the factors' scalings and versions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch import tensor_file
from moe_patch.errors import UnsupportedModelError
from moe_patch.formats.tensor import plain
from moe_patch.runtime.adapters import Factors
from moe_patch.runtime.module_patch import current_factors, patch_of
from moe_patch.runtime.modules import is_sharded

FORMAT = "moe_patch nan 1"
ARGUMENTS = ("input", "ids", "weights")


@dataclass(frozen=True)
class NanCall:
    """The contents of such a file.

    Attributes:
        path, role: the block, and what was called: "experts" or "block" (as a whole).
        module, cls: the class's module and name.
        config_module, config_cls, config: the config's class and its values.
        backend: the patch's ``backend`` option.
        args: the call's arguments.
        parameters: the module's parameters and buffers by name.
        factors: parameter -> low-rank factors.
        versions: library -> version that wrote the file.
    """

    path: str
    role: str
    module: str
    cls: str
    config_module: str
    config_cls: str
    config: dict[str, Any]
    backend: str
    args: tuple[Tensor, ...]
    parameters: dict[str, Tensor]
    factors: dict[str, list[Factors]]
    versions: dict[str, str]


def write(probe: Any, module: nn.Module, args: tuple, file: Path) -> None:
    """Write the call of a probed module.

    Raises:
        OSError, UnsupportedOptionError: the file cannot be written.
        UnsupportedModelError: the module holds only parts of its weights.
    """
    import transformers

    patch = patch_of(module)
    assert patch is not None
    config = patch.saved.get("config", probe.model_config)
    tensors = dict(zip(ARGUMENTS, (a for a in args if isinstance(a, Tensor)), strict=False))
    tensors |= {f"parameters.{name}": t for name, t in _tensors(module).items()}
    scalings: dict[str, list[float]] = {}
    for name, given in current_factors(module).items():
        scalings[name] = [f.scaling for f in given]
        for i, factors in enumerate(given):
            tensors |= {f"lhs.{i}.{name}": factors.lhs, f"rhs.{i}.{name}": factors.rhs}
    for name, tensor in tensors.items():
        if is_sharded(tensor):
            raise UnsupportedModelError(
                f"{name} is sharded (DTensor); accepted: tensors that are whole in "
                "the call, as on one device, under DDP and under FSDP"
            )
    own = _class_of(module)
    about = {
        "path": probe.path,
        "role": probe.role,
        "class": json.dumps([own.__module__, own.__name__]),
        "config_class": json.dumps([type(config).__module__, type(config).__name__]),
        "config": json.dumps(config.to_dict(), default=str),
        "backend": patch.config.backend,
        "scalings": json.dumps(scalings),
        "versions": json.dumps(
            {"torch": torch.__version__, "transformers": transformers.__version__}
        ),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    tensor_file.write(file, FORMAT, tensors, about)


def read(file: str | Path) -> NanCall:
    """Read a file that :func:`write` wrote.

    Raises:
        UnsupportedOptionError: there is no such file, or it is of another kind.
    """
    tensors, about = tensor_file.read(file, FORMAT, "debug_nan")
    (module, cls), (config_module, config_cls) = (
        json.loads(about[key]) for key in ("class", "config_class")
    )
    prefix = "parameters."
    return NanCall(
        path=about["path"],
        role=about["role"],
        module=module,
        cls=cls,
        config_module=config_module,
        config_cls=config_cls,
        config=json.loads(about["config"]),
        backend=about["backend"],
        args=tuple(tensors[name] for name in ARGUMENTS if name in tensors),
        parameters={n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)},
        factors={
            name: [
                Factors(tensors[f"lhs.{i}.{name}"], tensors[f"rhs.{i}.{name}"], scaling)
                for i, scaling in enumerate(given)
            ]
            for name, given in json.loads(about["scalings"]).items()
        },
        versions=json.loads(about["versions"]),
    )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by their names in a freshly built module.

    Parametrized ones are evaluated, quantised ones dequantised. state_dict is no alternative: its
    FSDP hooks would shard the weights again in the middle of this call.
    """
    found: dict[str, Tensor] = {}
    for path, owner in module.named_modules():
        if path.split(".")[-1] == "parametrizations" or ".parametrizations." in f".{path}.":
            continue
        prefix = f"{path}." if path else ""
        passing = owner._non_persistent_buffers_set
        held = {**owner._parameters, **owner._buffers}
        held = {name: tensor for name, tensor in held.items() if name not in passing}
        if (entries := owner._modules.get("parametrizations")) is not None:
            held |= {name: getattr(owner, name) for name in entries._modules}
        found |= {f"{prefix}{name}": plain(t) for name, t in held.items() if t is not None}
    return found


def _class_of(module: nn.Module) -> type:
    """Return the class in transformers, below generated ones (FSDP, parametrizations)."""
    own = (c for c in type(module).__mro__ if c.__module__.startswith("transformers."))
    return next(own, type(module))


def file_of(probe: Any) -> Path:
    """Return the file for the call of a probed module; each rank has its own."""
    rank = ""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = f".rank{torch.distributed.get_rank()}"
    return Path(probe.folder) / f"moe_patch_nan.{probe.path}{rank}.safetensors"
