"""DeepSpeed ZeRO-3 with two processes whose tokens use different experts.

The tests need DeepSpeed, which is no dependency (DS_BUILD_OPS=0 suffices). On the CPU its
collectives run on gloo.
"""

from __future__ import annotations

import pytest
import torch
from transformers.integrations import HfDeepSpeedConfig

from moe_patch import patch_model, patch_report
from tests.stack.test_ranks import (
    LIMIT,
    LORA,
    STEPS,
    batch_of,
    build,
    check,
    one_process,
    optimizer_of,
    record_choices,
    to_rank,
    train,
    whole_batch,
)
from tests.support import tiny_models
from tests.support.adapters import adapt
from tests.support.dist_helpers import run_ranks
from tests.support.numerics import assert_bits, assert_close

deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

pytestmark = pytest.mark.slow

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0.0,  # DeepSpeed's default clips
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    # Every parameter is partitioned, also those that are small enough to stay whole.
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
MOMENTUM = 0.9
EMPTY = "skipped: ZeRO-3 partitioned weights"


def start(model):
    optimizer = optimizer_of(model, MOMENTUM)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)[0]


def steps(engine, batch, count):
    """Return whole gradients of the first step and parameters after the last, like train()."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    trained = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
    first = {}
    for _ in range(count):
        engine.backward(engine(**batch).loss)
        first = first or {n: safe_get_full_grad(p).clone() for n, p in trained}
        engine.step()
    return first, {n: safe_get_full_fp32_param(p).clone() for n, p in trained}


def zero3(rank, lora, order):
    model, seen = build(lora, rank), []
    record_choices(model, seen)
    if order == "patch first":
        patch_model(model)
    engine = start(model)
    patch_model(model)
    assert {p.numel() for p in model.parameters()} == {0}
    (found,) = {(row.tier, row.self_check) for row in patch_report(model)}
    assert found == ("full", "passed" if order == "patch first" else EMPTY)
    return *steps(engine, to_rank(batch_of(rank), rank), STEPS), seen


@pytest.mark.parametrize("order", ["patch first", "partition first"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_five_steps_equal_one_process(lora, order):
    check(run_ranks(zero3, lora, order), one_process(lora, MOMENTUM))


def leaves(rank):
    """Gather whole blocks: patching leaves the class of the blocks that the user names."""
    model, seen = patch_model(build(False, rank)), []
    record_choices(model, seen)
    blocks = [block for _, block in tiny_models.blocks(model)]
    from deepspeed.utils import set_z3_leaf_modules, z3_leaf_module

    found = set_z3_leaf_modules(model, [type(blocks[0])])
    assert len(found) == len(blocks) == 2
    assert all(z3_leaf_module(block) for block in blocks)
    return *steps(start(model), to_rank(batch_of(rank), rank), STEPS), seen


def test_leaf_modules_are_found_and_train_the_same():
    check(run_ranks(leaves), one_process(False, MOMENTUM))


def loaded(rank, model_class, folder, lora):
    """Patch a model that was partitioned before any whole weight existed in this process."""
    kept_alive = HfDeepSpeedConfig(CONFIG)
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    assert kept_alive.is_zero3()
    assert {p.numel() for p in model.parameters()} == {0}
    model = patch_model(adapt(model, LORA) if lora else model).train()
    assert {(row.tier, row.self_check) for row in patch_report(model)} == {("full", EMPTY)}
    seen = []
    record_choices(model, seen)
    return *steps(start(model), to_rank(batch_of(rank), rank), STEPS), seen


def test_from_pretrained_partitions_what_is_patched(tmp_path):
    model = build(False)
    model.save_pretrained(tmp_path)
    check(run_ranks(loaded, type(model), str(tmp_path), False), one_process(False, MOMENTUM))


def resumed(rank, lora, folder):
    batch = to_rank(batch_of(rank), rank)
    engine = start(patch_model(build(lora, rank)))
    steps(engine, batch, 2)
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder)
    whole = steps(engine, batch, STEPS - 2)
    again = start(patch_model(build(lora, rank)))
    again.load_checkpoint(folder)
    return whole, steps(again, batch, STEPS - 2)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_save_and_resume(lora, tmp_path):
    for whole, again in run_ranks(resumed, lora, str(tmp_path)):
        for found, wanted in zip(again, whole, strict=True):
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert_bits(found[name], value, name)
    saved = torch.load(tmp_path / "pytorch_model.bin")
    model = build(lora)
    assert saved.keys() == model.state_dict().keys()
    _, parameters = train(model, to_rank(whole_batch(), 0), 2, optimizer_of(model, MOMENTUM))
    for name, value in parameters.items():
        assert_close(saved[name].float().cpu(), value.cpu(), LIMIT, name)
