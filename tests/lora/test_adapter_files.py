"""convert_adapter: a saved adapter keeps its meaning for another release of PEFT."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

import moe_patch.tools.adapter_files as adapter_files
from moe_patch import UnsupportedModelError, UnsupportedOptionError, convert_adapter
from moe_patch.runtime.adapters import is_param_wrapper
from moe_patch.runtime.peft_release import rewrites_targets
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapt, attention, lora_config, router_parameter
from tests.support.numerics import FP32, assert_close

pytestmark = pytest.mark.versions
# The release whose layout the installed one does not have: 0.18 swaps nothing.
OTHER = "0.18.1" if rewrites_targets() else "0.21.2"


def saved(model_type, folder, **over):
    """A model with adapters on experts, router and attention, and where they lie."""
    parameters = [*EXPERTS, router_parameter(model_type)]
    config = lora_config(parameters, attention(model_type))
    model = adapt(tiny_models.build(model_type, **over), config)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("model_type", "over", "pairs"),
    [
        ("qwen3_moe", {}, 4),
        ("qwen3_moe", {"moe_intermediate_size": 16}, 4),  # 2F = D: sizes tell nothing
        ("gpt_oss", {}, 0),  # transposed: both releases store it alike
    ],
)
def test_the_other_release_gets_the_same_delta(model_type, over, pairs, tmp_path):
    """Match the other release's formula for its files, and convert back bit for bit."""
    model = saved(model_type, tmp_path / "here", **over)
    plain = tiny_models.build(model_type, **over)
    assert convert_adapter(plain, tmp_path / "here", tmp_path / "there", OTHER) == pairs
    found = load_file(tmp_path / "there" / adapter_files.WEIGHTS)
    formula = "ore,eri->eio" if OTHER < "0.19" or not pairs else "ore,eri->eoi"
    experts = 0
    for path, wrapper in model.named_modules():
        if is_param_wrapper(wrapper) and wrapper.num_experts > 1:
            a, b = (found[f"{path}.lora_{name}.weight"] for name in "AB")
            E = wrapper.num_experts
            delta = torch.einsum(
                formula, b.reshape(b.shape[0], -1, E), a.reshape(E, -1, a.shape[1])
            )
            delta = delta * wrapper.scaling["default"]
            assert_close(delta, wrapper.get_delta_weight("default"), FP32, path)
            experts += 1
    assert experts == 4
    config = json.loads((tmp_path / "there" / adapter_files.CONFIG).read_text())
    assert config["peft_version"] == OTHER
    assert convert_adapter(plain, tmp_path / "there", tmp_path / "back") == pairs
    first, last = (load_file(tmp_path / x / adapter_files.WEIGHTS) for x in ("here", "back"))
    assert first.keys() == last.keys()
    assert all(torch.equal(first[key], last[key]) for key in first)
    loaded = PeftModel.from_pretrained(plain, tmp_path / "back")
    batch = tiny_models.inputs(plain)
    assert torch.equal(loaded.eval()(**batch).logits, model.eval()(**batch).logits)


def test_what_cannot_be_converted_is_named(tmp_path):
    saved("qwen3_moe", tmp_path / "here")
    wide = tiny_models.build("qwen3_moe", moe_intermediate_size=24)
    with pytest.raises(UnsupportedModelError, match="fit no weight of the model's experts"):
        convert_adapter(wide, tmp_path / "here", tmp_path / "there", OTHER)
    assert not (tmp_path / "there").exists()
    with pytest.raises(UnsupportedOptionError, match="exists; accepted: a new folder"):
        convert_adapter(wide, tmp_path / "here", tmp_path / "here")
    with pytest.raises(UnsupportedOptionError, match=r"adapter_model\.safetensors is missing"):
        convert_adapter(wide, tmp_path / "nothing", tmp_path / "there")
