"""Measure the memory of training steps on a card beside what ``moe-patch plan`` says of them.

Each configuration trains in a process of its own, with the training command's own code. Random
weights of true sizes are made directly in their storage; a row says how many layers there are.
Processes import their libraries ahead, but only one at a time touches the card. --offloaded keeps
the experts in host memory.

    python benchmarks/studies/plan_rows.py --commit SHA --out rows.jsonl            the twelve
    python benchmarks/studies/plan_rows.py --commit SHA --out rows.jsonl --drawn 0  three by seed
    python benchmarks/studies/plan_rows.py --commit SHA --out rows.jsonl --recipes  of configs/
    python benchmarks/studies/plan_rows.py --commit SHA --out rows.jsonl --in-fp8   products in FP8
    python benchmarks/studies/plan_rows.py --device cpu --small                     a dry run
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent)]

GIB = 2**30
STEPS = 5
AHEAD = 12  # processes that import while one measures
# The seed of the drawn configurations; it was committed together with the formula.
SEED = 25


@dataclass(frozen=True)
class Setting:
    """One configuration: a model of plan_models.MODELS, some of its layers, and a recipe."""

    model: str
    layers: int
    storage: str
    tokens: int
    rank: int = 16
    optimizer: str = "adamw"
    checkpointing: bool = True
    liger: bool = False
    full: bool = False
    linear: str = "bf16"
    embedding: str = "bf16"
    adapters: str = "fp32"
    attention: str | None = None
    drawn: bool = False
    cap_gib: float | None = None
    config: str | None = None
    steps: int = STEPS
    patched: bool = True
    prepared: bool = False  # by peft.prepare_model_for_kbit_training
    offload: bool = False
    compute: str = "decoded"


SETTINGS = (
    Setting("Qwen3-30B-A3B", 12, "nf4", 2048),
    Setting("Qwen3-30B-A3B", 12, "nf4", 8192, liger=True, optimizer="adamw_8bit"),
    Setting("Qwen3-30B-A3B", 12, "bf16", 4096, rank=8),
    Setting("Qwen3-30B-A3B", 4, "bf16", 2048, full=True),
    Setting("Qwen3-30B-A3B", 12, "fp8", 4096, rank=8, checkpointing=False),
    Setting("Qwen3-30B-A3B", 12, "nf4", 16384, 4, "sgd", liger=True, linear="nf4", adapters="bf16"),
    Setting("gpt-oss-20b", 12, "mxfp4", 2048, rank=8),
    Setting("gpt-oss-20b", 8, "mxfp4", 1024, 16, "adamw_8bit", liger=True, checkpointing=False),
    Setting("gpt-oss-20b", 8, "bf16", 2048, 8, liger=True, linear="nf4", adapters="bf16"),
    Setting("GLM-4.5-Air", 6, "nf4", 4096),
    Setting("GLM-4.5-Air", 6, "fp8", 8192, 8, "adamw_8bit", linear="nf4", adapters="bf16"),
    Setting("GLM-4.5-Air", 4, "bf16", 2048, 16, "sgd", checkpointing=False),
)


# All layers of Qwen3-30B-A3B with the experts in host memory.
OFFLOADED = tuple(
    Setting("Qwen3-30B-A3B", 48, "nf4", tokens, 16, "adamw_8bit", liger=True, linear="nf4",
            adapters="bf16", offload=True)
    for tokens in (2048, 16384)
)  # fmt: skip
# Products in FP8, with and without transposed copies. In the last two a block decides the peak.
IN_FP8 = (
    Setting("Qwen3-30B-A3B", 12, "fp8", 8192, compute="fp8_copy"),
    Setting("GLM-4.5-Air", 6, "fp8", 8192, 8, "adamw_8bit", linear="nf4", adapters="bf16",
            compute="fp8_copy"),
    Setting("Qwen3-30B-A3B", 12, "fp8", 8192, compute="fp8"),
    Setting("Qwen3-30B-A3B", 6, "fp8", 32768, 8, liger=True, compute="fp8_copy"),
    Setting("Qwen3-30B-A3B", 6, "fp8", 32768, 8, liger=True, compute="fp8"),
)  # fmt: skip
# Files of configs/ at their true sizes, each under a hard cap of so many GiB.
RECIPES = {
    "qwen3_30b_24gb": 20.5,
    "qwen3_30b_20gb": 17.5,
    "gpt_oss_20b_16gb": 12.9,
    "gpt_oss_120b_80gb": 73.5,
    "glm4_air_80gb": 73.5,
}


def read_recipe(name: str, cap: float) -> Setting:
    """Return a file of configs/ as a setting, with all layers of its model."""
    from plan_models import MODELS

    node = yaml.safe_load((HERE.parents[2] / "configs" / f"{name}.yaml").read_text("utf-8"))
    model = Path(node["model"]["path"]).name
    return Setting(
        model, MODELS[model]["num_hidden_layers"], node["quantize_experts"],
        node["data"]["block_size"], node["lora"]["r"], "adamw_8bit",
        node["training"]["gradient_checkpointing"], node["liger"],
        linear=node.get("quantize_linear", "bf16"),
        embedding=node.get("quantize_embedding", "bf16"), adapters="bf16",
        attention=node["model"].get("attn_implementation"), cap_gib=cap, config=name,
    )  # fmt: skip


def draw(count: int, seed: int) -> Iterator[Setting]:
    """Yield configurations that a seed chooses."""
    pick = random.Random(seed)
    for _ in range(count):
        model = pick.choice(("Qwen3-30B-A3B", "gpt-oss-20b", "GLM-4.5-Air"))
        gpt = model == "gpt-oss-20b"
        yield Setting(
            model,
            pick.randint(3, 10),
            pick.choice(("mxfp4", "bf16") if gpt else ("nf4", "fp8", "bf16")),
            pick.choice((1024, 2048, 3072) if gpt else (1024, 3072, 6144, 12288)),
            pick.choice((4, 8, 16, 32)),
            pick.choice(("adamw", "adamw_8bit", "sgd")),
            pick.random() < 0.7,
            pick.random() < 0.5 and model != "GLM-4.5-Air",
            linear=pick.choice(("bf16", "nf4")),
            adapters=pick.choice(("fp32", "bf16")),
            drawn=True,
        )


def node_of(one: Setting, targets: dict[str, list[str]], cpu: bool) -> dict[str, Any]:
    """Return the training file of a setting; the model it names is never made."""
    from moe_patch.cli.plan_recipe import OPTIM

    if one.config is not None:
        text = (HERE.parents[2] / "configs" / f"{one.config}.yaml").read_text("utf-8")
        node = yaml.safe_load(text)
        node["model"], node["tokenizer"] = {"model_type": "qwen3_moe", "dtype": "bfloat16"}, "train"
        node["training"] |= {
            "max_steps": one.steps, "warmup_steps": 0, "disable_tqdm": True, "use_cpu": cpu,
            "learning_rate": float(node["training"]["learning_rate"]),
            "dataloader_pin_memory": False,
        }  # fmt: skip
        return {key: value for key, value in node.items() if not key.startswith("tiny")}
    node: dict[str, Any] = {
        "model": {"model_type": "qwen3_moe", "dtype": "bfloat16"},
        "tokenizer": "train",
        "data": {"source": "python-stdlib-docstrings", "block_size": one.tokens},
        "training": {
            "max_steps": one.steps, "per_device_train_batch_size": 1, "learning_rate": 1e-4,
            "bf16": True, "gradient_checkpointing": one.checkpointing,
            "optim": OPTIM[one.optimizer], "disable_tqdm": True, "use_cpu": cpu,
            "dataloader_pin_memory": False,
        },
        "liger": one.liger,
        "adapter_dtype": {"fp32": "float32", "bf16": "bfloat16"}[one.adapters],
        "output_dir": "outputs/plan_rows",
    }  # fmt: skip
    if not one.full:
        node["lora"] = {"r": one.rank, "lora_alpha": 2 * one.rank, **targets}
    return node


def prepare(one: Setting, small: bool) -> tuple[Any, Any, dict[str, list[str]]]:
    """Return the model on the meta device, its sizes, and the adapters' targets."""
    from plan_models import config_of, meta_model

    from moe_patch import lora_targets
    from moe_patch.cli.plan_sizes import read_sizes

    model = meta_model(config_of(one.model, 2 if small else one.layers, small))
    if one.attention is not None:
        model.set_attn_implementation(one.attention)
    targets = {} if one.full else lora_targets(model)
    if one.config is not None:
        lora = node_of(one, {}, False)["lora"]
        targets = {key: lora[key] for key in ("target_modules", "target_parameters")}
    return model, read_sizes(model, targets), targets


def recipe_of(one: Setting, hopper: bool) -> Any:
    """Return the plan's recipe of a setting."""
    from moe_patch.tools.plan_types import Recipe

    return Recipe(
        one.tokens, one.rank, one.storage, one.linear, one.optimizer, one.checkpointing,
        liger=one.liger, full=one.full, adapters=one.adapters,
        hopper=hopper, embedding=one.embedding, offload=one.offload,
        compute=one.compute,
    )  # fmt: skip


def measure(one: Setting, prepared: tuple[Any, Any, Any], device: Any) -> dict[str, Any]:
    """Train a few steps and return the measured part of a row, and the plan's moments."""
    import torch
    from plan_models import fill

    from moe_patch import patch_model
    from moe_patch.cli.plan_recipe import said
    from moe_patch.tools.plan_total import make_plan
    from moe_patch.train import build
    from moe_patch.train.adapters import add_adapters
    from moe_patch.train.config import make_config
    from moe_patch.train.data import TokenBlocks
    from moe_patch.train.liger import check_liger
    from moe_patch.train.loop import train_once

    model, sizes, targets = prepared
    cuda = device.type == "cuda"
    marks = [("start", time.perf_counter())]
    recipe = recipe_of(one, cuda and torch.cuda.get_device_capability() == (9, 0))
    plan = make_plan(sizes, recipe)
    config = make_config(node_of(one, targets, not cuda))
    if one.liger:
        check_liger(device, config.training)
    args = build.training_arguments(config, Path("outputs/plan_rows"))
    if one.cap_gib is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(one.cap_gib * GIB / total)
    home = torch.device("cpu") if one.offload else device
    model = fill(model, one.storage, one.linear, device, one.embedding, home).train()
    marks.append(("fill", time.perf_counter()))
    if one.prepared:
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model)
    with torch.device(device):  # else PEFT draws the adapters on the CPU
        model = add_adapters(model, config.lora, 0, config.adapter_dtype)
    if one.patched:
        patch_model(model, offload_experts=one.offload, compute=one.compute)
    model.to(device)  # PEFT puts adapters beside their weights, which may be on the host
    marks.append(("patch", time.perf_counter()))
    vocabulary = sizes.vocab
    blocks = TokenBlocks(torch.randint(0, vocabulary, (one.steps, one.tokens)))
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trained = train_once(model, args, blocks, name="row")
    marks.append(("train", time.perf_counter()))
    words = said(recipe)
    words += f", {one.attention} attention" if one.attention else ""
    words += f", under a cap of {one.cap_gib} GiB" if one.cap_gib else ""
    found = {
        "recipe": words,
        "plan_gib": plan.allocated / GIB,
        "plan_reserved": plan.reserved / GIB,
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB if cuda else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if cuda else None,
        "tokens_per_s": trained.steps * one.tokens / trained.steady,
        "card": torch.cuda.get_device_name() if cuda else "cpu",
    }
    if cuda:
        found["reserved_now"] = torch.cuda.memory_reserved()
        found["largest"] = largest_moment(plan)
    found["losses"] = [round(loss, 3) for loss in trained.losses.values()]
    found["seconds"] = {
        name: round(end - start, 1)
        for (_, start), (name, end) in zip(marks, marks[1:], strict=False)
    }
    return found


def largest_moment(plan: Any) -> str:
    """Return the moment of the plan's peak."""
    return max(plan.moments, key=plan.moments.get)


def child(options: argparse.Namespace) -> None:
    """Prepare, wait for a line on stdin, measure, and print one line of JSON."""
    import torch

    one = Setting(**json.loads(options.child))
    if options.warm:
        one = replace(one, layers=2)
    if options.small:
        one = replace(one, tokens=64, liger=False, layers=2)
    prepared = prepare(one, options.small)
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401

    if one.liger:
        import liger_kernel.transformers  # noqa: F401
    print("ready", flush=True)
    if not options.warm and not sys.stdin.readline():
        return
    device = torch.device(options.device)
    torch.manual_seed(0)
    found = measure(one, prepared, device)
    print(json.dumps(found), flush=True)
    if not options.warm:
        sys.stdin.readline()  # keep the context for the parent's NVML


def start(one: Setting, options: argparse.Namespace, *flags: str) -> subprocess.Popen[str]:
    """Start the process of a setting; it imports and then waits, unless a flag is --warm."""
    command = [sys.executable, "-W", "ignore", str(HERE), "--child", json.dumps(asdict(one))]
    command += ["--device", options.device, *(["--small"] if options.small else []), *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def lines_until(process: subprocess.Popen[str], begins: str) -> tuple[str | None, list[str]]:
    """Read a process' output up to the line that begins so; return it and the lines before it."""
    before: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(begins):
            return line, before
        before.append(line)
    return None, before


class Card:
    """Used memory of the card by NVML, without a CUDA context in this process."""

    def __init__(self, device: str) -> None:
        self.handle = None
        if device != "cpu":
            import pynvml

            pynvml.nvmlInit()
            # NVML counts all cards of the host, also those that CUDA does not see here.
            seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            if seen.isdigit():
                self.handle = pynvml.nvmlDeviceGetHandleByIndex(int(seen))
            else:
                self.handle = pynvml.nvmlDeviceGetHandleByUUID(seen)

    def used(self) -> int:
        """Return the bytes in use."""
        if self.handle is None:
            return 0
        import pynvml

        return int(pynvml.nvmlDeviceGetMemoryInfo(self.handle).used)


def run_one(
    one: Setting,
    process: subprocess.Popen[str],
    prepared: tuple[str | None, list[str]],
    card: Card,
    options: argparse.Namespace,
) -> dict[str, Any] | None:
    """Let a prepared process measure; return its row, or None if it failed."""
    assert process.stdin is not None
    ready, before = prepared
    baseline = card.used()
    found = None
    if ready is not None:
        process.stdin.write("go\n")
        process.stdin.flush()
        found, before = lines_until(process, '{"recipe"')
    if found is None:
        print(f"{one}: failed", *[line.rstrip() for line in before[-25:]], sep="\n", flush=True)
        process.wait()
        return None
    measured = json.loads(found)
    used = card.used() - baseline
    process.kill()
    process.wait()
    reserved_now = measured.pop("reserved_now", 0)
    extra = {
        name: measured.pop(name, None) for name in ("losses", "seconds", "largest", "plan_reserved")
    }
    row = {
        "model": one.model, "layers": one.layers, "storage": one.storage, "tokens": one.tokens,
        "rank": None if one.full else one.rank, "optimizer": one.optimizer,
        "checkpointing": one.checkpointing, "liger": one.liger, "full": one.full,
        "offload": one.offload, "chunk": None,
        **{name: measured[name] for name in ("plan_gib", "allocated_gib", "reserved_gib")},
        "context_gib": (used - reserved_now) / GIB if card.handle else None,
        "tokens_per_s": measured["tokens_per_s"], "drawn": one.drawn, "recipe": measured["recipe"],
        "card": measured["card"], "commit": options.commit,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }  # fmt: skip
    print(said_of(row, extra), flush=True)
    return row


def said_of(row: dict[str, Any], extra: dict[str, Any]) -> str:
    """Return a line that compares a row with its plan."""
    if row["allocated_gib"] is None:
        return f"{row} {extra}"
    off = row["plan_gib"] / row["allocated_gib"] - 1
    reserved = extra["plan_reserved"] / row["reserved_gib"] - 1
    return (
        f"{row['model']} {row['layers']}L T={row['tokens']} {row['recipe']}: plan "
        f"{row['plan_gib']:.2f}, allocated {row['allocated_gib']:.2f} ({off:+.1%}), reserved "
        f"{row['reserved_gib']:.2f} ({reserved:+.1%}), context {row['context_gib']:.2f} GiB, "
        f"{row['tokens_per_s']:.0f} tokens/s, {extra}"
    )


def warm_up(settings: list[Setting], options: argparse.Namespace) -> None:
    """Train two layers of every setting at once, so that all kernels are compiled and on disk."""
    processes = [start(one, options, "--warm") for one in settings]
    for one, process in zip(settings, processes, strict=True):
        found, before = lines_until(process, '{"recipe"')
        process.wait()
        if found is None:
            print(f"warm {one}:", *[line.rstrip() for line in before[-12:]], sep="\n", flush=True)


def run_all(
    settings: list[Setting], options: argparse.Namespace
) -> Iterator[dict[str, Any] | None]:
    """Measure every setting in turn, append its row to the file, and yield it, or None."""
    card = Card(options.device)
    begin = time.monotonic()
    waiting = [start(one, options) for one in settings[:AHEAD]]
    ready = [lines_until(process, "ready") for process in waiting]  # imports would slow the first
    print(f"ready after {time.monotonic() - begin:.0f} s", flush=True)
    if options.warm:
        warm_up([one for one in settings if one.patched], options)
        print(f"warm after {time.monotonic() - begin:.0f} s", flush=True)
    for at, one in enumerate(settings):
        process, row = waiting.pop(0), None
        prepared = ready.pop(0) if ready else lines_until(process, "ready")
        if options.limit and time.monotonic() - begin > options.limit:
            print(f"{one}: not run, {options.limit} s are over", flush=True)
            process.kill()
        else:
            row = run_one(one, process, prepared, card, options)
        if at + AHEAD < len(settings):
            waiting.append(start(settings[at + AHEAD], options))
        if row is not None and options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        print(f"{time.monotonic() - begin:.0f} s", flush=True)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--commit", default="", help="full SHA, for the rows")
    parser.add_argument("--out", type=Path, help="file to append the rows to")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="small widths, two layers, 64 tokens")
    parser.add_argument("--drawn", type=int, metavar="N", help="the N-th three drawn by the seed")
    parser.add_argument(
        "--recipes", nargs="*", choices=RECIPES, help="files of configs/, capped; none named: all"
    )
    parser.add_argument("--offloaded", action="store_true", help="with experts in host memory")
    parser.add_argument("--in-fp8", action="store_true", help="with products in FP8")
    parser.add_argument(
        "--only", type=int, nargs="*", help="numbers of the twelve, after --recipes"
    )
    parser.add_argument("--limit", type=float, help="seconds after which no setting is started")
    parser.add_argument("--warm", action="store_true", help="compile all kernels at once first")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        return child(options)
    settings = list(SETTINGS)
    if options.recipes is not None:
        settings = [read_recipe(name, RECIPES[name]) for name in options.recipes or RECIPES]
    if options.offloaded:
        settings = list(OFFLOADED)
    if options.in_fp8:
        settings = list(IN_FP8)
    if options.drawn is not None:
        settings = list(draw(3, SEED + options.drawn))
    if options.only is not None:
        settings = settings if options.recipes is not None else []
        settings += [SETTINGS[at] for at in options.only]
    for _ in run_all(settings, options):
        pass


if __name__ == "__main__":
    main()
