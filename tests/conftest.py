"""Fixtures shared by all tests. Nothing here may hide a failure."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import dist_helpers, interpreted, tiny_models

# On tiny tensors the threads of an operator only wait for each other, more so beside a worker.
torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Models are thousands of objects; by default, a tenth of the time goes to collecting garbage.
    # Not on a GPU, where tests measure memory, and garbage from earlier ones would count.
    gc.set_threshold(50_000, 20, 50)
    # torch formats the stack at every seed, for devices that may come into use: 1 ms in a test.
    for device_type in (torch.cuda, torch.xpu, torch.mtia):
        device_type.manual_seed_all = lambda seed: None


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Start every test from the same random state, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _not_recorded() -> None:
    """Forget recorded launches, because a test may replace kernels."""
    module: Any = sys.modules.get("moe_patch.kernels.experts.experts")
    if module is not None:
        module.experts_forward.kept.clear()
        module.experts_backward.kept.clear()


@pytest.fixture(scope="module", autouse=True)
def _frozen() -> None:
    """Exempt earlier files' imports from garbage collection.

    A full collection would take a second, and Trainer runs several per training run.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _ranks_end() -> Iterator[None]:
    """End a file's ranks, which would slow down the tests of others."""
    yield
    dist_helpers.end_ranks()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Device of the test: the CPU, or with ``-m gpu`` the GPU."""
    return request.param


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    """Outcome of each of the file's CASES under the interpreter: empty, or the failure."""
    interpreted.skip_without_histogram()
    return interpreted.run(request.module.__file__)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A text for runs of the training command."""
    from tests.support.train_nodes import TEXT  # imports Trainer and PEFT, which few tests need

    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised memory with NaN: an element that a kernel fails to write shows up."""
    before = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.use_deterministic_algorithms(before)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of families, or parts of them, that the installed transformers lacks.

    The registry and the recipes decide which they are (tiny_models.absent, absent_parts), never
    the test. A test belongs to the recipes among its parameters and in its mark `families`,
    which may name parts as well (tiny_models.needs).
    """
    absent = tiny_models.absent() | tiny_models.absent_parts()
    without = absent | tiny_models.block_chosen()
    gone = [
        item
        for item in items
        if _recipes_of(item) & (without if item.get_closest_marker("routers") else absent)
    ]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in set(gone)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole files, so that a module's fixtures are made once.

    By default xdist hands out tests in small batches, and both workers then make every fixture.
    An explicit ``--dist`` other than the default is left alone.
    """
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling  # only where xdist is installed

    return WorkStealingScheduling(config, log)


def _recipes_of(item: pytest.Item) -> set[str]:
    if item.get_closest_marker("every_release") is not None:
        return set()
    names = {name for mark in item.iter_markers("families") for name in mark.args}
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        for value in item.callspec.params.values():
            several = value if isinstance(value, (tuple, list)) else (value,)
            names |= {each for each in several if isinstance(each, str)}
    return names


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Name lambdas without their address; else a run's workers would collect different tests."""
    return argname if getattr(val, "__name__", "") == "<lambda>" else None
