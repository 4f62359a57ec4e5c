"""The plan command: its numbers, a recipe that the training command takes, one line a mistake."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig

from moe_patch.cli import main
from moe_patch.cli.plan import memory_bytes
from moe_patch.cli.plan_sizes import read_sizes
from moe_patch.train.build import check_options
from moe_patch.train.config import load_config
from tests.support import tiny_models
from tests.support.cli_calls import answer, error_of, only_config

WIDE = {"hidden_size": 64, "moe_intermediate_size": 64, "vocab_size": 4096}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return only_config(tmp_path_factory.mktemp("wide"), "qwen3_moe", **WIDE)


def test_offloaded_experts_take_two_slots(capsys, folder):
    arguments = ("plan", folder, "--dtype", "bfloat16", "--storage", "nf4")
    resident = answer(capsys, *arguments)
    found = answer(capsys, *arguments, "--offload", "--memory", "80GB")
    layers = only_layers(folder)
    assert found["weights"]["experts"] == resident["weights"]["experts"] * 2 // layers
    assert found["recipe"]["moe_patch"] == {"offload_experts": True}
    assert "frozen" in error_of(capsys, "plan", folder, "--full", "--offload")


def only_layers(folder):
    return json.loads((Path(folder) / "config.json").read_text())["num_hidden_layers"]


def test_the_parts_of_a_run(capsys, folder):
    found = answer(capsys, "plan", folder, "--dtype", "bfloat16", "--tokens", "64")
    inspected = answer(capsys, "inspect", folder, "--dtype", "bfloat16")
    assert sum(found["weights"].values()) == inspected["weight_bytes"]
    assert found["weights"]["experts"] == inspected["expert_bytes"]
    assert found["allocated_bytes"] == max(found["moments"].values())
    assert found["recipe"] is found["most_tokens"] is found["memory_bytes"] is None
    for storage, size in inspected["expert_bytes_quantised"].items():
        packed = answer(capsys, "plan", folder, "--dtype", "bfloat16", "--storage", storage)
        assert packed["weights"]["experts"] == size
    assert main(["plan", folder]) == 0
    out = capsys.readouterr().out
    for word in ("weights: experts", "optimizer", "logits peak", "last backward", "context"):
        assert word in out


RECIPES = [
    ((), {"quantize_experts": None, "liger": False}),
    (("--storage", "nf4", "--rank", "4"), {"quantize_experts": "nf4"}),
    (("--full", "--optimizer", "adamw_8bit"), {"lora": None}),
    (("--adapters", "bf16"), {"adapter_dtype": "bfloat16"}),
    (("--linear", "nf4"), {"quantize_linear": "nf4", "quantize_embedding": None}),
    (("--embedding", "nf4"), {"quantize_embedding": "nf4", "adapter_dtype": "float32"}),
    (("--liger", "--recompute", "--ranks", "2"), {"liger": True, "moe_patch": {"recompute": True}}),
]


@pytest.mark.parametrize(("options", "expected"), RECIPES, ids=str)
def test_the_training_command_takes_the_recipe(capsys, tmp_path, folder, options, expected):
    path = tmp_path / "recipe.yaml"
    given = ("--memory", "1GB", "--dtype", "bfloat16", "--recipe", str(path), "--tokens", "64")
    found = answer(capsys, "plan", folder, *given, *options)
    config = load_config(path)
    check_options(config)
    for key, value in expected.items():
        assert getattr(config, key) == value
    chosen = found["options"]
    assert config.model.path == folder
    assert config.data.block_size == chosen["tokens"] == 64
    assert config.training["gradient_checkpointing"] == chosen["checkpointing"]
    assert config.lora is None or config.lora["r"] == chosen["rank"]
    assert found["needed_bytes"] <= found["memory_bytes"] == 10**9
    assert found["most_tokens"] >= 64


def test_the_printed_recipe_is_the_file(capsys, tmp_path, folder):
    path = tmp_path / "recipe.yaml"
    assert main(["plan", folder, "--memory", "1GB", "--recipe", str(path)]) == 0
    assert capsys.readouterr().out.endswith(path.read_text())
    assert "--recipe" in error_of(capsys, "plan", folder, "--recipe", str(path))


def test_less_memory_gives_up_more(capsys, folder):
    def chosen(memory: int):
        given = ("--memory", f"{memory / 1e6}MB", "--tokens", "4096", "--dtype", "bfloat16")
        return answer(capsys, "plan", folder, *given)

    most = chosen(10**10)
    assert not most["options"]["checkpointing"]
    assert most["options"]["storage"] == "bf16"
    less = chosen(most["needed_bytes"] - 10**6)
    assert less["options"]["checkpointing"] or less["options"]["liger"]
    assert less["needed_bytes"] < most["needed_bytes"]
    assert less["options"]["rank"] == 16


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GB", 24e9), ("22.5 GiB", 22.5 * 2**30), ("16", 16e9), ("800mib", 800 << 20)],
)
def test_sizes(text, size):
    assert memory_bytes(text) == int(size)


MISTAKES = [
    (("--memory", "24 pounds"), "accepted: a size such as 24GB"),
    (("--memory", "0GB"), "accepted: a size such as 24GB"),
    (("--tokens", "0"), "--tokens 0: accepted: 1 or more"),
    (("--ranks", "-1"), "--ranks -1: accepted: 1 or more"),
    (("--full", "--storage", "nf4"), "--full trains every weight"),
    (("--storage", "mxfp4"), "--storage mxfp4: only for checkpoints that"),
    (("--offload", "--ranks", "2"), "--offload with --ranks 2: FSDP2 would shard experts"),
    (("--full", "--embedding", "nf4"), "--full trains every weight"),
    (("--adapters", "bf16", "--dtype", "float32", "--memory", "1GB"), "accepted: --dtype bfl"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_a_mistake_is_one_line(capsys, folder, options, message):
    assert message in error_of(capsys, "plan", folder, *options)


def test_memory_that_nothing_reaches(capsys, folder):
    given = ("plan", folder, "--dtype", "bfloat16", "--memory")
    message = error_of(capsys, *given, "0.7GB")
    assert "no recipe for" in message
    smallest = (
        "rank 4, experts in nf4, adamw, checkpointing, Liger, {}Linear in nf4, embedding in nf4, "
        "bf16 adapters"
    )
    assert f"({smallest.format('experts in host memory, ')}) needs" in message
    assert "GiB too much; accepted: a card of 0.9 GB" in message
    message = error_of(capsys, *given, "0.7GB", "--no-offload")
    assert f"({smallest.format('')}) needs" in message
    message = error_of(capsys, *given, "0.9GB", "--tokens", "1000000")
    fitting = int(message.split("accepted: ")[1].split(" tokens")[0].replace(",", ""))
    found = answer(capsys, *given, "0.9GB", "--tokens", str(fitting))
    assert found["most_tokens"] == fitting


def test_experts_leave_the_card_where_nothing_else_fits(capsys, tmp_path):
    folder = only_config(tmp_path, "qwen3_moe", **WIDE, num_experts=256, num_hidden_layers=8)
    given = ("plan", folder, "--dtype", "bfloat16", "--tokens", "64")
    packed = (
        *given, "--rank", "4", "--storage", "nf4", "--linear", "nf4", "--adapters", "bf16",
        "--optimizer", "adamw_8bit", "--liger", "--embedding", "nf4",
    )  # fmt: skip
    memory = f"{(answer(capsys, *packed)['needed_bytes'] - 10**6) / 1e6}MB"
    found = answer(capsys, *given, "--memory", memory)
    assert found["recipe"]["moe_patch"] == {"offload_experts": True}
    assert found["options"]["storage"] == "nf4"
    for fixed in (("--no-offload",), ("--full",), ("--ranks", "2", "--linear", "bf16")):
        small = "1MB" if "--ranks" in fixed else memory
        assert "host memory" not in error_of(capsys, *given, "--memory", small, *fixed)


def test_a_dense_model(capsys, tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 64}
    LlamaConfig(**sizes).save_pretrained(tmp_path)
    message = error_of(capsys, "plan", str(tmp_path), "--memory", "24GB")
    assert "LlamaForCausalLM has no MoE block; accepted: MoE models" in message


@pytest.mark.families("dots3_note_vision")
def test_a_model_without_a_vocabulary(capsys, tmp_path):
    folder = only_config(tmp_path, "dots3_note_vision")
    message = error_of(capsys, "plan", folder, "--memory", "24GB")
    assert "has no vocabulary, so a run has no logits to count" in message


@pytest.mark.families("axk2")
def test_a_query_with_a_gate():
    """A.X-K2's latent attention has another name for its query projection."""
    sizes = read_sizes(tiny_models.build("axk2"), targets={})
    assert {layer.attention for layer in sizes.layers} == {2 * 64 + 2 * 32}


def test_checkpoints_that_are_quantised(capsys, tmp_path):
    folder = only_config(tmp_path, "qwen3_moe", **WIDE)
    path = Path(folder, "config.json")
    plain = json.loads(path.read_text())

    def quantise(**about):
        path.write_text(json.dumps({**plain, "quantization_config": about}))

    quantise(quant_method="awq", bits=4)
    assert "does not read experts packed with awq" in error_of(capsys, "plan", folder)
    quantise(quant_method="fp8")
    assert answer(capsys, "plan", folder)["options"]["storage"] == "fp8"
    assert "accepted: fp8" in error_of(capsys, "plan", folder, "--storage", "nf4")
    quantise(quant_method="bitsandbytes", load_in_4bit=True)
    found = answer(capsys, "plan", folder, "--memory", "1GB", "--tokens", "64")
    assert found["options"]["linear"] == "nf4"
    assert found["options"]["storage"] == "bf16"


@pytest.mark.families("gpt_oss")
def test_attention_without_a_fused_kernel_is_counted_and_named(capsys, tmp_path):
    folder = only_config(tmp_path, "gpt_oss")
    few, many = (answer(capsys, "plan", folder, "--tokens", str(n)) for n in (512, 1024))
    assert many["parts"]["one_layer"] > 3 * few["parts"]["one_layer"]
    assert "no fused attention" in few["notes"][0]
    given = (
        "plan",
        folder,
        "--tokens",
        "1024",
        "--memory",
        "80GB",
        "--checkpointing",
        "--attention",
    )
    flex = answer(capsys, *given, "flex_attention")
    assert flex["parts"]["one_layer"] < few["parts"]["one_layer"]
    assert flex["notes"] == []
    assert flex["recipe"]["model"]["attn_implementation"] == "flex_attention"
    assert answer(capsys, *given, "eager")["parts"] == many["parts"]
    assert main(["plan", folder]) == 0
    assert "note: transformers has no fused attention" in capsys.readouterr().out
