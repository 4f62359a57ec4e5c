"""Experts in host memory: order, buffers, bits, state, copies and undo, with the CPU as device.

The transfer copies as late as it may and leaves NaN until then (tests/support/offload_cases.py).
"""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_patch import (
    UnsupportedModelError,
    UnsupportedOptionError,
    patch_model,
    quantize_experts,
    unpatch_model,
)
from moe_patch.patching.discover import discover, place_of
from moe_patch.runtime import offload
from tests.support import quant_models, tiny_models
from tests.support.adapters import (
    EXPERTS,
    adapt,
    adapter_gradients,
    expert_modules,
    lora_config,
    step,
)
from tests.support.numerics import assert_bits
from tests.support.offload_cases import (
    LateTransfer,
    blocks_copied,
    seats,
    state_of,
    transfer_of,
)

LAYERS = 4
NAMES = "gate_up_proj", "down_proj"
CASES = [("qwen3_moe", ""), ("qwen3_moe", "nf4"), ("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4"),
         ("gpt_oss", "")]  # fmt: skip


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "transfer_to", LateTransfer)


def build(family: str = "qwen3_moe", storage: str = "") -> tuple[Any, dict[str, Tensor]]:
    base = quant_models.build(family, num_hidden_layers=LAYERS)
    batch = tiny_models.inputs(base)
    return adapt(quant_models.store(base, storage), lora_config(EXPERTS, ["q_proj"])), batch


def checkpointed(model: Any, reentrant: bool = False) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model.train()


def weights(model: nn.Module) -> list[Tensor]:
    return [experts._parameters[n] for experts in expert_modules(model) for n in NAMES]  # type: ignore[misc]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_bits_of_resident_experts(case: tuple[str, str]) -> None:
    """Steps with and without checkpointing, generate, and the state dict."""
    resident, batch = build(*case)
    ours = copy.deepcopy(resident)
    patch_model(resident)
    patch_model(ours, offload_experts=True)
    for change in (lambda model: model, checkpointed):
        assert_bits(step(change(ours), batch), step(change(resident), batch))
        found, expected = adapter_gradients(ours), adapter_gradients(resident)
        for name, gradient in expected.items():
            assert_bits(found[name], gradient)
    prompt = {"input_ids": batch["input_ids"][:1, :4], "max_new_tokens": 3, "do_sample": False}
    prompt |= {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0}
    # transformers 5.9 counts experts with the mask of all positions, and fails in the second step.
    prompt["output_router_logits"] = False
    found, expected = (model.eval().generate(**prompt) for model in (ours, resident))
    assert_bits(torch.stack(found.logits), torch.stack(expected.logits))
    assert len(transfer_of(ours).buffers) == 2
    state = ours.state_dict()
    for name, value in resident.state_dict().items():
        assert_bits(state[name], value)


@pytest.mark.parametrize("checkpointing", ["no", "reentrant", "not reentrant"])
def test_order_and_buffers(checkpointing: str) -> None:
    """Ascending forward, descending backward; the last two blocks are there already."""
    model, batch = build()
    if checkpointing != "no":
        checkpointed(model, checkpointing == "reentrant")
    patch_model(model, offload_experts=True)
    for _ in range(2):
        out = model(**batch)
        assert blocks_copied(model) == [0, 1, 2, 3]
        out.loss.backward()
        assert blocks_copied(model) == [1, 0]
    one = sum(w.nbytes for w in weights(model)[:2])
    assert transfer_of(model).buffers == [one, one]


def test_the_next_block_is_copied_while_one_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = build()
    patch_model(model, offload_experts=True)
    begun: list[list[int]] = []
    wait = LateTransfer.wait

    def noted(self: LateTransfer, event: Any) -> None:
        begun.append(blocks_copied(model))
        wait(self, event)

    monkeypatch.setattr(LateTransfer, "wait", noted)
    loss = model(**batch).loss
    assert begun == [[0, 1], [2], [3], []]
    begun.clear()
    loss.backward()
    assert begun == [[], [1], [0], []]


def test_the_weight_itself_is_the_host_memory() -> None:
    """No parameter moves, and beside two slots no expert-sized storage is added."""
    model, batch = build()
    before = [(id(w), w.data_ptr()) for w in weights(model)]
    size = weights(model)[1].untyped_storage().nbytes()
    others = storages(size)
    patch_model(model, offload_experts=True)
    step(model, batch)
    model.zero_grad()
    assert [(id(w), w.data_ptr()) for w in weights(model)] == before
    (lane,) = state_of(model).lanes.values()
    slots = {slot.buffer.data_ptr() for slot in lane.slots if slot.buffer is not None}
    assert storages(size) - others == slots
    assert len(slots) == 2
    unpatch_model(model)
    del lane
    assert [(id(w), w.data_ptr()) for w in weights(model)] == before
    assert storages(size) <= others
    assert not any("_apply" in experts.__dict__ for experts in expert_modules(model))


def storages(least: int) -> set[int]:
    """Return the addresses of all live storages of at least some bytes."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
    found = [t.untyped_storage() for t in tensors if t.device.type == "cpu" and not t.is_sparse]
    return {storage.data_ptr() for storage in found if storage.nbytes() >= least}


def test_changed_weights_take_effect() -> None:
    """A pending backward is refused, and the next pass reads what was written, to ``data`` too."""
    model, batch = build()
    other, _ = build()
    patch_model(model, offload_experts=True)
    patch_model(other)
    step(model, batch)
    loss = model(**batch).loss
    with torch.no_grad():
        for w in [*weights(other), *weights(model)]:
            w.mul_(1.5)
    with pytest.raises(UnsupportedModelError, match="changed in place between forward and"):
        loss.backward()
    assert_bits(step(model, batch), step(other, batch))
    for one in (model, other):
        for w in weights(one):
            w.data.mul_(0.5)
    assert_bits(step(model, batch), step(other, batch))


@pytest.mark.parametrize("storage", ["", "nf4"])
def test_saved_files_are_those_of_resident_experts(storage: str, tmp_path: Path) -> None:
    model = quant_models.store(quant_models.build(), storage)
    model.save_pretrained(tmp_path / "resident")  # type: ignore[operator]
    patch_model(model, offload_experts=True)
    with torch.no_grad():
        model(**tiny_models.inputs(model))
    model.save_pretrained(tmp_path / "ours")  # type: ignore[operator]
    for file in (tmp_path / "resident").iterdir():
        assert (tmp_path / "ours" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
def test_compiled_models_call_the_experts_between_graphs() -> None:
    model, batch = build()
    patch_model(model, offload_experts=True)
    expected = step(model, batch)
    gradients = {name: g.clone() for name, g in adapter_gradients(model).items()}
    assert_bits(step(torch.compile(model, backend="eager"), batch), expected)
    for name, gradient in adapter_gradients(model).items():
        assert_bits(gradient, gradients[name])


def test_copies_have_their_own_seats() -> None:
    model, batch = build()
    patch_model(model, offload_experts=True)
    pickled = pickle.dumps(model)
    expected = step(model, batch)
    for twin in (copy.deepcopy(model), pickle.loads(pickled)):
        assert state_of(twin) is not state_of(model)
        assert len({id(seat.offload) for seat in seats(twin)}) == 1
        assert_bits(step(twin, batch), expected)
        assert blocks_copied(twin)[:LAYERS] == list(range(LAYERS))
        with torch.no_grad():
            weights(twin)[1].zero_()
        assert not torch.equal(step(twin, batch), expected)
        unpatch_model(twin)
    layer = copy.deepcopy(model.base_model.model.model.layers[1])
    assert list(state_of(layer).seats) == [1]
    assert_bits(step(model, batch), expected)


def test_moving_the_model_leaves_the_experts() -> None:
    model, _ = build("gpt_oss")
    patch_model(model, offload_experts=True)
    with pytest.raises(UnsupportedOptionError, match=r"experts.*gate_up_proj: a change from"):
        model.to(torch.bfloat16)
    model.to("meta")
    held = {id(w) for w in weights(model)}
    assert {p.device.type for p in model.parameters() if id(p) in held} == {"cpu"}
    assert {p.device.type for p in model.parameters() if id(p) not in held} == {"meta"}


def test_few_rows_copy_only_their_experts() -> None:
    base = quant_models.build("qwen3_moe", num_hidden_layers=2, num_experts=16)
    quant_models.store(base, "nf4")
    expected = copy.deepcopy(patch_model(copy.deepcopy(base)))
    patch_model(base, offload_experts=True)
    ids = {"input_ids": tiny_models.inputs(base)["input_ids"][:1, :2]}
    with torch.no_grad():
        assert_bits(base(**ids).logits, expected(**ids).logits)
    whole = sum(p.packed.nbytes for p in quant_models.quantised(base))
    copied = sum(s.nbytes for sources in transfer_of(base).copied for s in sources)
    assert copied < whole / 2


def test_the_report_names_the_device_that_computes() -> None:
    model = quant_models.build("qwen3_moe")
    patch_model(model, offload_experts=True)
    block = discover(model)[0]
    model.to("meta")
    weight = expert_modules(model)[0]._parameters["down_proj"]
    assert weight is not None
    assert place_of(block, weight) == torch.device("meta")
    unpatch_model(model)
    assert place_of(block, weight) == torch.device("cpu")


def test_packing_elsewhere_gives_the_same_bytes() -> None:
    """``pack_on`` packs on one device for another; "cpu" for "cpu" copies nothing wrong."""
    plain = quant_models.build("qwen3_moe")
    other = quantize_experts(copy.deepcopy(plain), "nf4", device="cpu", pack_on="cpu")
    quantize_experts(plain, "nf4")
    for one, two in zip(quant_models.quantised(plain), quant_models.quantised(other), strict=True):
        assert_bits(one.packed, two.packed)
        assert_bits(one.scale_0, two.scale_0)  # type: ignore[attr-defined]
