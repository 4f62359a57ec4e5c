"""warmup: every kind of block once, nothing left behind, and on a GPU no compilation afterwards."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model

import moe_patch.tools.warmup
from moe_patch import PatchStateError, UnsupportedOptionError, lora_targets, patch_model, record
from moe_patch.ops.backend import BackendChoice
from moe_patch.tools.warmup import warmup
from tests.support import SUPPORT, tiny_models
from tests.support.limits import HANG_S
from tests.support.parity import run_block
from tests.support.snapshots import assert_unchanged, snapshot
from tests.support.tiny_models import blocks


@pytest.fixture
def everywhere(monkeypatch) -> None:
    """Run blocks although a CPU has nothing to compile."""
    choice = BackendChoice("triton", "for this test")
    monkeypatch.setattr(moe_patch.tools.warmup, "choose_backend", lambda *_: choice)


def test_an_unpatched_model_and_options_beside_a_model_are_refused() -> None:
    model = tiny_models.build("qwen3_moe")
    with pytest.raises(PatchStateError, match="not patched; call patch_model first"):
        warmup(model, progress=False)
    patch_model(model)
    with pytest.raises(UnsupportedOptionError, match="recompute.*together with a model"):
        warmup(model, progress=False, recompute=True)
    with pytest.raises(UnsupportedOptionError, match="dtype together with a model"):
        warmup(model, progress=False, dtype=torch.bfloat16)


def test_progress_goes_to_stderr(capsys) -> None:
    warmup(patch_model(tiny_models.build("qwen3_moe")))
    said = capsys.readouterr()
    assert "compiling MoE kernels: 100%" in said.err
    assert said.out == ""


def test_on_a_cpu_there_is_nothing_to_compile() -> None:
    (row,) = warmup(patch_model(tiny_models.build("qwen3_moe")), progress=False)
    assert row.tokens == []
    assert "nothing to compile on the torch backend (no Triton kernels on cpu)" in row.skipped


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("lora", [False, True])
def test_one_row_per_kind_and_nothing_left_behind(lora) -> None:
    model = tiny_models.build("deepseek_v3")
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, **lora_targets(model)))
    patch_model(model)
    before, state = snapshot(model), torch.get_rng_state()
    (row,) = warmup(model, progress=False)
    # With 8 experts, 2 of them per token: 1, 32 and 128 rows per expert.
    assert (row.tokens, row.skipped) == ([1, 128, 512], "")
    assert_unchanged(before, snapshot(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("training", [True, False])
def test_the_same_call_as_the_block_makes(training, monkeypatch) -> None:
    calls = []
    original = moe_patch.runtime.experts.experts_mlp

    def count(x_TD, ids_TK, weights_TK, w, glu, **options):
        leaves = {"x": x_TD, "weights": weights_TK, "w13": w.w13_EHD, "A": options["lora13"].A_ERI}
        tensors = {
            n: (t.dtype, t.shape[1:], t.stride(), t.requires_grad) for n, t in leaves.items()
        }
        calls.append((tensors, ids_TK.dtype, ids_TK.shape, torch.is_grad_enabled()))
        return original(x_TD, ids_TK, weights_TK, w, glu, **options)

    model = tiny_models.build("qwen3_moe", num_hidden_layers=1)
    model = patch_model(get_peft_model(model, LoraConfig(r=2, **lora_targets(model))))
    x = torch.randn(1, 6, tiny_models.SIZES["hidden_size"], requires_grad=training)
    monkeypatch.setattr(moe_patch.runtime.experts, "experts_mlp", count)
    with torch.set_grad_enabled(training):
        blocks(model)[0][1](x)
    warmup(model, [6], training=training, progress=False)
    assert calls[1] == calls[0]
    # A model in training is also evaluated.
    assert [grad for *_, grad in calls[1:]] == ([True, False] if training else [False])


@pytest.mark.usefixtures("everywhere")
def test_a_config_needs_no_model() -> None:
    (row,) = warmup(tiny_models.config("qwen3_moe"), [3, 5], progress=False, recompute=True)
    assert (row.path, row.tokens, row.skipped) == ("model.layers.0.mlp", [3, 5], "")


@pytest.mark.usefixtures("everywhere")
@pytest.mark.families("muse_spark", "jetmoe", "doge")
def test_what_is_not_run_says_why() -> None:
    phimoe = patch_model(tiny_models.build("phimoe"))
    assert "pass top_k" in warmup(phimoe, progress=False)[0].skipped
    assert warmup(phimoe, [2], top_k=2, progress=False)[0].tokens == [2]
    composed = patch_model(tiny_models.build("muse_spark"))
    assert warmup(composed, [2], progress=False)[0].tokens == [2]
    own = patch_model(tiny_models.build("jetmoe"))
    assert "a forward of their own" in warmup(own, progress=False)[0].skipped
    doge = patch_model(tiny_models.build("doge"))
    assert "no experts module" in warmup(doge, progress=False)[0].skipped
    model = patch_model(tiny_models.build("qwen3_moe"))
    with record(model), pytest.raises(PatchStateError, match="call warmup before record"):
        warmup(model, progress=False)


@pytest.mark.slow
def test_no_size_compiles_afterwards_on_hopper() -> None:
    """Sizes other than those warmed up compile no kernel for sm_90 (offline_warmup.py)."""
    pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "offline_warmup.py")],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    compiled = json.loads(result.stdout.splitlines()[-1])
    from moe_patch.kernels.common.versions import known_triton

    # On an unknown Triton the portable kernel replaces the specialised one.
    dh = "_hopper_dh_kernel" if known_triton() else "_dh_kernel"
    assert {"forward_kernel", "_up_kernel", dh} <= set(compiled["warmup"])
    assert compiled["later"] == []


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_gpu_no_size_compiles_afterwards(model_type, monkeypatch) -> None:
    import triton

    compiled: list[str] = []

    def note(*_, fn, **__) -> None:
        compiled.append(fn.name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    model = patch_model(tiny_models.build(model_type, dtype=torch.bfloat16).to("cuda"))
    block, D = blocks(model)[0][1], tiny_models.SIZES["hidden_size"]
    (row,) = warmup(model, progress=False)
    assert row.skipped == ""
    assert compiled
    compiled.clear()
    for T in (512, *range(1, 601)):
        run_block(block, torch.randn(1, T, D, device="cuda", dtype=torch.bfloat16))
    assert set(compiled) == set()


@pytest.mark.gpu
def test_gpu_warms_and_trains_in_two_gigabytes() -> None:
    """Compiling and choosing tiles need no spare memory."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "num_experts": 64}
    model = tiny_models.build("qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=1, **sizes)
    patch_model(model.to("cuda"))
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties("cuda").total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**31) / total)
    try:
        (row,) = warmup(model, progress=False)
        assert row.skipped == ""
        x = torch.randn(1, 8192, 1024, device="cuda", dtype=torch.bfloat16)
        for name, value in run_block(blocks(model)[0][1], x).items():
            assert value is None or value.isfinite().all(), name
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_gpu_warmed_from_a_config_serves_the_model(monkeypatch) -> None:
    import triton

    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda *_, fn, **__: compiled.append(fn.name)
    )
    config = tiny_models.config("olmoe")
    rows = warmup(copy.deepcopy(config), progress=False, dtype=torch.bfloat16, device="cuda")
    assert [row.skipped for row in rows] == [""]
    assert compiled
    compiled.clear()
    model = patch_model(tiny_models.build("olmoe", dtype=torch.bfloat16).to("cuda"))
    x = torch.randn(2, 9, tiny_models.SIZES["hidden_size"], device="cuda", dtype=torch.bfloat16)
    compiled.clear()
    run_block(blocks(model)[0][1], x)
    assert not compiled
