"""Frozen weights in 4 bits by bitsandbytes, adapters in bf16, and what a training file refuses."""

from __future__ import annotations

import importlib.util
import weakref

import pytest
import torch
from peft.tuners.lora.bnb import Linear4bit as AdaptedLinear4bit
from torch import nn

from moe_patch import lora_targets
from moe_patch.errors import UnsupportedModelError, UnsupportedOptionError
from moe_patch.train.adapters import add_adapters
from moe_patch.train.config import make_config
from moe_patch.train.frozen import check_bitsandbytes, quantize_embedding, quantize_linears
from tests.support import tiny_models
from tests.support.train_nodes import node

bnb = pytest.importorskip("bitsandbytes")
WIDE = {"hidden_size": 64, "moe_intermediate_size": 64, "tie_word_embeddings": False}


@pytest.mark.families("deepseek_v3")
def test_linear_modules_of_the_layers_are_in_4_bits():
    model = tiny_models.build("deepseek_v3", torch.bfloat16, **WIDE)
    plain = {name: p.detach().clone() for name, p in model.named_parameters()}
    linears = {n for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"}
    assert any("shared_experts" in name for name in linears)
    quantize_linears(model)
    packed = {n: m for n, m in model.named_modules() if isinstance(m, bnb.nn.Linear4bit)}
    assert packed.keys() == linears
    for name, p in model.named_parameters():
        if name.removesuffix(".weight") not in packed:
            assert torch.equal(p, plain[name]), name
    name, one = next(iter(packed.items()))
    wanted = bnb.functional.dequantize_4bit(
        *bnb.functional.quantize_4bit(
            plain[f"{name}.weight"], quant_type="nf4", compress_statistics=True
        )
    )
    x = torch.randn(3, one.in_features, dtype=torch.bfloat16)
    torch.testing.assert_close(one(x), x @ wanted.T, rtol=0.02, atol=0.02)


def test_each_16_bit_weight_is_freed_before_the_next_is_packed(monkeypatch):
    model = tiny_models.build("qwen3_moe", torch.bfloat16, **WIDE)
    plain = [weakref.ref(m) for m in model.modules() if type(m) is nn.Linear]
    alive, made = [], bnb.nn.Linear4bit

    def counted(*args, **kwargs):
        alive.append(sum(one() is not None for one in plain))
        return made(*args, **kwargs)

    monkeypatch.setattr(bnb.nn, "Linear4bit", counted)
    quantize_linears(model)
    assert alive == list(range(len(plain), len(plain) - len(alive), -1))


def test_routers_that_are_linear_modules_stay():
    model = tiny_models.build("doge", torch.bfloat16, hidden_size=64)
    before = [n for n, m in model.named_modules() if "router_gate" in n and type(m) is nn.Linear]
    quantize_linears(model)
    assert [n for n, m in model.named_modules() if "router_gate" in n and type(m) is nn.Linear] == (
        before
    )


def test_an_embedding_looks_up_decoded_rows():
    model = tiny_models.build("qwen3_moe", torch.bfloat16, **WIDE)
    weight = model.get_input_embeddings().weight.detach().clone()
    quantize_embedding(model)
    ids = torch.tensor([[3, 1, 3]])
    found = model.get_input_embeddings()(ids)
    packed = bnb.functional.quantize_4bit(weight, quant_type="nf4")
    wanted = bnb.functional.dequantize_4bit(*packed)[ids]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted)
    assert "model.embed_tokens.weight" in model.state_dict()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tie_word_embeddings": True}, "is the head's weight as well"),
        ({"hidden_size": 32}, "rows of a multiple of 64 values"),
    ],
    ids=["tied", "narrow"],
)
def test_an_embedding_that_cannot_be_packed_is_named(changes, why):
    model = tiny_models.build("qwen3_moe", torch.bfloat16, **(WIDE | changes))
    with pytest.raises(UnsupportedModelError, match="its input embedding") as raised:
        quantize_embedding(model)
    assert why in str(raised.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_adapter_has_the_dtype(dtype):
    model = tiny_models.build("qwen3_moe", torch.bfloat16, **WIDE)
    targets = lora_targets(model)
    assert lora_targets(quantize_linears(model)) == targets
    adapted = add_adapters(model, {"r": 2, **targets}, 0, dtype)
    assert any(isinstance(module, AdaptedLinear4bit) for module in adapted.modules())
    found = {p.dtype for p in adapted.parameters() if p.requires_grad}
    assert found == {getattr(torch, dtype)}


BF16 = {**node()["model"], "dtype": "bfloat16"}
MISTAKES = [
    ({"adapter_dtype": "bf16"}, "adapter_dtype is 'bf16'; accepted: float32, bfloat16"),
    ({"adapter_dtype": "bfloat16"}, "bfloat16 needs `lora` and model.dtype: bfloat16"),
    ({"adapter_dtype": "bfloat16", "model": BF16, "lora": None}, "bfloat16 needs `lora`"),
    ({"quantize_linear": "fp8"}, "quantize_linear is 'fp8'; accepted: nf4"),
    ({"quantize_linear": "nf4", "lora": None}, "quantize_linear freezes weights; it needs `lora`"),
    ({"quantize_embedding": "nf4", "lora": None}, "quantize_embedding freezes weights"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_a_mistake_in_the_file_is_one_line(changes, message):
    with pytest.raises(UnsupportedOptionError) as raised:
        make_config(node(**changes))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantize_linear": "nf4"},
        {"quantize_embedding": "nf4"},
        {"training": {"optim": "adamw_bnb_8bit"}},
        {"training": {"optim": "paged_adamw_8bit"}},
    ],
    ids=str,
)
def test_bitsandbytes_that_is_missing_is_named_before_anything_is_loaded(changes, monkeypatch):
    config = make_config(node(**changes))
    check_bitsandbytes(config)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedOptionError, match="run pip install bitsandbytes") as raised:
        check_bitsandbytes(config)
    assert "\n" not in str(raised.value)
    check_bitsandbytes(make_config(node()))
