"""Bytes of packed experts that FSDP2 holds, gathers and sends equal those of ``moe-patch plan``."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from moe_patch.cli.plan_sizes import read_sizes
from moe_patch.formats.shard import QuantShard
from moe_patch.formats.tensor import QuantTensor
from moe_patch.tools import plan_weights
from moe_patch.tools.plan_types import Recipe
from tests.stack.test_packed_ranks import KINDS
from tests.support import packed_ranks as cases
from tests.support.adapters import attention
from tests.support.dist_helpers import run_ranks
from tests.support.packed_ranks import adapted, batch_of, shard
from tests.support.quant_models import EXPERTS


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


class Counted:
    """FSDP2's ordinary all-gather, with the bytes of each result."""

    def __init__(self):
        self.bytes = []

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.bytes.append(output_tensor.nbytes)
        return torch.distributed.all_gather_into_tensor(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


def padding(layer, world):
    """Return the bytes that FSDP2 adds to plain parameters: whole rows for the last ranks."""
    plain = [p for p in layer.parameters() if not isinstance(p.to_local(), QuantShard)]
    return sum(-p.shape[0] % world * p.numel() // p.shape[0] * p.itemsize for p in plain)


def bytes_held(rank, kinds=KINDS, world=2):
    found = {}
    for kind in kinds:
        model = shard(adapted(*kind, rank, world=world, r=4))
        seen, wide, count = [], [], Counted()
        numel = kind[1] * 64 * 64

        def look(layer, *_, seen=seen, wide=wide, numel=numel):
            seen.append(gathered_now(layer))
            if len(seen) == 1:  # looking at all objects takes seconds
                objects = (t for t in gc.get_objects() if type(t) is torch.Tensor)
                floats = (t for t in objects if t.is_floating_point() and t.itemsize > 1)
                wide += [tuple(t.shape) for t in floats if t.numel() == numel]

        layers = cases.layers(model)
        added = padding(layers[0], world)
        for layer in layers:
            layer.set_custom_all_gather(count)
            layer.mlp.register_forward_pre_hook(lambda m, a, layer=layer: look(layer))
        model(**batch_of(rank, world=world)).loss.backward()
        outside = [p.to_local() for p in model.parameters()]
        between = [type(local).__name__ for local in outside if isinstance(local, QuantTensor)]
        found[kind] = held(model), seen, [n - added for n in count.bytes], wide, between
    return found


def planned(kind, ranks):
    """Return what ``moe-patch plan --ranks`` says of experts held and of a layer gathered."""
    storage, experts = kind
    name = "gpt_oss" if storage == "mxfp4" else "qwen3_moe"
    count = {"num_local_experts" if storage == "mxfp4" else "num_experts": experts}
    plain = cases.build(name, **count)
    targets = {"target_modules": attention(name), "target_parameters": list(EXPERTS)}
    recipe = Recipe(storage=storage, ranks=ranks, rank=4)
    sizes = read_sizes(plain, targets)
    packed = tuple(w for w in sizes.weights if plan_weights.storage_of(w, recipe) == storage)
    experts = plan_weights.weight_bytes(replace(sizes, weights=packed), recipe)["experts"]
    return experts, plan_weights.layer_bytes(sizes, recipe)


def check_bytes(results, kinds=KINDS):
    for kind in kinds:
        experts, layer = planned(kind, len(results))
        for result in results:
            kept, seen, sent, wide, between = result[kind]
            assert kept == experts, kind
            assert set(seen) == set(sent) == {layer}, kind
            assert not wide, kind
            assert not between, kind


def test_bytes_held_and_gathered_are_those_of_the_plan():
    check_bytes(run_ranks(bytes_held))
