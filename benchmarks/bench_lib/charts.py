"""Draw charts of the newest rows as SVG. They need matplotlib (the extra ``plots``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_lib.newest import OURS, Line, lines_of, one_per_shape
from bench_lib.ops import OPS
from bench_lib.rows import RowError

COLOURS = ("#1b6ca8", "#8d99ae", "#c9a227", "#5b8c5a", "#b5533c", "#7b5ea7")
WIDTH = 0.8


def _figure(title: str, lines: Sequence[Line], height: float = 3.6) -> tuple[Any, Any]:
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "moe_patch", "svg.fonttype": "none", "font.size": 9}
    figure, axes = pyplot.subplots(figsize=(8, height), layout="constrained")
    axes.set_title(f"{title}\n{_caption(lines)}", loc="left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _caption(lines: Sequence[Line]) -> str:
    rows = {line.ours["run"]: line.ours for line in lines}
    return ", ".join(dict.fromkeys(f"{row['card']}, {row['date'][:10]}" for row in rows.values()))


def _bars(axes: Any, lines: Sequence[Line], impls: Sequence[str], field: str) -> None:
    """Draw a group of bars per line, one per implementation; a dash marks a missing value."""
    width = WIDTH / len(impls)
    for i, impl in enumerate(impls):
        for x, line in enumerate(lines):
            found = line.number(impl, field)
            at = x - WIDTH / 2 + (i + 0.5) * width
            axes.bar(
                at, found or 0, width, color=COLOURS[i % len(COLOURS)],
                label=impl if x == 0 else None,
            )  # fmt: skip
            axes.text(
                at, found or 0, "–" if found is None else f"{found:.0f}", ha="center",
                va="bottom", fontsize=6,
            )  # fmt: skip
    axes.set_xticks(range(len(lines)), [f"{line.shape}\nT={line.T}" for line in lines])


def _rates(op_name: str, title: str, lines: list[Line], path: Path) -> None:
    """Draw TFLOP/s per shape, with the ceiling of dense batched products above each group."""
    figure, axes = _figure(title, lines)
    names = OPS[op_name].names()
    impls = [n for n in names if any(line.time(n) for line in lines) and ":" not in n]
    _bars(axes, lines, impls, "tflops")
    for x, line in enumerate(lines):
        ceiling = line.number(OURS, "ceiling_tflops")
        if ceiling is not None:
            label = "cuBLAS bmm, same work" if x == 0 else None
            axes.hlines(ceiling, x - WIDTH / 2, x + WIDTH / 2, "black", lw=1, label=label)
    axes.set_ylabel("TFLOP/s")
    axes.legend(frameon=False, ncols=3, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.17))
    _save(figure, path)


def experts(results: Path, path: Path) -> bool:
    lines = [line for line in lines_of("experts", results) if line.passes == "fwd+bwd"]
    if lines:
        _rates("experts", "Experts, forward + backward, bf16", one_per_shape(lines), path)
    return bool(lines)


def lora(results: Path, path: Path) -> bool:
    lines = [line for line in lines_of("lora", results) if line.passes == "fwd+bwd" and line.R]
    if lines:
        title = "LoRA r = 16 on both projections, forward + backward, bf16"
        _rates("lora", title, one_per_shape(lines), path)
    return bool(lines)


def model(results: Path, path: Path) -> bool:
    """Draw step time unpatched and patched, with the part in MoE blocks in front."""
    lines = lines_of("model", results)
    if not lines:
        return False
    figure, axes = _figure("12 layers of Qwen3-30B-A3B, LoRA, HF Trainer", lines, 3.4)
    for x, line in enumerate(lines):
        for i, impl in enumerate(("peft", OURS)):
            step_ms, moe_ms = line.time(impl), line.number(impl, "moe_ms")
            at = x + (i - 0.5) * WIDTH / 2
            if step_ms is None:
                axes.text(at, 0, "does not\nfit", ha="center", va="bottom", fontsize=7)
                continue
            label = ("unpatched + PEFT", "patched")[i]
            axes.bar(
                at, step_ms, WIDTH / 2, color=COLOURS[1 - i], alpha=0.45,
                label=f"{label}: rest of the step",
            )  # fmt: skip
            axes.bar(at, moe_ms, WIDTH / 2, color=COLOURS[1 - i], label=f"{label}: MoE blocks")
    axes.set_xticks(
        range(len(lines)), [line.shape.removeprefix("qwen3_30b_12L_") for line in lines]
    )
    axes.set_ylabel("ms per step")
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(
        handles.values(), handles.keys(), frameon=False, fontsize=7, ncols=4, loc="upper center",
        bbox_to_anchor=(0.5, -0.08),
    )  # fmt: skip
    _save(figure, path)
    return True


CHARTS: dict[str, Callable[[Path, Path], bool]] = {
    "experts": experts,
    "lora": lora,
    "model": model,
}


def draw(results: Path, folder: Path) -> list[Path]:
    """Draw every chart that has rows, as NAME.svg in a folder.

    Raises:
        RowError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise RowError("charts need matplotlib: pip install 'moe-patch[plots]'")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [(chart, folder / f"bench_{name}.svg") for name, chart in CHARTS.items()]
    return [path for chart, path in paths if chart(results, path)]
