"""Drift of transformers against the registry: new families, changed sources, docs/families.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import transformers

import moe_patch
from moe_patch import supported_model_types
from moe_patch.families import drift, families, later_families
from moe_patch.families.installed import models_folder, moe_model_types
from moe_patch.families.table import END, START, table
from moe_patch.runtime.spec import FamilySpec

PAGE = Path(moe_patch.__file__).parents[1] / "docs" / "families.md"
TODO = "see scripts/families.py: correct the entries, run scripts/parity.py, then --accept"


def folders_with_experts() -> set[str]:
    """Return the model folders whose modeling file builds experts, whatever their config says."""
    folders = set()
    for path in models_folder().glob("*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        if "xperts" not in text and "MoE" not in text and "Moe" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Assign) and any(
                isinstance(t, ast.Attribute) and t.attr in ("experts", "gate", "router_gate")
                for t in node.targets
            ):
                built = ast.unparse(node.value)
                if re.match(r"\w*(Experts|MoE|Moe|MoA)\w*\(|nn\.Linear\(.*num_keys", built):
                    folders.add(path.parent.name)
    return folders


def test_every_moe_model_type_has_a_tier():
    tiers, types = supported_model_types(), moe_model_types()
    assert set(tiers) >= set(types)
    assert set(tiers.values()) <= {"full", "experts", "refused"}
    folders = folders_with_experts()
    unseen = folders - {t.folder for t in types.values()}
    assert not unseen, f"{sorted(unseen)} build experts, but no model type of theirs counts as MoE"
    assert len(folders) > 40  # 45 in transformers 5.9


def test_sources_are_those_the_entries_were_checked_with():
    found = [str(difference) for difference in drift.differences(families(), later_families())]
    assert not found, "\n".join([*found, TODO])


def test_a_changed_class_is_named_with_its_file(monkeypatch):
    store = drift.stored()
    store["olmoe"]["OlmoeTopKRouter"] = {"0" * 16: "5.0.0"}
    monkeypatch.setattr(drift, "stored", lambda: store)
    (difference,) = drift.differences(families(), later_families())
    assert difference[:2] == ("changed", "olmoe")
    assert "OlmoeTopKRouter" in difference.what
    assert difference.file.endswith("models/olmoe/modeling_olmoe.py")


@pytest.mark.families("mellum")
def test_a_family_without_an_entry_is_new_and_of_tier_experts(monkeypatch):
    kept = tuple(spec for spec in families() if "mellum" not in spec.model_types)
    (difference,) = drift.differences(kept, later_families())
    assert difference[:2] == ("new", "mellum")
    assert difference.file.endswith("models/mellum/modeling_mellum.py")
    monkeypatch.setattr("moe_patch.families._FAMILIES", list(kept))
    assert supported_model_types()["mellum"] == "experts"


def test_a_class_that_is_gone_is_named():
    spec = FamilySpec(model_types=("olmoe",), module="olmoe", experts="NoSuch", tier="experts")
    gone = [d for d in drift.differences((*families(), spec)) if d.kind == "gone"]
    assert [d.what for d in gone] == ["experts class NoSuch is missing"]


def test_comments_do_not_count_and_code_does():
    source = "class A:\n    def f(self):\n        return 1\n"
    assert drift.source_hash(source) == drift.source_hash(
        "class A:\n\n    # why\n    def f(self):\n        return 1\n"
    )
    assert drift.source_hash(source) != drift.source_hash(source.replace("1", "2"))


def test_wrappers_take_the_tier_of_their_towers():
    tiers = supported_model_types()
    assert tiers["qwen3_vl_moe"] == tiers["qwen3_vl_moe_text"] == "full"
    assert tiers.get("vitpose", "refused") == "refused"  # older releases have no such type


def test_readme_table_is_current():
    written = PAGE.read_text(encoding="utf-8").split(START)[1].split(END)[0].strip()
    release = re.search(r"as of transformers ([\w.]+)\.\n", written)
    assert release is not None, f"no table in {PAGE}: run scripts/families.py --table"
    if release[1] == transformers.__version__:
        assert written == table(families(), release[1]), "run scripts/families.py --table"
    for spec in (*families(), *later_families()):
        assert f"`{spec.model_types[0]}`" in written, f"{spec.model_types[0]} is not in the table"
