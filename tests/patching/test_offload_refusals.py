"""Refusals by name, before anything changes: experts in host memory cannot have everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from moe_patch import (
    PatchConfig,
    UnsupportedModelError,
    UnsupportedOptionError,
    patch_model,
    unpatch_model,
)
from moe_patch.patching import offload as taking
from moe_patch.runtime import offload, transfers
from moe_patch.runtime.module_patch import patch_of
from moe_patch.types import Lora
from tests.support import quant_models, tiny_models
from tests.support.adapters import EXPERTS, adapt, expert_modules, lora_config
from tests.support.offload_cases import seats


def test_trainable_experts_are_refused_by_name() -> None:
    model = quant_models.build("qwen3_moe")
    patch_model(model, offload_experts=True)
    batch = tiny_models.inputs(model)
    with pytest.raises(UnsupportedOptionError, match=r"layers\.0\.mlp\.experts.*no gradient"):
        model(**batch)
    with torch.no_grad():
        model(**batch)


def test_a_failure_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = quant_models.build("qwen3_moe", num_hidden_layers=3)

    def fail(self: offload.Seat, *_: Any, **__: Any) -> Any:
        if self.index == 2:
            raise UnsupportedOptionError("no room")

    monkeypatch.setattr(offload.Seat, "read", fail)
    with pytest.raises(UnsupportedOptionError, match="no room"):
        patch_model(model, offload_experts=True)
    for experts in expert_modules(model):
        assert patch_of(experts) is None
        assert "_apply" not in experts.__dict__


def is_one_sentence(error: Exception) -> bool:
    return "\n" not in str(error) and ". " not in str(error)


def test_memory_that_is_missing_or_cannot_be_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.empty(1 << 50, dtype=torch.uint8, device="meta")
    model = quant_models.build("qwen3_moe")
    with monkeypatch.context() as patched:
        patched.setattr(taking, "_weights", lambda *_: iter([large]))
        with pytest.raises(UnsupportedOptionError, match="need 1048576.0 GiB of host m") as raised:
            patch_model(model, offload_experts=True)
    assert is_one_sentence(raised.value)
    assert all(patch_of(experts) is None for experts in expert_modules(model))

    class Refusing:
        def cudaHostRegister(self, *_: int) -> int:
            return 2

        def cudaError(self, code: int) -> int:
            return code

        def cudaGetErrorString(self, _: int) -> str:
            return "out of memory"

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    with pytest.raises(UnsupportedOptionError, match="layer 3: .*error 2, out of mem") as raised:
        transfers.LockedMemory(torch.empty(8).untyped_storage(), "layer 3")
    assert is_one_sentence(raised.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"fuse_lora": "off"}, "fuse_lora='off'"), ({"shadow_check": 5}, "shadow_check=5")],
    ids=str,
)
def test_options_that_compute_elsewhere_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=said):
        PatchConfig(offload_experts=True, **options)


def test_adapters_elsewhere_are_refused_before_they_compute_or_merge() -> None:
    """PEFT puts an adapter beside its weight, and merges layer by layer."""
    base = quant_models.build("qwen3_moe", num_hidden_layers=3)
    model = adapt(base, lora_config(EXPERTS))
    patch_model(model, offload_experts=True)
    for name, module in model.named_modules():
        if name.endswith(("lora_A", "lora_B")):
            module.to("meta")
    nothing = torch.empty(2, 2, 2, device="meta")
    with pytest.raises(UnsupportedModelError, match=r"experts.*an adapter is on meta, .* on cpu"):
        seats(model)[0].check_adapter(Lora(nothing, nothing, 1.0), torch.device("cpu"))
    with pytest.raises(UnsupportedModelError, match=r"in host memory.*adapters are on meta; no w"):
        model.merge_and_unload()
    unpatch_model(model)
    assert "merge_and_unload" not in model.base_model.__dict__


def test_own_activations_are_refused_by_name() -> None:
    model = quant_models.build("qwen3_moe")
    experts = expert_modules(model)[0]
    experts.act_fn = nn.Softplus()
    with pytest.raises(UnsupportedModelError, match=r"layers\.0.*offload_experts: its activation"):
        patch_model(model, offload_experts=True)
