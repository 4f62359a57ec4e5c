"""Models on the command line: quantised checkpoints, numbers that do not fit, other kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import Qwen3VLMoeConfig

from moe_patch import load_quantized
from moe_patch.cli import CHECK_FAILED, main
from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.quant.stored import stored, stored_method
from moe_patch.train.build import build_base, check_options
from moe_patch.train.config import make_config
from moe_patch.train.data import train_tokenizer
from tests.support import tiny_models
from tests.support.cli_calls import answer, error_of, only_config
from tests.support.train_nodes import TEXT, node

BNB = {"quant_method": "bitsandbytes"}
NOT_READ = "moe_patch does not read experts packed with"
QUANTISED = [
    # (quantization_config, method, what is said of the experts, tier)
    ({"quant_method": "awq", "bits": 4}, "awq", f"{NOT_READ} awq;", "refused"),
    ({"quant_method": "gptq", "bits": 4}, "gptq", f"{NOT_READ} gptq;", "refused"),
    ({"quant_method": "compressed-tensors"}, "compressed-tensors", NOT_READ, "refused"),
    ({"quant_method": "fp8", "weight_block_size": None}, "fp8", "blocks of None;", "refused"),
    ({"quant_method": "hqq"}, "hqq", f"{NOT_READ} hqq;", "refused"),
    ({"quant_method": "own"}, "own", "by 'own'; it skips an unknown method", "refused"),
    ({"bits": 4}, "a method without a name", "packed experts at random values", "refused"),
    ({**BNB, "load_in_4bit": True}, "bitsandbytes", "packed in 4 bits", "full"),
    ({**BNB, "load_in_8bit": True}, "bitsandbytes", "packed in 8 bits", "full"),
    ({"load_in_4bit": True}, "bitsandbytes", "packed in 4 bits", "full"),
    ({"quant_method": "fp8"}, "fp8", "load_quantized(MODEL, 'fp8') takes", "full"),
    ({"quant_method": "mxfp4"}, "mxfp4", "load_quantized(MODEL, 'mxfp4') takes", "full"),
]


def change(folder: str | Path, **values) -> str:
    """Override values in a folder's config.json."""
    path = Path(folder, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return str(folder)


@pytest.mark.parametrize(("about", "method", "said", "tier"), QUANTISED, ids=lambda v: str(v)[:50])
def test_inspect_says_what_becomes_of_quantised_experts(
    capsys, tmp_path, about, method, said, tier
):
    folder = change(only_config(tmp_path, "qwen3_moe"), quantization_config=about)
    status = CHECK_FAILED if tier == "refused" else 0
    found = answer(capsys, "inspect", folder, "--dtype", "bfloat16", status=status)
    assert found["quantised_with"] == method
    assert said in found["quantisation"]
    assert found["weight_bytes"] is None
    assert {block["tier"] for block in found["blocks"]} == {tier}
    model = tiny_models.build("qwen3_moe")
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    assert found["expert_bytes"] == (2 * experts if tier == "full" else None)
    assert bool(found["expert_bytes_quantised"]) == (tier == "full")
    assert main(["inspect", folder]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(", stored size unknown")
    assert lines[1] == f"quantised with {method}: {found['quantisation']}"


def test_a_plain_checkpoint_is_not_said_to_be_quantised(capsys, tmp_path):
    found = answer(capsys, "inspect", only_config(tmp_path, "qwen3_moe"))
    assert found["quantised_with"] is found["quantisation"] is None
    assert found["weight_bytes"] == 2 * found["parameters"]


def test_the_text_towers_quantisation_counts():
    """Read the text tower's quantisation config, as transformers does."""
    config = Qwen3VLMoeConfig()
    assert stored(config) is None
    config.text_config.quantization_config = {"quant_method": "own"}
    assert stored_method(config) == "own"
    assert not stored(config).is_known


NUMBERS = [
    ("qwen3_moe", {"num_experts_per_tok": 9}, "a token goes to 9 of 8 experts; accepted: 1 to 8"),
    ("qwen3_moe", {"num_experts_per_tok": 0}, "a token goes to 0 of 8 experts"),
    ("gpt_oss", {"num_experts_per_tok": 9}, "a token goes to 9 of 8 experts"),
    ("deepseek_v3", {"n_group": 3}, "8 experts are in 3 groups; accepted: a divisor of 8"),
    ("deepseek_v3", {"n_group": 2, "topk_group": 3}, "a token goes to 3 of 2 groups"),
]


@pytest.mark.parametrize(("family", "values", "reason"), NUMBERS, ids=lambda v: str(v)[:40])
def test_inspect_refuses_numbers_that_cannot_be_routed(capsys, tmp_path, family, values, reason):
    folder = change(only_config(tmp_path, family), **values)
    blocks = answer(capsys, "inspect", folder, status=CHECK_FAILED)["blocks"]
    assert {block["tier"] for block in blocks} == {"refused"}
    assert all(f"in config.json {reason}" in block["reason"] for block in blocks)
    assert not any("saved_bytes_per_token" in block for block in blocks)


ADAPTER = {"adapter_config.json": '{"base_model_name_or_path": "org/base"}'}
KINDS = [
    # (files, which of them is named, what is said)
    (ADAPTER | {"adapter_model.safetensors": ""}, "", "is a PEFT adapter of 'org/base', not"),
    (ADAPTER | {"config.json": '{"model_type": "qwen3_moe"}'}, "", "is a PEFT adapter of 'org"),
    ({"adapter_config.json": "broken"}, "", "is a PEFT adapter, not a model"),
    ({"a.gguf": "GGUF"}, "a.gguf", "is a GGUF file"),
    ({"blob": "GGUF\3"}, "blob", "is a GGUF file"),
    ({"a.gguf": "GGUF"}, "", "holds GGUF files"),
    ({"model.safetensors": ""}, "model.safetensors", "is a file of weights only"),
    ({"pytorch_model.bin": ""}, "pytorch_model.bin", "is a file of weights only"),
    ({"notes.txt": "x"}, "notes.txt", "is a file; accepted: a folder"),
    ({"model.safetensors": "", "tokenizer.json": ""}, "", "holds weights (model.safetensors) wit"),
    ({"tokenizer_config.json": "{}"}, "", "holds a tokenizer and no model"),
    ({"model_index.json": "{}", "text/config.json": "{}"}, "", "is a pipeline of diffusers"),
    ({"config.json": '{"_class_name": "UNet"}'}, "", "is a UNet of diffusers"),
    (
        {"run.json": "{}", "model/config.json": "{}"},
        "",
        "holds no config.json, but its subfolders do; name one: model",
    ),
    (
        {"snapshots/f00/config.json": "{}"},
        "",
        "holds no config.json, but its subfolders do; name one: snaps",
    ),
]


@pytest.mark.parametrize(("files", "named", "said"), KINDS, ids=[said for _, _, said in KINDS])
def test_other_kinds_are_named(capsys, tmp_path, files, named, said):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    path = str(tmp_path / named)
    for command in ("inspect", "verify"):
        assert f"MODEL {path!r} {said}" in error_of(capsys, command, path)
    with pytest.raises(UnsupportedOptionError) as caught:
        check_options(make_config(node(model=path, tokenizer="train")))
    assert f"model: {path!r} {said}" in str(caught.value)


@pytest.fixture
def packed(capsys, tmp_path) -> Path:
    """A checkpoint whose experts have names and bytes that only another tool can read."""
    tiny_models.build("qwen3_moe").save_pretrained(tmp_path)
    capsys.readouterr()  # its progress
    path = tmp_path / "model.safetensors"
    tensors = {
        name.replace(".weight", ".qweight") if ".experts." in name else name: value
        for name, value in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})
    return tmp_path


def test_a_quantisation_that_transformers_skips_is_refused_wherever_it_is_loaded(capsys, packed):
    """Refuse it: transformers loads it with a mere warning, and the experts are random."""
    folder = change(packed, quantization_config={"quant_method": "own"})
    assert "does not support quantisation by 'own'" in error_of(
        capsys, "verify", folder, "--device", "cpu"
    )
    with pytest.raises(UnsupportedModelError, match="does not support quantisation by 'own'"):
        load_quantized(folder, "nf4")
    config = make_config(node(model=folder, tokenizer="train"))
    with pytest.raises(UnsupportedModelError, match="does not support quantisation by 'own'"):
        build_base(config.model, train_tokenizer([TEXT], 300), seed=0)


def test_training_refuses_a_checkpoint_that_lacks_experts(packed):
    config = make_config(node(model=str(packed), tokenizer="train"))
    first = r"4 weights are not in its files .*, model\.layers\.0\.mlp\.experts\.down_proj first"
    with pytest.raises(UnsupportedOptionError, match=first):
        build_base(config.model, train_tokenizer([TEXT], 300), seed=0)
