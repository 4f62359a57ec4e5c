"""A change between two calls is followed, and a decision that is kept from the first is caught.

Numbers of calls: test_host_calls.py, whose counter of operators is used here.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moe_patch import patch_model
from moe_patch.ops.experts import op
from moe_patch.runtime import experts, forward
from moe_patch.runtime.spec import FamilySpec
from tests.ops.test_host_calls import Counting
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapt, lora_config
from tests.support.numerics import FP32
from tests.support.parity import assert_parity, run_block


def _blocks(model_type: str = "qwen3_moe") -> tuple[Any, Any]:
    """A patched block and transformers' own with the same weights."""
    model, reference = (tiny_models.build(model_type) for _ in range(2))
    patch_model(model)
    return tiny_models.blocks(model)[0][1], tiny_models.blocks(reference)[0][1]


def _new_parameter(block: Any) -> None:
    old = block.experts.down_proj
    block.experts.down_proj = nn.Parameter(old.detach() * 2)


def _new_router(block: Any) -> None:
    block.gate.weight = nn.Parameter(block.gate.weight.detach().flip(0))


def _other_top_k(block: Any) -> None:
    block.gate.top_k = 1


def _frozen(block: Any) -> None:
    block.experts.gate_up_proj.requires_grad_(False)
    block.gate.weight.requires_grad_(False)


def _other_activation(block: Any) -> None:
    block.experts.act_fn = nn.ReLU()


def _hooked_activation(block: Any) -> None:
    block.experts.act_fn.register_forward_hook(lambda module, args, out: out * 2)


def _other_dtype(block: Any) -> None:
    block.to(torch.float64)


def _evaluated(block: Any) -> None:
    block.eval()


def _same(mine: Any, theirs: Any) -> None:
    """Compare values and gradients of two blocks on the same random input."""
    dtype = mine.gate.weight.dtype
    x = torch.randn(2, 5, mine.gate.weight.shape[1], dtype=dtype)
    limit = 1e-2 if dtype == torch.float16 else FP32  # transformers' scores are fp32 in fp64, too
    assert_parity(run_block(mine, x), run_block(theirs, x), limit)


@pytest.mark.parametrize(
    "change",
    [_new_parameter, _new_router, _other_top_k, _frozen, _other_activation, _hooked_activation,
     _other_dtype, _evaluated],
)  # fmt: skip
def test_a_change_between_two_calls_is_followed(change: Callable[[Any], None]) -> None:
    """Match transformers' own block after equal changes; run twice, as caches fill."""
    mine, theirs = _blocks()
    for changed in (False, True, True):
        if changed:
            change(mine)
            change(theirs)
        _same(mine, theirs)


def _narrow_blocks() -> tuple[Any, Any]:
    """The blocks in fp16, so that a step to fp32 shows a dtype that was kept."""
    mine, theirs = _blocks()
    return mine.half(), theirs.half()


def _widened(block: Any) -> None:
    block.float()


def test_a_wider_dtype_is_followed() -> None:
    pair = _narrow_blocks()
    _same(*pair)
    for block in pair:
        _widened(block)
    _same(*pair)


def _new_bias(block: Any) -> None:
    router = block.gate
    router.e_score_correction_bias = router.e_score_correction_bias.detach().flip(0) * 1.5


def test_a_correction_bias_that_moves_between_two_calls_is_followed() -> None:
    pair = _blocks("glm4_moe")
    for _ in range(3):
        _same(*pair)
        for block in pair:
            _new_bias(block)


def _adapted_blocks() -> list[Any]:
    """A patched block and PEFT's own, both with adapters on their experts."""
    models = [tiny_models.build("qwen3_moe") for _ in range(2)]
    blocks: list[Any] = [tiny_models.blocks(model)[0][1] for model in models]
    adapted = [adapt(model, lora_config(EXPERTS)) for model in models]
    patch_model(adapted[0])
    return blocks


def _new_factor(block: Any) -> None:
    linear = block.experts.lora_B["default"]
    linear.weight = nn.Parameter(linear.weight.detach() * -3)


def _other_scaling(block: Any) -> None:
    block.experts.scaling.update(default=0.5)


def _disabled(block: Any) -> None:
    block.experts.enable_adapters(False)


def test_adapters_that_are_switched_replaced_and_frozen_are_followed() -> None:
    """Match PEFT itself in one model that stays patched."""
    blocks = _adapted_blocks()
    changes: list[Callable[[Any], Any]] = [
        lambda block: None,
        _new_factor,
        _other_scaling,
        _disabled,
        lambda block: block.experts.enable_adapters(True),
        lambda block: block.experts.lora_A["default"].weight.requires_grad_(False),
        lambda block: block.double(),
    ]
    for change in changes:
        for block in blocks:
            change(block)
        _same(*blocks)


def _traced_calls(block: Any) -> collections.Counter[str]:
    """Count this library's operators in a call under a mode that watches them."""
    x = torch.randn(2, 5, block.gate.weight.shape[1])
    with Counting() as counting, torch.no_grad():
        block(x)
    return collections.Counter({k: n for k, n in counting.calls.items() if "moe_patch" in k})


def test_a_mode_that_is_entered_between_two_calls_sees_the_operators() -> None:
    """Plain eager work passes the dispatcher by, which is decided anew in each call."""
    mine, theirs = _blocks()
    _same(mine, theirs)
    assert _traced_calls(mine)
    _same(mine, theirs)


def _first_kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a mutant of a function that decides once for a module and never again."""
    kept: dict[Any, Any] = {}

    def stale(*args: Any, **kwargs: Any) -> Any:
        key = args[0] if isinstance(args[0], nn.Module) else None
        if key not in kept:
            kept[key] = function(*args, **kwargs)
        return kept[key]

    return stale


@pytest.mark.parametrize(
    ("owner", "name", "change", "blocks"),
    [
        (experts, "read_glu", _other_activation, _blocks),
        (experts, "read_glu", _hooked_activation, _blocks),
        (experts, "read_tensors", _new_parameter, _blocks),
        (experts, "compute_dtype", _widened, _narrow_blocks),
        (FamilySpec, "params_of", _other_top_k, _blocks),
        (FamilySpec, "bias_of", _new_bias, lambda: _blocks("glm4_moe")),
        (forward, "active_factors", _new_factor, _adapted_blocks),
        (forward, "active_factors", _other_scaling, _adapted_blocks),
        (forward, "paused", _disabled, _adapted_blocks),
    ],
)
def test_a_decision_that_is_kept_is_caught(
    owner: Any,
    name: str,
    change: Callable[[Any], None],
    blocks: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutants of a function that is called anew in each call: (where it is used, its name, what
    has to overturn its first answer). The comparison passes before the change, not after it.
    """
    pair = blocks()
    monkeypatch.setattr(owner, name, _first_kept(getattr(owner, name)))
    _same(*pair)
    for block in pair:
        change(block)
    with pytest.raises(AssertionError):
        _same(*pair)


def test_a_dispatcher_that_is_judged_once_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    block, _ = _blocks()
    monkeypatch.setattr(op, "is_plain_eager", lambda tensors: True)
    assert not _traced_calls(block)
