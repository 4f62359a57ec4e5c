"""FSDP2 over experts in 4 and 8 bits, two processes: steps, bytes, states, loading from rank 0.

gloo on a CPU, NCCL on two cards. Every worker runs all storages, because each call costs seconds.
"""

from __future__ import annotations

import gc
from dataclasses import replace

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

from moe_patch.cli.plan_sizes import read_sizes
from moe_patch.errors import UnsupportedModelError
from moe_patch.formats.shard import QuantShard
from moe_patch.formats.tensor import QuantTensor
from moe_patch.tools import plan_memory
from moe_patch.tools.plan_types import Recipe
from moe_patch.train.sharded import check_equal
from tests.stack.test_ranks import optimizer_of, train
from tests.support import packed_ranks as cases
from tests.support.adapters import adapt, attention, lora_config
from tests.support.dist_helpers import device, run_ranks
from tests.support.numerics import FP32, assert_bits, assert_close
from tests.support.packed_ranks import adapted, base, batch_of, shard, whole_batch
from tests.support.quant_models import EXPERTS

KINDS = [("nf4", 8), ("nf4", 5), ("fp8", 5), ("mxfp4", 5)]
STEPS = 2


def logits(model, batch):
    with torch.no_grad():
        return model(input_ids=batch["input_ids"]).logits


def steps(rank):
    """Return by kind: logits before training, first loss, first gradients, last parameters."""
    found = {}
    for kind in KINDS:
        model, batch = shard(adapted(*kind, rank)), batch_of(rank)
        before, loss = logits(model, batch), model(**batch).loss.item()
        found[kind] = before, loss, *train(model, batch, STEPS, optimizer_of(model, 0.9))
    return found


def one_process(kind):
    model, batch = adapted(*kind), whole_batch()
    before = [logits(model, batch_of(rank, 0)).cpu() for rank in (0, 1)]
    loss = model(**batch).loss.item()
    run = train(model, batch, STEPS, optimizer_of(model, 0.9))
    return before, loss, *({name: t.cpu() for name, t in each.items()} for each in run)


def test_steps_equal_one_process():
    """The forward is equal bit for bit: gathered experts decode as those of one process."""
    results = run_ranks(steps)
    for kind in KINDS:
        before, loss, gradients, parameters = one_process(kind)
        ranks = [result[kind] for result in results]
        assert sum(one[1] for one in ranks) / 2 == pytest.approx(loss, rel=1e-5)
        for rank, (own, _, own_gradients, own_parameters) in enumerate(ranks):
            assert_bits(own, before[rank], f"{kind} logits of rank {rank}")
            assert own_gradients.keys() == gradients.keys()
            for name, value in gradients.items():
                assert_close(own_gradients[name], value, FP32, f"{kind} gradient of {name}")
            for name, value in parameters.items():
                assert_close(own_parameters[name], value, FP32, f"{kind} {name}")


def storage_bytes(tensors):
    """Return the bytes of distinct live storages."""
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def held(model):
    """Return the bytes of the packed experts that this rank keeps."""
    parts = [p.to_local() for p in model.parameters() if isinstance(p.data.to_local(), QuantShard)]
    weights = [part.held_weight for part in parts]
    return storage_bytes(t for weight in weights for t in (weight.packed, *weight.scales))


def gathered_now(layer):
    """Return the bytes of a layer's gathered parameters: live storages of packed experts."""
    packed = [p.weight for p in layer.parameters() if isinstance(p, QuantTensor)]
    own = [t for weight in packed for t in (weight.packed, weight.scales[0])]
    others = [p for p in layer.parameters() if not isinstance(p, QuantTensor)]
    assert len(packed) == 2
    return storage_bytes(own) + sum(p.numel() * p.itemsize for p in others)


def bytes_held(rank):
    found = {}
    for kind in KINDS:
        model = shard(adapted(*kind, rank, r=4))
        seen, wide = [], []
        numel = kind[1] * 64 * 64

        def look(layer, *_, seen=seen, wide=wide, numel=numel):
            seen.append(gathered_now(layer))
            if len(seen) == 1:  # looking at all objects takes seconds
                objects = (t for t in gc.get_objects() if type(t) is torch.Tensor)
                floats = (t for t in objects if t.is_floating_point() and t.itemsize > 1)
                wide += [tuple(t.shape) for t in floats if t.numel() == numel]

        for layer in cases.layers(model):
            layer.mlp.register_forward_pre_hook(lambda m, a, layer=layer: look(layer))
        batch = batch_of(rank)
        model(**batch).loss.backward()
        outside = [p.to_local() for p in model.parameters()]
        between = [type(local).__name__ for local in outside if isinstance(local, QuantTensor)]
        found[kind] = held(model), seen, wide, between
    return found


def planned(kind):
    """Return what ``moe-patch plan --ranks 2`` says of experts held and of a layer gathered."""
    storage, experts = kind
    name = "gpt_oss" if storage == "mxfp4" else "qwen3_moe"
    count = {"num_local_experts" if storage == "mxfp4" else "num_experts": experts}
    plain = cases.build(name, **count)
    targets = {"target_modules": attention(name), "target_parameters": list(EXPERTS)}
    recipe = Recipe(storage=storage, ranks=2, rank=4)
    sizes = read_sizes(plain, targets)
    packed = tuple(w for w in sizes.weights if plan_memory.storage_of(w, recipe) == storage)
    experts = plan_memory.weight_bytes(replace(sizes, weights=packed), recipe)["experts"]
    return experts, plan_memory.layer_bytes(sizes, recipe)


def test_bytes_held_and_gathered_are_those_of_the_plan():
    results = run_ranks(bytes_held)
    for kind in KINDS:
        experts, layer = planned(kind)
        for result in results:
            kept, seen, wide, between = result[kind]
            assert kept == experts, kind
            assert set(seen) == {layer}, kind
            assert not wide, kind
            assert not between, kind


def states(rank, folder):
    """Load states into other models; return logits, a resumed run and the whole state, by kind."""
    batch = batch_of(rank)
    return {kind: states_of(kind, rank, batch, f"{folder}/{kind[0]}{kind[1]}") for kind in KINDS}


def states_of(kind, rank, batch, folder):
    model = shard(adapted(*kind, rank))
    optimizer = optimizer_of(model, 0.9)
    train(model, batch, 1, optimizer)
    expected = logits(model, batch)
    other = shard(adapted(*kind, rank, seed=9))
    assert not torch.equal(logits(other, batch), expected)
    # Assigned after a forward, as well as copied: scales of all experts change too.
    for assign in (True, False):
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


def refused(rank):
    """Return the messages of what a sharded model refuses."""
    model = shard(adapted("nf4", 8, rank))
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    plain = {name: torch.zeros(t.shape) for name, t in model.named_parameters()}
    weight = next(p for p in model.parameters() if isinstance(p.to_local(), QuantShard))
    calls = {
        "broadcast state": lambda: set_model_state_dict(
            model,
            whole,
            options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
        ),
        "16 bits": lambda: model.load_state_dict(plain, strict=False),
        "decoding": lambda: weight.to_local()[0],
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
    assert "lora_A.default.weight: (shape, dtype, sum) is ((24, 64)" in first[0]
    assert "on rank 0 and ((32, 64)" in first[0]
    assert "rank 1" in first[1]
