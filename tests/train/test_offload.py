"""Training runs whose experts are in host memory: ``moe_patch: {offload_experts: true}``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from moe_patch import UnsupportedOptionError, patch_model
from moe_patch.quant.surgery import ignore_in_ddp
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


def test_ddp_ignores_experts_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """DDP needs all parameters on one device, and experts stay on the host."""
    model = quant_models.build()
    patch_model(model, offload_experts=True)
    given: list[Any] = []
    name = "_set_params_and_buffers_to_ignore_for_model"
    monkeypatch.setattr(DistributedDataParallel, name, lambda _, names: given.extend(names))
    ignore_in_ddp(model)
    assert given == [n for n, p in model.named_parameters() if ".experts." in n and p.dim() == 3]
