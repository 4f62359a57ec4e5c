"""FSDP2 over packed experts on four ranks: uneven parts, a rank without experts, two axes.

Also checkpoints that another number of ranks has written.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)

from tests.stack.test_packed_bytes import bytes_held, check_bytes
from tests.stack.test_packed_ranks import check_steps, logits, steps
from tests.stack.test_ranks import optimizer_of, train
from tests.support.dist_helpers import run_ranks
from tests.support.numerics import FP32, assert_bits, assert_close
from tests.support.packed_ranks import adapted, batch_of, shard

pytestmark = pytest.mark.slow
# Experts by rank: 2 2 2 2, 2 2 1 0 (the last rank holds padding alone), and 2 2 2 1.
KINDS = [("nf4", 8), ("nf4", 5), ("fp8", 5), ("mxfp4", 5), ("nf4", 7)]
WHOLE = StateDictOptions(full_state_dict=True)
HYBRID = [("nf4", 5), ("mxfp4", 5)]


def test_steps_equal_one_process():
    check_steps(run_ranks(steps, KINDS, 4, world=4), KINDS)


@pytest.mark.parametrize("axes", [(2, 2), (4, 1)])
def test_parts_of_two_axes_equal_one_process(axes):
    """Copies of the model, each divided over two ranks or over one."""
    check_steps(run_ranks(steps, HYBRID, 4, axes, world=4), HYBRID)


def test_bytes_held_and_gathered_are_those_of_the_plan():
    check_bytes(run_ranks(bytes_held, KINDS, 4, world=4), KINDS)


def parts_of(model, optimizer):
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def saved(rank, folder, world):
    """Train a step on tokens that are the same on all ranks; save, and train another one."""
    batch, found = batch_of(0, rank, world), {}
    for kind in KINDS:
        model = shard(adapted(*kind, rank, world=world))
        optimizer = optimizer_of(model, 0.9)
        train(model, batch, 1, optimizer)
        dcp.save(parts_of(model, optimizer), checkpoint_id=f"{folder}/{kind[0]}{kind[1]}")
        whole = get_model_state_dict(model, options=WHOLE)
        if rank == 0:
            torch.save(whole, f"{folder}/{kind[0]}{kind[1]}.pt")
        found[kind] = logits(model, batch), train(model, batch, 1, optimizer)[1]
    return found


def resumed(rank, folder, world):
    """Load into models of other experts, and train the second step."""
    batch, found = batch_of(0, rank, world), {}
    for kind in KINDS:
        model = shard(adapted(*kind, rank, seed=9, world=world))
        optimizer = optimizer_of(model, 0.9)
        train(model, batch, 1, optimizer)  # the optimiser's state exists, with other values
        parts = parts_of(model, optimizer)
        dcp.load(parts, checkpoint_id=f"{folder}/{kind[0]}{kind[1]}")
        set_state_dict(
            model, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
        )
        before = logits(model, batch)
        again = shard(adapted(*kind, rank, seed=9, world=world))
        whole = torch.load(f"{folder}/{kind[0]}{kind[1]}.pt", weights_only=True)
        set_model_state_dict(again, whole, options=WHOLE)
        assert_bits(logits(again, batch), before, f"{kind} whole state")
        found[kind] = before, train(model, batch, 1, optimizer)[1]
    return found


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_checkpoints_resume_on_another_number_of_ranks(before, after, tmp_path):
    first = run_ranks(saved, str(tmp_path), before, world=before)[0]
    for found in run_ranks(resumed, str(tmp_path), after, world=after):
        for kind in KINDS:
            assert_bits(found[kind][0], first[kind][0], f"{kind} logits")
            for name, value in first[kind][1].items():
                assert_close(found[kind][1][name], value, FP32, f"{kind} {name}")
