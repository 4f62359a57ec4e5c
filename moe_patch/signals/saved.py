"""Save a recorder in a safetensors file, for charts and scores in another process.

The file holds the newest forward's ids, weights, counts and norms of each layer and the load of
each closed step. It omits logits and router inputs, which are as large as the model's activations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_patch import tensor_file
from moe_patch.ops.experts.op import Signals
from moe_patch.runtime.taps import LayerSignals
from moe_patch.signals.recorder import Recorder, StepSignals

FORMAT = "moe_patch signals 2"
FIELDS = ("ids", "weights", "tokens_per_expert")


def save_recorder(recorder: Recorder, file: str | Path) -> None:
    """Write a recorder to a file; a tensor that was not recorded is left out."""
    tensors: dict[str, Tensor] = {}
    for i, (path, layer) in enumerate(recorder.layers.items()):
        found = {**_newest(layer), "history": _history(recorder, path)}
        tensors |= {f"{i}.{name}": t for name, t in found.items() if t is not None}
    about = {
        "steps": str(len(recorder.history)),
        "layers": json.dumps(
            [
                {"path": path, "missing": layer.missing, "has_lora": layer.has_lora}
                for path, layer in recorder.layers.items()
            ]
        ),
    }
    tensor_file.write(file, FORMAT, tensors, about)


def _newest(layer: LayerSignals) -> dict[str, Tensor | None]:
    """Return the tensors of a layer's newest forward, by their names in the file."""
    found = {name: getattr(layer, name) for name in FIELDS}
    if layer.signals is not None:
        found["act_norm"] = layer.signals.act_norm_TK
        if layer.grad_norm_params is not None:
            found["grads"] = layer.signals.grads_3TK
    return found


def _history(recorder: Recorder, path: str) -> Tensor | None:
    """Return a layer's load in each closed step, zeros for steps without it; None without any."""
    steps = [closed.load.get(path) for closed in recorder.history]
    seen = [load_E for load_E in steps if load_E is not None]
    if not seen:
        return None
    return torch.stack([torch.zeros_like(seen[0]) if step is None else step for step in steps])


def load_recorder(file: str | Path) -> Recorder:
    """Load a recorder that :func:`save_recorder` wrote; it records nothing more.

    Raises:
        UnsupportedOptionError: there is no such file, or it is of another kind.
    """
    tensors, about = tensor_file.read(file, FORMAT, "save_recorder")
    found = json.loads(about["layers"])
    layers = {layer["path"]: _layer(layer, tensors, i) for i, layer in enumerate(found)}
    recorder = Recorder(layers)
    histories = {path: tensors.get(f"{i}.history") for i, path in enumerate(layers)}
    kept = {path: steps for path, steps in histories.items() if steps is not None}
    for step in range(int(about["steps"])):
        # All zeros mean that the layer did not run in that step and had no entry.
        ran = {path: steps[step] for path, steps in kept.items() if steps[step].any()}
        recorder.history.append(StepSignals(ran))
    return recorder


def _layer(about: dict[str, Any], tensors: dict[str, Tensor], index: int) -> LayerSignals:
    layer = LayerSignals(about["path"], about["missing"], has_lora=about["has_lora"])
    for name in FIELDS:
        setattr(layer, name, tensors.get(f"{index}.{name}"))
    act_norm, grads = tensors.get(f"{index}.act_norm"), tensors.get(f"{index}.grads")
    if act_norm is not None:
        written = act_norm.new_empty(0)
        if grads is not None:
            # Copying in place marks the tensor as written by a backward pass; reading it does not.
            written = torch.empty_like(grads).copy_(grads)
        layer.signals = Signals(written, act_norm)
    return layer
