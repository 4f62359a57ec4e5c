"""FSDP2 and DDP over experts in 4 and 8 bits, two processes: steps, states, what is refused.

gloo on a CPU, NCCL on two cards. Every worker runs all storages, because each call costs seconds.
"""

from __future__ import annotations

import re

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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from moe_patch import patch_model
from moe_patch.errors import UnsupportedModelError
from moe_patch.quant.sharded_state import is_sharded
from moe_patch.train.sharded import check_equal
from tests.stack.test_ranks import optimizer_of, train
from tests.support.adapters import adapt, lora_config
from tests.support.dist_helpers import device, run_ranks
from tests.support.numerics import FP32, assert_bits, assert_close
from tests.support.packed_ranks import adapted, base, batch_of, shard, whole_batch
from tests.support.quant_models import EXPERTS

KINDS = [("nf4", 8), ("nf4", 5), ("fp8", 5), ("mxfp4", 5)]
STEPS = 2


def logits(model, batch):
    with torch.no_grad():
        return model(input_ids=batch["input_ids"]).logits


def steps(rank, kinds=KINDS, world=2, axes=None, offload=False):
    """Return by kind: logits before training, first loss, first gradients, last parameters.

    ``axes`` are the sizes of a mesh: copies of the model, and parts of each.
    """
    own, options, found = device(world, rank), {}, {}
    if axes is not None:
        names = ("dp_replicate", "dp_shard")
        options["mesh"] = init_device_mesh(own.type, axes, mesh_dim_names=names)
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=own.type == "cuda")
    for kind in kinds:
        model = shard(adapted(*kind, rank, world=world), **options)
        batch = batch_of(rank, world=world)
        before, loss = logits(model, batch), model(**batch).loss.item()
        found[kind] = before, loss, *train(model, batch, STEPS, optimizer_of(model, 0.9))
        assert not offload or {p.device.type for p in model.parameters()} == {"cpu"}
    return found


def one_process(kind, world):
    model, batch = adapted(*kind, world=world), whole_batch(world)
    before = [logits(model, batch_of(rank, 0, world)).cpu() for rank in range(world)]
    loss = model(**batch).loss.item()
    run = train(model, batch, STEPS, optimizer_of(model, 0.9))
    return before, loss, *({name: t.cpu() for name, t in each.items()} for each in run)


def check_steps(results, kinds=KINDS):
    """Compare with one process.

    The forward is equal bit for bit: gathered experts decode as those of one process.
    """
    world = len(results)
    for kind in kinds:
        before, loss, gradients, parameters = one_process(kind, world)
        ranks = [result[kind] for result in results]
        assert sum(one[1] for one in ranks) / world == pytest.approx(loss, rel=1e-5)
        for rank, (own, _, own_gradients, own_parameters) in enumerate(ranks):
            assert_bits(own, before[rank], f"{kind} logits of rank {rank}")
            assert own_gradients.keys() == gradients.keys()
            for name, value in gradients.items():
                assert_close(own_gradients[name], value, FP32, f"{kind} gradient of {name}")
            for name, value in parameters.items():
                assert_close(own_parameters[name], value, FP32, f"{kind} {name}")


def test_steps_equal_one_process():
    check_steps(run_ranks(steps))


def test_steps_with_parts_in_host_memory_equal_one_process():
    check_steps(run_ranks(steps, KINDS[1:2], 2, None, True), KINDS[1:2])


def test_steps_of_one_rank():
    """FSDP2 gathers otherwise on a mesh of one."""
    check_steps(run_ranks(steps, KINDS[1:], 1, world=1), KINDS[1:])


def ddp_steps(rank, kinds):
    """Return what :func:`steps` does, of ranks that hold all experts and reduce the adapters."""
    found = {}
    for kind in kinds:
        model, batch = adapted(*kind, rank), batch_of(rank)
        before, loss = logits(model, batch), model(**batch).loss.item()
        run = train(DistributedDataParallel(model), batch, STEPS, optimizer_of(model, 0.9))
        found[kind] = before, loss, *run
    return found


def test_steps_under_ddp_equal_one_process():
    kinds = [KINDS[0], *KINDS[2:]]
    check_steps(run_ranks(ddp_steps, kinds), kinds)


def states(rank, folder):
    """Load states into other models; return logits, a resumed run and the whole state, by kind."""
    batch = batch_of(rank)
    return {kind: states_of(kind, rank, batch, f"{folder}/{kind[0]}{kind[1]}") for kind in KINDS}


def experts_of(model):
    """Return the parts of this rank."""
    return [p.to_local() for p in model.parameters() if is_sharded(p)]


def same_bytes(one, other):
    return torch.equal(one.weight.packed.view(torch.uint8), other.weight.packed.view(torch.uint8))


def states_of(kind, rank, batch, folder):
    model = shard(adapted(*kind, rank))
    optimizer = optimizer_of(model, 0.9)
    train(model, batch, 1, optimizer)
    expected = logits(model, batch)
    # Assigned after a forward, as well as copied: scales of all experts change too.
    for assign in (True, False):
        other = shard(adapted(*kind, rank, seed=9))
        assert not torch.equal(logits(other, batch), expected)
        assert not any(map(same_bytes, experts_of(other), experts_of(model)))
        other.load_state_dict(model.state_dict(), assign=assign)
        assert_bits(logits(other, batch), expected, f"{kind} assign={assign}")
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(parts, checkpoint_id=folder)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    other = shard(adapted(*kind, rank, seed=9))
    set_model_state_dict(other, dict(whole), options=StateDictOptions(full_state_dict=True))
    assert_bits(logits(other, batch), expected, f"{kind} whole state")
    trained = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert trained.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    run = train(model, batch, 2, optimizer)
    again = shard(adapted(*kind, rank, seed=9))
    optimizer = optimizer_of(again, 0.9)
    train(again, batch, 1, optimizer)
    parts = dict(zip(("model", "optimizer"), get_state_dict(again, optimizer), strict=True))
    dcp.load(parts, checkpoint_id=folder)
    set_state_dict(
        again, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"]
    )
    return expected, run, train(again, batch, 2, optimizer), whole


@pytest.mark.slow
def test_states_are_saved_resumed_and_load_in_one_process(tmp_path):
    results = run_ranks(states, str(tmp_path))
    for kind in KINDS:
        for rank, result in enumerate(results):
            expected, *runs, whole = result[kind]
            for found, wanted in zip(runs[1], runs[0], strict=True):
                for name, value in wanted.items():
                    assert_bits(found[name], value, f"{kind} {name}")
            one = adapted(*kind, seed=9)
            one.load_state_dict(whole)
            assert_bits(logits(one, batch_of(rank, 0)).cpu(), expected, f"{kind} in one process")


def run_part(rank):
    """Run a model with a part of its experts, as expert parallelism of transformers leaves it."""
    model = patch_model(base("nf4").to(device(2, rank)))
    experts = model.model.layers[0].mlp.experts
    part = experts.gate_up_proj.split(4)[rank]
    experts.register_parameter("gate_up_proj", torch.nn.Parameter(part, requires_grad=False))
    return logits(model, batch_of(rank))


def refused(rank):
    """Return the messages of what a sharded model refuses."""
    model = shard(adapted("nf4", 8, rank))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    plain = {name: torch.zeros(t.shape) for name, t in model.named_parameters()}
    weight = experts_of(model)[0]
    calls = {
        "broadcast state": lambda: set_model_state_dict(
            model,
            whole,
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        ),
        "16 bits": lambda: model.load_state_dict(plain, strict=False),
        "decoding": lambda: weight[0],
        "a part": lambda: run_part(rank),
        "saving": lambda: model.base_model.model.save_pretrained("nowhere"),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except (UnsupportedModelError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_what_a_sharded_model_refuses_by_name():
    for found in run_ranks(refused):
        assert "fsdp2_load_full_state_dict" in found["broadcast state"]
        assert "gate_up_proj is sharded and stored in nf4" in found["16 bits"]
        assert "one rank's part of experts" in found["decoding"]
        assert "nothing has gathered them; accepted: FSDP2" in found["a part"]
        assert "gate_up_proj is packed and sharded" in found["saving"]


def differing(rank):
    """Return the messages for adapters of another rank, and of other values, on rank 1."""
    found = []
    for change in ({"r": 3 + rank}, {"seed": rank}):
        seed = change.pop("seed", 0)
        torch.manual_seed(seed)
        model = base("nf4")
        config = lora_config(EXPERTS, ["q_proj"], **change)
        with pytest.raises(UnsupportedModelError) as refused:
            check_equal(adapt(model, config, seed=seed).to(device(2, rank)))
        found.append(str(refused.value))
    return found


def test_adapters_that_differ_between_ranks_are_refused_by_all():
    first, second = run_ranks(differing)
    assert first == second
    # PEFT's releases list the projections in another order, so the width may be either's.
    parts = r"lora_A.default.weight: \(shape, dtype, sum\) is \(\(24, \d+\).*on rank 0 and \(\(32, "
    assert re.search(parts, first[0])
    assert "rank 1" in first[1]
