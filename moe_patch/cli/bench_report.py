"""``bench --report``: print what an issue about speed needs, in one block of text."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import shutil
import subprocess
import sys
from typing import Any

import torch

from moe_patch._version import __version__
from moe_patch.cli.output import bytes_text
from moe_patch.cli.selftest import jobs_for

# One line is printed per token count; the largest still fits on a card of 8 GB.
TOKENS, TOKENS_ON_CPU = (256, 4096, 16384), (512,)
_VERSIONS = ("torch", "triton", "transformers", "peft")


def default_config() -> Any:
    """Return a one-layer config with Qwen3-30B-A3B's block sizes, without a download."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8,
        norm_topk_prob=True, num_hidden_layers=1, num_attention_heads=32, num_key_value_heads=4,
        head_dim=128, vocab_size=512,
    )  # fmt: skip


def about(device: torch.device) -> dict[str, Any]:
    """Return the card, the versions, the kernels that run on it, and the self-test's outcome."""
    return {"card": _card(device), "versions": _versions(), "kernels": _kernels(device)} | {
        "selftest": _selftest(device)
    }


def _card(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": platform.processor() or platform.machine(), "capability": None}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": _driver(),
    }


def _driver() -> str:
    """Return the driver version that nvidia-smi prints, or "unknown"."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "unknown"
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True).stdout.split()
    return said[0] if said else "unknown"


def _versions() -> dict[str, str]:
    found = {"moe_patch": __version__, "python": platform.python_version()}
    for name in _VERSIONS:
        there = importlib.util.find_spec(name) is not None
        found[name] = importlib.import_module(name).__version__ if there else "not installed"
    return found


def _kernels(device: torch.device) -> dict[str, str]:
    from moe_patch.ops.backend import choose_backend

    choice = choose_backend("auto", device, torch.bfloat16)
    if choice.name != "triton":
        return {"which": f"none, the torch backend: {choice.reason}", "direct_launches": "no"}
    from moe_patch.kernels.common.device import device_at
    from moe_patch.kernels.common.versions import gates, tested

    which, direct = "portable", "yes" if tested().direct else "no, by Triton"
    if device_at(device).capability == (9, 0):
        found = gates()
        which = "; ".join(filter(None, ["Hopper" if found.hopper else "portable", found.reason]))
    return {"which": which, "direct_launches": direct}


def _selftest(device: torch.device) -> dict[str, Any]:
    from moe_patch.tools.selftest import selftest

    result = selftest(device, progress=sys.stderr.isatty(), jobs=jobs_for(device))
    return {
        "checks": len(result.checks),
        "failed": [f"{c.name}: {c.detail}" for c in result.checks if not c.passed],
        "worst": max(check.error for check in result.checks),
        "backend": result.backend,
    }


def text_of(found: dict[str, Any], points: list[dict[str, Any]]) -> str:
    """Return the report as text.

    Args:
        found: the result of :func:`about`.
        points: results of the benchmark, one per token count.
    """
    card, checks = found["card"], found["selftest"]
    lines = ["```", f"card: {card['name']}"]
    if card["capability"] is not None:
        lines[-1] += (
            f", capability {card['capability']}, {card['multiprocessors']} multiprocessors, "
            f"{bytes_text(card['memory_bytes'])}, driver {card['driver']}"
        )
    lines.append("versions: " + ", ".join(f"{k} {v}" for k, v in found["versions"].items()))
    kernels = found["kernels"]
    lines.append(f"kernels: {kernels['which']}")
    lines.append(f"launched directly: {kernels['direct_launches']}")
    lines += [line for point in points for line in _lines_of(point)]
    holding = checks["checks"] - len(checks["failed"])
    lines.append(
        f"selftest: {holding} of {checks['checks']} checks hold on {checks['backend']}, worst "
        f"error {checks['worst']:.2f} of its limit"
    )
    lines += [f"  FAILED {each}" for each in checks["failed"]]
    return "\n".join([*lines, "```"])


def _lines_of(point: dict[str, Any]) -> list[str]:
    """Return the lines of one token count: what was timed, and the patch's speedup."""
    block = point["block"].rpartition(".")[2]
    head = f"{block} of {point['model']}, {point['tokens']} tokens, {point['dtype']}:"
    if "failed" in point:
        return [f"{head} {point['failed']}"]
    times = {(row["what"], row["pass"]): row for row in point["rows"]}
    lines = [head]
    for which in ("fwd", "fwd+bwd"):
        before, after = times["unpatched", which], times["patched", which]
        lines.append(
            f"  {which}: patched {after['ms']:.3f} ms ({after['backend']}), unpatched "
            f"{before['ms']:.3f} ms, {before['ms'] / after['ms']:.2f}x"
        )
    return lines
