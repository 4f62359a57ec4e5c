"""Gathering weights that processes hold in parts; whole runs are in tests/stack/test_launch.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn

from moe_patch import UnsupportedOptionError
from moe_patch.train import sharded
from moe_patch.train.config import make_config
from moe_patch.train.sharded import check_whole, gather, size
from tests.support.train_nodes import node

WRAPPED = nn.Linear(1, 1)


def trainer(kind, state):
    """Return the parts of a Trainer that gather reads; ``state`` is returned, or raised."""

    def get_state_dict(model):
        assert model is WRAPPED
        if isinstance(state, Exception):
            raise state
        return state

    accelerator = SimpleNamespace(distributed_type=kind, get_state_dict=get_state_dict)
    return SimpleNamespace(accelerator=accelerator, model_wrapped=WRAPPED)


@pytest.mark.parametrize("kind", [DistributedType.NO, DistributedType.MULTI_GPU])
def test_whole_models_are_left_alone(kind):
    assert gather(trainer(kind, AssertionError("nothing is gathered"))) is None


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED])
@pytest.mark.parametrize("state", [{"w": torch.ones(2)}, {}, None], ids=["first", "other", "none"])
def test_parts_come_back_as_one_state(kind, state):
    """Return one state from its parts; an empty dict, not None, on other processes."""
    assert gather(trainer(kind, state)) == (state or {})


def test_zero3_without_gathering_names_the_option():
    refused = trainer(DistributedType.DEEPSPEED, ValueError("Cannot get 16bit model weights"))
    with pytest.raises(UnsupportedOptionError, match="zero3_save_16bit_model: true"):
        gather(refused)


def test_size_of_a_parameter_that_zero3_emptied():
    parameter = nn.Parameter(torch.empty(0))
    assert size(parameter) == 0
    parameter.ds_numel = 12
    assert size(parameter) == 12


WHOLE = {
    "quantize_linear": {"quantize_linear": "nf4"},
    "quantize_embedding": {"quantize_embedding": "nf4"},
    "moe_patch.offload_experts": {"moe_patch": {"offload_experts": True}},
}


@pytest.mark.parametrize("key", WHOLE)
@pytest.mark.parametrize("how", ["fsdp", "zero3"])
def test_weights_that_have_to_stay_whole_are_not_sharded(key, how, monkeypatch):
    """Accept them alone and under DDP; accept sharding of everything else."""
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    packed = make_config(node(**WHOLE[key]))
    check_whole(packed)
    if how == "fsdp":
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    else:
        monkeypatch.setattr(sharded, "is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(UnsupportedOptionError, match=f"^{key}: .* not sharded; accepted: DDP"):
        check_whole(packed)
    check_whole(make_config(node(quantize_experts="nf4")))
