"""Charts of a recorder's contents (matplotlib: ``pip install 'moe-patch[plots]'``).

    figure = load_heatmap(recorder); figure.savefig("load.png")

Each function takes a :class:`Recorder`, or the path of a file that ``save_recorder`` wrote, and
returns a matplotlib Figure, which a notebook displays. No global state of matplotlib changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_patch.errors import UnsupportedOptionError
from moe_patch.runtime.taps import LayerSignals
from moe_patch.schema import check_choice
from moe_patch.signals.balance import balance
from moe_patch.signals.losses import delta_sc
from moe_patch.signals.recorder import Recorder
from moe_patch.signals.saved import load_recorder

Source = Recorder | str | Path
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)


def load_heatmap(source: Source) -> Any:
    """Plot experts x layers: the share of rows that each expert took, over an even share.

    1 is even. The colours end at 0 and at three times an even share, where balance is lost. Counts
    are over the closed steps, or of the newest forward if no step was closed.
    """
    recorder = _recorder(source)
    loads = _loads(recorder)
    if not loads:
        raise _nothing("load", "run a forward inside `with record(model)`")
    figure, axes = _figure(_wide(loads), _high(loads))
    image = axes.imshow(
        _even_shares(list(loads.values())), aspect="auto", cmap="RdBu_r", norm=_around_one(),
        interpolation="nearest",
    )  # fmt: skip
    axes.set(xlabel="expert", title="Expert load")
    _layer_ticks(axes.yaxis, loads)
    _integer_ticks(axes.xaxis)
    figure.colorbar(image, ax=axes, label="times an even share", extend="max", ticks=[0, 1, 2, 3])
    return figure


def load_over_training(source: Source, layer: str | None = None) -> Any:
    """Plot experts x steps of one layer, and below it the largest violation of all layers.

    Steps in which a layer did not run are grey and leave a gap in the curve.

    Args:
        source: a recorder whose ``step`` was called after each optimiser step.
        layer: block path; default: the layer with the least even load over all steps.

    Raises:
        UnsupportedOptionError: no step was closed, or there is no such layer.
    """
    recorder = _recorder(source)
    if not recorder.history:
        raise _nothing("history", "call recorder.step() after each optimiser step")
    totals = _loads(recorder)
    if not totals:
        raise _nothing("load", "run a forward inside `with record(model)`")
    if layer is None:
        layer = max(totals, key=lambda path: balance(totals[path]).max_violation)
    check_choice("plots: layer", layer, totals)
    figure, (top, bottom) = _figure(7.0, 5.2, rows=2, heights=(3, 2))
    shares = _even_shares(_by_step(recorder, layer, totals[layer]))
    image = top.imshow(
        list(zip(*shares, strict=True)), aspect="auto", cmap="RdBu_r", norm=_around_one(),
        interpolation="nearest", extent=(0.5, len(shares) + 0.5, len(shares[0]) - 0.5, -0.5),
    )  # fmt: skip
    top.set(ylabel="expert", title=f"Expert load of {layer}", facecolor="0.8")
    _integer_ticks(top.yaxis)
    figure.colorbar(image, ax=top, label="times an even share", extend="max", ticks=[0, 1, 2, 3])
    steps = range(1, len(recorder.history) + 1)
    others = [path for path in totals if path != layer]
    for path in [*others, layer]:
        loads = _by_step(recorder, path, totals[path])
        found = [balance(load_E).max_violation for load_E in loads]
        if path == layer:
            bottom.plot(steps, found, label=_short(path, "layer "), color="C3", linewidth=1.8)
        else:
            label = "other layers" if path == others[0] else None
            bottom.plot(steps, found, label=label, color="0.7", linewidth=0.9)
    bottom.set(xlabel="step", ylabel="max violation", xlim=(0.5, len(shares) + 0.5), ylim=(0, None))
    bottom.grid(alpha=0.3)
    bottom.legend(frameon=False, fontsize="small")
    top.sharex(bottom)
    top.tick_params(labelbottom=False)
    _integer_ticks(bottom.xaxis)
    return figure


def delta_sc_per_expert(source: Source, gradient: str = "params") -> Any:
    """Plot experts x layers: the mean ΔSC of each expert's rows; grey if an expert has none.

    Args:
        source: a recorder after backward.
        gradient: as for :func:`moe_patch.delta_sc`.
    """
    recorder = _recorder(source)
    scores = delta_sc(recorder, gradient)
    rows = {path: _mean_by_expert(recorder.layers[path], scores[path]) for path in scores}
    figure, axes = _figure(_wide(rows), _high(rows))
    values = [row.tolist() for row in rows.values()]
    largest = max((abs(v) for row in values for v in row if v == v), default=1.0) or 1.0
    image = axes.imshow(
        values, aspect="auto", cmap="PuOr", vmin=-largest, vmax=largest, interpolation="nearest"
    )
    axes.set(xlabel="expert", title="ΔSC by expert (grey: no rows)")
    _layer_ticks(axes.yaxis, rows)
    _integer_ticks(axes.xaxis)
    axes.set_facecolor("0.8")
    figure.colorbar(image, ax=axes, label="mean ΔSC")
    return figure


def router_confidence(source: Source) -> Any:
    """Plot, by layer, a token's largest routing weight over their sum: median and quantiles.

    The dashed line is 1 / K, where the router does not distinguish between its choices.
    """
    recorder = _recorder(source)
    weights = {
        p: layer.weights for p, layer in recorder.layers.items() if layer.weights is not None
    }
    found = {path: _confidence(w_TK) for path, w_TK in weights.items() if w_TK.numel()}
    if not found:
        raise _nothing("weights", "run a forward inside `with record(model)`")
    low, lower, middle, upper, high = (
        [torch.quantile(values, q).item() for values in found.values()] for q in QUANTILES
    )
    figure, axes = _figure(min(12.0, max(5.0, 1.8 + 0.35 * len(found))), 3.6)
    at = list(range(len(found)))
    for top, bottom, colour, label in (
        (high, low, "#c6d8ec", "80% of the tokens"),
        (upper, lower, "#7fa8d1", "50%"),
    ):
        heights = [t - b for t, b in zip(top, bottom, strict=True)]
        axes.bar(at, heights, 0.6, bottom, color=colour, label=label)
    axes.hlines(
        middle, [i - 0.3 for i in at], [i + 0.3 for i in at], color="#1f3b5c", label="median"
    )
    ks = {w_TK.shape[1] for w_TK in weights.values()}
    if len(ks) == 1:
        axes.axhline(1 / ks.pop(), linestyle="--", linewidth=1, color="0.4", label="1 / K")
    axes.set(ylabel="largest weight of a token", ylim=(0, 1.02), title="Router confidence")
    _layer_ticks(axes.xaxis, found)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside lower center", frameon=False, fontsize="small", ncols=4)
    return figure


def _recorder(source: Source) -> Recorder:
    return source if isinstance(source, Recorder) else load_recorder(source)


def _nothing(what: str, remedy: str) -> UnsupportedOptionError:
    return UnsupportedOptionError(f"plots: the recorder holds no {what}; {remedy}")


def _figure(width: float, height: float, rows: int = 1, heights: Any = None) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedOptionError(
            "plots: matplotlib is not installed: pip install 'moe-patch[plots]'"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained", dpi=150)
    return figure, figure.subplots(rows, height_ratios=heights)


def _wide(rows: dict[str, Tensor]) -> float:
    return min(12.0, max(5.0, 2.5 + 0.09 * max(row.shape[0] for row in rows.values())))


def _high(rows: dict[str, Tensor]) -> float:
    return min(9.0, 1.6 + 0.22 * len(rows))


def _loads(recorder: Recorder) -> dict[str, Tensor]:
    """Return the load [E] by path: summed over the closed steps, or of the newest forward."""
    if recorder.history:
        seen = {path: load_E for closed in recorder.history for path, load_E in closed.load.items()}
        ordered = [path for path in recorder.layers if path in seen]
        return {p: torch.stack(_by_step(recorder, p, seen[p])).sum(0) for p in ordered}
    counts = {path: layer.tokens_per_expert for path, layer in recorder.layers.items()}
    return {path: load_E for path, load_E in counts.items() if load_E is not None}


def _by_step(recorder: Recorder, path: str, like_E: Tensor) -> list[Tensor]:
    """Return [E] of each closed step; zeros if the layer did not run (image tower, layer drop)."""
    return [closed.load.get(path, torch.zeros_like(like_E)) for closed in recorder.history]


def _even_shares(loads: list[Tensor]) -> list[list[float]]:
    """Return rows of load over an even load; NaN pads rows with fewer experts."""
    widest = max(load_E.shape[0] for load_E in loads)
    rows = []
    for load_E in loads:
        share = (load_E.double() * load_E.shape[0] / load_E.sum()).tolist()
        rows.append(share + [float("nan")] * (widest - len(share)))
    return rows


def _around_one() -> Any:
    from matplotlib.colors import TwoSlopeNorm

    return TwoSlopeNorm(vmin=0, vcenter=1, vmax=3)


def _mean_by_expert(layer: LayerSignals, score_TK: Tensor) -> Tensor:
    """Return the mean score [E] of each expert's rows, NaN if it has none."""
    assert layer.ids is not None
    assert layer.tokens_per_expert is not None
    counts_E = layer.tokens_per_expert.double().cpu()
    ids_N, score_N = layer.ids.reshape(-1).long().cpu(), score_TK.double().reshape(-1).cpu()
    here_N = (ids_N >= 0) & (ids_N < counts_E.shape[0])
    sums_E = torch.zeros_like(counts_E).index_add(0, ids_N[here_N], score_N[here_N])
    return sums_E / counts_E


def _confidence(weights_TK: Tensor) -> Tensor:
    """Return [T], the largest weight of each token over the sum of its weights."""
    weights_TK = weights_TK.double().abs().cpu()
    sums_T1 = weights_TK.sum(-1, keepdim=True)
    return (weights_TK / sums_T1).amax(-1)[sums_T1.squeeze(1) > 0]


def _short(path: str, word: str = "") -> str:
    """Return the layer's number after a word, or the path if there is no number."""
    numbers = [part for part in path.split(".") if part.isdigit()]
    return f"{word}{numbers[-1]}" if numbers else path


def _layer_ticks(axis: Any, rows: dict[str, Any]) -> None:
    every = max(1, len(rows) // 24)
    shown = list(range(0, len(rows), every))
    axis.set_ticks(shown, [_short(list(rows)[i]) for i in shown])
    axis.set_label_text("layer")


def _integer_ticks(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))
