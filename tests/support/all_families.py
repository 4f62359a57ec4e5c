"""Parity of one recipe with transformers: the code that runs, its results, and adapters.

    result = check("qwen3_moe")        Result(name, tier, worst, problem, lora)

A patched and an unpatched copy of a tiny model take the same training step in fp32. Every output,
router logit, auxiliary loss and gradient must agree within LIMIT. The tier is the lowest of the
blocks' entries and is proven by the code objects that ran. The same holds with LoRA on both expert
projections, wrapped before and after patching.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from moe_patch import UnsupportedModelError, patch_model, patch_report, unpatch_model
from moe_patch.patching.discover import discover
from tests.support import tiny_models
from tests.support.adapters import adapt, lora_config
from tests.support.numerics import rel_err
from tests.support.parity import Run, run_block, run_model
from tests.support.tiny_recipes import FAMILIES
from tests.support.trace import assert_tier, executed

LIMIT = 2e-5
# A gradient that is zero in exact arithmetic (a bias before a softmax) is pure rounding noise with
# no size of its own. It is measured against this share of the largest gradient instead.
NOISE = 1e-6
# A crash in one recipe is a finding like any other; the run goes on.
CRASHES = (RuntimeError, AttributeError, TypeError, ValueError, LookupError)


@dataclass
class Result:
    """Outcome of the check of one recipe.

    Attributes:
        name: the recipe.
        tier: "full", "experts" or "refused" (the lowest of the model's blocks).
        worst: the largest relative error of anything compared.
        lora: "both orders", or why PEFT cannot adapt the experts.
        problem: empty when all is well.
    """

    name: str
    tier: str = ""
    worst: float = 0.0
    lora: str = ""
    problem: str = ""


def check(
    name: str,
    self_check: bool = True,
    prepare: Callable[[nn.Module], Any] | None = None,
    **overrides: Any,
) -> Result:
    """Run the parity check of one recipe; report a difference instead of raising.

    Args:
        name: a recipe of tests/support/tiny_recipes.py.
        self_check: patch with the self-check, which would refuse before anything is compared.
        prepare: changes the model before it is used.
        overrides: config values.
    """
    result = Result(name)
    threads = torch.get_num_threads()
    # For tensors of a few hundred numbers a second thread costs more than it saves.
    torch.set_num_threads(1)
    try:
        model = tiny_models.build(name, **overrides)
        if prepare is not None:
            prepare(model)
        # A block with training noise writes into its input, which a leaf tensor forbids.
        noisy = any("jitter" in key for key in overrides)
        alone = FAMILIES[name].block_alone and not noisy
        _check_model(name, model, result, alone, self_check)
        if result.tier != "refused":
            _check_lora(name, model, result)
    except (AssertionError, *CRASHES) as error:
        result.problem = f"{type(error).__name__}: {error}"
    finally:
        torch.set_num_threads(threads)
    return result


def _check_model(
    name: str, model: nn.Module, result: Result, block_alone: bool, self_check: bool
) -> None:
    batch, options = tiny_models.inputs(model), _options(name)
    result.tier = min(
        (b.spec.tier for b in discover(model)),
        key=("refused", "experts", "full").index,
        default="refused",
    )
    if result.tier == "refused":
        _check_refused(model, batch)
        return
    reference = run_model(model, batch, **options)
    blocks = [(found.path, found.block) for found in discover(model) if found.block is not None]
    blocks = blocks if block_alone else []
    expected = [run_block(block, tiny_models.hidden(block, 1, 5)) for _, block in blocks]
    before = {p: t._version for p, t in model.named_parameters()}
    patch_model(model, self_check=self_check)
    runs: list[Run] = []
    ran = executed(lambda: runs.append(run_model(model, batch, **options)))
    assert {row.tier for row in patch_report(model)} >= {result.tier}
    assert_tier(result.tier, model, ran)
    assert not ran & _experts_of_transformers(model), "transformers' experts ran"
    _compare(result, "model", runs[0], reference)
    for (path, block), wanted in zip(blocks, expected, strict=True):
        found = run_block(block, tiny_models.hidden(block, 1, 5))
        _compare(result, path, found, wanted)
    unpatch_model(model)
    assert before == {p: t._version for p, t in model.named_parameters()}, "a weight was written"


def _experts_of_transformers(model: nn.Module) -> set[CodeType]:
    """Return the forwards of experts classes, and of blocks that contain router and experts.

    Covers the blocks that a patch finds, registered or not.
    """
    found = discover(model)
    modules = [experts for block in found for _, experts in block.experts]
    modules += [block.block for block in found if block.spec.experts is None and block.block]
    return {inspect.unwrap(type(module).forward).__code__ for module in modules}


def _check_refused(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Expect a refusal by name, and an unchanged model with ``strict=False``."""
    model.eval()
    with torch.no_grad():
        expected = tiny_models.loss(model(**batch))
        try:
            patch_model(model)
        except UnsupportedModelError:
            patch_model(model, strict=False)
            assert {row.tier for row in patch_report(model)} == {"refused"}
            assert torch.equal(tiny_models.loss(model(**batch)), expected), "the model was changed"
            return
    raise AssertionError("a family of tier refused was patched")


def _check_lora(name: str, model: nn.Module, result: Result) -> None:
    parameters = expert_parameters(model)
    if not parameters:
        result.lora = "no expert parameter that PEFT can target"
        return
    batch = tiny_models.inputs(model)
    config = lora_config(parameters)
    ours = {order: copy.deepcopy(model) for order in ("patch first", "peft first")}
    patch_model(ours["patch first"], self_check=False)
    wrapped = {order: adapt(twin, config) for order, twin in ours.items()}
    patch_model(wrapped["peft first"], self_check=False)
    reference = _trainable(run_model(adapt(model, config), batch))
    for order, twin in wrapped.items():
        found = _trainable(run_model(twin, batch))
        _compare(result, f"lora, {order}", found, reference)
    result.lora = "both orders"


def expert_parameters(model: nn.Module) -> list[str]:
    """Names of the experts' stacked projections for PEFT's ``target_parameters``."""
    names = {
        ".".join(f"{path}.{name}".split(".")[-2:])
        for block in discover(model)
        for path, experts in block.experts
        for name, parameter in experts.named_parameters()
        if parameter.dim() == 3
    }
    return sorted(names)


def _options(name: str) -> dict[str, Any]:
    return {} if FAMILIES[name].feed in ("pixels", "patches") else {"output_router_logits": True}


def _trainable(run: Run) -> Run:
    kept = {n: t for n, t in run.items() if not n.startswith("grad.") or "lora_" in n}
    dead = [n for n, t in kept.items() if n.startswith("grad.") and (t is None or not t.any())]
    assert not dead, f"no gradient for {dead}"
    return kept


def _compare(result: Result, what: str, mine: Run, reference: Run) -> None:
    assert mine.keys() == reference.keys(), f"{what}: {sorted(mine.keys() ^ reference.keys())}"
    gradients = [t for n, t in reference.items() if t is not None and n.startswith(("grad.", "d"))]
    noise = NOISE * max((t.double().norm().item() for t in gradients), default=0.0)
    for name, wanted in reference.items():
        found = mine[name]
        assert (found is None) == (wanted is None), f"{what}: {name} is None on one side only"
        if wanted is None:
            continue
        assert found.shape == wanted.shape, f"{what}: {name} has shape {tuple(found.shape)}"
        assert found.dtype == wanted.dtype, f"{what}: {name} is {found.dtype}, not {wanted.dtype}"
        distance = (found.double() - wanted.double()).norm().item()
        error = rel_err(found, wanted)
        if name.startswith(("grad.", "d")) and distance <= noise:
            continue
        result.worst = max(result.worst, error)
        assert error <= LIMIT, f"{what}: {name} differs by {error:.1e}, limit {LIMIT:.0e}"
