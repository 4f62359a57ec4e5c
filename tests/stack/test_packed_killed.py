"""A rank that dies in forward, backward or save: the other ends with an error, not in a hang.

Also adapters of different sizes that nobody has compared. gloo on a CPU, NCCL on two cards.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tests.support import dist_helpers
from tests.support import packed_ranks as cases
from tests.support.dist_helpers import WATCHDOG, device, free_port

GROUP_S = 20
# Far beyond the group's own limit, for slow machines; the test itself waits no longer than needed.
END_S = 240
# From the end of one rank to that of the other; without WATCHDOG it takes 80 s on cards.
OTHER_S = GROUP_S + 40


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def arm(model, where):
    """Make this rank die at its next forward or backward of the second layer."""
    layer = cases.layers(model)[1]
    if where == "forward":
        layer.mlp.register_forward_pre_hook(die)
    if where == "backward":
        layer.mlp.register_forward_hook(lambda m, a, out: hooked(out))


def hooked(out):
    tensor = out[0] if isinstance(out, tuple) else out
    if tensor.requires_grad:
        tensor.register_hook(die)


def lose(rank, port, where, folder):
    """Train a step, lose rank 1, and write rank 0's error."""
    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"} | WATCHDOG)
    own = device(2, rank)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    torch.distributed.init_process_group(
        "gloo" if own.type == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=GROUP_S),
    )
    differs = {"r": 3 + rank} if where == "adapters" else {}
    try:
        model = cases.shard(cases.adapted("nf4", 8, rank, **differs))
        batch = cases.batch_of(rank)
        if where != "adapters":
            model(**batch).loss.backward()
        if rank == 1:
            arm(model, where)
            if where == "save":
                die()
        model(**batch).loss.backward()
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if own.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:
        with open(f"{folder}/{rank}", "w", encoding="utf-8") as file:
            file.write(f"{type(error).__name__}: {error}")
        os._exit(1)  # leaving the group in order would wait for the rank that is gone
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward", "save", "adapters"])
def test_the_other_rank_ends_with_an_error(where, tmp_path):
    port, context = free_port(), dist_helpers._CONTEXT
    ranks = [
        context.Process(target=lose, args=(rank, port, where, str(tmp_path)), daemon=True)
        for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    ranks[1].join(END_S)
    ranks[0].join(OTHER_S)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert None not in codes, "a rank hangs"
    assert codes[0] != 0
    if where == "adapters":
        assert codes[1] != 0
    else:
        assert codes[1] == -signal.SIGKILL
