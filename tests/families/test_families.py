"""Every registered family against transformers: values, gradients, and what really ran.

Parametrised over the recipes of tests/support/tiny_recipes.py that the registry has an entry for.
An entry without a recipe fails here; a new entry with one is covered without another line.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_patch import patch_model, patch_report, supported_model_types
from moe_patch.families import families, lookup
from moe_patch.patching.discover import discover
from tests.support import tiny_models, window
from tests.support.numerics import FP32, assert_bits, assert_close, probe, rel_err
from tests.support.parity import Run, assert_bf16_parity, assert_parity, run_block, run_model
from tests.support.snapshots import tensors
from tests.support.trace import assert_tier, executed

SERVED = {spec.module for spec in families() if spec.tier != "refused"}
NAMES = sorted(name for name in tiny_models.patchable() if tiny_models.folder(name) in SERVED)


def ordinary(name: str) -> bool:
    """Return whether blocks take hidden states alone and call router and experts as most do."""
    specs = [spec for spec in families() if spec.module == tiny_models.folder(name)]
    own = [s for s in specs if s.block_forward or s.experts_forward or s.router_forward]
    return tiny_models.FAMILIES[name].block_alone and not own and all(s.block for s in specs)


ALONE = [name for name in NAMES if ordinary(name)]
SHAPES = {1: (1, 1), 7: (1, 7), 64: (4, 16)}
SOME, SOME_ALONE = window.some(NAMES), window.some(ALONE)


def pair(name: str, dtype: torch.dtype = torch.float32, **over: Any) -> tuple[nn.Module, nn.Module]:
    """A patched model and the same model untouched, on transformers' eager experts."""
    reference = tiny_models.build(name, dtype, **over)
    return patch_model(copy.deepcopy(reference)), reference


def same_pair(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """The pair that the tests of this file share; they run it and change nothing of it."""
    if (name, dtype) not in _pairs:
        models = pair(name, dtype)
        _pairs[name, dtype] = (models, [tensors(model) for model in models])
    models = _pairs[name, dtype][0]
    for model in models:
        model.train().zero_grad()
    return models


_pairs: dict[tuple[str, torch.dtype], tuple[tuple[nn.Module, nn.Module], list]] = {}


@pytest.fixture(scope="module", autouse=True)
def _shared_pairs_are_never_written() -> Iterator[None]:
    yield
    for models, before in _pairs.values():
        assert [tensors(model) for model in models] == before
    _pairs.clear()


def first_blocks(models: tuple[nn.Module, nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The first MoE block of each of two equal models."""
    return tuple(tiny_models.blocks(model)[0][1] for model in models)


def routers(module: nn.Module) -> list[nn.Module]:
    return [m for m in module.modules() if (found := lookup(m)) and found[1] == "router"]


@pytest.mark.versions
def test_every_entry_has_a_tiny_model() -> None:
    """Fail for each registered router or experts class that no tiny model contains."""
    held = {type(m).__name__ for name in NAMES for m in tiny_models.build(name).modules()}
    here = supported_model_types()  # an entry for another release's types is inert
    untested = {tiny_models.folder(name) for name in tiny_models.absent()}
    entries = [s for s in families() if s.tier != "refused" and {*s.model_types} & {*here}]
    entries = [spec for spec in entries if spec.module not in untested]
    classes = {getattr(spec, role) for spec in entries for role in ("router", "experts")}
    assert classes - held - {None} == set()


@pytest.mark.parametrize("T", [1, pytest.param(7, marks=pytest.mark.versions), 64])
@pytest.mark.parametrize("name", NAMES)
def test_model_matches_transformers(name, T) -> None:
    """Output, losses, router logits and every gradient agree, in train mode and fp32."""
    model, reference = same_pair(name)
    batch = tiny_models.inputs(reference, *SHAPES[T])
    assert_parity(run_model(model, batch), run_model(reference, batch), FP32)


@pytest.mark.versions
@pytest.mark.parametrize("name", NAMES)
def test_the_declared_tier_is_what_runs(name) -> None:
    model, reference = same_pair(name)
    batch = tiny_models.inputs(model)
    (tier,) = {row.tier for row in patch_report(model)}
    assert {row.self_check for row in patch_report(model)} == {"passed"}
    assert_tier(tier, model, executed(lambda: run_model(model, batch)))
    assert_tier("refused", reference, executed(lambda: run_model(reference, batch)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SOME)
def test_the_self_check_passes_in_low_precision(name, dtype) -> None:
    model = patch_model(tiny_models.build(name, dtype))
    assert {row.self_check for row in patch_report(model)} == {"passed"}


@pytest.mark.parametrize("name", SOME)
def test_every_block_is_found(name) -> None:
    model = tiny_models.build(name)
    experts = [m for m in model.modules() if (found := lookup(m)) and found[1] == "experts"]
    held = [m for block in discover(model) for _, m in block.experts]
    assert discover(model)
    assert len(held) == len(experts)
    assert all(a is b for a, b in zip(held, experts, strict=True))


@pytest.mark.parametrize("T", SHAPES)
@pytest.mark.parametrize("name", SOME_ALONE)
def test_block_matches_transformers(name, T) -> None:
    """The block's output and every gradient in it agree, from hidden states of size one."""
    block, reference = first_blocks(same_pair(name))
    x = tiny_models.hidden(reference, *SHAPES[T])
    mine, ref = run_block(block, x), run_block(reference, x)
    assert_parity(mine, ref, FP32)
    assert any(value is not None and value.any() for key, value in ref.items() if "experts" in key)


@pytest.mark.parametrize("shape", [(1, 0), (0, 5)])
@pytest.mark.parametrize("name", SOME_ALONE)
def test_block_without_tokens(name, shape) -> None:
    """Return an empty result and zero gradients; transformers' eager path fails or detaches."""
    block, _ = first_blocks(same_pair(name))
    x = tiny_models.hidden(block, *shape)
    mine = run_block(block, x)
    assert mine["out.0"].shape == x.shape or mine["out.0"].numel() == 0 == x.numel()
    for key, grad in mine.items():
        if key.startswith("grad.") and "experts" in key or key == "dx":
            assert grad is not None, key
            assert not grad.any(), key


@pytest.mark.parametrize("name", SOME_ALONE)
def test_an_empty_batch_beside_a_normal_one_changes_no_gradient(name) -> None:
    block, reference = first_blocks(same_pair(name))
    x, empty = tiny_models.hidden(block, 1, 7), tiny_models.hidden(block, 1, 0)
    outs = [out[0] if isinstance(out, tuple) else out for out in (block(x), block(empty))]
    (probe(outs[0]) + outs[1].sum()).backward()
    ref = run_block(reference, x)
    for key, p in block.named_parameters():
        if p.requires_grad and ref[f"grad.{key}"] is not None:
            assert_close(p.grad, ref[f"grad.{key}"], FP32, key)


@pytest.mark.parametrize("name", SOME_ALONE)
def test_one_token_equals_its_row_of_many(name) -> None:
    block, _ = first_blocks(same_pair(name))
    x = tiny_models.hidden(block, 1, 64)
    with torch.no_grad():
        many, one = block(x), block(x[:, :1].contiguous())
    many, one = (out[0] if isinstance(out, tuple) else out for out in (many, one))
    assert_close(one.reshape(1, -1), many.reshape(64, -1)[:1], FP32)


# --- bf16 -----------------------------------------------------------------------------------------
# tests/ops/test_routing.py covers the router alone; these tests fix its ids and cover the block.


def with_routing(block: nn.Module, outputs: tuple) -> Any:
    """Replace what the block's router returns, patched or not, by a forward hook; keeps dtypes."""
    (router,) = routers(block)

    def replace(module: nn.Module, args: tuple, out: tuple) -> tuple:
        return tuple(
            new if not new.is_floating_point() else new.to(old.dtype)
            for new, old in zip(outputs, out, strict=True)
        )

    return router.register_forward_hook(replace)


# Their code casts to fp32, so that no fp64 evaluation exists. fp32 is far enough from bf16.
NAMES_FP32 = ("inkling2", "inkling2_loop")


def wide_copy(name: str, model: nn.Module) -> nn.Module:
    """The same low-precision weights, evaluated in fp64 where the family's code can."""
    dtype = torch.float32 if name in NAMES_FP32 else torch.float64
    return tiny_models.cast(copy.deepcopy(model), dtype)


@pytest.mark.routers
@pytest.mark.parametrize("name", SOME_ALONE)
def test_block_in_bf16_on_equal_ids(name) -> None:
    """Output and gradients are at most 1.5 times as far from fp64 as eager, on equal routing."""
    model, reference = same_pair(name, torch.bfloat16)
    wide = wide_copy(name, reference)
    blocks = [tiny_models.blocks(m)[0][1] for m in (model, reference, wide)]
    x = tiny_models.hidden(blocks[1], 4, 16).detach()
    seen: list[tuple] = []
    hook = routers(blocks[1])[0].register_forward_hook(lambda m, a, out: seen.append(out))
    blocks[1](x)
    hook.remove()
    outputs = tuple(t.detach() for t in seen[0])
    runs = []
    for block in blocks:
        hook = with_routing(block, outputs)
        runs.append(run_block(block, x.to(block.experts.down_proj.dtype)))
        hook.remove()
    own_router = tuple(key for key in runs[2] if key.startswith(("grad.gate.", "grad.router.")))
    assert_bf16_parity(*runs, skip=own_router)


@pytest.mark.parametrize("name", SOME_ALONE)
def test_experts_in_bf16(name) -> None:
    """The experts module alone agrees, gradient of the routing weights included."""
    model, reference = same_pair(name, torch.bfloat16)
    wide = wide_copy(name, reference)
    generator = torch.Generator().manual_seed(0)
    modules = [tiny_models.blocks(m)[0][1].experts for m in (model, reference, wide)]
    T, D = 64, modules[1].down_proj.shape[2 if transposed(modules[1]) else 1]
    x = torch.randn(T, D, generator=generator).bfloat16()
    ids = torch.rand(T, 8, generator=generator).argsort(-1)[:, :2]
    weights = torch.rand(T, 2, generator=generator).bfloat16()
    runs = []
    for module in modules:
        dtype = module.down_proj.dtype
        runs.append(run_experts(module, x.to(dtype), ids, weights.to(dtype)))
    assert_bf16_parity(*runs)


def transposed(experts: nn.Module) -> bool:
    """Return whether weights are stored [E, in, out]; undecorated classes here never are."""
    return experts.__dict__.get("is_transposed", False)


def run_experts(experts: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Run:
    """Call an experts module and return its outputs and gradients, like run_block."""
    experts.zero_grad()
    x, weights = (t.detach().clone().requires_grad_() for t in (x, weights))
    out = experts(x, ids, weights)
    probe(out).backward()
    run: Run = {"out": out.detach(), "dx": x.grad, "dweights": weights.grad}
    return run | {f"grad.{n}": p.grad.clone() for n, p in experts.named_parameters()}


# --- routers as modules ---------------------------------------------------------------------------
# Forward hooks on a patched router still fire, and may still replace its outputs.


def fired(model: nn.Module) -> list[str]:
    """Paths of routers, experts and blocks in the order in which their forward hooks fire."""
    paths: list[str] = []
    for path, module in model.named_modules():
        if lookup(module):
            module.register_forward_hook(lambda m, a, o, path=path: paths.append(path))
    run_model(model, tiny_models.inputs(model))
    return paths


@pytest.mark.parametrize("name", SOME)
def test_hooks_on_router_and_experts_fire_once_per_block(name) -> None:
    model, reference = pair(name)
    counts = [fired(each) for each in (model, reference)]
    assert counts[0] == counts[1]
    assert len(set(counts[0])) == len(counts[0]) > 0


@pytest.mark.routers
@pytest.mark.parametrize("name", SOME_ALONE)
def test_a_router_hook_that_replaces_ids_steers_the_block(name) -> None:
    block, reference = first_blocks(pair(name))
    x = tiny_models.hidden(reference, 1, 16)
    plain = run_block(reference, x)

    def replay(module: nn.Module, args: tuple, out: tuple) -> tuple:
        return tuple(t if t.is_floating_point() else (t + 1) % 8 for t in out)

    for each in (block, reference):
        (router,) = routers(each)
        router.register_forward_hook(replay)
    mine, ref = run_block(block, x), run_block(reference, x)
    assert_parity(mine, ref, FP32)
    assert rel_err(ref["out.0"], plain["out.0"]) > 0.1
    names = [key for key in mine if key.startswith(("grad.gate.", "grad.router."))]
    assert any(mine[key] is not None and mine[key].any() for key in names)


@pytest.mark.parametrize("name", SOME_ALONE)
def test_return_type_and_shape(name) -> None:
    block, reference = first_blocks(same_pair(name))
    x = tiny_models.hidden(reference, 2, 5)
    mine, ref = block(x), reference(x)
    assert type(mine) is type(ref)
    for a, b in zip(*((o if isinstance(o, tuple) else (o,)) for o in (mine, ref)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert (mine[0] if isinstance(mine, tuple) else mine).is_contiguous()


@pytest.mark.parametrize("name", SOME_ALONE)
@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_hidden_states_are_never_written(name, mode) -> None:
    block, _ = first_blocks(same_pair(name))
    block.train(mode == "train")
    D = tiny_models.SIZES["hidden_size"]
    wide = torch.randn(2, 5, D + 6)
    before = wide.clone()
    for x in (wide[..., 2 : 2 + D], wide[..., :D].contiguous()):
        with torch.set_grad_enabled(mode != "no_grad"):
            copied = x.clone()
            block(x)
            assert_bits(x, copied)
    assert_bits(wide, before)
