"""A rank that is killed under expert parallelism: the others end with an error, they do not hang.

The group's own limit of time is GROUP_S; NCCL's watchdog needs it, gloo notices the closed
connection at once.
"""

from __future__ import annotations

import os
import re
import signal

import pytest
import torch

from moe_patch import patch_model
from moe_patch.expert_parallel import attach_adapter
from tests.support import expert_adapters as cases
from tests.support import window
from tests.support.dist_helpers import Ranks

pytestmark = [window.expert_adapters, pytest.mark.slow]
GROUP_S, MARGIN_S = 20.0, 40.0
LAYOUT = list(cases.layouts(2).values())[-1]


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def worker(rank, model_class, folder, when):
    model = patch_model(
        attach_adapter(
            cases.load(model_class, folder, LAYOUT.options), cases.config("qwen3_moe", False)
        )
    )
    cases.run(model, "any", (rank,))
    if rank and when == "forward":
        model.base_model.model.model.layers[1].mlp.experts.register_forward_pre_hook(die)
    if rank and when == "backward":
        layer = model.base_model.model.model.layers[0]
        layer.register_forward_hook(lambda _, __, out: out.register_hook(die) and None)
    if rank and when == "save":
        die()
    if when != "save":
        cases.run(model, "any", (rank,))
        torch.distributed.barrier()
    model.save_pretrained(f"{folder}/adapter")


@pytest.mark.parametrize("when", ["forward", "backward", "save"])
def test_the_others_end_with_an_error(tmp_path, when):
    model = cases.make("qwen3_moe")
    model.save_pretrained(tmp_path)
    ranks = Ranks(2, GROUP_S)
    try:
        for pipe in ranks.pipes:
            pipe.send((worker, (type(model), str(tmp_path), when), str(tmp_path)))
        ranks.processes[1].join(MARGIN_S)
        assert ranks.processes[1].exitcode == -signal.SIGKILL
        assert ranks.pipes[0].poll(GROUP_S + MARGIN_S), "rank 0 hangs"
        report = ranks._answer(0) or ""  # NCCL's watchdog ends the process without a report
        assert re.search("Error|exit code [^0]", report), report
        assert not (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    finally:
        ranks.kill()
