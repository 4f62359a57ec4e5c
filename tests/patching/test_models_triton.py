"""Whole patched models on the Triton backend, on a CPU: routers, experts, adapters and losses.

The kernels run under Triton's interpreter where a card would run them; the reference is always
transformers, and PEFT where there are adapters, unpatched. On a GPU:
test_models_gpu.py, tests/lora and tests/families/test_doge.py.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch import patch_model, patch_report, replay_routing
from moe_patch.kernels.experts import experts, groups
from moe_patch.kernels.routing import losses, product_key, route, weights_at
from moe_patch.ops import backend
from tests.families import test_doge
from tests.support import interpreted, tiny_models, window
from tests.support.adapters import (
    EXPERTS,
    adapted_pair,
    as_in_peft_018,
    assert_same_step,
    lora_config,
    recipe,
)
from tests.support.numerics import FP32, assert_bits
from tests.support.parity import assert_parity, run_model
from tests.support.replay_cases import step, traced
from tests.train import test_router_losses

ONE_LAYER = {"num_hidden_layers": 1}
FUSED = "fused (down_proj, gate_up_proj)"


@contextlib.contextmanager
def on_triton(*ran: tuple[object, str]) -> Iterator[None]:
    """Let Triton take fp32 and fp16 on a CPU, and require calls of each function of ``ran``."""
    original, spies = backend.why_not_triton, []

    def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
        return None if dtype in (torch.float32, torch.float16) else original(device, dtype)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(backend, "why_not_triton", why_not))
        for module, name in ran:
            function = getattr(module, name)
            spies.append(stack.enter_context(mock.patch.object(module, name, side_effect=function)))
        yield
        for (_, name), spy in zip(ran, spies, strict=True):
            assert spy.called, f"{name} did not run"


BOTH = (
    (route, "route_forward"), (route, "route_backward"),
    (experts, "experts_forward"), (experts, "experts_backward"),
)  # fmt: skip


def assert_on_triton(model: torch.nn.Module, lora: str) -> None:
    for row in patch_report(model):
        assert (row.tier, row.router_backend, row.experts_backend) == ("full", "triton", "triton")
        assert (row.lora, row.reason) == (lora, "")


def check_model(model_type: str, device: str) -> None:
    """Check outputs and every gradient."""
    reference = tiny_models.build(model_type, **ONE_LAYER)
    batch = tiny_models.inputs(reference)
    model = copy.deepcopy(reference)
    with on_triton(*BOTH):
        patch_model(model, self_check=False)
        assert_on_triton(model, "none")
        assert_parity(run_model(model, batch), run_model(reference, batch), FP32)


def check_replay(model_type: str, device: str) -> None:
    """A replay of the own routing runs the kernel for given ids, and changes no bit."""
    with on_triton(*BOTH, (weights_at, "weights_at")):
        model = patch_model(tiny_models.build(model_type, **ONE_LAYER), self_check=False)
        batch = tiny_models.inputs(model)
        expected = step(model, batch)
        with replay_routing(model, traced(model, batch)):
            found = step(model, batch)
    for mine, theirs in zip(found, expected, strict=True):
        assert_bits(mine, theirs)


ADAPTED = {"patch": {"self_check": False}, "overrides": ONE_LAYER}


def check_adapters(model_type: str, device: str) -> None:
    """Adapt both projections and the router."""
    with on_triton(*BOTH):
        pair = adapted_pair(model_type, recipe(model_type), **ADAPTED)
        assert_on_triton(pair.ours, FUSED)
        assert_same_step(pair)


def check_two_adapters(model_type: str, device: str) -> None:
    """The sum of two adapters of other ranks."""
    with on_triton(*BOTH):
        pair = adapted_pair(model_type, recipe(model_type), **ADAPTED)
        for model in pair[:2]:
            torch.manual_seed(7)
            model.add_adapter("second", lora_config(recipe(model_type), r=5, use_rslora=True))
            model.base_model.set_adapter(["second", "default"])
        assert_same_step(pair)


def check_unswapped_adapters(device: str) -> None:
    """Read factors in the layout of PEFT 0.18, in which the rows of A lie far apart."""
    with on_triton(*BOTH[2:]):
        pair = adapted_pair("qwen3_moe", EXPERTS, patch={"self_check": False}, overrides=ONE_LAYER)
        for model in pair[:2]:
            as_in_peft_018(model)
        assert_on_triton(pair.ours, FUSED)
        assert_same_step(pair)


def check_llama4_adapters(device: str) -> None:
    """Match PEFT on Llama-4: a bound block, weights stored transposed, scaled inputs."""
    with on_triton(*BOTH):
        pair = adapted_pair("llama4", EXPERTS, patch={"self_check": False})
        assert {row.lora for row in patch_report(pair.ours)} == {FUSED}
        assert_same_step(pair)


# Families whose own code runs between grouped products, and how far fp32 results may be apart.
COMPOSED = {"dbrx": 2 * FP32, "jetmoe": 2 * FP32, "muse_spark": 2 * FP32, "step3p7": 2 * FP32}
STACKS = ["input_linear.weight", "output_linear.weight"]
GROUPED = (groups, "grouped_linear"), (groups, "outer_sum")


def check_composed(model_type: str, device: str) -> None:
    """Run routers and products on Triton, around the model's own activation, norm or layout."""
    reference = tiny_models.build(model_type)
    model = copy.deepcopy(reference)
    batch = tiny_models.inputs(reference)
    with on_triton(*BOTH[:2], *GROUPED):
        patch_model(model, self_check=False)
        for row in patch_report(model):
            assert (row.router_backend, row.experts_backend) == ("triton", "triton")
        assert_parity(run_model(model, batch), run_model(reference, batch), COMPOSED[model_type])


def check_composed_adapters(model_type: str, targets: list[str], device: str) -> None:
    with on_triton(*GROUPED):
        pair = adapted_pair(model_type, targets, patch={"self_check": False})
        assert any(row.lora.startswith("fused") for row in patch_report(pair.ours))
        assert_same_step(pair)


def check_doge(device: str) -> None:
    ran = (product_key, "product_key_forward"), (product_key, "product_key_backward")
    with on_triton(*ran):
        test_doge.test_doge_with_certain_ties_is_transformers_with_ties_broken(64, device)


def check_router_losses(device: str) -> None:
    ran = (losses, "router_sums"), (losses, "router_sums_backward")
    with on_triton(*ran), tempfile.TemporaryDirectory() as folder:
        test_router_losses.test_load_balance_equals_transformers_own(
            "qwen3_moe", True, Path(folder)
        )


SEVERAL = {
    f"two-lora-{name}": partial(check_two_adapters, name) for name in ("qwen3_moe", "gpt_oss")
}
CASES: dict[str, Callable[[str], None]] = {
    **{name: partial(check_model, name) for name in ("deepseek_v3", "gpt_oss", "mixtral")},
    **{f"lora-{name}": partial(check_adapters, name) for name in ("qwen3_moe", "gpt_oss")},
    **SEVERAL,
    "lora-unswapped": check_unswapped_adapters,
    "replay": partial(check_replay, "qwen3_moe"),
    "lora-llama4": check_llama4_adapters,
    **{name: partial(check_composed, name) for name in COMPOSED},
    "lora-jetmoe": partial(check_composed_adapters, "jetmoe", STACKS),
    "doge": check_doge,
    "router_losses": check_router_losses,
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=[window.second_adapter] * (name in SEVERAL)) for name in CASES],
)
def test_interpreted(outcomes: dict[str, str], case: str) -> None:
    assert outcomes[case] == ""


if __name__ == "__main__":
    interpreted.report(CASES)
