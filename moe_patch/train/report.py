"""Report a finished run: tables, the loss curve, and run.json."""

from __future__ import annotations

import csv
import json
import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from moe_patch._version import __version__
from moe_patch.patching.report import BlockReport
from moe_patch.train.checks import Check, first_apart
from moe_patch.train.config import TrainConfig
from moe_patch.train.loop import FIRST_STEPS, Trained
from moe_patch.train.output import MARKER

SHOWN_STEPS = 8


def print_results(
    folder: Path,
    config: TrainConfig,
    trained: dict[str, Trained],
    checks: list[Check],
    rows: list[BlockReport],
) -> None:
    """Print the tables and checks of a run; write its CSV files and the loss curve."""
    if rows:
        print(rows)
    patched, unpatched = (
        trained[name].losses if name in trained else {} for name in ("patched", "unpatched")
    )
    print(loss_table(patched, unpatched))
    metrics = next(iter(trained.values())).metrics
    if metrics:
        print(metrics_table(metrics))
        write_metrics(folder / "metrics.csv", metrics)
    for name, one in trained.items():
        print(time_line(name, one))
    if patched and unpatched:
        print(first_apart(patched, unpatched))
    for check in checks:
        print(check)
    write_losses(folder / "losses.csv", patched, unpatched)
    curves = {name: one.losses for name, one in trained.items()}
    title = config.model.path or str(config.model.model_type)
    print(draw_losses(folder / "loss.png", curves, title))


def loss_table(patched: dict[int, float], unpatched: dict[int, float]) -> str:
    """Return losses side by side at a few evenly spaced steps; a dash marks a missing one."""
    steps = sorted(patched.keys() | unpatched.keys())
    if not steps:
        return "no loss was logged"
    lines = [f"{'step':>6}  {'patched':>12}  {'unpatched':>12}"]
    for step in _spaced(steps):
        left, right = (
            f"{losses[step]:12.7f}" if step in losses else f"{'-':>12}"
            for losses in (patched, unpatched)
        )
        lines.append(f"{step:>6}  {left}  {right}")
    return "\n".join(lines)


def _spaced(steps: list[int]) -> list[int]:
    last = len(steps) - 1
    return [
        steps[i] for i in sorted({round(i * last / (SHOWN_STEPS - 1)) for i in range(SHOWN_STEPS)})
    ]


def time_line(name: str, run: Trained) -> str:
    """Return a training's time without its first steps, which compile kernels and fill caches."""
    said = f"{name}: {len(run.losses)} losses logged, "
    if run.steps == 0:
        return said + f"{run.seconds:.1f} s, first steps and compilation included"
    first, each = run.seconds - run.steady, 1e3 * run.steady / run.steps
    return said + (
        f"{run.steady:.1f} s for {run.steps} steps ({each:.1f} ms each), without the {first:.1f} s "
        f"of the start and the first {FIRST_STEPS} steps, which compile"
    )


def metrics_table(metrics: dict[int, dict[str, float]]) -> str:
    """Return the routers' measures at a few evenly spaced steps."""
    names = list(next(iter(metrics.values())))
    lines = ["  ".join([f"{'step':>6}", *names])]
    for step in _spaced(sorted(metrics)):
        values = (f"{metrics[step][name]:{len(name)}.4f}" for name in names)
        lines.append("  ".join([f"{step:>6}", *values]))
    return "\n".join(lines)


def write_metrics(path: Path, metrics: dict[int, dict[str, float]]) -> None:
    """Write a CSV file with one row per logged step."""
    names = list(next(iter(metrics.values())))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *names])
        writer.writerows([step, *found.values()] for step, found in sorted(metrics.items()))


def write_losses(path: Path, patched: dict[int, float], unpatched: dict[int, float]) -> None:
    """Write a CSV file with one row per logged step; a missing loss is an empty cell."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "loss_patched", "loss_unpatched"])
        for step in sorted(patched.keys() | unpatched.keys()):
            writer.writerow([step, patched.get(step, ""), unpatched.get(step, "")])


def draw_losses(path: Path, curves: dict[str, dict[int, float]], title: str) -> str:
    """Draw the curves into a PNG file; return one line that says whether it worked."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "loss curve: not drawn, matplotlib is missing (pip install 'moe-patch[train]')"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    # Dash the later curve, so that both are visible where they are equal.
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=False):
        axes.plot(list(losses), list(losses.values()), style, label=name, linewidth=1.5)
    axes.set(xlabel="optimizer step", ylabel="training loss (nats per token)", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return f"loss curve: {path.name}"


def write_summary(
    folder: Path,
    config: TrainConfig,
    trained: dict[str, Trained],
    checks: list[Check],
    patch_rows: list[BlockReport],
) -> None:
    """Write run.json: configuration, versions, times, final losses, checks and patch report."""
    packages = ("torch", "transformers", "peft", "accelerate")
    summary = {
        "config": asdict(config),
        "versions": {
            "moe_patch": __version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages},
        },
        "runs": {
            name: {
                "seconds": run.seconds,
                "steps_after_first": run.steps,
                "seconds_after_first": run.steady,
                "final_loss": list(run.losses.values())[-1:],
            }
            for name, run in trained.items()
        },
        "checks": [{**asdict(check), "passed": check.passed} for check in checks],
        "patch": [asdict(row) for row in patch_rows],
    }
    text = json.dumps(summary, indent=2, default=str)
    (folder / MARKER).write_text(text + "\n", encoding="utf-8")
