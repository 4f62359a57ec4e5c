"""Routing as vLLM and SGLang return it, placed in the trainer's batches.

The engines' arrays are made by hand. Every id is computed from its sequence, position, layer and
slot, so it says where it has to be.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_patch import (
    UnsupportedModelError,
    UnsupportedOptionError,
    record,
    replay_routing,
)
from moe_patch.signals.engines import EngineLayers, EngineRows, engine_trace
from tests.support import tiny_models
from tests.support.replay_cases import patched, step, traced

# Five decoder layers, of which 1, 2 and 4 have experts.
LAYERS = EngineLayers(("l.1.mlp", "l.2.mlp", "l.4.mlp"), (1, 2, 4), 5, (200, 200, 200), 2)
LENGTHS = (4, 7, 5)


def expected(sequence: int, tokens: int, layers: EngineLayers = LAYERS) -> Tensor:
    """The ids [tokens, L, K] of a sequence; the last token has none."""
    token = torch.arange(tokens)[:, None, None]
    layer = torch.arange(len(layers.paths))[:, None]
    ids = 60 * sequence + 7 * token + 2 * layer + torch.arange(layers.top_k)
    ids[-1] = -1
    return ids.int()


def columns(ids_NLK: Tensor, layers: EngineLayers = LAYERS) -> np.ndarray:
    """The engine's array: a column per decoder layer, zeros in those without experts."""
    rows = ids_NLK[:-1]
    full = torch.zeros(rows.shape[0], layers.total, layers.top_k, dtype=torch.int32)
    full[:, list(layers.columns)] = rows.int()
    return full.numpy()


def npy(array: np.ndarray) -> str:
    with io.BytesIO() as buffer:
        np.save(buffer, array, allow_pickle=False)
        return base64.b64encode(buffer.getvalue()).decode("ascii")


def plain(array: np.ndarray) -> str:
    return base64.b64encode(array.astype("<i4").tobytes()).decode("ascii")


FORMS: dict[str, Any] = {
    "vllm": lambda full, n: EngineRows(full.astype("uint8"), n),
    "vllm wide": lambda full, n: EngineRows(full.astype("uint16"), n),
    "vllm http": lambda full, n: EngineRows(npy(full.astype("uint8")), n),
    "sglang": lambda full, n: EngineRows(plain(full), n, "sglang"),
    "sglang flat": lambda full, n: EngineRows(full.reshape(-1), n, "sglang"),
    "tensor": lambda full, n: EngineRows(torch.as_tensor(full).long(), n),
    "moe layers": lambda full, n: EngineRows(full[:, list(LAYERS.columns)], n),
    "sglang moe layers": lambda full, n: EngineRows(plain(full[:, [1, 2, 4]]), n, "sglang"),
}


def masks(padding: str) -> Tensor:
    """[3, 9]: left, right, or a prompt padded left and a completion padded right."""
    mask = torch.zeros(3, 9, dtype=torch.bool)
    for row, n in enumerate(LENGTHS):
        start = {"left": 9 - n, "right": 0, "both": 2 - row}[padding]
        mask[row, start : start + n] = True
    return mask


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padding", ["left", "right", "both", "packed"])
def test_every_id_is_placed_at_its_token_and_layer(form, padding) -> None:
    outputs = [FORMS[form](columns(expected(i, n)), n) for i, n in enumerate(LENGTHS)]
    if padding == "packed":  # and padded at its end
        mask = torch.arange(20).unsqueeze(0) < sum(LENGTHS)
        placed = engine_trace(LAYERS, outputs, mask, LENGTHS)
    else:
        mask = masks(padding)
        placed = engine_trace(LAYERS, outputs, mask.long().numpy())
    wanted = torch.cat([expected(i, n) for i, n in enumerate(LENGTHS)])
    assert torch.equal(placed.trace.ids_TLK[mask.flatten()], wanted)
    assert (placed.trace.ids_TLK[~mask.flatten()] == -1).all()
    assert (placed.trace.paths, placed.trace.experts) == (LAYERS.paths, 200)
    assert (placed.tokens, placed.free) == (LENGTHS, (1, 1, 1))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_cut_partial_and_unwritten_rows_are_counted(engine) -> None:
    """A sequence cut on both sides, one whose rows begin later, one with cached tokens."""
    ids = [expected(i, n) for i, n in enumerate(LENGTHS)]
    arrays = [columns(each) for each in ids]
    arrays[1] = arrays[1][3:]
    arrays[2][:2] = 0  # tokens of a cached prompt, never written
    outputs = [
        EngineRows(arrays[0], 4, engine, cut=(2, 1)),
        EngineRows(arrays[1], 7, engine, first=3),
        EngineRows(arrays[2], 5, engine),
    ]
    ids[0] = ids[0][2:-1]
    ids[1][:3] = -1
    ids[2][:2] = -1
    lengths = [1, 7, 5]
    placed = engine_trace(LAYERS, outputs, torch.ones(1, 13), lengths)
    assert torch.equal(placed.trace.ids_TLK, torch.cat(ids))
    assert placed.free == (0, 4, 3)


@pytest.mark.parametrize("data", [np.zeros((0, 5, 2), "uint8"), ""], ids=["vllm", "sglang"])
def test_a_request_without_rows_leaves_every_token_to_the_router(data) -> None:
    """Rows from the end of the prompt on, and one sampled token."""
    output = EngineRows(data, 4, "sglang" if isinstance(data, str) else "vllm", first=3)
    placed = engine_trace(LAYERS, [output], torch.ones(1, 4))
    assert (placed.trace.ids_TLK == -1).all()
    assert placed.free == (4,)


def test_with_one_expert_per_token_zero_is_an_id() -> None:
    layers = EngineLayers(("l.0",), (0,), 1, (4,), 1)
    placed = engine_trace(layers, [EngineRows(np.zeros((2, 1, 1), "uint8"), 3)], torch.ones(1, 3))
    assert placed.trace.ids_TLK.flatten().tolist() == [0, 0, -1]
    assert placed.free == (1,)


def changed(**at: Any) -> np.ndarray:
    """The second sequence's array with one token's ids replaced in one layer's column."""
    full = columns(expected(1, 7))
    full[at["row"], at["column"]] = at["ids"]
    return full


FULL = columns(expected(1, 7))
WRONG = {
    "an id beyond E": (
        EngineRows(changed(row=3, column=2, ids=[7, 200]), 7),
        r"sequence 1, l\.2\.mlp: row 3 has the ids \[7, 200\]; accepted: 2 different ids below 200",
    ),
    "twice": (
        EngineRows(changed(row=0, column=4, ids=[5, 5]), 7),
        r"sequence 1, l\.4\.mlp: row 0 has the ids \[5, 5\]",
    ),
    "written in part": (
        EngineRows(changed(row=2, column=1, ids=[-1, -1]), 7),
        r"sequence 1, l\.1\.mlp: row 2 has the ids \[-1, -1\]",
    ),
    "a dense layer's column": (
        EngineRows(np.concatenate([FULL[:, 1:], FULL[:, :1]], 1), 7),
        r"sequence 1, l\.2\.mlp: row 0 has the ids \[0, 0\]",
    ),
    "too few rows": (EngineRows(FULL[1:], 7), r"sequence 1: routing of shape \(5, 5, 2\)"),
    "another K": (EngineRows(FULL[..., :1], 7), r"shape \(6, 5, 1\); accepted: \[6, 5, 2\]"),
    "another model": (EngineRows(FULL[:, :4], 7), r"shape \(6, 4, 2\).*or 3 MoE layers \(l\.1"),
    "another K as text": (
        EngineRows(plain(FULL[:5, :, :1]), 7, "sglang"),
        r"sequence 1: routing of shape \(25,\)",
    ),
    "another tokenisation": (
        EngineRows(columns(expected(1, 8)), 8),
        r"sequence 1: the batch has 7 tokens, but the engine has 8 before the cut of \(0, 0\)",
    ),
    "floats": (EngineRows(FULL.astype("float32"), 7), "sequence 1: ids are torch.float32"),
    "none": (EngineRows(None, 7), "sequence 1: the engine returned no routing"),
    "no npy": (EngineRows(plain(FULL), 7), "sequence 1: routed_experts cannot be decoded"),
    "no base64": (EngineRows("?", 7, "sglang"), "sequence 1: routed_experts cannot be decoded"),
    "no whole ids": (EngineRows("AAAA", 7, "sglang"), "cannot be decoded"),
    "another engine": (EngineRows(FULL, 7, "other"), "sequence 1: engine is 'other'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_named_by_sequence_and_layer(case) -> None:
    output, message = WRONG[case]
    first = EngineRows(columns(expected(0, 4)), 4)
    with pytest.raises(UnsupportedOptionError, match=message):
        engine_trace(LAYERS, [first, output], torch.ones(1, 11), [4, 7])


def test_another_number_of_sequences_is_refused() -> None:
    first = EngineRows(columns(expected(0, 4)), 4)
    with pytest.raises(UnsupportedOptionError, match="the engine returned 1 sequences"):
        engine_trace(LAYERS, [first], torch.ones(2, 4))
    with pytest.raises(UnsupportedOptionError, match="the batch has 5 tokens"):
        engine_trace(LAYERS, [first], torch.ones(1, 5), [4])


@pytest.mark.routers
@pytest.mark.families("qwen3_moe", "glm4_moe_lite", "nemotron_h", "longcat_flash")
@pytest.mark.parametrize(
    ("model_type", "found", "total"),
    [
        ("qwen3_moe", (0, 1), 2),
        ("glm4_moe_lite", (1,), 2),  # a dense layer first
        ("nemotron_h", (1,), 4),  # attention and Mamba layers count as layers
        ("longcat_flash", (0, 1), 4),  # experts without weights count in E
    ],
)
def test_a_models_own_routing_comes_back_through_the_engines_format(
    model_type, found, total
) -> None:
    model = patched(model_type).eval()
    layers = EngineLayers.of(model)
    assert (layers.columns, layers.total) == (found, total)
    batch = tiny_models.inputs(model)
    trace = traced(model, batch)
    assert (layers.paths, set(layers.experts)) == (trace.paths, {trace.experts})
    ids_BNLK = trace.ids_TLK.reshape(2, -1, *trace.ids_TLK.shape[1:])
    ids_BNLK = (ids_BNLK + 1) % trace.experts  # experts that the router does not choose
    n = ids_BNLK.shape[1]
    outputs = [EngineRows(columns(each, layers), n) for each in ids_BNLK]
    placed = engine_trace(layers, outputs, torch.ones(2, n))
    with replay_routing(model, placed.trace), record(model) as recorder:
        step(model, batch)
    for index, layer in enumerate(recorder.layers.values()):
        used = layer.ids.reshape(2, n, -1)
        assert torch.equal(used[:, :-1].long(), ids_BNLK[:, :-1, index].long())


@pytest.mark.families("ernie4_5_vl_moe", "zaya")
def test_models_whose_layers_an_engine_cannot_name_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="one block per layer"):
        EngineLayers.of(patched("ernie4_5_vl_moe"))
    with pytest.raises(UnsupportedModelError, match="zaya run a forward of their own"):
        EngineLayers.of(patched("zaya"))
