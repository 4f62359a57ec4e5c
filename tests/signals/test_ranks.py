"""Two ranks: counts, biases, norms under DDP and FSDP2; layers that one rank skips; debug_nan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moe_patch import (
    UnsupportedModelError,
    patch_model,
    record,
    replay_file,
    shadow_results,
    smk_loss,
    update_expert_bias,
)
from moe_patch.signals.updates import keep_updates
from tests.support import signals_cases as cases
from tests.support import tiny_models
from tests.support.adapters import EXPERTS
from tests.support.dist_helpers import run_ranks
from tests.support.numerics import FP32, FP64, assert_bits, assert_close
from tests.support.signals_cases import (
    CHECKPOINTS,
    GRADIENTS,
    build,
    checkpointed,
    correction_biases,
    sum_loss,
)


def patched(model_type: str) -> Any:
    return patch_model(tiny_models.build(model_type), self_check=False)


def _rank(rank: int, folder: str) -> tuple[Any, ...]:
    model = patched("deepseek_v3")
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    with record(parallel) as recorder:
        tiny_models.loss(parallel(**tiny_models.inputs(model, seed=rank + 1))).backward()
        signs = update_expert_bias(parallel, recorder, group=dist.group.WORLD)
        own = {path: layer.load for path, layer in recorder.layers.items()}
        closed = recorder.step(group=dist.group.WORLD)
    norms = {path: layer.grad_norm_params for path, layer in recorder.layers.items()}
    found = own, closed.load, signs, correction_biases(model), norms
    _sharded()
    _sharded_with_adapters()
    _one_layer_less(rank)
    _nan_under_fsdp(rank, folder)
    return found


def _sharded_with_adapters() -> None:
    """Layers and experts as units, adapters on the experts, both kinds of checkpoints."""
    for reentrant in CHECKPOINTS:
        whole, sharded = (cases.patched("qwen3_moe", layers=2, lora=EXPERTS) for _ in range(2))
        for model in (whole, sharded):
            checkpointed(model, reentrant)
        layers = sharded.get_base_model().model.layers
        for unit in (*(layer.mlp.experts for layer in layers), *layers, sharded):
            fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
        batch = tiny_models.inputs(whole.get_base_model())
        recorders = []
        for model in (whole, sharded):
            with record(model) as recorder:
                sum_loss(model, batch).backward()
            recorders.append(recorder)
        for path, layer in recorders[0].layers.items():
            for name in ("act_norm", *GRADIENTS, "grad_norm_lora"):
                found = getattr(recorders[1].layers[path], name)
                assert_close(found, getattr(layer, name), FP64, name)


def _nan_under_fsdp(rank: int, folder: str) -> None:
    """Write one file per rank, and finish that step and the next."""
    for units in ("layers", "experts"):
        place = Path(folder, units)
        model = tiny_models.build("qwen3_moe")
        patch_model(model, self_check=False, debug_nan=True, debug_dir=str(place))
        model.model.layers[1].mlp.experts.down_proj.data[3] = float("nan")
        batch = tiny_models.inputs(model)
        experts = [layer.mlp.experts for layer in model.model.layers] if units == "experts" else []
        for unit in (*experts, *model.model.layers, model):
            fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
        with record(model) as recorder:
            for _ in range(2):
                tiny_models.loss(model(**batch)).backward()
        (file,) = place.glob(f"*.rank{rank}.safetensors")
        result = replay_file(file, "cpu")
        ids = recorder.layers["model.layers.1.mlp"].ids
        assert ids is not None
        bad = (ids == 3).any(-1).nonzero().flatten().tolist()
        assert result.ours == result.theirs == tuple(bad) != ()
        assert list(result.parameters) == ["down_proj"]


def _one_layer_less(rank: int) -> None:
    """Make the same collective calls on ranks that ran other layers, such as image towers."""
    model = patched("minimax_m2")
    first, second = (block for _, block in tiny_models.blocks(model))
    with record(model) as recorder:
        for block, ranks in ((first, (0,)), (second, (0, 1))):
            if rank in ranks:
                block(tiny_models.hidden(block, 1, 5))
        closed = recorder.step(dist.group.WORLD)
        nothing = recorder.step(dist.group.WORLD)
    assert [int(load.sum()) for load in closed.load.values()] == [5 * 2, 2 * 5 * 2]
    assert not nothing.load


def _sharded() -> None:
    """Match the whole model under FSDP2 with equal batches; refuse sharded parameters."""
    whole = patch_model(build("qwen3_moe", layers=2), self_check=False)
    sharded = patch_model(build("qwen3_moe", layers=2), self_check=False, shadow_check=1)
    for unit in (*sharded.model.layers, sharded):
        fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
    recorders = []
    for model in (whole, sharded):
        with record(model, router_input=True) as recorder:
            sum_loss(model, tiny_models.inputs(whole)).backward()
        recorders.append(recorder)
    for path, layer in recorders[0].layers.items():
        found = recorders[1].layers[path]
        assert torch.equal(found.ids, layer.ids)
        assert_close(found.act_norm, layer.act_norm, FP64, path)
        assert_close(found.grad_norm_params, layer.grad_norm_params, FP64, path)
    compared = shadow_results(sharded)
    assert {result.role for result in compared} == {"router", "experts"}
    assert not any(result.skipped for result in compared)
    assert all(result.within for result in compared)
    with pytest.raises(UnsupportedModelError, match=r"gate: weight is sharded \(DTensor\)"):
        smk_loss(recorders[1], sharded)
    with pytest.raises(UnsupportedModelError, match="experts: gate_up_proj is sharded"):
        keep_updates(recorders[1], sharded, 2)


def test_two_ranks_under_ddp_stay_equal_and_under_fsdp2_record_the_same(tmp_path) -> None:
    (own0, sum0, signs0, bias0, norms0), (own1, sum1, signs1, bias1, norms1) = run_ranks(
        _rank, str(tmp_path)
    )
    for seed, norms in ((1, norms0), (2, norms1)):
        model = patched("deepseek_v3")
        with record(model) as recorder:
            tiny_models.loss(model(**tiny_models.inputs(model, seed=seed))).backward()
        for path, layer in recorder.layers.items():
            assert_close(norms[f"module.{path}"], layer.grad_norm_params, FP32, path)
    for path in own0:
        assert path.startswith("module.")
        assert not torch.equal(own0[path], own1[path])
        assert torch.equal(sum0[path], own0[path] + own1[path])
        assert torch.equal(sum0[path], sum1[path])
        total = own0[path] + own1[path]
        assert torch.equal(signs0[path], torch.sign(total.double().mean() - total).float())
        assert torch.equal(signs0[path], signs1[path])
    for name in bias0:
        assert_bits(bias0[name], bias1[name], name)
