"""torch.compile: one graph per block and per model, dynamic T, patched before and after.

Blocks with adapters are in tests/lora/test_training.py, those of special families in
tests/families/test_irregular_contracts.py.
"""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from moe_patch import patch_model, patch_report, unpatch_model
from moe_patch.ops.experts.op import experts_mlp
from moe_patch.types import ExpertWeights, Glu, Lora
from tests.support import tiny_models
from tests.support.numerics import FP32, assert_close

LIMIT = 2e-6
FAMILIES = ["qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss", "mixtral"]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def step(module, x, parameters):
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    return out, *torch.autograd.grad(out.square().sum(), [x, *parameters])


def assert_one_graph(block, backend, limit):
    """Run six numbers of tokens in one graph and at most two compilations, with equal results.

    Returns the compiled block, the last input and the parameters of the gradients.
    """
    parameters = [p for p in block.parameters() if p.requires_grad]
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    for tokens in (7, 12, 3, 31, 16, 5):
        x = tiny_models.hidden(block, 1, tokens)
        pairs = zip(step(compiled, x, parameters), step(block, x, parameters), strict=True)
        for found, wanted in pairs:
            assert_close(found, wanted, limit)
    assert counter.frame_count <= 2
    return compiled, x, parameters


@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_is_one_graph_for_every_number_of_tokens(name):
    """Compile forward and backward at most twice, the second time for the dynamic size."""
    block = tiny_models.blocks(patch_model(tiny_models.build(name)))[0][1]
    assert_one_graph(block, "aot_eager", LIMIT)


def assert_one_graph_of_a_model(model, order, backend, limit):
    """Run three numbers of tokens in one graph and at most two compilations, with equal results."""
    if order == "patch first":
        patch_model(model)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    if order == "compile first":
        patch_model(compiled)
    assert {row.tier for row in patch_report(compiled)} == {"full"}
    for tokens in (7, 12, 5):
        batch = {key: t.to(model.device) for key, t in tiny_models.inputs(model, 2, tokens).items()}
        runs = []
        for each in (compiled, model):
            model.zero_grad(set_to_none=True)
            loss = each(**batch).loss
            loss.backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            runs.append([loss.detach(), *gradients])
        for found, wanted in zip(*runs, strict=True):
            assert_close(found, wanted, limit)
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("name", "layers", "order"),
    [
        ("qwen3_moe", 2, "patch first"),
        ("gpt_oss", 1, "compile first"),
    ],
)
def test_a_whole_model_is_one_graph(name, layers, order):
    """Compile forward into one graph; the tests of blocks cover backward's graph."""
    over = {"output_router_logits": False, "num_hidden_layers": layers}
    if name == "gpt_oss":  # a sliding window is transformers' own reason to compile again
        over["layer_types"] = ["full_attention"]
    assert_one_graph_of_a_model(tiny_models.build(name, **over), order, "eager", LIMIT)


def test_a_compiled_model_follows_patch_and_undo():
    """Apply each patch and each undo at the next call: no older trace runs."""
    model = tiny_models.build("qwen3_moe", output_router_logits=False)
    x = tiny_models.inputs(model)["input_ids"]
    calls = []
    experts = torch.ops.moe_patch.experts.inference

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is experts:
                calls.append(1)
            return func(*args, **(kwargs or {}))

    compiled = torch.compile(model, backend="eager")

    def count():
        calls.clear()
        with torch.no_grad(), Count():
            compiled(x)
        return len(calls)

    assert count() == 0
    patch_model(model)
    assert count() == 2
    unpatch_model(model)
    assert count() == 0


@pytest.mark.parametrize("grad", [True, False])
def test_experts_where_shapes_are_dynamic_and_floats_symbols(grad):
    D, F, E, K = 16, 8, 4, 2
    w = ExpertWeights(*(torch.randn(s, requires_grad=grad) for s in ((E, 2 * F, D), (E, D, F))))
    lora = Lora(torch.randn(E, 3, D), torch.randn(E, 2 * F, 3), 0.5)

    def run(x_TD, ids_TK, weights_TK, glu):
        return experts_mlp(x_TD, ids_TK, weights_TK, w, glu, lora13=lora, backend="torch")

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=counter)
    glu = Glu("swiglu_oai", interleaved=True, alpha=1.702, limit=7.0)
    for T in (7, 9, 12, 5):
        x_TD = torch.randn(T, D, requires_grad=grad)
        args = x_TD, torch.rand(T, E).argsort(1)[:, :K].contiguous(), torch.rand(T, K), glu
        with torch.set_grad_enabled(grad):
            outs = compiled(*args), run(*args)
            assert_close(*outs, LIMIT)
            if grad:
                assert_close(*(torch.autograd.grad(out.sum(), x_TD)[0] for out in outs), LIMIT)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "qwen2_moe", "gpt_oss"])
def test_a_patched_block_can_be_exported(model_type) -> None:
    """Export a patched block; unpatched eager experts cannot, as their loop depends on data."""
    _, block = tiny_models.blocks(patch_model(tiny_models.build(model_type).eval()))[0]
    x = tiny_models.hidden(block, 2, 5)
    with torch.no_grad():
        exported = torch.export.export(block, (x,)).module()
        found, wanted = exported(x), block(x)
    for one, other in zip(
        *(o if isinstance(o, tuple) else (o,) for o in (found, wanted)), strict=True
    ):
        assert_close(one, other, FP32)
