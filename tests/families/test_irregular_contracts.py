"""Families whose router, experts or block are called unlike the rule: the contract of each."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moe_patch import UnsupportedModelError, patch_model, patch_report
from tests.support import tiny_models
from tests.support.numerics import assert_close, probe
from tests.support.parity import assert_parity, run_block
from tests.support.special import LIMIT, only, pair, seeded

VARIANTS = [
    ("cohere2_moe", {"expert_selection_fn": "sigmoid", "norm_topk_prob": True}),
    ("cohere2_moe", {"expert_selection_fn": "sigmoid", "norm_topk_prob": False}),
    ("cohere2_moe", {"shared_expert_combination_strategy": "average"}),
    ("cohere2_moe", {"num_shared_experts": 0}),
    ("deepseek_v4", {"scoring_func": "sigmoid"}),
    ("doge", {"num_experts_per_tok": 5}),
    ("inkling", {"n_shared_experts": 2}),
    ("inkling2", {"scoring_func": "sqrtsoftplus"}),
    ("jetmoe", {"num_experts_per_tok": 3}),
    ("llama4", {"num_experts_per_tok": 1}),
    ("longcat_flash", {"zero_expert_num": 0}),
    ("phimoe", {"input_jitter_noise": 0.1, "router_jitter_noise": 0.3}),
    ("step3p7", {"mlp_layer_types": ["sparse", "sparse"], "swiglu_limits": [0.0, 0.5]}),
]


@pytest.mark.parametrize(("name", "over"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "")
def test_config_variants(name, over) -> None:
    model, reference = pair(name, **over)
    assert_parity(seeded(model), seeded(reference), LIMIT)


@pytest.mark.families("dbrx")
@pytest.mark.parametrize("p", [None, 1.0, 2.0])
def test_dbrx_norm_and_jitter(p) -> None:
    """Every L_p norm of the weights agrees; equal jitter acts on the experts' input."""
    base = tiny_models.FAMILIES["dbrx"].over["ffn_config"]
    over = base | {"moe_normalize_expert_weights": p, "moe_jitter_eps": 0.2}
    model, reference = pair("dbrx", ffn_config=over)
    noisy = seeded(reference)
    assert_parity(seeded(model), noisy, LIMIT)
    for each in (model, reference):
        each.eval()
    calm = seeded(reference)
    assert_parity(seeded(model), calm, LIMIT)
    assert not torch.equal(noisy["out"], calm["out"])


@pytest.mark.parametrize("seed", range(4))
def test_phimoe_samples_the_same_experts(seed) -> None:
    """SparseMixer in training agrees after many draws: ids, weights, gradient, generator state."""
    model, reference = pair("phimoe", router_jitter_noise=0.5)
    routers = [only(m, "PhimoeTopKRouter") for m in (model, reference)]
    x = tiny_models.hidden(reference, 8, 64).reshape(-1, 32).detach()
    results = []
    for router in routers:
        torch.manual_seed(seed)
        leaf = x.clone().requires_grad_()
        logits, weights, ids = router(leaf)
        probe(weights).backward()
        results.append((logits, weights, ids, leaf.grad, torch.get_rng_state()))
    for mine, theirs in zip(results[0][:2], results[1][:2], strict=True):
        assert_close(mine, theirs, LIMIT)
    assert torch.equal(results[0][2], results[1][2])
    assert_close(results[0][3], results[1][3], LIMIT)
    assert torch.equal(results[0][4], results[1][4])
    best = results[0][0].argmax(-1)
    assert (results[0][2][:, 0] != best).any(), "nothing was sampled"


BLOCKS = {
    "dbrx": "DbrxFFN", "deepseek_v4": "DeepseekV4SparseMoeBlock", "doge": "DogeCDMoE",
    "inkling": "InklingMoE", "jetmoe": "JetMoeMoE", "llama4": "Llama4TextMoe",
    "longcat_flash": "LongcatFlashMoE", "phimoe": "PhimoeSparseMoeBlock",
    "zaya": "ZayaSparseMoeBlock",
}  # fmt: skip


def last_block(model: nn.Module, name: str) -> nn.Module:
    """Return the last block: DeepSeek-V4's first block hashes token ids."""
    return [m for m in model.modules() if type(m).__name__ == BLOCKS[name]][-1]


@pytest.mark.parametrize("shape", [(1, 0, 32), (0, 5, 32)])
@pytest.mark.parametrize("name", BLOCKS)
def test_no_tokens(name, shape) -> None:
    """Return an empty result, and zero gradients for every parameter that the block uses."""
    block = last_block(pair(name)[0], name)
    x = torch.randn(shape, requires_grad=True)
    out = block(x)
    out = out[0] if isinstance(out, tuple) else out
    assert out.numel() == 0
    assert out.shape[-1] == 32
    out.sum().backward()
    for key, p in block.named_parameters():
        # The scale needs a previous layer's state. A correction bias affects only the choice.
        if p.requires_grad and "router_states_scale" not in key and "correction_bias" not in key:
            assert p.grad is not None, key
            assert not p.grad.any(), key


@pytest.mark.parametrize("name", BLOCKS)
def test_the_block_compiles_without_a_graph_break(name) -> None:
    block = last_block(pair(name)[0].eval(), name)
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for mine, eager in zip(
        run_block(compiled, x).items(), run_block(block, x).items(), strict=True
    ):
        if eager[1] is not None:
            assert_close(mine[1], eager[1], LIMIT, eager[0])


# --- single families ------------------------------------------------------------------------------


def test_llama4_scores_and_both_calls_of_its_experts() -> None:
    model, reference = pair("llama4")
    x = tiny_models.hidden(reference, 1, 9).reshape(9, -1).detach()
    scores, logits = only(model, "Llama4Router")(x)
    ref_scores, ref_logits = only(reference, "Llama4Router")(x)
    assert_close(scores, ref_scores, LIMIT)
    assert_close(logits, ref_logits, LIMIT)
    rows = x.repeat(8, 1)
    experts = [only(m, "Llama4TextExperts") for m in (model, reference)]
    assert_parity(*(run_block(e, rows) for e in experts), LIMIT)
    out, block_logits = only(model, "Llama4TextMoe")(x.view(3, 3, -1))
    assert out.shape == x.shape
    assert_close(block_logits, ref_logits, LIMIT)


def test_llama4_router_hook_that_replaces_the_scores_steers_the_block() -> None:
    blocks = [only(model, "Llama4TextMoe") for model in pair("llama4")]
    x = tiny_models.hidden(blocks[1], 3, 5)
    for block in blocks:
        block.router.register_forward_hook(lambda m, args, out: (-2 * out[0].roll(1, 1), out[1]))
    assert_parity(*(run_block(block, x) for block in blocks), LIMIT)


@pytest.mark.families("longcat_flash")
def test_longcat_identity_experts_return_their_input() -> None:
    model, reference = pair("longcat_flash")
    experts = [only(m, "LongcatFlashExperts") for m in (model, reference)]
    x = tiny_models.hidden(reference, 1, 6).reshape(6, -1).detach()
    ids = torch.tensor([[8, 9], [0, 8], [9, 3], [1, 2], [8, 0], [9, 9]])
    weights = torch.rand(6, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    runs = []
    for module in experts:
        leaf, w = x.clone().requires_grad_(), weights.detach().clone().requires_grad_()
        out = module(leaf, ids, w)
        probe(out).backward()
        runs.append({"out": out.detach(), "dx": leaf.grad, "dweights": w.grad})
    assert_parity(*runs, LIMIT)
    assert_close(runs[0]["out"][0], x[0] * weights[0].sum(), LIMIT)
    beyond = experts[0](x, torch.full((6, 2), 10), weights)
    assert not beyond.any(), "an id past the identity experts is an empty slot"


@pytest.mark.families("zaya")
def test_zaya_skips_and_hands_its_state_on() -> None:
    model, reference = pair("zaya")
    for each in (model, reference):
        for module in each.modules():
            if type(module).__name__ == "ZayaRouter":
                module.balancing_biases[-1] = 0.3
    block, ref_block = (only(m, "ZayaSparseMoeBlock") for m in (model, reference))
    x = tiny_models.hidden(reference, 2, 32).detach()
    mine, theirs = (b.gate(x) for b in (block, ref_block))
    for a, b in zip(mine, theirs, strict=True):
        if a.is_floating_point():
            assert_close(a, b, LIMIT)
        else:
            assert torch.equal(a, b)
    skipped = (theirs[1] == 0).sum()
    assert 0 < skipped < theirs[1].numel()
    assert_parity(seeded(model), seeded(reference), LIMIT)


@pytest.mark.families("inkling")
def test_inkling_router_weights_the_shared_experts() -> None:
    model, reference = pair("inkling", n_shared_experts=2)
    x = tiny_models.hidden(reference, 2, 16).detach()
    mine, theirs = (only(m, "InklingTopkRouter")(x) for m in (model, reference))
    assert len(mine) == len(theirs) == 4
    assert_close(mine[0], theirs[0], LIMIT)
    assert_close(mine[3], theirs[3], LIMIT)
    assert torch.equal(mine[2].sort(-1).values, theirs[2].sort(-1).values)


def test_gemma4_returns_probabilities_and_scaled_weights() -> None:
    model, reference = pair("gemma4")
    x = tiny_models.hidden(reference, 1, 16).reshape(16, -1).detach()
    mine, theirs = (only(m, "Gemma4TextRouter")(x) for m in (model, reference))
    for a, b in zip(mine[:2], theirs[:2], strict=True):
        assert_close(a, b, LIMIT)
    assert torch.equal(mine[2], theirs[2])
    assert_close(mine[0].sum(-1), torch.ones(16), LIMIT)


@pytest.mark.families("doge")
def test_doge_keys_and_logits() -> None:
    model, reference = pair("doge")
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    (out, logits), (ref_out, ref_logits) = (only(m, "DogeCDMoE")(x) for m in (model, reference))
    assert logits.shape == (2, 10, 4)
    assert_close(logits, ref_logits, LIMIT)
    assert_close(out, ref_out, LIMIT)


@torch.no_grad()
@pytest.mark.families("doge")
def test_doge_renormalises_without_gradients() -> None:
    """Values agree; gradients have no reference, as transformers divides in place."""
    model, reference = pair("doge", norm_topk_prob=True)
    batch = tiny_models.inputs(reference)
    assert_close(model(**batch).logits, reference(**batch).logits, LIMIT)


@pytest.mark.families("step3p7")
def test_step3p7_fuses_layers_without_a_limit() -> None:
    """Fuse layers without a limit; a limit after the activation needs separate grouped products."""
    model, _ = pair("step3p7", mlp_layer_types=["sparse", "sparse"], swiglu_limits=[None, 7.0])
    assert [bool(row.reason) for row in patch_report(model)] == [False, True]


@pytest.mark.families("inkling2")
def test_scores_that_no_routing_function_knows_are_refused() -> None:
    model = tiny_models.build("inkling2", scoring_func="tanh")
    with pytest.raises(UnsupportedModelError, match="Tanh.*sigmoid, sqrtsoftplus"):
        patch_model(model)
    assert not patch_report(model)


@pytest.mark.families("longcat_flash")
def test_undecorated_experts_under_a_foreign_forward_are_refused() -> None:
    """Refuse a forward bound on the instance, as expert and tensor parallelism bind one."""
    model = tiny_models.build("longcat_flash")
    experts = only(model, "LongcatFlashExperts")
    own = experts.forward
    experts.forward = lambda *args: own(*args)
    with pytest.raises(UnsupportedModelError, match="LongcatFlashExperts"):
        patch_model(model)
