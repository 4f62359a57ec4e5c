"""Compare logits in fp32: base plus PEFT's adapter with a merged checkpoint or with an export."""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_patch.cli import models
from moe_patch.cli.output import quiet_libraries
from moe_patch.runtime.compare import relative_error


def of_merged(
    args: argparse.Namespace, config: Any, folder: Path, adapter: Any, merged: Any
) -> dict[str, float]:
    """Return relative errors of the logits of a merged checkpoint.

    Weights that the result holds in FP8 or MXFP4 are those of the result on both sides, because
    encoding loses more than the limit. Their deltas are compared weight by weight elsewhere.

    Returns:
        ``merged``: the result, as transformers reads it, against PEFT's merge, whose changed
        weights are stored as in the result. ``rounding``: the result against the unmerged adapter.
        ``adapter``: the base against the unmerged adapter, for scale.
    """
    device = models.device_of(args)
    with _quiet():
        model = _load(folder, config, device)
        ids = _ids(model, args)
        plain = _run(model, ids)
        wrapped = _with_peft(model, args.adapter)
        unmerged = _run(wrapped, ids)
        model = wrapped.merge_and_unload()
        _store(model, adapter, merged)
        expected = _run(model, ids)
        del model, wrapped
        again = models.load_config(args.merged)
        found = _run(_load(Path(args.merged), again, device), ids)
    return {
        "merged": relative_error(found, expected),
        "rounding": relative_error(found, unmerged),
        "adapter": relative_error(plain, unmerged),
    }


def of_exported(
    args: argparse.Namespace, config: Any, folder: Path, adapter: Any, base: Any
) -> dict[str, float]:
    """Return relative errors of the logits of an exported adapter.

    The engine's deltas, read from the exported file, are added to the base's weights.

    Returns:
        ``exported``: base plus these deltas against PEFT's unmerged adapter. ``adapter``: the base
        against the unmerged adapter, for scale.
    """
    from moe_patch.serving.read_back import deltas

    device = models.device_of(args)
    with _quiet():
        model = _load(folder, config, device)
        ids = _ids(model, args)
        plain = _run(model, ids)
        wrapped = _with_peft(model, args.adapter)
        unmerged = _run(wrapped, ids)
        model = wrapped.unload()
        for name, delta in deltas(adapter, base, args.exported):
            model.get_parameter(name).data += delta.to(device)
        found = _run(model, ids)
    return {"exported": relative_error(found, unmerged), "adapter": relative_error(plain, unmerged)}


def _load(folder: Path, config: Any, device: torch.device) -> Any:
    """Load a model in fp32; packed weights are dequantised by transformers."""
    from moe_patch.quant.stored import quantisation

    config = copy.deepcopy(config)
    for one in (config, config.get_text_config()):
        if hasattr(one, "quantization_config"):
            one.quantization_config = {**(quantisation(one) or {}), "dequantize": True}
    model = models.load(str(folder), config, torch.float32, device)
    return model.float()


def _with_peft(model: Any, folder: str) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(model, folder).eval()


def _store(model: Any, adapter: Any, merged: Any) -> None:
    """Give the changed weights of a model the dtype, or the packed values, of the result."""
    from moe_patch.serving.checkpoint import PLAIN
    from moe_patch.serving.proof import Reader

    reader, named = Reader(merged, adapter.plain), dict(model.named_parameters())
    for name in adapter.changes:
        if name not in reader.units or name not in named:
            continue
        storage, dtype = reader.storage(name)
        value = named[name].data
        if storage == PLAIN:
            named[name].data = value.to(dtype).float()
        else:
            named[name].data = reader.read(name).to(value.device)


@contextmanager
def _quiet() -> Iterator[None]:
    with quiet_libraries(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _ids(model: Any, args: argparse.Namespace) -> Tensor:
    generator = torch.Generator().manual_seed(args.seed)
    with models.explained("MODEL takes no token ids (--no-logits compares only the weights)"):
        vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(vocabulary, (args.batch, args.length), generator=generator)
    return ids.to(model.device)


@torch.no_grad()
def _run(model: Any, ids: Tensor) -> Tensor:
    with models.explained(
        "MODEL cannot run on token ids alone (--no-logits compares only the weights)"
    ):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.double().cpu()
