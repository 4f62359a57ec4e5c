"""Adapters on a patched model equal PEFT on the unpatched one, without forming a merged weight.

The reference is always PEFT's own forward on transformers' eager experts with the same factors.
"""

from __future__ import annotations

import copy

import pytest
import torch
from peft import inject_adapter_in_model

import moe_patch.ops.experts.grouped
from moe_patch import UnsupportedOptionError, patch_model, patch_report
from moe_patch.runtime.adapters import is_param_wrapper
from moe_patch.runtime.peft_release import factor_proxies, lora_proxies, rewrites_targets
from tests.support import tiny_models
from tests.support.adapters import (
    DOWN,
    EXPERTS,
    FAMILIES,
    ORDERS,
    SHARED,
    UP,
    Pair,
    adapt,
    adapted_pair,
    adapter_gradients,
    assert_adapters_act,
    assert_same_step,
    attention,
    expert_modules,
    limit_on,
    lora_config,
    recipe,
    router_parameter,
    step,
)
from tests.support.numerics import FP32, assert_close, bf16_rule, rel_err
from tests.support.snapshots import logits

pytestmark = pytest.mark.versions


@pytest.fixture
def merged_weights(monkeypatch):
    """Record the shape of every expert weight that PEFT's proxies merge with a delta."""
    shapes = []

    def count(cls):
        original = cls.forward

        def forward(self, weight):
            if weight.dim() == 3:
                shapes.append(tuple(weight.shape))
            return original(self, weight)

        monkeypatch.setattr(cls, "forward", forward)

    for cls in lora_proxies():
        count(cls)
    return shapes


@pytest.fixture
def outer_sums(monkeypatch, device):
    """Record the shape of every weight gradient that the device's backend computes."""
    shapes = []
    if device == "cuda":
        from moe_patch.kernels.common import repeat
        from moe_patch.kernels.experts import call, dw, experts, factors

        # A replayed pass calls no function that could be counted.
        monkeypatch.setattr(repeat, "_MOST_TOKENS", 0)

        def counted(kernel, like):
            def run(*operands, **options):
                if operands[3] is not None:
                    shapes.append(tuple(operands[like].shape))
                return kernel(*operands, **options)

            return run

        for module in (call, experts):
            monkeypatch.setattr(module, "outer_sum", counted(dw.outer_sum, like=3))
        monkeypatch.setattr(call, "factor_backward", counted(factors.factor_backward, like=2))
        return shapes
    original = moe_patch.ops.experts.grouped.Groups.outer_sum

    def outer_sum(self, dy_NO, x_NI, like_EOI):
        shapes.append(tuple(like_EOI.shape))
        return original(self, dy_NO, x_NI, like_EOI)

    monkeypatch.setattr(moe_patch.ops.experts.grouped.Groups, "outer_sum", outer_sum)
    return shapes


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_adapter_of_a_usual_recipe(model_type, order, merged_weights, device):
    """Both projections, the router and attention."""
    parameters = recipe(model_type)
    pair = adapted_pair(model_type, parameters, attention(model_type), order=order, device=device)
    assert_adapters_act(pair.ours, pair.batch)
    assert_same_step(pair)
    merged_weights.clear()
    step(pair.reference, pair.batch)
    assert len(merged_weights) >= 8, "PEFT merges each weight when it registers and when it is read"
    merged_weights.clear()
    step(pair.ours, pair.batch)
    fused = {row.lora for row in patch_report(pair.ours)}
    if order == "patch first":
        assert all(
            "call patch_model again with the same options to fuse" in value for value in fused
        )
        # PEFT's own registration merges. Before 0.21 its proxy returns only the merged weight.
        assert len(merged_weights) == (4 if factor_proxies() else 8)
    else:
        assert fused == {"fused (down_proj, gate_up_proj)"}
        assert merged_weights == []


@pytest.mark.parametrize("parameter", EXPERTS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_one_projection_alone(model_type, parameter, merged_weights, device):
    pair = adapted_pair(model_type, [parameter], device=device)
    assert_adapters_act(pair.ours, pair.batch)
    assert_same_step(pair)
    merged_weights.clear()
    step(pair.ours, pair.batch)
    assert merged_weights == []


@pytest.mark.routers
@pytest.mark.parametrize("order", ["peft first", "patch first"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_router_alone(model_type, order, device):
    pair = adapted_pair(model_type, [router_parameter(model_type)], order=order, device=device)
    assert_adapters_act(pair.ours, pair.batch)
    assert_same_step(pair)
    assert {row.tier for row in patch_report(pair.ours)} == {"full"}


@pytest.mark.parametrize("order", ["peft first", "patch first"])
@pytest.mark.parametrize("model_type", SHARED)
def test_shared_experts_as_parameters(model_type, order, device):
    targets = [f"{name}.weight" for name in SHARED[model_type]]
    pair = adapted_pair(model_type, [*EXPERTS, *targets], order=order, device=device)
    assert_adapters_act(pair.ours, pair.batch)
    # PEFT 0.18 draws other random factors, and one gradient is small: 1.3e-5.
    assert_same_step(pair, None if rewrites_targets() else 2 * FP32)


@pytest.mark.parametrize("order", ["peft first", "patch first"])
@pytest.mark.parametrize("model_type", SHARED)
def test_shared_experts_and_their_gate_as_linear_modules(model_type, order, device):
    """Adapt the layers alone: given a model's config, PEFT mistakes gate_proj for the experts'."""
    reference = tiny_models.build(model_type).to(device)
    ours = copy.deepcopy(reference)
    batch = {key: value.to(device) for key, value in tiny_models.inputs(reference).items()}
    plain = logits(reference, batch)
    if order == "patch first":
        patch_model(ours)
    for model in (reference, ours):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            inject_adapter_in_model(lora_config(modules=SHARED[model_type]), model.model.layers)
    if order == "peft first":
        patch_model(ours)
    pair = Pair(reference, ours, batch)
    assert rel_err(logits(ours, pair.batch), plain) > 1e-2, "the adapters do not act"
    assert_same_step(pair)
    adapted = {name.split(".lora_")[0] for name in adapter_gradients(ours) if ".lora_" in name}
    assert {name.split(".mlp.")[1] for name in adapted} == set(SHARED[model_type])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_attention_alone_computes_no_expert_weight_gradient(model_type, outer_sums, device):
    pair = adapted_pair(model_type, modules=attention(model_type), device=device)
    outer_sums.clear()  # the self-check's
    assert_same_step(pair)
    assert outer_sums == []
    for experts in expert_modules(pair.ours):
        assert all(p.grad is None and not p.requires_grad for p in experts.parameters())


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_expert_adapters_compute_no_dense_weight_gradient(model_type, outer_sums, device):
    rank = 3
    pair = adapted_pair(model_type, EXPERTS, r=rank, device=device)
    outer_sums.clear()  # the self-check's
    step(pair.ours, pair.batch)
    assert len(outer_sums) == 8, "two factors of two projections in two layers"
    assert all(rank in shape[1:] for shape in outer_sums)
    assert all(p.grad is None for e in expert_modules(pair.ours) for p in e.parameters())


def test_the_counter_of_weight_gradients_counts(outer_sums, device):
    model = patch_model(tiny_models.build("qwen3_moe").to(device))
    outer_sums.clear()  # the self-check's
    step(model, {key: value.to(device) for key, value in tiny_models.inputs(model).items()})
    assert len(outer_sums) == 4


@pytest.mark.parametrize("rank", [3, 8])
@pytest.mark.parametrize("width", [8, 16, 24], ids=["2F<D", "2F=D", "2F>D"])
@pytest.mark.parametrize(
    ("model_type", "key"),
    [("qwen3_moe", "moe_intermediate_size"), ("gpt_oss", "intermediate_size")],
)
def test_ranks_and_widths_and_merging(model_type, key, width, rank, device):
    pair = adapted_pair(
        model_type, EXPERTS, r=rank, overrides={key: width, "hidden_size": 32}, device=device
    )
    up = expert_modules(pair.ours)[0].gate_up_proj
    assert sorted(up.shape[1:]) == sorted((2 * width, 32))
    assert_same_step(pair)
    with torch.no_grad():
        adapted = pair.ours(**pair.batch).logits
        merged = pair.ours.merge_and_unload()(**pair.batch).logits
        reference = pair.reference.merge_and_unload()(**pair.batch).logits
    assert_close(merged, adapted, 1e-4)
    assert_close(merged, reference, limit_on(pair.batch))


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"rank_pattern": {r".*\.gate_up_proj": 5}},
        {"alpha_pattern": {r".*\.down_proj": 11}},
        {"rank_pattern": {r".*layers\.1.*": 2}, "alpha_pattern": {r".*layers\.0.*": 1}},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("model_type", ["olmoe", "gpt_oss"])
def test_scaling_and_rank_variants(model_type, options, device):
    pair = adapted_pair(model_type, EXPERTS, **options, device=device)
    plain = adapted_pair(model_type, EXPERTS, device=device)
    signature = [
        [
            (tuple(m.r.values()), tuple(m.scaling.values()))
            for m in p.ours.modules()
            if is_param_wrapper(m)
        ]
        for p in (pair, plain)
    ]
    assert signature[0] != signature[1], "the pattern matched nothing"
    assert_same_step(pair)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_fp32_factors_over_a_bf16_base(model_type, device):
    """Results on equal ids are as close to fp64 as PEFT, which rounds W + delta to bf16."""
    pair = adapted_pair(model_type, EXPERTS, dtype=torch.bfloat16, device=device)
    exact = copy.deepcopy(pair.reference).double()
    generator = torch.Generator().manual_seed(0)
    E, D = expert_modules(pair.ours)[0].gate_up_proj.shape[0], 32
    ids = torch.rand(40, E, generator=generator).argsort(-1)[:, :2]
    x, probe = torch.randn(2, 40, D, generator=generator).bfloat16().to(device)
    weights = torch.rand(40, 2, generator=generator).bfloat16().to(device)
    ids = ids.to(device)
    results = []
    for model, dtype in ((pair.reference, x.dtype), (pair.ours, x.dtype), (exact, torch.float64)):
        wrapper = next(m for name, m in model.named_modules() if name.endswith("mlp.experts"))
        factors = [p for p in wrapper.parameters() if p.requires_grad]
        out = wrapper(x.to(dtype), ids, weights.to(dtype))
        gradients = torch.autograd.grad(out, factors, probe.to(dtype))
        results.append([out, *gradients])
        if model is not exact:
            assert {t.dtype for t in (*factors, *gradients)} == {torch.float32}
    for name, theirs, ours, ref in zip(["out", "A", "B", "A", "B"], *results, strict=True):
        bf16_rule(ours, theirs, ref, name)


def test_fuse_lora_off_leaves_adapters_to_peft(merged_weights, device):
    pair = adapted_pair("qwen3_moe", EXPERTS, patch={"fuse_lora": "off"}, device=device)
    assert_same_step(pair)
    merged_weights.clear()
    step(pair.ours, pair.batch)
    assert len(merged_weights) == 8, "PEFT merges each weight when it registers and when it is read"
    assert {row.lora for row in patch_report(pair.ours)} == {"peft: fuse_lora is off"}


def test_fuse_lora_require(merged_weights, device):
    pair = adapted_pair("gpt_oss", EXPERTS, patch={"fuse_lora": "require"}, device=device)
    assert_same_step(pair)
    merged_weights.clear()
    step(pair.ours, pair.batch)
    assert merged_weights == []
    model = adapt(
        tiny_models.build("gpt_oss").to(device), lora_config([UP, "experts.gate_up_proj_bias"])
    )
    with pytest.raises(
        UnsupportedOptionError,
        match="fuse_lora='require' cannot hold: parameter 'gate_up_proj_bias'",
    ):
        patch_model(model, fuse_lora="require")


def test_adapters_on_expert_biases_run_through_peft(device):
    pair = adapted_pair(
        "gpt_oss", [UP, DOWN, "experts.gate_up_proj_bias", "experts.down_proj_bias"], device=device
    )
    assert_adapters_act(pair.ours, pair.batch)
    assert_same_step(pair)


@pytest.mark.parametrize("recompute", [False, True])
def test_recompute_changes_no_bit(recompute, device):
    pair = adapted_pair("qwen3_moe", EXPERTS, patch={"recompute": recompute}, device=device)
    other = adapted_pair("qwen3_moe", EXPERTS, patch={"recompute": not recompute}, device=device)
    assert torch.equal(step(pair.ours, pair.batch), step(other.ours, other.batch))
    for a, b in zip(
        adapter_gradients(pair.ours).values(), adapter_gradients(other.ours).values(), strict=True
    ):
        assert torch.equal(a, b)
