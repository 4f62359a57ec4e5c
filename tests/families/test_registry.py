"""Family entries check themselves, and a user's own family works like a built-in one."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import pickle

import pytest
import torch
import transformers

import moe_patch.patching.report
from moe_patch import (
    FamilySpec,
    UnsupportedModelError,
    families,
    patch_model,
    patch_report,
    register_family,
    supported_model_types,
    unpatch_model,
)
from moe_patch.families import logits as logits_of
from moe_patch.ops.backend import BackendChoice
from moe_patch.ops.routing import RouteRule, sigmoid_topk, softmax_topk, stable_topk
from moe_patch.runtime.spec import Arg, Const, GluRule
from moe_patch.types import Routing
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapt, assert_same_step, lora_config
from tests.support.adapters import Pair as AdaptedPair
from tests.support.numerics import FP32, assert_bits, assert_close
from tests.support.snapshots import assert_unchanged, snapshot
from tests.support.toy_family import ToyModel, ToyRouter

pytestmark = pytest.mark.versions
EIGHT = (
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "minimax_m2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
)
TOY = {
    "model_types": ("toy_moe",),
    "experts": "ToyExperts",
    "router": "ToyRouter",
    "block": "ToyBlock",
    "logits": logits_of.linear,
    "routing": softmax_topk,
    "params": {"top_k": "chosen", "renormalize": Const(True)},
    "router_attr": "picker",
}


def two_best(logits_TE, bias_E=None, *, top_k, weights_dtype=None, ties="lower", impl=None):
    """A user's own function, which leaves ``impl`` aside."""
    weights_TK, ids_TK = stable_topk(logits_TE.softmax(-1, dtype=torch.float32), top_k, ties)
    return Routing(ids_TK, weights_TK / weights_TK.sum(-1, keepdim=True), logits_TE)


@functools.wraps(softmax_topk)
def wrapped_rule(*args, **kwargs):
    """A user's function around a shipped rule, with the rule's parameters."""
    return softmax_topk(*args, **kwargs)


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """Restore the registry after each test."""
    monkeypatch.setattr(families, "_FAMILIES", list(families._FAMILIES))
    monkeypatch.setattr(families, "_LATER", list(families._LATER))
    monkeypatch.setattr(families, "_BY_CLASS", {k: list(v) for k, v in families._BY_CLASS.items()})


def spec_of(model_type: str) -> FamilySpec:
    (found,) = [spec for spec in families.families() if model_type in spec.model_types]
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"params": {"topk": "chosen", "renormalize": Const(True)}},
            r"softmax_topk has no parameter \['topk'\].*top_k",
        ),
        ({"params": {"renormalize": Const(True)}}, r"softmax_topk needs \['top_k'\]"),
        (
            {"params": {"top_k": "chosen", "renormalize": Const(True), "ties": Const("lower")}},
            r"no parameter \['ties'\]",
        ),
        (
            {"params": {"top_k": "chosen", "renormalize": Const(True), "score": Const("sigmoid")}},
            r"no parameter \['score'\]",
        ),
        ({"routing": two_best}, r"two_best has no parameter \['renormalize'\]; accepted: top_k"),
        ({"routing": two_best, "params": {}}, r"two_best needs \['top_k'\]"),
        ({"routing": None}, "no routing function"),
        ({"routing": None, "params": {}}, "no routing function"),
        ({"router": None}, "router's class name"),
        ({"logits": None}, "logits expression"),
        ({"tier": "half"}, "full, experts, refused"),
        ({"tier": "refused"}, "needs a reason"),
        ({"weights_dtype": "fp32"}, "score, logits, hidden"),
        ({"shared_gate": "shared_gate"}, "shared_gate without shared"),
        ({"shared": "shared", "block": None}, "block's class name"),
        ({"router": "Linear"}, "router='Linear' is a class of torch.nn, which all models have"),
        (
            {"params": {"top_k": 2, "renormalize": Const(True)}},
            r"\['top_k'\] is 2; accepted: an at",
        ),
        ({"params": {"top_k": "chosen", "renormalize": True}}, r"or Const\(value\)"),
        ({"params": None}, "params is None; accepted: a mapping"),
        ({"bias": Const(0.0)}, "bias is Const"),
        ({"routing": "softmax_topk"}, "accepted: a rule of moe_patch.ops.routing"),
        ({"since": "soon"}, "since is 'soon'; accepted: a release"),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_entry_fails_at_construction(change, message):
    FamilySpec(**TOY)
    with pytest.raises(ValueError, match=message) as raised:
        FamilySpec(**{**TOY, **change})
    assert "toy_moe" in str(raised.value)


def test_entries_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec_of("qwen3_moe").tier = "refused"


@pytest.mark.routers
@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize(
    ("model_type", "change", "cls", "attribute"),
    [
        ("qwen3_moe", {"params": {"top_k": "topk"}}, "Qwen3MoeTopKRouter", "topk"),
        ("deepseek_v3", {"bias": "correction"}, "DeepseekV3TopkRouter", "correction"),
        ("qwen2_moe", {"shared": "shared_one"}, "Qwen2MoeSparseMoeBlock", "shared_one"),
        ("qwen2_moe", {"shared_gate": "gate_of_it"}, "Qwen2MoeSparseMoeBlock", "gate_of_it"),
        ("glm4_moe", {"router_attr": "router"}, "Glm4MoeMoE", "router"),
        ("gpt_oss", {"glu": GluRule("swiglu_oai", alpha="alfa")}, "GptOssExperts", "alfa"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistyped_attribute_is_found_at_patch_time(
    model_type, change, cls, attribute, self_check
):
    register_family(dataclasses.replace(spec_of(model_type), **change))
    model = tiny_models.build(model_type)
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError) as raised:
        patch_model(model, self_check=self_check)
    for part in (cls, repr(attribute), transformers.__version__):
        assert part in str(raised.value)
    assert_unchanged(before, snapshot(model))


@pytest.mark.routers
@pytest.mark.parametrize(
    ("model_type", "change", "what"),
    [
        ("mixtral", {"params": {"top_k": "top_k", "renormalize": Const(False)}}, "routing weights"),
        ("deepseek_v3", {"bias": None}, "experts"),
        (
            "qwen3_moe",
            {"logits": lambda router, hidden: 2 * logits_of.linear(router, hidden)},
            "router logits",
        ),
    ],
)
def test_a_wrong_entry_is_refused_by_the_self_check(model_type, change, what):
    register_family(dataclasses.replace(spec_of(model_type), **change))
    model = tiny_models.build(model_type)
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=f"model.layers.0.mlp.gate.*self-check.*{what}"):
        patch_model(model)
    assert_unchanged(before, snapshot(model))


def test_supported_model_types():
    types = supported_model_types()
    assert {types[name] for name in EIGHT} == {"full"}
    assert set(types.values()) <= {"full", "experts", "refused"}
    assert all(name in transformers.CONFIG_MAPPING for name in types)


def test_a_model_type_that_transformers_lacks_is_inert():
    register_family(
        dataclasses.replace(
            spec_of("qwen3_moe"), model_types=("not_there_yet",), module="not_there_yet"
        )
    )
    assert "not_there_yet" not in supported_model_types()
    assert {row.tier for row in patch_report(patch_model(tiny_models.build("qwen3_moe")))} == {
        "full"
    }


@pytest.fixture
def toy():
    torch.manual_seed(0)
    return ToyModel()


@pytest.fixture
def batch():
    return {"x": torch.randn(11, 8, generator=torch.Generator().manual_seed(1))}


def gradients(model, batch):
    model.zero_grad(set_to_none=True)
    model(**batch).loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("shared", [None, "shared"], ids=["bound router", "bound block"])
def test_a_users_family_works_end_to_end(toy, batch, shared):
    register_family(FamilySpec(**TOY, shared=shared))
    out, expected, before = toy(**batch).logits, gradients(toy, batch), snapshot(toy)
    patch_model(toy)
    rows = patch_report(toy)
    assert [(row.path, row.model_type, row.tier) for row in rows] == [
        ("layers.0", "toy_moe", "full"), ("layers.1", "toy_moe", "full"),
    ]  # fmt: skip
    assert {(row.router, row.shared, row.self_check) for row in rows} == {
        ("softmax_topk", shared or "none", "passed")
    }
    assert_close(toy(**batch).logits, out, FP32)
    for found, wanted in zip(gradients(toy, batch), expected, strict=True):
        assert_close(found, wanted, FP32)
    toy.zero_grad(set_to_none=True)
    unpatch_model(toy)
    for entry, state in snapshot(toy).items():
        assert list(state.entries) == list(before[entry].entries)
    assert_bits(toy(**batch).logits, out)


@pytest.mark.parametrize("ties", ["lower", "torch"])
@pytest.mark.parametrize(
    ("function", "params"),
    [(two_best, {"top_k": "chosen"}), (wrapped_rule, TOY["params"])],
    ids=["own", "wrapped"],
)
def test_a_users_own_routing_function(toy, batch, monkeypatch, function, params, ties):
    """Report the function as the router, and judge only options outside of it, such as ties."""
    register_family(FamilySpec(**{**TOY, "routing": function, "params": params}))
    out = toy(**batch).logits
    assert_close(patch_model(toy, ties=ties)(**batch).logits, out, FP32)
    name = function.__name__
    assert {(row.router, row.router_backend) for row in patch_report(toy)} == {(name, "torch")}
    pretended = BackendChoice("triton", "")
    monkeypatch.setattr(moe_patch.patching.report, "choose_backend", lambda *_: pretended)
    for row in patch_report(toy):
        assert (row.router, row.router_backend) == (name, "triton" if ties == "lower" else "torch")
        own = f"routing: {name} decides per call which part runs on the kernels"
        assert row.reason == own if ties == "lower" else "ties='torch'" in row.reason


@pytest.mark.parametrize("of", [copy.deepcopy, lambda spec: pickle.loads(pickle.dumps(spec))])
def test_a_copied_entry_is_still_the_shipped_one(of):
    entries = [s for s in families.families() if isinstance(s.routing, RouteRule)]
    assert all(families.is_shipped(of(s)) for s in entries)
    changed = dataclasses.replace(entries[0], routing=RouteRule(entries[0].routing.name))
    assert not families.is_shipped(changed)


def test_a_users_family_with_adapters(toy, batch):
    register_family(FamilySpec(**TOY))
    reference = adapt(copy.deepcopy(toy), lora_config([*EXPERTS, "picker.weight"], ["shared"]))
    ours = patch_model(adapt(toy, lora_config([*EXPERTS, "picker.weight"], ["shared"])))
    assert {row.lora for row in patch_report(ours)} == {"fused (down_proj, gate_up_proj)"}
    assert_same_step(AdaptedPair(reference, ours, batch))


def test_without_an_entry_the_decorated_experts_still_run(toy, batch):
    out = toy(**batch).logits
    patch_model(toy)
    assert {(row.tier, row.router) for row in patch_report(toy)} == {("experts", "transformers")}
    assert_close(toy(**batch).logits, out, FP32)


def test_a_later_entry_for_the_same_classes_replaces(toy):
    register_family(FamilySpec(**TOY))
    register_family(FamilySpec(**{**TOY, "tier": "refused", "reason": "retired for this test"}))
    assert len([spec for spec in families.families() if "toy_moe" in spec.model_types]) == 1
    with pytest.raises(UnsupportedModelError, match="layers.0: retired for this test"):
        patch_model(toy)
    register_family(FamilySpec(**TOY))
    assert len([spec for spec in families.families() if "toy_moe" in spec.model_types]) == 1
    assert {row.tier for row in patch_report(patch_model(toy))} == {"full"}


def test_module_folder_keeps_equal_class_names_apart(toy):
    register_family(FamilySpec(**TOY, module="somewhere_else"))
    patch_model(toy)
    assert {row.tier for row in patch_report(toy)} == {"experts"}, (
        "an entry for another folder was used"
    )


def test_bias_from_the_block_needs_an_argument_index():
    spec = FamilySpec(
        model_types=("toy_moe",),
        router="ToyRouter",
        experts="ToyExperts",
        logits=logits_of.linear,
        routing=sigmoid_topk,
        params={"top_k": "chosen", "renormalize": Const(True)},
        bias=Arg(1),
    )
    router, hidden = ToyRouter(4, 8), torch.randn(5, 8)
    bias = torch.tensor([0.0, 9.0, 0.0, 9.0])
    assert spec.route(router, hidden, (bias,)).ids_TK.sort(-1).values.tolist() == [[1, 3]] * 5


ROUTER_FORWARD = ToyRouter.forward


def scaled_and_noisy(self, hidden_states):
    """Use ``scale`` and ``noise``, attributes that no entry for ToyRouter reads."""
    logits, weights, ids = ROUTER_FORWARD(self, hidden_states)
    weights = weights * self.__dict__.get("scale", 1.0)
    return logits, weights + self.training * self.__dict__.get("noise", 0.0), ids


scaled_and_noisy.__module__ = ToyRouter.__module__


@pytest.mark.parametrize("attribute", ["scale", "noise"])
def test_every_block_of_a_users_family_is_checked_in_both_modes(toy, monkeypatch, attribute):
    """Check every block of a user's family in train and in eval mode.

    A shipped family is checked once for each kind of block, in eval mode.
    """
    monkeypatch.setattr(ToyRouter, "forward", scaled_and_noisy)
    register_family(FamilySpec(**TOY))
    assert {row.self_check for row in patch_report(patch_model(toy))} == {"passed"}
    unpatch_model(toy)
    setattr(toy.layers[1].picker, attribute, 2.5)
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.1\.picker: self-check: routing weights"
    ):
        patch_model(toy)
    with pytest.warns(UserWarning, match="1 of 2 MoE blocks"):
        patch_model(toy, strict=False)
    assert [row.tier for row in patch_report(toy)] == ["full", "refused"]


def test_an_entry_for_a_later_release_waits_for_it(toy):
    register_family(FamilySpec(**TOY, since="99.0"))
    assert {row.tier for row in patch_report(patch_model(toy))} == {"experts"}
    assert "toy_moe" in families.later_families()[-1].model_types


def test_a_bound_forward_shows_the_signature_of_its_own(toy):
    register_family(FamilySpec(**TOY, shared="shared"))
    patch_model(toy)
    block = toy.layers[0]
    assert list(inspect.signature(block.forward).parameters) == ["hidden_states"]
    assert next(iter(inspect.signature(block.picker.forward).parameters)) == "hidden_states"
