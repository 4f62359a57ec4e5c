"""Negative controls: every planted fault runs, and fails exactly the checks that the table names.

The checks call the functions that the real tests call.
``python -m tests.project.test_mutants`` prints the table of docs/testing.md.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from moe_patch import UnsupportedModelError, patch_model, register_family
from moe_patch.families import families, lookup
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, adapted_pair, assert_same_step
from tests.support.mutants import MUTANTS, Mutant
from tests.support.numerics import FP32
from tests.support.parity import assert_parity, assert_router_parity, ours, run_block, run_model
from tests.support.trace import assert_tier, executed

Patch = Callable[..., nn.Module]


@contextmanager
def planted(mutant: Mutant) -> Iterator[Patch]:
    """Plant the fault, and yield a function that patches a model without the self-check."""
    original = next(spec for spec in families() if mutant.model_type in spec.model_types)
    with pytest.MonkeyPatch.context() as replaced:
        if mutant.attribute is not None:
            replaced.setattr(*mutant.attribute)
        if mutant.entry is not None:
            register_family(dataclasses.replace(original, **mutant.entry(original)))
        try:
            yield patch_model if mutant.bound else (lambda model, **_: model)
        finally:
            register_family(original)


def pair(mutant: Mutant, patch: Patch) -> tuple[nn.Module, nn.Module]:
    reference = tiny_models.build(mutant.model_type, **mutant.over)
    if mutant.prepare is not None:
        mutant.prepare(reference)
    return patch(copy.deepcopy(reference), self_check=False), reference


def check_router(mutant: Mutant, patch: Patch, dtype: torch.dtype = torch.float32) -> None:
    model = tiny_models.build(mutant.model_type, dtype, **mutant.over)
    if mutant.prepare is not None:
        mutant.prepare(model)
    path, block = tiny_models.blocks(model)[0]
    router = next(m for m in block.modules() if (found := lookup(m)) and found[1] == "router")
    x = torch.randn(64, tiny_models.SIZES["hidden_size"]).to(dtype)
    args = (block.e_score_correction_bias,) if mutant.model_type == "minimax_m2" else ()

    def choice(logits: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(logits.float()) + bias[0] if bias else logits.float()

    ties = dtype == torch.bfloat16 and router.weight.dtype == dtype
    assert_router_parity(ours, router, x, *args, limit=1e-6, choice=choice if ties else None)


def check_router_in_bf16(mutant: Mutant, patch: Patch) -> None:
    check_router(mutant, patch, torch.bfloat16)


def check_ties(mutant: Mutant, patch: Patch) -> None:
    router = next(
        m
        for m in tiny_models.build(mutant.model_type, **mutant.over).modules()
        if (found := lookup(m)) and found[1] == "router"
    )
    nn.init.zeros_(router.weight)
    if mutant.model_type in ("deepseek_v3", "glm4_moe"):
        router.e_score_correction_bias.zero_()
    E, K = router.weight.shape[0], router.top_k
    args = (torch.zeros(E),) if mutant.model_type == "minimax_m2" else ()
    if "bias" in router._parameters:
        nn.init.zeros_(router.bias)
    ids = ours(router, torch.randn(5, router.weight.shape[1]), *args)[2]
    assert ids.tolist() == [list(range(K))] * 5


def check_block(mutant: Mutant, patch: Patch) -> None:
    block, reference = (tiny_models.blocks(m)[0][1] for m in pair(mutant, patch))
    x = tiny_models.hidden(reference, 4, 16)
    assert_parity(run_block(block, x), run_block(reference, x), FP32)


def check_model(mutant: Mutant, patch: Patch) -> None:
    model, reference = pair(mutant, patch)
    batch = tiny_models.inputs(reference, 4, 16)
    assert_parity(run_model(model, batch), run_model(reference, batch), FP32)


def check_trace(mutant: Mutant, patch: Patch) -> None:
    model, _ = pair(mutant, patch)
    batch = tiny_models.inputs(model)
    assert_tier("full", model, executed(lambda: run_model(model, batch)))


def check_adapters(mutant: Mutant, patch: Patch) -> None:
    if mutant.bound:
        options = {"patch": {"self_check": False}, "overrides": mutant.over}
        assert_same_step(adapted_pair(mutant.model_type, EXPERTS, **options))


def check_self(mutant: Mutant, patch: Patch) -> None:
    _, reference = pair(mutant, patch)
    try:
        patch(copy.deepcopy(reference))
    except UnsupportedModelError as error:
        raise AssertionError(error) from error


# name of the check -> (function, a real test that asserts the same)
CHECKS = {
    "router": (check_router, "ops/test_routing::test_router_matches_transformers"),
    "router in bf16": (
        check_router_in_bf16,
        "ops/test_routing::test_router_matches_transformers_in_bf16",
    ),
    "ties": (
        check_ties,
        "ops/test_routing_definition::test_ties_go_to_the_lower_id_and_the_lower_group",
    ),
    "block": (check_block, "families/test_families::test_block_matches_transformers"),
    "model": (check_model, "families/test_families::test_model_matches_transformers"),
    "trace": (check_trace, "families/test_families::test_the_declared_tier_is_what_runs"),
    "adapters": (check_adapters, "lora/test_lora::test_one_projection_alone"),
    "self-check": (
        check_self,
        "patching/test_selfcheck::test_a_wrong_entry_is_caught_and_nothing_is_bound",
    ),
}
MODELS = sorted({(m.model_type, *sorted(m.over.items(), key=str)) for m in MUTANTS}, key=str)


def fails(check: Callable[[Mutant, Patch], None], mutant: Mutant, patch: Patch) -> bool:
    """Return whether a check catches the mutant by an assertion; any other error propagates."""
    torch.manual_seed(0)
    try:
        check(mutant, patch)
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(
            mutant,
            id=str(mutant),
            marks=pytest.mark.families(*tiny_models.needs(mutant.model_type, mutant.over, True)),
        )
        for mutant in MUTANTS
    ],
)
def test_a_mutant_runs_and_is_caught_where_the_table_says(mutant) -> None:
    with planted(mutant) as patch:
        model, _ = pair(mutant, patch)
        run = run_model(model, tiny_models.inputs(model))
        assert torch.isfinite(run["out"]).all()
        caught = {name for name, (check, _) in CHECKS.items() if fails(check, mutant, patch)}
    assert caught == set(mutant.caught_by), (
        "correct caught_by in tests/support/mutants.py, then the docs"
    )


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            model,
            id=str(model),
            marks=pytest.mark.families(*tiny_models.needs(model[0], dict(model[1:]), True)),
        )
        for model in MODELS
    ],
)
def test_every_check_passes_without_a_fault(model) -> None:
    model_type, *over = model
    sound = Mutant("none", model_type, (), dict(over))
    with planted(sound) as patch:
        assert not [n for n, (check, _) in CHECKS.items() if fails(check, sound, patch)]


@pytest.mark.routers
@pytest.mark.families("deepseek_v3")
def test_excluded_groups_pass_without_a_fault() -> None:
    """Weights that a mutant needs fail no check without the mutant."""
    (mutant,) = [m for m in MUTANTS if m.prepare is not None]
    sound = dataclasses.replace(mutant, entry=None)
    with planted(sound) as patch:
        assert not [n for n, (check, _) in CHECKS.items() if fails(check, sound, patch)]


def table() -> str:
    """Return mutants by check, and checks by test, as Markdown."""
    head = f"| planted fault | family | {' | '.join(CHECKS)} |"
    lines = [head, "|---" * (len(CHECKS) + 2) + "|"]
    for mutant in MUTANTS:
        marks = ["x" if name in mutant.caught_by else "" for name in CHECKS]
        lines.append(f"| {mutant.name} | {mutant.model_type} | {' | '.join(marks)} |")
    lines += ["", "| check | a real test that asserts the same |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | `{where}` |" for name, (_, where) in CHECKS.items()])


def test_the_named_tests_exist() -> None:
    for _, where in CHECKS.values():
        file, name = where.split("::")
        source = (Path(__file__).parents[1] / f"{file}.py").read_text(encoding="utf-8")
        assert f"def {name}(" in source


def test_the_documented_table_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
    assert table() in text, (
        "docs/testing.md: replace the table by python -m tests.project.test_mutants"
    )


if __name__ == "__main__":
    print(table())
