"""warmup: every kind of block once, nothing left behind, and on a GPU no compilation afterwards."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import moe_patch.tools.warmup
from moe_patch import (
    PatchStateError,
    UnsupportedModelError,
    UnsupportedOptionError,
    lora_targets,
    patch_model,
    quantize_experts,
    record,
)
from moe_patch.cli import main
from moe_patch.formats.packed import PackedWeight
from moe_patch.ops.backend import BackendChoice
from moe_patch.tools.warmup import WarmedBlock, warmup
from tests.support import SUPPORT, tiny_models
from tests.support.adapters import EXPERTS, adapt, lora_config
from tests.support.limits import HANG_S
from tests.support.packed_ranks import base
from tests.support.parity import run_block
from tests.support.snapshots import assert_unchanged, snapshot
from tests.support.tiny_models import blocks

LORAS = "lora13", "lora2"


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
    with pytest.raises(UnsupportedOptionError, match="'int8'; accepted: bf16, nf4, fp8, mxfp4"):
        warmup(model, progress=False, storage="int8")


@pytest.mark.usefixtures("everywhere")
def test_a_storage_is_for_experts_on_meta() -> None:
    model = patch_model(tiny_models.build("qwen3_moe"))
    with pytest.raises(UnsupportedOptionError, match="storage='fp8', but .* is not on the meta"):
        warmup(model, progress=False, storage="fp8")


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


@pytest.fixture
def packed_calls(monkeypatch) -> list[tuple]:
    """Record what each call of the fused operator is compiled for, by storage of the experts."""
    calls: list[tuple] = []
    original = moe_patch.runtime.experts.experts_mlp

    def note(x_TD, ids_TK, weights_TK, w, glu, **options):
        ranks = [None if lora is None else lora.A_ERI.shape for lora in map(options.get, LORAS)]
        w13, of = w.w13_EHD, ("bf16", False, 0)
        if isinstance(w13, PackedWeight):
            of = w13.storage, w13.in_fp8, len(w13.scales)
        calls.append((len(x_TD), *of, x_TD.dtype, torch.is_grad_enabled(), *ranks))
        return original(x_TD, ids_TK, weights_TK, w, glu, **options)

    monkeypatch.setattr(moe_patch.runtime.experts, "experts_mlp", note)
    return calls


@pytest.mark.usefixtures("everywhere")
def test_mxfp4_experts_run_as_in_training(packed_calls, tmp_path) -> None:
    """A loaded model, one on meta, a config and the command make equal calls."""
    calls, model = packed_calls, patch_model(base("mxfp4"))
    D = model.config.hidden_size
    blocks(model)[0][1](torch.randn(1, 6, D, requires_grad=True))
    assert calls[0][:2] == (6, "mxfp4")
    warmup(model, [6], progress=False)
    warmup(copy.deepcopy(model).to("meta"), [6], progress=False, device="cpu")
    config = copy.deepcopy(model.config)
    warmup(config, [6], progress=False, storage="mxfp4")
    config.quantization_config = {"quant_method": "mxfp4"}
    warmup(config, [6], progress=False)
    config.save_pretrained(tmp_path)
    command = ["warmup", str(tmp_path), "--device", "cpu", "--tokens", "6", "--json"]
    assert main([*command, "--dtype", "float32"]) == 0
    assert calls[1] == calls[0]
    assert calls[1:] == calls[1:3] * 5
    calls.clear()
    # Where transformers dequantises them, they are plain.
    assert main([*command, "--storage", "bf16"]) == 0
    config.quantization_config["dequantize"] = True
    warmup(config, [6], progress=False)
    assert [each[1] for each in calls] == ["bf16"] * 4
    narrow = tiny_models.config("gpt_oss", hidden_size=48)
    with pytest.raises(UnsupportedModelError, match="mxfp4 needs inputs of a multiple of 32"):
        warmup(narrow, [6], progress=False, storage="mxfp4")


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("compute", ["decoded", "fp8", "fp8_copy"])
def test_fp8_experts_run_as_in_training(compute, packed_calls, monkeypatch, tmp_path) -> None:
    """A quantised model and a config of its storage make equal calls; the command does too."""
    calls = packed_calls
    monkeypatch.setattr(moe_patch.runtime.fp8, "_is_hopper", lambda *_: True)
    monkeypatch.setattr(moe_patch.runtime.fp8, "_runs", lambda *_: True)
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1}
    model = quantize_experts(tiny_models.build("qwen3_moe", torch.bfloat16, **sizes), "fp8")
    patch_model(model, compute=compute)
    x = torch.randn(1, 6, 128, dtype=torch.bfloat16, requires_grad=True)
    blocks(model)[0][1](x)
    (row,) = warmup(model, [6], progress=False)
    assert row.skipped == ""
    assert calls[1] == calls[0]
    assert (
        calls[0][2:4] == {"decoded": (False, 1), "fp8": (True, 1), "fp8_copy": (True, 3)}[compute]
    )
    config = tiny_models.config("qwen3_moe", **sizes)
    options = {"dtype": torch.bfloat16, "compute": compute, "device": "cpu"}
    warmup(config, [6], progress=False, storage="fp8", **options)
    command = ["warmup", str(tmp_path), "--compute", compute, "--device", "cpu", "--tokens", "6"]
    command += ["--dtype", "bfloat16", "--json"]
    config.save_pretrained(tmp_path)
    assert main([*command, "--storage", "fp8"]) == 0
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    warmup(config, [6], progress=False, **options)
    config.save_pretrained(tmp_path)
    assert main(command) == 0
    # Packed experts on meta keep their storage.
    warmup(copy.deepcopy(model).to("meta"), [6], progress=False, device="cpu")
    assert calls[3:] == calls[1:3] * 5
    # Plans this long are decoded into a buffer.
    (row,) = warmup(model, progress=False, training=False)
    assert row.tokens == [1, 128, 512, 2052]


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


FP8_KERNELS = {
    "_quantise_rows_kernel", "_hopper_fp8_up_kernel", "_hopper_fp8_rows_kernel",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["plain", "fp8", "fp8_copy"])
def test_no_size_compiles_afterwards_on_hopper(compute: str) -> None:
    """Sizes other than those warmed up compile no kernel for sm_90 (offline_warmup.py)."""
    pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "offline_warmup.py"), compute],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    compiled = json.loads(result.stdout.splitlines()[-1])
    from moe_patch.kernels.common.versions import known_triton

    # On an unknown Triton the portable kernel replaces the specialised one.
    dh = "_hopper_dh_kernel" if known_triton() else "_dh_kernel"
    own = {
        "plain": {"_up_kernel", dh},
        "fp8": FP8_KERNELS | {"_packed_rows_kernel"},
        "fp8_copy": FP8_KERNELS | {"_hopper_fp8_dh_kernel"},
    }
    assert {"forward_kernel"} | own[compute] <= set(compiled["warmup"])
    assert compiled["later"] == []


def launched_by(warm: Callable[[], list[WarmedBlock]]) -> set[str]:
    """Return the kernels that a warmup of one block launches.

    It may compile none of them, because other tests of this process have.
    """
    from triton import knobs

    names: set[str] = set()
    hook = lambda launch: names.add(launch.get()["name"])  # noqa: E731
    with mock.patch.object(knobs.runtime, "launch_enter_hook", hook):
        (row,) = warm()
    assert row.skipped == ""
    return names


def compiled_by(run: Callable[[], Any]) -> set[str]:
    """Return the kernels that are compiled meanwhile."""
    from triton import knobs

    names: set[str] = set()
    hook = lambda *_, fn, **__: names.add(fn.name)  # noqa: E731
    with mock.patch.object(knobs.runtime, "jit_post_compile_hook", hook):
        run()
    return names


def run_sizes(block: nn.Module, D: int) -> None:
    """Run a block in bf16 on token counts of all classes of tiles, with and without gradients."""
    for T in (6, 1, 17, 64, 128, 300, 512, 2048, 2052, 4096, 8192):
        x = torch.randn(1, T, D, device="cuda", dtype=torch.bfloat16)
        run_block(block, x)
        with torch.no_grad():
            block(x)


@pytest.mark.gpu
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_gpu_no_size_compiles_afterwards(model_type) -> None:
    model = patch_model(tiny_models.build(model_type, dtype=torch.bfloat16).to("cuda"))
    block, D = blocks(model)[0][1], tiny_models.SIZES["hidden_size"]
    assert "forward_kernel" in launched_by(lambda: warmup(model, progress=False))

    def every_size() -> None:
        for T in (512, *range(1, 601)):
            run_block(block, torch.randn(1, T, D, device="cuda", dtype=torch.bfloat16))

    assert compiled_by(every_size) == set()


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["decoded", "fp8", "fp8_copy"])
def test_gpu_no_size_compiles_afterwards_with_fp8_experts(compute) -> None:
    """A config warms what a model launches that is quantised and adapted later."""
    sizes = {"hidden_size": 384, "moe_intermediate_size": 256, "num_hidden_layers": 1}
    empty = tiny_models.build("qwen3_moe", dtype=torch.bfloat16, **sizes).to("meta")
    empty = patch_model(adapt(empty, lora_config(EXPERTS, [], r=8)), compute=compute)
    launched = launched_by(lambda: warmup(empty, progress=False, device="cuda", storage="fp8"))
    of = {"decoded": set(), "fp8": FP8_KERNELS, "fp8_copy": FP8_KERNELS | {"_hopper_fp8_dh_kernel"}}
    hopper = torch.cuda.get_device_capability() == (9, 0)
    assert launched & of["fp8_copy"] == (of[compute] if hopper else set())
    model = tiny_models.build("qwen3_moe", dtype=torch.bfloat16, **sizes).to("cuda")
    model = adapt(quantize_experts(model, "fp8"), lora_config(EXPERTS, [], r=8)).to("cuda")
    patch_model(model, self_check=False, compute=compute)
    assert compiled_by(lambda: run_sizes(blocks(model)[0][1], 384)) == set()


@pytest.mark.gpu
def test_gpu_no_size_compiles_afterwards_with_mxfp4_experts() -> None:
    model = patch_model(base("mxfp4").to("cuda", torch.bfloat16), self_check=False)
    config = copy.deepcopy(model.config)
    config.quantization_config = {"quant_method": "mxfp4"}
    options: Any = {"progress": False, "dtype": torch.bfloat16, "device": "cuda"}
    assert "_mxfp4_kernel" in launched_by(lambda: warmup(config, **options))
    assert compiled_by(lambda: run_sizes(blocks(model)[0][1], config.hidden_size)) == set()


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
def test_gpu_warmed_from_a_config_serves_the_model() -> None:
    config = tiny_models.config("olmoe")
    options: Any = {"progress": False, "dtype": torch.bfloat16, "device": "cuda"}
    assert "forward_kernel" in launched_by(lambda: warmup(copy.deepcopy(config), **options))
    model = patch_model(tiny_models.build("olmoe", dtype=torch.bfloat16).to("cuda"))
    x = torch.randn(2, 9, tiny_models.SIZES["hidden_size"], device="cuda", dtype=torch.bfloat16)
    assert compiled_by(lambda: run_block(blocks(model)[0][1], x)) == set()
