"""Training runs whose experts are in host memory: ``moe_patch: {offload_experts: true}``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_patch import UnsupportedOptionError, patch_model, unpatch_model
from moe_patch.runtime import offload
from moe_patch.train import build, run
from moe_patch.train.config import make_config
from tests.support import quant_models
from tests.support.offload_cases import LateTransfer
from tests.support.train_nodes import node, small

OFFLOAD = {"moe_patch": {"offload_experts": True}}


def test_a_run_has_the_losses_of_resident_experts(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is built on the CPU, patched, and only then moved."""
    made: list[LateTransfer] = []

    def transfer_to(device: torch.device) -> LateTransfer:
        made.append(LateTransfer(device))
        return made[-1]

    monkeypatch.setattr(offload, "transfer_to", transfer_to)
    resident = run.run(small(tmp_path, text_file))
    assert made == []
    ours = run.run(small(tmp_path, text_file, **OFFLOAD), overwrite=True)
    assert made
    assert all(one.copied for one in made)
    assert ours.trained["patched"].losses == resident.trained["patched"].losses
    assert ours.failed == []


def test_where_a_run_is_built() -> None:
    card = torch.device("cuda")
    assert build.home_of(make_config(node()), card) == card
    assert build.home_of(make_config(node(moe_patch=False)), card) == card
    assert build.home_of(make_config(node(**OFFLOAD)), card) == torch.device("cpu")


def test_full_fine_tuning_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(UnsupportedOptionError, match="offload_experts freezes the experts"):
        make_config(node(lora=None, **OFFLOAD))


def test_trained_experts_are_refused_before_the_first_step(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("training has begun")

    monkeypatch.setattr(run, "train_once", never)
    lora = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["experts"]}
    with pytest.raises(UnsupportedOptionError, match=r"experts.* would be trained") as raised:
        run.run(small(tmp_path, text_file, lora=lora, **OFFLOAD))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_ddp_ignores_experts_in_host_memory() -> None:
    """DDP needs all parameters on one device, and experts stay on the host."""
    model = quant_models.build()
    patch_model(model, offload_experts=True)
    held = [n for n, p in model.named_parameters() if ".experts." in n and p.dim() == 3]
    assert held
    assert model._ddp_params_and_buffers_to_ignore == held
    assert all(model.get_parameter(name)._ddp_ignored for name in held)
    unpatch_model(model)
    assert not hasattr(model, "_ddp_params_and_buffers_to_ignore")
    assert not any(hasattr(p, "_ddp_ignored") for p in model.parameters())
