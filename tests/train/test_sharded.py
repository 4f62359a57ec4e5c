"""Gathering weights that processes hold in parts; whole runs are in tests/stack/test_launch.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn

from moe_patch import UnsupportedOptionError
from moe_patch.train.sharded import gather, size

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
