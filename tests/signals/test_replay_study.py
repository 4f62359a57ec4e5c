"""The claim of benchmarks/studies/replay_study.py on one seed, in small."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

STUDIES = Path(__file__).parents[2] / "benchmarks" / "studies"


@pytest.fixture(scope="module")
def study() -> Any:
    spec = importlib.util.spec_from_file_location("replay_study", STUDIES / "replay_study.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.modules["replay_study"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path[:] = before
    del sys.modules["replay_study"]


@pytest.mark.families("olmoe", "qwen3_moe")
@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe"])
def test_a_replay_halves_the_divergence_from_a_bf16_engine(name, study, monkeypatch) -> None:
    """Without any perturbation; other ids raise it, and the trainer's own change no bit."""
    monkeypatch.setattr(study, "NEW", 16)
    trainer, prompts_BP = study.trained(name, 0, 0)
    found = study.compare(trainer, study.Engine(trainer), prompts_BP[:12], 0)
    assert found["disagreement of routings"] >= 0.01
    assert found["kl"]["no replay"] >= 2 * found["kl"]["engine"]
    assert min(found["kl"]["another sample"], found["kl"]["shuffled"]) > found["kl"]["no replay"]
    assert found["own ids change no bit"]
