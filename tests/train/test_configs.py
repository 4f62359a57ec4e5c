"""The shipped configurations: their full size is well-formed, their tiny size trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

import moe_patch
from moe_patch.errors import UnsupportedOptionError
from moe_patch.train import run
from moe_patch.train.build import check_options
from moe_patch.train.config import load_config, make_config
from tests.support.train_nodes import TEXT, node

CONFIGS = sorted((Path(moe_patch.__file__).parents[1] / "configs").glob("*.yaml"))
SIZED = [path for path in CONFIGS if "tiny_values:" in path.read_text(encoding="utf-8")]


def family(path: Path) -> str:
    """Return the recipe of a configuration's family."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))["tiny_values"]["model"]["model_type"]


def test_every_family_of_the_readme_has_one():
    names = {path.stem for path in SIZED}
    assert names == {
        "qwen3_moe_lora", "olmoe_full", "deepseek_v3_lora", "glm4_moe_lora", "minimax_m2_lora",
        "gpt_oss_lora", "doge", "qwen3_moe_qlora", "qwen3_30b_24gb", "qwen3_30b_20gb",
        "gpt_oss_20b_16gb", "gpt_oss_120b_80gb", "glm4_air_80gb",
    }  # fmt: skip


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_full_size_is_well_formed(path):
    config = load_config(path)
    check_options(config)
    assert config.output_dir == f"outputs/{path.stem}"


def marks(path):
    """Return the marks of a config; all recipes for one card but the first are slow."""
    slow = path.stem.endswith("gb") and path.stem != "qwen3_30b_24gb"
    return [pytest.mark.families(family(path)), *([pytest.mark.slow] if slow else [])]


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=marks(path)) for path in SIZED]
)
def test_tiny_size_trains(path, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    config = load_config(
        path,
        {
            "tiny": True,
            "tiny_values.data.source": str(text),
            "tiny_values.training.disable_tqdm": True,
            "tiny_values.output_dir": str(tmp_path / "out"),
        },
    )
    result = run.run(config)
    assert result.failed == []
    assert any(check.name.startswith("losses, steps 1-3") for check in result.checks)
    losses = [list(trained.losses.values()) for trained in result.trained.values()]
    assert all(len(set(values)) == 3 for values in losses), losses


ONE_CARD = [path for path in SIZED if path.stem.endswith("gb")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.stem, marks=pytest.mark.families(family(p))) for p in ONE_CARD],
)
def test_the_loss_of_a_recipe_for_one_card_goes_down_on_real_text(path, tmp_path):
    changes = {
        "tiny": True, "training.max_steps": 100, "training.disable_tqdm": True,
        "compare_unpatched": False, "output_dir": str(tmp_path / "out"),
    }  # fmt: skip
    losses = list(run.run(load_config(path, changes)).trained["patched"].losses.values())
    assert sum(losses[-10:]) / 10 < sum(losses[:10]) / 10 - 0.08


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tiny": "yes"}, "tiny is 'yes'; expected a bool"),
        ({"tiny": True}, "tiny is true, but there are no tiny_values"),
        ({"tiny": True, "tiny_values": 3}, "tiny_values is 3; expected a mapping"),
        ({"tiny_values": {"modle": {}}}, "tiny_values: unknown key 'modle'; did you mean 'model'?"),
    ],
)
def test_a_wrong_tiny_switch_is_named(change, message):
    with pytest.raises(UnsupportedOptionError) as raised:
        make_config(node(**change))
    assert message in str(raised.value)


def test_tiny_replaces_keys_and_merges_training():
    values = {"model": {"model_type": "olmoe"}, "training": {"max_steps": 1}, "lora": None}
    big = make_config(node(tiny=False, tiny_values=values))
    small = make_config(node(tiny=True, tiny_values=values))
    assert big == make_config(node())
    assert small.model.model_type == "olmoe"
    assert not small.model.overrides
    assert small.lora is None
    assert small.training == {**big.training, "max_steps": 1}


def test_what_is_set_on_the_command_line_is_put_over_the_tiny_values(tmp_path):
    """Override the file's values by ``--output-dir`` and ``--set``, at either size."""
    path = next(path for path in SIZED if path.stem == "qwen3_moe_lora")
    own = yaml.safe_load(path.read_text(encoding="utf-8"))["tiny_values"]
    given = {
        "output_dir": str(tmp_path),
        "training.max_steps": own["training"]["max_steps"] + 4,
        "model.num_experts": 2 * own["model"]["num_experts"],
        "tiny": True,
    }
    config = load_config(path, given)
    assert config.output_dir == str(tmp_path)
    assert config.training["max_steps"] == given["training.max_steps"]
    assert config.training["use_cpu"] is True
    assert config.model.overrides == {
        **{key: value for key, value in own["model"].items() if key != "model_type"},
        "num_experts": given["model.num_experts"],
    }
