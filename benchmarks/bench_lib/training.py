"""Train a slice of Qwen3-30B-A3B with PEFT adapters in HF Trainer: op ``model`` times this."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bench_lib.meter import Meter
from bench_lib.shapes import Shape

LAYERS = 12
RANK = 16
WARM_STEPS = 1
STEPS = 3
SEED = 2026
INIT_STD = 0.02
# Values that a dry run changes to small sizes.
TINY = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64}


def build_model(shape: Shape, device: torch.device, layers: int, vocab: int | None = None) -> Any:
    """Make the model on its device, with random weights and adapters on attention and experts."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig
    from transformers.initialization import no_init_weights

    from moe_patch import lora_targets

    tiny = shape.name == "tiny"
    sizes: dict[str, Any] = TINY if tiny else {
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    }  # fmt: skip
    config = Qwen3MoeConfig(
        hidden_size=shape.D, moe_intermediate_size=shape.F, num_experts=shape.E,
        num_experts_per_tok=shape.K, num_hidden_layers=layers, norm_topk_prob=True,
        intermediate_size=3 * shape.D, max_position_embeddings=40960, use_cache=False,
        **(sizes | ({} if vocab is None else {"vocab_size": vocab})),
    )  # fmt: skip
    dtype = torch.float32 if tiny else torch.bfloat16
    with torch.device(device), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(device).manual_seed(SEED)
    for weight in model.parameters():
        if weight.dim() == 1:
            weight.data.fill_(1.0)
        else:
            weight.data.normal_(std=INIT_STD, generator=generator)
    targets = lora_targets(model, router=False, shared=False)
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, **targets))


def reset_adapters(model: nn.Module) -> None:
    """Set both factors to the same random values: a zero B would hide a lost adapter."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            generator = torch.Generator(parameter.device).manual_seed(SEED)
            parameter.data.normal_(std=INIT_STD, generator=generator)
            parameter.grad = None


class RandomTokens(torch.utils.data.Dataset):
    """Sequences of random tokens, the same for every implementation."""

    def __init__(self, count: int, length: int, vocab: int) -> None:
        generator = torch.Generator().manual_seed(SEED)
        self.ids = torch.randint(vocab, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@dataclass
class Steps:
    """The measurements of a training.

    Attributes:
        step_ms, moe_ms: per measured step.
        first: the loss before the first update and the norm of every adapter's gradient.
        peak_bytes: highest allocation of the measured steps, or None.
    """

    step_ms: list[float] = field(default_factory=list)
    moe_ms: list[float] = field(default_factory=list)
    first: Tensor = field(default_factory=lambda: torch.empty(0))
    peak_bytes: int | None = None

    def fields(self, tokens: int) -> dict[str, Any]:
        """Return the measurements as fields of a row."""
        step_ms = statistics.median(self.step_ms)
        return {
            "median_ms": step_ms,
            "moe_ms": statistics.median(self.moe_ms),
            "tokens_per_s": 1e3 * tokens / step_ms,
            "peak_bytes": self.peak_bytes,
        }


def blocks_and_layers(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the MoE blocks of the slice and the decoder layers around them."""
    layers = list(model.get_base_model().model.layers)
    return [layer.mlp for layer in layers], layers


def train(
    model: Any,
    batch: int,
    length: int,
    checkpointing: bool,
    device: torch.device,
    liger: bool = False,
) -> Steps:
    """Run a few Trainer steps, timed from outside: forward, backward, clipping and AdamW."""
    from transformers import Trainer, TrainerCallback

    found = Steps()
    on_cuda = device.type == "cuda"
    meter = Meter(*blocks_and_layers(model), device)

    class Clock(TrainerCallback):
        started = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == WARM_STEPS and on_cuda:
                torch.cuda.reset_peak_memory_stats(device)
            self.started = _now(device)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step_ms, moe_ms = 1e3 * (_now(device) - self.started), meter.take_ms()
            if state.global_step > WARM_STEPS:
                found.step_ms.append(step_ms)
                found.moe_ms.append(moe_ms)

    class Watched(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            if self.state.global_step == 0:
                norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
                found.first = torch.stack([loss, *norms]).double().cpu()
            return loss

    steps, vocab = WARM_STEPS + STEPS, model.config.vocab_size
    with tempfile.TemporaryDirectory(prefix="bench-model-") as folder:
        trainer = Watched(
            model,
            _arguments(folder, batch, checkpointing, on_cuda, liger),
            train_dataset=RandomTokens(steps * batch, length, vocab),
            callbacks=[Clock()],
        )
        try:
            trainer.train()
        finally:
            meter.remove()
            model.zero_grad(set_to_none=True)
            model.gradient_checkpointing_disable()
            trainer.accelerator.free_memory()
    if on_cuda:
        found.peak_bytes = torch.cuda.max_memory_allocated(device)
    return found


def _now(device: torch.device) -> float:
    """Return the time in seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _arguments(folder: str, batch: int, checkpointing: bool, on_cuda: bool, liger: bool) -> Any:
    """Return arguments of a Trainer that only trains."""
    from transformers import TrainingArguments

    from moe_patch.train.liger import ARGUMENTS

    return TrainingArguments(
        output_dir=folder, max_steps=WARM_STEPS + STEPS, per_device_train_batch_size=batch,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        bf16=on_cuda, use_cpu=not on_cuda, seed=SEED, report_to="none", save_strategy="no",
        logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=on_cuda,
        **(ARGUMENTS if liger else {}),
    )  # fmt: skip
