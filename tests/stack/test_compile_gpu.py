"""On a CUDA device: inductor, generate with and without compiled decoding, CUDA graphs.

The same on CPU is in tests/stack/test_compile.py and tests/stack/test_generate.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers.generation import CompileConfig

from moe_patch import patch_model, unpatch_model
from tests.stack.test_compile import assert_one_graph, assert_one_graph_of_a_model, step
from tests.stack.test_generate import NEW, WAYS
from tests.stack.test_stacks_gpu import assert_ours, batch_for, build, kernels
from tests.support import tiny_models
from tests.support.limits import HANG_S
from tests.support.numerics import FP32, assert_bits
from tests.support.snapshots import experts_setting

pytestmark = pytest.mark.gpu

DEVICE, ROOT = "cuda", Path(__file__).parents[2]
OURS = ("_up_kernel", "_combine_kernel")
DECODE = {
    "do_sample": False,
    "cache_implementation": "static",
    "compile_config": CompileConfig(fullgraph=True, mode="reduce-overhead"),
}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_waiting():
    """Whatever makes the host wait for the device is an error, from ``with no_waiting():`` on."""

    class Watch:
        def __enter__(self):
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    return Watch()


@pytest.mark.parametrize("name", ["qwen2_moe", "gpt_oss"])
def test_a_block_under_inductor(name, no_waiting):
    """Compile one graph, forward and backward, twice for six T; then never synchronise the host."""
    block = tiny_models.blocks(patch_model(build(name)))[0][1]
    compiled, x, parameters = assert_one_graph(block, "inductor", FP32)
    for each in (compiled, block):
        with no_waiting:
            step(each, x, parameters)


@pytest.mark.parametrize(
    ("name", "order"),
    [("qwen3_moe", "patch first"), ("qwen3_moe", "compile first")],
)
def test_a_whole_model_under_inductor(name, order):
    """Compile forward and backward twice for three T."""
    model = build(name, output_router_logits=False, num_hidden_layers=1)
    assert_one_graph_of_a_model(model, order, "inductor", FP32)
    assert_ours(model)


def decoder(name):
    model = build(name, output_router_logits=False).eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    return model


def generate(model, **options):
    torch.manual_seed(7)
    ids = batch_for(model)["input_ids"]
    return model.generate(ids, max_new_tokens=NEW, min_new_tokens=NEW, **options)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("way", WAYS)
def test_tokens_equal_the_unpatched_models(name, way):
    """Generate equal tokens in fp32 with our kernels in every step and layer; keep the setting."""
    model = decoder(name)
    options = WAYS[way] | {"disable_compile": True}
    expected, setting = generate(model, **options), experts_setting(model)
    patch_model(model)
    assert_ours(model)
    assert torch.equal(generate(model, **options), expected)
    ran = kernels(lambda: generate(model, **options))
    assert {key: ran.get(key) for key in OURS} == dict.fromkeys(OURS, 2 * NEW)
    assert not [key for key in ran if "grouped" in key.lower()]
    assert experts_setting(model) == setting
    unpatch_model(model)
    assert torch.equal(generate(model, **options), expected)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_compiled_decoding(name):
    """Run our kernels inside the CUDA graphs into which generate compiles its decode step."""
    model = decoder(name)
    expected = generate(model, **WAYS["static cache"], disable_compile=True)
    setting = experts_setting(model)
    patch_model(model)
    for _ in range(3):
        assert torch.equal(generate(model, **DECODE), expected)
    ran = kernels(lambda: generate(model, **DECODE))
    assert {key: ran.get(key) for key in OURS} == dict.fromkeys(OURS, 2 * NEW)
    assert experts_setting(model) == setting


COLD = """
import torch
from moe_patch import PatchStateError
from tests.ops.test_experts_gpu import Layer

layer, graph = Layer(8, 2, 4, 64, 32), torch.cuda.CUDAGraph()
try:
    with torch.no_grad(), torch.cuda.graph(graph):
        try:
            out = layer.forward()
        except PatchStateError as error:
            print(error)
except RuntimeError as error:
    assert "capture" in str(error), error
else:
    graph.replay()
    print("warmup is not needed:", torch.equal(out, layer.forward()))
"""


def test_a_capture_without_a_warm_up_asks_for_one(tmp_path):
    """Raise an error that names warmup, in a new process: here every kernel may have run."""
    env = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", COLD]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warmup" in done.stdout
    assert "False" not in done.stdout


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_captured_block_routes_anew(name, dtype, tokens):
    """Replay equals the eager call on each input, although parameters require gradients."""
    model = patch_model(build(name, dtype))
    block = tiny_models.blocks(model)[0][1]
    assert all(p.requires_grad for p in block.parameters())
    static = torch.randn(1, tokens, tiny_models.SIZES["hidden_size"], device=DEVICE, dtype=dtype)
    first = lambda out: out[0] if isinstance(out, tuple) else out  # noqa: E731
    with torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                block(static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = first(block(static))
        for _ in range(6):
            fresh = torch.randn_like(static)
            static.copy_(fresh)
            graph.replay()
            assert_bits(out, first(block(fresh)))
