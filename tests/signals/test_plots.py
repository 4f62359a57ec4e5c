"""Plots show the recorded values, from a recorder and from a file alike."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_patch import UnsupportedOptionError, delta_sc, patch_model, record
from moe_patch.signals import plots
from moe_patch.signals.balance import balance
from moe_patch.signals.losses import gate_accuracy
from moe_patch.signals.recorder import Recorder
from moe_patch.signals.saved import load_recorder, save_recorder
from tests.support import tiny_models
from tests.support.numerics import FP64, assert_bits, assert_close
from tests.support.signals_cases import build

PICTURES = ("load_heatmap", "load_over_training", "delta_sc_per_expert", "router_confidence")
STEPS = 3


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    """Three steps of two micro-batches; K = 3, so that ΔSC is more than a sign."""
    overrides = tiny_models.with_experts("qwen3_moe", 8, 3)
    model = patch_model(build("qwen3_moe", layers=2, **overrides), self_check=False)
    with record(model) as found:
        for seed in range(2 * STEPS):
            tiny_models.loss(model(**tiny_models.inputs(model, seed=seed))).backward()
            if seed % 2:
                found.step()
    return found


@pytest.fixture(params=["recorder", "file"])
def source(request, recorder, tmp_path) -> Any:
    if request.param == "recorder":
        return recorder
    save_recorder(recorder, tmp_path / "signals.safetensors")
    return tmp_path / "signals.safetensors"


def drawn(axes: Any) -> Tensor:
    """Return the numbers of an image, NaN where empty."""
    return torch.tensor(axes.images[0].get_array().filled(float("nan")), dtype=torch.float64)


def totals(recorder: Recorder) -> dict[str, Tensor]:
    return {
        path: torch.stack([closed.load[path] for closed in recorder.history]).sum(0).double()
        for path in recorder.layers
    }


def test_load_heatmap(source, recorder) -> None:
    figure = plots.load_heatmap(source)
    wanted = torch.stack([load / load.mean() for load in totals(recorder).values()])
    assert_close(drawn(figure.axes[0]), wanted, FP64)
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["0", "1"]


def test_load_over_training(source, recorder) -> None:
    loads = totals(recorder)
    uneven = max(loads, key=lambda path: balance(loads[path]).max_violation)
    for layer, shown in ((None, uneven), (list(loads)[0], list(loads)[0])):
        top, bottom, _ = plots.load_over_training(source, layer).axes
        steps = [closed.load[shown].double() for closed in recorder.history]
        wanted = torch.stack([load / load.mean() for load in steps]).mT
        assert_close(drawn(top), wanted, FP64)
        assert shown in top.get_title()
        lines = {line.get_label(): line.get_ydata() for line in bottom.lines}
        found = torch.tensor(lines[f"layer {shown.split('.')[2]}"])
        violations = [balance(load).max_violation for load in steps]
        assert_close(found, torch.tensor(violations, dtype=torch.float64), FP64)
        assert len(bottom.lines) == 2


def test_delta_sc_per_expert(source, recorder) -> None:
    figure = plots.delta_sc_per_expert(source)
    image = drawn(figure.axes[0])
    for row, (path, score_TK) in zip(image, delta_sc(recorder).items(), strict=True):
        ids = recorder.layers[path].ids
        for e, value in enumerate(row):
            mine = score_TK[ids == e]
            assert value.isnan() == (mine.numel() == 0)
            if mine.numel():
                assert value.item() == pytest.approx(mine.mean().item(), rel=1e-9, abs=1e-12)


def test_router_confidence(source, recorder) -> None:
    axes = plots.router_confidence(source).axes[0]
    (medians,) = (c for c in axes.collections if c.get_label() == "median")
    for segment, layer in zip(medians.get_segments(), recorder.layers.values(), strict=True):
        share = layer.weights.amax(-1) / layer.weights.sum(-1)
        assert segment[0][1] == pytest.approx(torch.quantile(share, 0.5).item(), rel=1e-9)
    (even,) = (line for line in axes.lines if line.get_label() == "1 / K")
    assert even.get_ydata()[0] == pytest.approx(1 / 3)


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_is_drawn_and_small(name, recorder, tmp_path) -> None:
    getattr(plots, name)(recorder).savefig(tmp_path / "picture.png")
    assert 1000 < (tmp_path / "picture.png").stat().st_size < 100_000


def test_a_file_gives_scores_and_history_back(recorder, tmp_path) -> None:
    save_recorder(recorder, tmp_path / "signals.safetensors")
    back = load_recorder(tmp_path / "signals.safetensors")
    assert list(back.layers) == list(recorder.layers)
    for path, layer in recorder.layers.items():
        for name in ("ids", "weights", "tokens_per_expert", "act_norm", "grad_norm_params"):
            assert_bits(getattr(back.layers[path], name), getattr(layer, name), name)
        assert back.layers[path].grad_norm_lora is None
        assert back.layers[path].missing == layer.missing
    for mine, theirs in zip(back.history, recorder.history, strict=True):
        assert mine.load.keys() == theirs.load.keys()
        assert all(torch.equal(mine.load[path], theirs.load[path]) for path in mine.load)
    assert gate_accuracy(back).keys() == recorder.layers.keys()
    save_file({"ids": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(UnsupportedOptionError, match=r"other\.safetensors: format is None"):
        load_recorder(tmp_path / "other.safetensors")
    with pytest.raises(UnsupportedOptionError, match=r"missing: not a safetensors file"):
        load_recorder(tmp_path / "missing")


def test_what_is_not_there_is_named(recorder, monkeypatch, tmp_path) -> None:
    model = patch_model(build("qwen3_moe"), self_check=False)
    with record(model) as empty:
        pass
    save_recorder(empty, tmp_path / "empty.safetensors")
    for found in (empty, tmp_path / "empty.safetensors"):
        for name, match in (
            ("load_heatmap", "holds no load"),
            ("load_over_training", "holds no history; call recorder.step"),
            ("router_confidence", "holds no weights"),
        ):
            with pytest.raises(UnsupportedOptionError, match=match):
                getattr(plots, name)(found)
    with pytest.raises(UnsupportedOptionError, match="layer is 'mlp'; accepted: model.layers.0"):
        plots.load_over_training(recorder, "mlp")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedOptionError, match=r"pip install 'moe-patch\[plots\]'"):
        plots.load_heatmap(recorder)


def test_without_a_closed_step_the_newest_forward_counts() -> None:
    model = patch_model(build("qwen3_moe"), self_check=False)
    with record(model) as found, torch.no_grad():
        model(**tiny_models.inputs(model))
    (layer,) = found.layers.values()
    counts = layer.tokens_per_expert.double()
    image = drawn(plots.load_heatmap(found).axes[0])
    assert_close(image[0], counts / counts.mean(), FP64)


@pytest.mark.parametrize("where", ["recorder", "file"])
def test_a_layer_that_does_not_run_in_every_step(where, tmp_path) -> None:
    """Record no entry for a step in which a layer did not run, and leave a gap in its curves.

    An image tower is such a layer in a step of text alone.
    """
    model = patch_model(build("qwen3_moe", layers=2), self_check=False)
    with record(model) as found:
        found.step()
        model.model.layers[1].mlp(torch.randn(1, 5, 32, dtype=torch.float64))
        found.step()
        tiny_models.loss(model(**tiny_models.inputs(model))).backward()
        found.step()
    first, second = found.layers
    source: Any = found
    if where == "file":
        source = tmp_path / "signals.safetensors"
        save_recorder(found, source)
        back = load_recorder(source)
        assert [list(closed.load) for closed in back.history] == [[], [second], [first, second]]
    image = drawn(plots.load_heatmap(source).axes[0])
    counts = torch.stack([found.history[2].load[first], found.history[2].load[second]]).double()
    counts[1] += found.history[1].load[second]
    assert_close(image, counts / counts.mean(-1, keepdim=True), FP64)
    for layer, gaps in ((first, [True, True, False]), (second, [True, False, False])):
        top, bottom, _ = plots.load_over_training(source, layer).axes
        assert drawn(top).isnan().all(0).tolist() == gaps
        number = f"layer {layer.split('.')[2]}"
        (line,) = (x for x in bottom.lines if x.get_label() == number)
        assert torch.tensor(line.get_ydata()).isnan().tolist() == gaps


def test_steps_without_any_forward_hold_no_load() -> None:
    with record(patch_model(build("qwen3_moe"), self_check=False)) as found:
        found.step()
    for name in ("load_heatmap", "load_over_training"):
        with pytest.raises(UnsupportedOptionError, match="holds no load"):
            getattr(plots, name)(found)
