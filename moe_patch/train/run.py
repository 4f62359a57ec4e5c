"""READ FIRST for training: the run from a checked TrainConfig to a finished output folder."""

from __future__ import annotations

import copy
import gc
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import TrainingArguments

from moe_patch.patching.patch import patch_model
from moe_patch.patching.report import patch_report
from moe_patch.quant.elsewhere import materialise_adapters
from moe_patch.quant.sharded_state import rank0_only
from moe_patch.quant.surgery import dequantize_experts
from moe_patch.tools.base_identity import find_base, known_base, note_base
from moe_patch.train import build, checks, frozen, report
from moe_patch.train.adapters import add_adapters, cast_adapters
from moe_patch.train.build import home_of
from moe_patch.train.checks import Check
from moe_patch.train.config import TrainConfig
from moe_patch.train.data import TokenBlocks, make_blocks, read_texts
from moe_patch.train.liger import check_liger, check_liger_knows
from moe_patch.train.loop import Trained, train_once
from moe_patch.train.output import OutputFolder
from moe_patch.train.router_losses import RouterLossConfig
from moe_patch.train.sharded import check_equal, check_packed, check_whole, rebuild, size
from moe_patch.train.smk import SmkConfig


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        folder: adapter/ (or model/), base/ (of a model built from a config), losses.csv, loss.png,
            run.json, and with ``smk`` metrics.csv.
        trained: "patched" (or "unpatched", with ``moe_patch: false``), and "unpatched" for the
            comparison, if requested.
        checks: the comparisons made; the run is good if all have passed.
    """

    folder: Path
    trained: dict[str, Trained]
    checks: list[Check]

    @property
    def failed(self) -> list[Check]:
        """Return the checks that did not pass."""
        return [check for check in self.checks if not check.passed]


@dataclass(frozen=True)
class _Inputs:
    """Everything the runs share, made and checked before the first step."""

    config: TrainConfig
    tokenizer: Any
    blocks: TokenBlocks
    args: TrainingArguments

    @property
    def main(self) -> bool:
        """Return whether this process prints and writes."""
        return self.args.process_index == 0

    def say(self, *lines: Any) -> None:
        if self.main:
            print(*lines, sep="\n")


def run(config: TrainConfig, overwrite: bool = False) -> RunResult:
    """Train, compare, reload, and leave a finished folder at ``config.output_dir``.

    Every process of a distributed run (torchrun, accelerate launch) calls this. The first process
    prints, writes and makes the checks that need only one process.

    Args:
        config: the checked configuration.
        overwrite: replace a finished run at the same place.

    Raises:
        UnsupportedOptionError: an option, a file, the data or the folder cannot be used.
        UnsupportedModelError: the model cannot be patched.

    In both cases nothing has been trained, and nothing is left on disk.
    """
    start = time.perf_counter()
    output = OutputFolder(config.output_dir, overwrite)
    inputs = _prepare(config, output)
    model = _build(inputs)
    said, patched = _patch(model, config, inputs.args.device)
    check_equal(model)
    inputs.say(_describe(model), said)
    name = "patched" if patched else "unpatched"
    with output.open(inputs.main, inputs.args.distributed_state.wait_for_everyone) as folder:
        trained = {
            name: train_once(
                model,
                inputs.args,
                inputs.blocks,
                name=name,
                router_losses=_router_losses(config),
                smk=None if config.smk is None else SmkConfig(**config.smk),
            )
        }
        rows = patch_report(model)
        dtype = _precision(model, inputs)
        device, whole = inputs.args.device, trained[name].whole
        if inputs.main and whole is not None:
            model, device = rebuild(config, inputs.tokenizer, whole), torch.device("cpu")
        sharded = whole is not None
        logits = _save(model, inputs, folder, output.path, sharded) if inputs.main else None
        del model
        found = _compare(inputs, trained, dtype) if name == "patched" else []
        if logits is not None:
            found.append(_reload(inputs, folder, logits, dtype, device))
            report.print_results(folder, config, trained, found, rows)
            report.write_summary(folder, config, trained, found, rows)
    inputs.say(f"results: {output.path} ({time.perf_counter() - start:.0f} s in all)")
    return RunResult(output.path, trained, found)


def _prepare(config: TrainConfig, output: OutputFolder) -> _Inputs:
    build.check_options(config)
    args = build.training_arguments(config, output.partial / "checkpoints")
    if config.quantize_experts is not None:
        check_packed()
    check_whole(config)
    if config.liger:
        check_liger(args.device, config.training)
    frozen.check_bitsandbytes(config)
    if args.process_index == 0:
        output.check(reads=args.resume_from_checkpoint)
    texts = read_texts(config.data)
    tokenizer = build.build_tokenizer(config.tokenizer, texts)
    blocks = make_blocks(texts, tokenizer, config.data.block_size)
    inputs = _Inputs(config, tokenizer, blocks, args)
    inputs.say(
        f"data: {len(texts)} documents, {sum(map(len, texts)) / 1e6:.2f} M characters, "
        f"{len(blocks)} blocks of {config.data.block_size} tokens; "
        f"vocabulary of {len(tokenizer)}"
    )
    return inputs


def _build(inputs: _Inputs, plain: bool = False) -> Any:
    """Return the model with adapters on its device; ``plain`` dequantises quantised experts."""
    config, device = inputs.config, inputs.args.device
    # accelerate sends one process's weights to all, a parameter at a time.
    sent = config.quantize_experts is not None and rank0_only()
    home = device if plain else home_of(config, device)
    base = frozen.stored_base(
        config, inputs.tokenizer, device, torch.device("cpu") if sent else home
    )
    if config.liger:
        check_liger_knows(base.config.model_type)
    if plain and config.quantize_experts is not None:
        dequantize_experts(base)
    # Move before patching: the backend and its self-check depend on the device.
    model = add_adapters(base, config.lora, config.seed, config.adapter_dtype)
    if sent:
        materialise_adapters(model)
        return model
    return model.to(home)


def _describe(model: Any) -> str:
    total = sum(map(size, model.parameters()))
    trainable = sum(size(p) for p in model.parameters() if p.requires_grad)
    return f"model: {total / 1e6:.2f} M parameters, {trainable / 1e6:.2f} M of them trained"


def _patch(model: Any, config: TrainConfig, device: torch.device) -> tuple[str, int]:
    """Patch in place unless the file forbids it; return one line about it and the block count."""
    if config.moe_patch is False:
        return "moe_patch: off, as the configuration says", 0
    patch_model(model, config.moe_patch)
    frozen.check_offloaded(model)
    if home_of(config, device) != device:
        model.to(device)
    rows = patch_report(model)
    refused = [row for row in rows if row.tier == "refused"]
    patched = len(rows) - len(refused)
    said = f"moe_patch: {patched} MoE blocks patched"
    if refused:
        said += f", {len(refused)} refused ({refused[0].path}: {refused[0].reason})"
    return said, patched


def _router_losses(config: TrainConfig) -> RouterLossConfig | None:
    return None if config.router_losses is None else RouterLossConfig(**config.router_losses)


def _precision(model: Any, inputs: _Inputs) -> torch.dtype:
    """Return the dtype that rounds losses and logits; mixed precision stays on after training."""
    if inputs.args.bf16 or inputs.args.fp16:
        return torch.bfloat16 if inputs.args.bf16 else torch.float16
    every = inputs.config.lora is None  # look at base weights; adapters may have another dtype
    return next(p.dtype for p in model.parameters() if every or not p.requires_grad)


def _save(model: Any, inputs: _Inputs, folder: Path, final: Path, sharded: bool) -> Tensor:
    """Save the trained model; return its logits on the first examples."""
    config = inputs.config
    target = folder / ("model" if config.lora is None else "adapter")
    if config.lora is not None and config.model.path is None:
        # Random base weights exist nowhere else, and the adapter is useless without them. Sharded
        # weights are not drawn as a single process would draw them, so copy those.
        base = (
            copy.deepcopy(model).unload()
            if sharded and config.quantize_experts is None
            else build.build_base(config.model, inputs.tokenizer, config.seed)
        )
        base.save_pretrained(folder / "base")
        inputs.tokenizer.save_pretrained(folder / "base")
        for peft_config in model.peft_config.values():
            peft_config.base_model_name_or_path = str(final / "base")
    # The vocabulary is never resized here, and PEFT's "auto" would query the hub about it.
    options = {} if config.lora is None else {"save_embedding_layers": False}
    model.save_pretrained(target, **options)
    inputs.tokenizer.save_pretrained(target)
    if config.lora is not None:
        _note_base(target, folder, final, config.model.path)
    return checks.probe_logits(model, inputs.blocks)


def _note_base(adapter: Path, folder: Path, final: Path, path: str | None) -> None:
    """Write into the adapter's folder which base it is of."""
    base = known_base(folder / "base" if path is None else find_base(path))
    if base is not None:
        note_base(adapter, base if path is not None else base._replace(name=str(final / "base")))


def _compare(inputs: _Inputs, trained: dict[str, Trained], dtype: torch.dtype) -> list[Check]:
    """Train again without the patch, from the same seed, if the configuration says so."""
    compare = inputs.config.compare_unpatched
    if compare is False:
        return []
    gc.collect()
    args = replace(inputs.args, resume_from_checkpoint=None, save_strategy="no")
    last_step = None if compare is True else compare
    trained["unpatched"] = train_once(
        _build(inputs, plain=True),
        args,
        inputs.blocks,
        name="unpatched",
        last_step=last_step,
        router_losses=_router_losses(inputs.config),
    )
    return checks.compare_losses(trained["patched"].losses, trained["unpatched"].losses, dtype)


def _reload(
    inputs: _Inputs, folder: Path, logits: Tensor, dtype: torch.dtype, device: torch.device
) -> Check:
    gc.collect()
    config = inputs.config
    if frozen.stores_frozen(config):
        own = inputs.args.device
        home = home_of(config, own)
        base = frozen.stored_base(config, inputs.tokenizer, own, home)
        wide = config.adapter_dtype == "float32"
        adapted = PeftModel.from_pretrained(
            base, folder / "adapter", is_trainable=True, autocast_adapter_dtype=wide
        )
        if not wide:
            cast_adapters(adapted, torch.bfloat16)
        reloaded = patch_model(adapted.to(home), config.moe_patch).to(own)
        return checks.check_logits(
            logits, checks.probe_logits(reloaded, inputs.blocks), dtype, "logits, reloaded"
        )
    reloaded = checks.reload_unpatched(folder, config.model, device)
    return checks.check_logits(logits, checks.probe_logits(reloaded, inputs.blocks), dtype)
