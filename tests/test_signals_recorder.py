"""record(): what it keeps, that the norms are exact, and that it costs nothing when off."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_patch import (
    PatchStateError,
    UnsupportedModelError,
    UnsupportedOptionError,
    experts_torch,
    patch_model,
    patch_report,
    record,
)
from moe_patch.discover import discover
from moe_patch.signals import slot
from moe_patch.signals.losses import router_logits
from tests import tiny_models
from tests.adapters import EXPERTS, adapt, lora_config
from tests.numerics import FP32, assert_bits, assert_close
from tests.signals_cases import (
    build,
    experts_below,
    explicit_norms,
    last_layer,
    listening,
    per_token_norms,
    sum_loss,
    watch_output,
)
from tests.toy_family import ToyModel

EXACT = 1e-10
GRADIENTS = ("grad_norm_output", "grad_norm_params")
CHECKPOINTS = (None, False, True)


def patched(model_type: str, layers: int = 1, lora: tuple[str, ...] = (), **patch: Any) -> Any:
    model = build(model_type, layers)
    if lora:
        model = adapt(model, lora_config(lora))
    return patch_model(model, self_check=False, **patch)


def recorded(model: Any, batch: dict[str, Tensor]) -> Any:
    with record(model, router_input=True) as recorder:
        sum_loss(model, batch).backward()
    return recorder


def checkpointed(model: Any, reentrant: bool | None) -> None:
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("lora", [(), EXPERTS, EXPERTS[1:]], ids=["plain", "both", "down"])
@pytest.mark.parametrize("reentrant", CHECKPOINTS, ids=["kept", "checkpoint", "reentrant"])
def test_norms_in_the_last_layer_equal_per_token_gradients(model_type, lora, reentrant) -> None:
    """A sum-reduced loss behind the last block: what vmap(grad) returns per token and expert."""
    model = patched(model_type, lora=lora)
    checkpointed(model, reentrant)
    batch = tiny_models.inputs(model if not lora else model.get_base_model())
    (layer,) = recorded(model, batch).layers.values()
    expected = per_token_norms(model, batch, layer)
    assert layer.grad_norm_params.dtype == torch.float64
    assert_close(layer.grad_norm_params, expected["params"], EXACT, "parameters")
    if not lora:
        assert layer.grad_norm_lora is None
        return
    assert_close(layer.grad_norm_lora, expected["lora"], EXACT, "low-rank factors")


@pytest.mark.parametrize(
    ("model_type", "own_gate"),
    [
        ("qwen3_moe", False),
        ("gpt_oss", False),
        ("mixtral", False),
        ("muse_spark", False),  # a norm of its own between grouped products: rows seen by hooks
        ("gpt_oss", True),  # the same with biases
    ],
)
def test_norms_of_an_inner_layer_equal_explicit_outer_products(model_type, own_gate) -> None:
    model = patched(model_type, layers=2)
    experts = experts_below(tiny_models.blocks(model)[0][1])
    if own_gate:  # an activation put on the instance is run as it is
        experts._apply_gate = functools.partial(type(experts)._apply_gate, experts)
    seen = watch_output(experts)
    with record(model) as recorder:
        tiny_models.loss(model(**tiny_models.inputs(model))).backward()
    layer = next(iter(recorder.layers.values()))
    expected = explicit_norms(experts, seen, layer)
    assert_close(layer.act_norm, expected["act"], EXACT, "activation")
    assert_close(layer.grad_norm_output, expected["output"], EXACT, "output gradient")
    assert_close(layer.grad_norm_params, expected["params"], EXACT, "parameter gradient")


def test_recorded_decisions_are_those_of_transformers() -> None:
    reference = tiny_models.build("qwen3_moe")
    model = patch_model(copy.deepcopy(reference))
    batch = tiny_models.inputs(model)
    seen: list[tuple[Tensor, ...]] = []
    for _, block in tiny_models.blocks(reference):
        block.gate.register_forward_hook(lambda module, args, out: seen.append((*args, *out)))
    reference(**batch)
    with record(model, router_input=True) as recorder:
        model(**batch)
    assert list(recorder.layers) == [path for path, _ in tiny_models.blocks(model)]
    for layer, (x, logits, weights, ids) in zip(recorder.layers.values(), seen, strict=True):
        assert torch.equal(layer.ids, ids)
        assert_close(layer.logits, logits, FP32, "logits")
        assert_close(layer.weights, weights, FP32, "weights")
        assert_close(layer.router_input, x, FP32, "router input")
        assert torch.equal(layer.tokens_per_expert, torch.bincount(ids.flatten(), minlength=8))
        assert layer.act_norm.dtype == torch.float32


def test_fields_are_detached_and_gradients_are_none_before_backward() -> None:
    model = patched("qwen3_moe")
    batch = tiny_models.inputs(model)
    with record(model) as recorder:
        (layer,) = recorder.layers.values()
        assert layer.ids is layer.act_norm is layer.grad_norm_params is None
        loss = sum_loss(model, batch)
        assert [getattr(layer, name) for name in GRADIENTS] == [None, None]
        loss.backward()
    assert layer.router_input is None
    for name in ("ids", "weights", "logits", "act_norm", *GRADIENTS):
        assert not getattr(layer, name).requires_grad, name
    with record(model) as recorder, torch.no_grad():
        sum_loss(model, batch)
    (layer,) = recorder.layers.values()
    assert layer.act_norm is not None
    assert layer.grad_norm_params is None


@pytest.mark.parametrize("reentrant", CHECKPOINTS, ids=["kept", "checkpoint", "reentrant"])
def test_two_forwards_before_one_backward_keep_the_newest(reentrant) -> None:
    """As preference losses run a model: the gradients kept are those of the ids kept."""
    model = patched("qwen3_moe", layers=2)
    checkpointed(model, reentrant)
    first, second = (tiny_models.inputs(model, seed=seed) for seed in (1, 2))
    expected = recorded(model, second)
    with record(model) as recorder:
        (sum_loss(model, first) + sum_loss(model, second)).backward()
    for path, layer in recorder.layers.items():
        alone = expected.layers[path]
        assert torch.equal(layer.ids, alone.ids)
        assert_close(layer.grad_norm_params, alone.grad_norm_params, EXACT, path)


@pytest.mark.parametrize("reentrant", CHECKPOINTS, ids=["kept", "checkpoint", "reentrant"])
def test_a_step_counts_every_forward_once(reentrant) -> None:
    model = patched("qwen3_moe", layers=2)
    checkpointed(model, reentrant)
    batches = [tiny_models.inputs(model, seed=seed) for seed in (1, 2, 3)]
    with record(model, keep="all") as recorder:
        for batch in batches[:2]:
            sum_loss(model, batch).backward()
        first = recorder.step()
        sum_loss(model, batches[2]).backward()
        second = recorder.step()
        kept = {p: s.grad_norm_params.clone() for p, s in second.layers.items()}
        sum_loss(model, batches[0]).backward()
    assert recorder.history == [first, second]
    for path, layer in recorder.layers.items():
        assert int(first.load[path].sum()) == 2 * 14 * 2
        assert torch.equal(second.load[path], second.layers[path].tokens_per_expert)
        assert torch.equal(layer.load, layer.tokens_per_expert)
        assert_bits(second.layers[path].grad_norm_params, kept[path])
        assert not torch.equal(layer.grad_norm_params, kept[path])


class Launches(TorchDispatchMode):
    """Every operator that runs, with the number of bytes it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
        self.seen.append((str(func), sum(t.numel() * t.element_size() for t in tensors)))
        return out


def launches(model: Any, batch: dict[str, Tensor]) -> list[tuple[str, int]]:
    model.zero_grad(set_to_none=True)
    with Launches() as mode:
        sum_loss(model, batch).backward()
    return mode.seen


def test_off_costs_no_launch_and_no_byte() -> None:
    """Before and after a recording the same operators return the same bytes."""
    model = patched("qwen3_moe", layers=2)
    batch = tiny_models.inputs(model)
    never = launches(model, batch)
    with record(model, router_input=True):
        on = launches(model, batch)
    after = launches(model, batch)
    assert not listening(model)
    assert after == never
    assert len(on) > len(never)
    assert sum(size for _, size in on) > sum(size for _, size in never)


def test_off_no_norm_and_no_count_is_computed(monkeypatch) -> None:
    """Inside the experts operator too, where a dispatch mode does not look."""

    def fail(*args: Any) -> Tensor:
        raise AssertionError("computed")

    model = patched("qwen3_moe", layers=2)
    batch = tiny_models.inputs(model)
    monkeypatch.setattr(experts_torch, "row_norm", fail)
    monkeypatch.setattr(slot, "count_rows", fail)
    sum_loss(model, batch).backward()
    with record(model), pytest.raises(AssertionError, match="computed"):
        sum_loss(model, batch)


def test_recording_changes_no_bit() -> None:
    model = patched("gpt_oss", layers=2)
    batch = tiny_models.inputs(model)
    results = []
    for on in (False, True):
        model.zero_grad(set_to_none=True)
        if on:
            recorded(model, batch)
        else:
            sum_loss(model, batch).backward()
        results.append([p.grad for p in model.parameters()])
    for without, with_signals in zip(*results, strict=True):
        assert_bits(with_signals, without)


FIELDS = (
    "ids", "weights", "logits", "router_weights", "router_input", "tokens_per_expert", "load",
    "act_norm", *GRADIENTS,
)  # fmt: skip
# What a family cannot give; every other field of every recipe is recorded.
MISSING = {
    "dbrx": FIELDS,
    "doge": FIELDS,
    "jetmoe": FIELDS,
    "llama4": ("weights", "router_weights"),
    "longcat_flash": ("act_norm", "grad_norm_output"),
}


@pytest.mark.parametrize("model_type", tiny_models.patchable())
def test_every_field_of_every_family_is_recorded_or_named_as_missing(model_type) -> None:
    model = patch_model(tiny_models.build(model_type), self_check=False)
    with record(model, router_input=True) as recorder:
        tiny_models.loss(model(**tiny_models.inputs(model))).backward()
    report = patch_report(model)
    assert len(recorder.layers) == len(report)
    expected = set(MISSING.get(model_type, ()))
    if {row.tier for row in report} == {"experts"}:  # transformers' router keeps its own counsel
        expected |= set(FIELDS) & {"logits", "router_weights", "router_input"}
    for layer in recorder.layers.values():
        missing = {name for name in FIELDS if getattr(layer, name) is None}
        assert missing == layer.missing.keys() & set(FIELDS) == expected
        if layer.ids is None:
            continue
        E = layer.tokens_per_expert.shape[0]
        T, K = layer.ids.shape
        if "logits" not in expected:
            assert layer.logits.shape[0] == layer.router_input.shape[0] == T
            assert layer.logits.shape[1] >= E
        assert torch.equal(layer.tokens_per_expert, slot.count_rows(layer.ids, E))
        for name in {"weights", "act_norm", *GRADIENTS} - missing:
            values = getattr(layer, name)
            assert values.shape == (T, K), name
            assert torch.isfinite(values).all(), name
            assert values.any(), name


@pytest.mark.parametrize("model_type", ["phimoe", "inkling", "zaya", "llama4", "deepseek_v4"])
def test_routers_with_a_forward_of_their_own_are_recorded_as_transformers_returns(
    model_type,
) -> None:
    """Logits and weights; smk_loss says that it cannot compute such logits again."""
    reference = tiny_models.build(model_type).eval()
    model = patch_model(copy.deepcopy(reference), self_check=False)
    seen: list[Any] = []
    for found in discover(reference):
        for _, router in found.routers:
            router.register_forward_hook(lambda module, args, out: seen.append((args[0], out)))
    batch = tiny_models.inputs(model)
    tiny_models.loss(reference(**batch)).backward()
    with record(model, router_input=True) as recorder:
        tiny_models.loss(model(**batch)).backward()
    own = 0
    for layer, (hidden, out) in zip(recorder.layers.values(), seen, strict=True):
        logits, weights = (out[1], None) if model_type == "llama4" else out[:2]
        assert_close(layer.logits, logits, FP32, "logits")
        assert_close(layer.router_input, hidden.reshape(layer.router_input.shape), FP32, "input")
        if weights is not None:
            assert_close(layer.router_weights, weights, FP32, "weights")
        if layer.no_logits is not None:
            own += 1
            with pytest.raises(UnsupportedModelError, match="run a forward of their own"):
                router_logits(model, layer)
    assert own


def test_where_transformers_routes_the_experts_are_recorded() -> None:
    model = patch_model(ToyModel(), self_check=False)
    with record(model, router_input=True) as recorder:
        model(torch.randn(2, 5, 8)).loss.backward()
    assert list(recorder.layers) == ["layers.0", "layers.1"]
    for layer in recorder.layers.values():
        assert layer.ids.shape == layer.weights.shape == layer.grad_norm_params.shape == (10, 2)
        assert (layer.grad_norm_params > 0).all()
        assert layer.logits is layer.router_input is None
        assert layer.missing["logits"] == "transformers routes this block"


def test_llama4_rows_come_back_by_token() -> None:
    model = patch_model(tiny_models.build("llama4"), self_check=False)
    with record(model) as recorder:
        tiny_models.loss(model(**tiny_models.inputs(model))).backward()
    layer = next(iter(recorder.layers.values()))
    assert layer.ids.shape == layer.act_norm.shape == layer.grad_norm_params.shape == (14, 2)
    assert (layer.ids[:, 0] != layer.ids[:, 1]).all()


def test_errors() -> None:
    model = build("qwen3_moe")
    with pytest.raises(PatchStateError, match="no patched MoE block"), record(model):
        pass
    patch_model(model, self_check=False)
    with pytest.raises(UnsupportedOptionError, match="keep"), record(model, keep="some"):
        pass
    with record(model), pytest.raises(PatchStateError, match="already"), record(model):
        pass
    assert not listening(model)
    assert last_layer(model).mlp.experts.config._experts_implementation == "moe_patch"


def test_a_copy_of_a_recorded_model_is_not_recorded() -> None:
    model = patched("qwen3_moe")
    with record(model) as recorder:
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not listening(twin)
            sum_loss(twin, tiny_models.inputs(model)).backward()
    assert all(layer.ids is None for layer in recorder.layers.values())


def test_compiled_code_notices_the_recorder() -> None:
    """Compiled before, during and after; recorded layers run outside the graph."""
    model = patched("qwen3_moe", layers=2)
    batch = tiny_models.inputs(model)
    expected = recorded(model, batch)
    compiled = torch.compile(model, backend="aot_eager")
    sum_loss(compiled, batch)
    with record(model, router_input=True) as recorder:
        sum_loss(compiled, batch).backward()
        recorder.step()
    sum_loss(compiled, batch)
    for path, layer in recorder.layers.items():
        assert layer.load is None
        wanted = expected.layers[path]
        assert torch.equal(layer.ids, wanted.ids)
        assert_close(layer.router_input, wanted.router_input, EXACT, path)
        assert_close(layer.act_norm, wanted.act_norm, EXACT, path)
        assert_close(layer.grad_norm_params, wanted.grad_norm_params, EXACT, path)


@pytest.mark.parametrize("tokens", [(0, 7), (1, 1), (3, 11)])
def test_any_number_of_tokens(tokens) -> None:
    model = patched("qwen3_moe")
    block = last_layer(model).mlp
    x = torch.randn(*tokens, 32, dtype=torch.float64, requires_grad=True)
    with record(model, router_input=True) as recorder:
        block(x).square().sum().backward()
    (layer,) = recorder.layers.values()
    T = tokens[0] * tokens[1]
    for name in ("ids", "weights", "act_norm", *GRADIENTS):
        assert getattr(layer, name).shape == (T, 2), name
    assert int(layer.tokens_per_expert.sum()) == 2 * T


@pytest.mark.parametrize("empty", [-1, 8, 1000])
def test_empty_slots_count_nowhere_and_have_no_norm(empty) -> None:
    """The experts called with ids of nobody, as expert-parallel sentinels are."""
    model = patched("qwen3_moe")
    experts = experts_below(last_layer(model).mlp)
    ids = torch.tensor([[0, empty], [empty, empty], [3, 0]])
    weights = torch.full((3, 2), 0.5, dtype=torch.float64)
    x = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
    with record(model) as recorder:
        experts(x, ids, weights).square().sum().backward()
    (layer,) = recorder.layers.values()
    assert layer.tokens_per_expert.tolist() == [2, 0, 0, 1, 0, 0, 0, 0]
    for name in ("act_norm", *GRADIENTS):
        assert torch.equal(getattr(layer, name) > 0, ids == ids.clamp(0, 7)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_norms_are_fp32_and_near_fp64(dtype) -> None:
    """Against the same low-precision weights and inputs in fp64, on the same ids."""
    low = patch_model(tiny_models.build("qwen3_moe", dtype=dtype), self_check=False)
    high = patch_model(tiny_models.cast(copy.deepcopy(low), torch.float64), self_check=False)
    block, exact = (last_layer(model).mlp for model in (low, high))
    x = torch.randn(1, 9, 32).to(dtype)
    with record(low) as recorder:
        block(x).float().square().sum().backward()
    layer = list(recorder.layers.values())[-1]
    with record(high) as recorder:
        out = experts_below(exact)(x[0].double(), layer.ids, layer.weights.double())
        out.square().sum().backward()
    wanted = list(recorder.layers.values())[-1]
    for name in ("act_norm", *GRADIENTS):
        assert getattr(layer, name).dtype == torch.float32
        assert_close(getattr(layer, name), getattr(wanted, name), 2e-2, name)
