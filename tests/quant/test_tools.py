"""Quantised experts beside PEFT's and transformers' files and the debugging tools."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from moe_patch import (
    UnsupportedOptionError,
    dequantize_experts,
    load_quantized,
    patch_model,
    quantize_experts,
    record,
    replay_file,
    shadow_results,
)
from moe_patch.cli import main
from moe_patch.cli.output import bytes_text
from moe_patch.quant import surgery
from moe_patch.quant.memory import experts_memory
from tests.support import tiny_models
from tests.support.adapters import step
from tests.support.cli_calls import answer, only_config
from tests.support.numerics import FP32, assert_bits, assert_close
from tests.support.quant_models import SIZES, STORAGES, adapted, build, logits, quantised

NORMS = ("act_norm", "grad_norm_output", "grad_norm_params", "grad_norm_lora")


def inputs(model: Any) -> dict[str, torch.Tensor]:
    return tiny_models.inputs(model.get_base_model())


def test_a_saved_adapter_loads_on_the_quantised_and_on_the_16_bit_model(tmp_path: Path) -> None:
    """Load PEFT's files on both models; on the plain model the adapter acts as on plain weights."""
    model = patch_model(adapted(quantize_experts(build(), "nf4")))
    model.save_pretrained(tmp_path)
    again = patch_model(PeftModel.from_pretrained(quantize_experts(build(), "nf4"), tmp_path))
    assert_bits(logits(again), logits(model))
    plain = patch_model(PeftModel.from_pretrained(build(), tmp_path))
    assert_bits(logits(plain), logits(patch_model(adapted(build()))))
    assert (logits(plain) - logits(build())).norm() > 0.1 * logits(plain).norm()


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("model_type", SIZES)
def test_shadow_check_compares_with_the_dequantised_weights(model_type: str, storage: str) -> None:
    """Compare with dequantised weights and change no bit of the step, with and without adapters."""
    for lora in (True, False):
        models = [quantize_experts(build(model_type), storage) for _ in range(2)]
        models = [adapted(model) if lora else model for model in models]
        plain, watched = models
        patch_model(plain)
        patch_model(watched, shadow_check=1)
        batch = inputs(plain) if lora else tiny_models.inputs(plain)
        for _ in range(3):
            assert_bits(step(watched.train(), batch), step(plain.train(), batch))
        found = [result for result in shadow_results(watched) if result.role == "experts"]
        assert len(found) == 3
        for result in found:
            assert not result.skipped
            assert result.within, str(result)
            assert "output" in result.errors
            named = any("A of adapter 0" in name for name in result.errors)
            assert named == lora


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("model_type", SIZES)
def test_debug_nan_writes_weights_that_replay(
    model_type: str, storage: str, tmp_path: Path
) -> None:
    model = adapted(quantize_experts(build(model_type), storage))
    patch_model(model, debug_nan=True, debug_dir=str(tmp_path))
    path, block = tiny_models.blocks(model.get_base_model())[0]
    router = block.router if model_type == "gpt_oss" else block.gate
    batch = inputs(model)
    hook = router.register_forward_hook(
        lambda module, args, out: (out[0], out[1].index_fill(0, torch.tensor(5), torch.nan), out[2])
    )
    logits_of = model(**batch).logits
    hook.remove()
    assert not torch.isfinite(logits_of).all()
    (file,) = tmp_path.iterdir()
    result = replay_file(file, "cpu")
    assert result.path.endswith(path)
    assert result.ours == result.theirs == (5,)
    assert result.error < 1e-5
    assert not result.parameters


def test_signals_of_a_model_are_those_of_the_dequantised_one() -> None:
    model = quantize_experts(build(), "nf4")
    plain = patch_model(adapted(dequantize_experts(copy.deepcopy(model))))
    model = patch_model(adapted(model))
    found = []
    for one in (model, plain):
        with record(one) as recorder:
            one(**inputs(one)).loss.backward()
        found.append(list(recorder.layers.values()))
    for mine, theirs in zip(*found, strict=True):
        for name in NORMS:
            assert getattr(mine, name).any(), name
            assert_close(getattr(mine, name), getattr(theirs, name), FP32, name)


def count_alive(monkeypatch: Any, module: Any) -> list[int]:
    """Count at each call of ``pack`` in a module how many of its plain weights are still alive."""
    seen: list[weakref.ref] = []
    alive: list[int] = []
    own = module.pack

    def watched(weight: torch.Tensor, *args: Any) -> Any:
        gc.collect()
        seen.append(weakref.ref(weight))
        alive.append(sum(each() is not None for each in seen))
        return own(weight, *args)

    monkeypatch.setattr(module, "pack", watched)
    return alive


def test_one_plain_projection_is_alive_at_a_time(monkeypatch: Any, tmp_path: Path) -> None:
    """Hold one plain projection at a time, in place and while reading a checkpoint."""
    model = build(num_hidden_layers=3)
    model.save_pretrained(tmp_path)
    whole = [weakref.ref(p) for n, p in model.named_parameters() if "experts" in n]
    in_place = count_alive(monkeypatch, surgery)
    quantize_experts(model, "nf4")
    assert in_place == [1] * 6
    assert not any(each() is not None for each in whole)
    loaded = count_alive(monkeypatch, surgery)
    load_quantized(str(tmp_path), "nf4", dtype=torch.float32)
    assert loaded == [1] * 6


def test_inspect_says_which_storage_the_experts_cannot_have(tmp_path: Path, capsys: Any) -> None:
    reason = "model.layers.0.mlp.experts.down_proj has rows of 48, not a multiple of 64"
    folder = only_config(tmp_path, "qwen3_moe", hidden_size=64, moe_intermediate_size=48)
    found = answer(capsys, "inspect", folder)
    assert found["not_quantised"] == {"nf4": reason}
    assert list(found["expert_bytes_quantised"]) == ["fp8"]
    main(["inspect", folder])
    assert f"experts not in nf4: {reason}\n" in capsys.readouterr().out


@pytest.mark.families("dbrx")
def test_inspect_says_that_folded_experts_have_no_storage(tmp_path: Path, capsys: Any) -> None:
    folder = only_config(tmp_path, "dbrx")
    assert not answer(capsys, "inspect", folder)["expert_bytes_quantised"]
    main(["inspect", folder])
    assert "experts not in nf4, fp8: transformer.blocks.0.ffn" in capsys.readouterr().out


@pytest.mark.parametrize("model_type", SIZES)
def test_inspect_shows_the_bytes_that_quantising_leaves(
    model_type: str, tmp_path: Path, capsys: Any
) -> None:
    folder = only_config(tmp_path, model_type, **SIZES[model_type])
    found = answer(capsys, "inspect", folder, "--dtype", "float32")
    plain = build(model_type)
    biases = sum(p.nbytes for n, p in plain.named_parameters() if n.endswith("proj_bias"))
    assert found["expert_bytes"] == experts_memory(plain).stored + biases
    wanted = {
        storage: experts_memory(quantize_experts(build(model_type), storage)).stored
        for storage in STORAGES
    }
    assert found["expert_bytes_quantised"] == wanted
    assert main(["inspect", folder, "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    for storage, count in wanted.items():
        line = f"experts in {storage} (quantize_experts): {bytes_text(count)} in place of "
        assert line + bytes_text(found["expert_bytes"]) in out


def test_experts_beside_what_bitsandbytes_packs(tmp_path: Path) -> None:
    """Quantise by load_in_4bit the Linear modules, and by quantize_experts the experts."""
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes: optional")
    build().to(torch.bfloat16).save_pretrained(tmp_path)
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    with pytest.raises(UnsupportedOptionError, match="call quantize_experts"):
        load_quantized(str(tmp_path), "nf4", quantization_config=four_bits)
    with pytest.raises(
        UnsupportedOptionError, match="load_quantized sets device_map itself; accepted: dev"
    ):
        load_quantized(str(tmp_path), "nf4", device_map="auto")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=four_bits, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    quantize_experts(model, "nf4")
    assert isinstance(model.model.layers[0].self_attn.q_proj, bitsandbytes.nn.Linear4bit)
    assert len(quantised(model)) == 4
    plain = patch_model(adapted(dequantize_experts(copy.deepcopy(model))))
    model = patch_model(adapted(model), fuse_lora="require")
    assert_bits(step(model, inputs(model)), step(plain, inputs(plain)))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        if mine.requires_grad:
            assert_bits(mine.grad, theirs.grad)
