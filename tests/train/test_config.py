"""The configuration of the training command: accepted values, and the errors for mistakes."""

from pathlib import Path

import pytest
import yaml

from moe_patch.errors import UnsupportedOptionError
from moe_patch.train.build import check_options, one_line, training_arguments
from moe_patch.train.config import load_config, make_config
from tests.support.train_nodes import node

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"

WRONG = [
    # (change of the node, what the message must say)
    ({"ouput_dir": "x"}, "unknown key 'ouput_dir'; did you mean 'output_dir'?"),
    ({"tinny": True}, "unknown key 'tinny'; did you mean 'tiny'?"),
    (
        {"training": {"lerning_rate": 1}},
        "unknown key 'lerning_rate'; did you mean 'learning_rate'?",
    ),
    ({"training": {"max_steps": "many"}}, "training.max_steps is 'many'; expected an int"),
    ({"training": {"max_steps": True}}, "training.max_steps is True; expected an int"),
    ({"training": {"resume_from_checkpoint": "none"}}, "is 'none'; no such folder"),
    ({"training": {"resume_from_checkpoint": "tests"}}, "tests has no trainer_state.json"),
    ({"training": {"resume_from_checkpoint": True}}, "resume_from_checkpoint is True; expected"),
    ({"training": {"seed": 3}}, "training.seed: set it at the top level"),
    ({"training": {"eval_strategy": "often"}}, "training: often"),
    (
        {"lora": {"target_module": []}},
        "unknown key 'target_module'; did you mean 'target_modules'?",
    ),
    ({"lora": ["q_proj"]}, "lora is ['q_proj']; expected a mapping"),
    ({"model": {"model_type": "qwen3_mo"}}, "model.model_type is 'qwen3_mo'; did you mean"),
    ({"model": {"model_type": "qwen3_moe", "num_expert": 4}}, "did you mean 'num_experts'?"),
    ({"model": {"path": "x", "model_type": "y"}}, "exactly one of 'path' and 'model_type'"),
    ({"model": {"path": "x", "hidden_size": 3}}, "unknown key 'hidden_size'"),
    ({"model": {"path": "x", "dtype": "int8"}}, "model.dtype is 'int8'; accepted: float32"),
    ({"model": 3}, "model is 3; expected a path, hub id or mapping"),
    ({"model": None}, "the key 'model' is missing"),
    ({"output_dir": None}, "the key 'output_dir' is missing (or --output-dir)"),
    ({"tokenizer": None}, "has no tokenizer; add `tokenizer: train`"),
    ({"data": {"block_size": 8}}, "data: the key 'source' is missing"),
    ({"data": {"source": "x", "block_size": 1}}, "data.block_size is 1; at least 2"),
    ({"data": {"source": "x", "blocksize": 1}}, "did you mean 'block_size'?"),
    ({"compare_unpatched": 0}, "compare_unpatched is 0; at least 1 step"),
    ({"moe_patch": {"backnd": "torch"}}, "did you mean 'backend'?"),
    ({"moe_patch": "yes"}, "moe_patch is 'yes'; expected a bool (true, false) or a mapping"),
]


def check(changed, tmp_path):
    config = make_config(changed)
    check_options(config)
    training_arguments(config, tmp_path)


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[m[:40] for _, m in WRONG])
def test_wrong_config_is_named(tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(QUICKSTART.parents[1])
    with pytest.raises(UnsupportedOptionError) as caught:
        check(node(**change), tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_valid_node_passes(tmp_path):
    """Accept the node from which the negative cases above start."""
    check(node(), tmp_path)


def test_quickstart_passes_its_own_checks():
    check_options(load_config(QUICKSTART))


def test_load_config_reads_exponents_and_overrides(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: a/b\ndata: x.txt\noutput_dir: o\ntraining: {learning_rate: 1e-3}\n")
    config = load_config(path, {"training.max_steps": 7, "seed": 5})
    assert config.training == {"learning_rate": 1e-3, "max_steps": 7}
    assert config.seed == 5
    assert config.tokenizer.source == "a/b"


def test_anchors_are_merged(tmp_path):
    """Merge what an anchor names into a mapping, whose own keys come first."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: a/b\ndata: x.txt\noutput_dir: o\n"
        "training: &usual {learning_rate: .5e-3, max_steps: 9}\n"
        "tiny: true\ntiny_values: {training: {<<: *usual, max_steps: 2}}\n"
    )
    assert load_config(path).training == {"learning_rate": 5e-4, "max_steps": 2}


def test_an_option_over_a_flag_that_is_on(tmp_path):
    """Set an option over `true`, which means all options at their defaults."""
    path = tmp_path / "c.yaml"
    path.write_text("model: a/b\ndata: x.txt\noutput_dir: o\nmoe_patch: true\n")
    assert load_config(path, {"moe_patch.recompute": True}).moe_patch == {"recompute": True}
    path.write_text("model: a/b\ndata: x.txt\noutput_dir: o\nmoe_patch: false\n")
    with pytest.raises(UnsupportedOptionError, match="moe_patch is False; expected a mapping"):
        load_config(path, {"moe_patch.recompute": True})


BROKEN_FILES = [
    ("a: 1\na: 2\n", "key 'a' is given twice"),
    ("a: [1\n", "while parsing"),
    ("- 1\n", "expected a mapping, found list"),
    ("a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
]


@pytest.mark.parametrize(("text", "message"), BROKEN_FILES)
def test_broken_file(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(UnsupportedOptionError, match=message) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path):
    with pytest.raises(UnsupportedOptionError, match="cannot read the configuration"):
        load_config(tmp_path / "none.yaml")


def test_config_is_frozen():
    config = make_config(node())
    with pytest.raises(AttributeError):
        config.seed = 1


def test_one_line():
    assert one_line(ValueError("a\nb")) == "a"
    assert one_line(ValueError()) == "ValueError"


def test_a_byte_order_mark_in_the_file_is_read_and_utf_16_refused(tmp_path):
    text = yaml.safe_dump(node()).replace("\n", "\r\n")
    path = tmp_path / "c.yaml"
    path.write_bytes(text.encode("utf-8-sig"))
    assert load_config(path) == make_config(node())
    path.write_bytes(text.encode("utf-16"))
    with pytest.raises(UnsupportedOptionError, match="it is UTF-16; accepted: UTF-8"):
        load_config(path)


def test_variables_and_home_are_expanded_in_every_path(monkeypatch):
    monkeypatch.setenv("MOE_TEST_DIR", "/scratch")
    monkeypatch.setenv("HOME", "/home/me")
    found = make_config(
        node(
            model="${MOE_TEST_DIR}/model",
            tokenizer="~/tokenizer",
            data={"source": "$MOE_TEST_DIR/a.jsonl", "text_field": "$MOE_TEST_DIR"},
            output_dir="~/runs/${MOE_TEST_DIR}_1",
            training={"resume_from_checkpoint": "~/c/checkpoint-3"},
            moe_patch={"debug_dir": "$MOE_TEST_DIR/nan"},
        )
    )
    assert found.model.path == "/scratch/model"
    assert found.tokenizer.source == "/home/me/tokenizer"
    assert found.data.source == "/scratch/a.jsonl"
    assert found.data.text_field == "$MOE_TEST_DIR"  # no path
    assert found.output_dir == "/home/me/runs//scratch_1"
    assert found.training == {"resume_from_checkpoint": "/home/me/c/checkpoint-3"}
    assert found.moe_patch == {"debug_dir": "/scratch/nan"}
    own = make_config(node(model={"path": "~/m"}, tokenizer={"source": "$MOE_TEST_DIR/t"}))
    assert (own.model.path, own.tokenizer.source) == ("/home/me/m", "/scratch/t")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("runs/${MOE_TEST_DIR}/x", "variable MOE_TEST_DIR is unset or empty"),
        ("$MOE_TEST_DIR", "variable MOE_TEST_DIR is unset or empty"),
        ("${MOE_TEST_DIR:-runs}/x", "accepted variables"),
        ("~nobody_of_this_name/x", "there is no home folder for it"),
    ],
)
@pytest.mark.parametrize("key", ["output_dir", "model", "tokenizer", "data"])
def test_what_cannot_be_expanded_is_refused_by_name(monkeypatch, key, value, message):
    monkeypatch.delenv("MOE_TEST_DIR", raising=False)
    with pytest.raises(UnsupportedOptionError, match=message) as caught:
        make_config(node(**{key: value}))
    assert f"config: {key} is {value!r}" in str(caught.value)
