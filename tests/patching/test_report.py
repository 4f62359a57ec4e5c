"""The report: one frozen row of plain values per block, printable, current at each call."""

from __future__ import annotations

import dataclasses
import warnings

import pytest
from torch import nn

import moe_patch.patching.report
from moe_patch import BlockReport, patch_model, patch_report, unpatch_model
from moe_patch.ops.backend import BackendChoice
from moe_patch.runtime.peft_release import factor_proxies
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, UP, adapt, lora_config

COLUMNS = (
    "path", "model_type", "tier", "router", "router_backend", "experts_backend", "shared", "lora",
    "self_check", "reason",
)  # fmt: skip
ROUTING = {
    "deepseek_v3": "sigmoid_topk",
    "glm4_moe": "sigmoid_topk",
    "gpt_oss": "topk_softmax",
    "minimax_m2": "sigmoid_topk",
    "mixtral": "softmax_topk",
    "olmoe": "softmax_topk",
    "qwen2_moe": "softmax_topk",
    "qwen3_moe": "softmax_topk",
}
SHARED = {
    "deepseek_v3": "shared_experts",
    "glm4_moe": "shared_experts",
    "qwen2_moe": "shared_expert x sigmoid(shared_expert_gate)",
}


@pytest.mark.routers
@pytest.mark.parametrize("model_type", ROUTING)
def test_row_of_each_family(model_type):
    model = patch_model(tiny_models.build(model_type))
    rows = patch_report(model)
    assert [row.path for row in rows] == [path for path, _ in tiny_models.blocks(model)]
    for row in rows:
        assert row == BlockReport(
            path=row.path,
            model_type=model_type,
            tier="full",
            router=ROUTING[model_type],
            router_backend="torch",
            experts_backend="torch",
            shared=SHARED.get(model_type, "none"),
            lora="none",
            self_check="passed",
            reason="",
        )


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [(0, "experts run all tokens at once (chunk_tokens)"),
     (512, "chunk_tokens=512 has no effect on torch")],
)  # fmt: skip
def test_the_reason_names_a_chunk(chunk, reason):
    model = patch_model(tiny_models.build("qwen3_moe"), self_check=False, chunk_tokens=chunk)
    assert {row.reason for row in patch_report(model)} == {reason}


def test_rows_are_frozen_and_plain():
    row = patch_report(patch_model(tiny_models.build("qwen3_moe")))[0]
    assert tuple(field.name for field in dataclasses.fields(row)) == COLUMNS
    assert {type(value) for value in dataclasses.astuple(row)} <= {str, bool}
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.tier = "refused"


def test_self_check_column():
    model = tiny_models.build("qwen3_moe")
    patch_model(model, self_check=False)
    assert {row.self_check for row in patch_report(model)} == {"off"}
    unpatch_model(model)
    tiny_models.blocks(model)[0][1].experts.down_proj.data[0, 0, 0] = float("nan")
    patch_model(model)
    assert [row.self_check for row in patch_report(model)] == [
        "skipped: weights hold NaN or Inf",
        "passed",
    ]


def test_unpatched_and_unpatched_again_are_empty():
    model = tiny_models.build("qwen3_moe")
    assert patch_report(model) == []
    assert str(patch_report(model)) == "moe_patch: no patched MoE blocks"
    unpatch_model(patch_model(model))
    assert patch_report(model) == []


def test_prints_as_a_table():
    report = patch_report(patch_model(tiny_models.build("qwen2_moe")))
    head, *lines = str(report).splitlines()
    assert repr(report) == str(report)
    assert tuple(head.split()) == COLUMNS
    assert len(lines) == len(report) == 2
    for name in COLUMNS[:-2]:
        column = head.index(name)
        for line, row in zip(lines, report, strict=True):
            assert line[column:].startswith(getattr(row, name)), f"{name} is not aligned"


def test_notebook_table_escapes():
    report = patch_report(patch_model(tiny_models.build("qwen3_moe")))
    report[0] = dataclasses.replace(report[0], reason="<b>a & b</b>")
    text = report._repr_html_()
    assert "&lt;b&gt;a &amp; b&lt;/b&gt;" in text
    assert "<b>" not in text
    assert text.count("<tr>") == 1 + len(report)
    assert text.count("<th>") == len(COLUMNS)


def lora_column(model: nn.Module) -> str:
    (value,) = {row.lora for row in patch_report(model)}
    return value


def test_lora_column_follows_the_model():
    model = patch_model(tiny_models.build("qwen3_moe"))
    assert lora_column(model) == "none"
    wrapped = adapt(model, lora_config(EXPERTS))
    waiting = lora_column(wrapped)
    # Without PEFT's factor proxy (before 0.21), only the merged weight can be read.
    merged = "" if factor_proxies() else "PEFT's merged weight is read; "
    again = f"{merged}call patch_model again with the same options to fuse"
    assert f"peft (gate_up_proj: {again})" in waiting
    assert f"peft (down_proj: {again})" in waiting
    patch_model(wrapped)
    assert lora_column(wrapped) == "fused (down_proj, gate_up_proj)"
    assert lora_column(wrapped.merge_and_unload()) == "none"


def test_lora_column_of_one_projection_and_of_attention_alone():
    model = patch_model(adapt(tiny_models.build("qwen3_moe"), lora_config([UP])))
    assert lora_column(model) == "fused (gate_up_proj)"
    model = patch_model(adapt(tiny_models.build("qwen3_moe"), lora_config(modules=["q_proj"])))
    assert lora_column(model) == "none"


def test_lora_column_while_disabled_or_merged():
    model = patch_model(adapt(tiny_models.build("qwen3_moe"), lora_config([UP])))
    with model.disable_adapter():
        assert lora_column(model) == "peft (gate_up_proj: adapters are disabled)"
    assert lora_column(model) == "fused (gate_up_proj)"
    model.merge_adapter()
    assert lora_column(model) == "peft (gate_up_proj: adapters are merged into the weight)"
    model.unmerge_adapter()
    assert lora_column(model) == "fused (gate_up_proj)"


def test_lora_column_off():
    model = patch_model(
        adapt(tiny_models.build("qwen3_moe"), lora_config(EXPERTS)), fuse_lora="off"
    )
    assert lora_column(model) == "peft: fuse_lora is off"


def test_lora_column_names_what_cannot_be_fused():
    model = adapt(tiny_models.build("gpt_oss"), lora_config([UP, "experts.down_proj_bias"]))
    patch_model(model)
    assert lora_column(model) == (
        "fused (gate_up_proj); "
        "peft (down_proj_bias: parameter 'down_proj_bias' is not an expert projection)"
    )


@pytest.mark.parametrize("ties", ["lower", "torch"])
@pytest.mark.parametrize(
    ("model_type", "routing"),
    [
        ("qwen3_moe", "softmax_topk"),
        ("dbrx", "softmax_topk_norm"),
        ("doge", "product_key_block"),
    ],
)
def test_router_implementation_on_a_pretended_gpu(model_type, routing, ties, monkeypatch):
    """Name Triton as the router unless ``ties="torch"`` is set."""
    model = patch_model(tiny_models.build(model_type), ties=ties)
    monkeypatch.setattr(
        moe_patch.patching.report, "choose_backend", lambda *_: BackendChoice("triton", "")
    )
    for row in patch_report(model):
        assert (row.router, row.router_backend) == (
            routing,
            "triton" if ties == "lower" else "torch",
        )
        assert ("ties='torch'" in row.reason) == (ties == "torch")


@pytest.mark.parametrize(
    ("experts", "top_k", "said"), [(64, 33, "top_k=33 of 64 experts"), (513, 2, "513 experts")]
)
def test_sizes_that_the_routing_kernels_lack_are_named(experts, top_k, said, monkeypatch):
    sizes = {"num_experts": experts, "num_experts_per_tok": top_k, "num_hidden_layers": 1}
    model = patch_model(tiny_models.build("qwen3_moe", **sizes), self_check=False)
    monkeypatch.setattr(
        moe_patch.patching.report, "choose_backend", lambda *_: BackendChoice("triton", "")
    )
    (row,) = patch_report(model)
    assert (row.router_backend, row.experts_backend) == ("torch", "triton")
    assert f"routing: {said}" in row.reason


# Routing other than a choice by scores: a table of token ids, and samples of a mixture.
OWN_ROUTING = {"hash_router_forward", "sparsemixer"}


@pytest.mark.parametrize("model_type", tiny_models.patchable())
def test_every_family_on_a_pretended_gpu(model_type, monkeypatch):
    """Name a Triton kernel for every choice by scores, and the reason for any other routing."""
    model = patch_model(tiny_models.build(model_type), self_check=False)
    monkeypatch.setattr(
        moe_patch.patching.report, "choose_backend", lambda *_: BackendChoice("triton", "")
    )
    for row in patch_report(model):
        if row.tier == "experts":  # in releases before the entry's first
            assert row.router_backend == "transformers"
            continue
        own = row.router in OWN_ROUTING
        assert row.router_backend == ("torch" if own else "triton")
        assert ("the family routes in a forward of its own" in row.reason) == own


def test_refused_block_has_a_row():
    model = tiny_models.build("qwen3_moe")
    path, block = tiny_models.blocks(model)[1]
    block.gate.forward = lambda hidden: hidden
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch_model(model, strict=False)
    first, second = patch_report(model)
    assert first.tier == "full"
    assert (second.path, second.tier, second.experts_backend) == (path, "refused", "transformers")
    assert "test_refused_block_has_a_row" in second.reason
