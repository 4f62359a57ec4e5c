"""PatchConfig: values that a user or a YAML file may give, and the errors for wrong ones."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from moe_patch import MoePatchError, PatchConfig, UnsupportedOptionError

DEFAULTS = {
    "backend": "auto",
    "strict": True,
    "self_check": True,
    "fuse_lora": "auto",
    "recompute": False,
    "chunk_tokens": "auto",
    "batch_invariant": False,
    "ties": "lower",
    "include": (),
    "exclude": (),
}
CHANGED = {
    "backend": "torch",
    "strict": False,
    "self_check": False,
    "fuse_lora": "require",
    "recompute": True,
    "chunk_tokens": 4096,
    "ties": "torch",
    "include": ["*.layers.0.*"],
    "exclude": "*.layers.1.*",
}


def test_defaults():
    config = dataclasses.asdict(PatchConfig())
    assert {key: config[key] for key in DEFAULTS} == DEFAULTS


def test_frozen_and_hashable():
    config = PatchConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.backend = "torch"
    assert len({config, PatchConfig(), PatchConfig(backend="torch")}) == 2


@pytest.mark.parametrize("value", [None, True, {}], ids=repr)
def test_nothing_asked_for_means_the_defaults(value):
    assert PatchConfig.parse(value) == PatchConfig()


def test_false_means_do_not_patch():
    assert PatchConfig.parse(False) is None
    with pytest.raises(UnsupportedOptionError, match="false together with options.*strict"):
        PatchConfig.parse(False, strict=False)


def test_mapping_options_and_config_mean_the_same():
    expected = PatchConfig(
        **{**CHANGED, "include": ("*.layers.0.*",), "exclude": ("*.layers.1.*",)}
    )
    assert PatchConfig.parse(CHANGED) == expected
    assert PatchConfig.parse(None, **CHANGED) == expected
    assert PatchConfig.parse(PatchConfig(), **CHANGED) == expected
    assert PatchConfig.parse(expected) == expected
    assert PatchConfig.parse(CHANGED, ties="lower") == dataclasses.replace(expected, ties="lower")


YAML = """
moe_patch:
  backend: torch
  strict: false
  self_check: no
  fuse_lora: require
  recompute: on
  chunk_tokens: 4096
  ties: torch
  include: ["*.layers.0.*"]
  exclude: "*.layers.1.*"
"""


def test_yaml_text_and_node():
    expected = PatchConfig.parse(CHANGED)
    assert PatchConfig.parse(yaml.safe_load(YAML)["moe_patch"]) == expected
    ((_, node),) = yaml.compose(YAML).value
    assert PatchConfig.parse(node) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("true", PatchConfig()), ("on", PatchConfig()), ("", PatchConfig()), ("false", None)],
)
def test_yaml_scalars(text, expected):
    assert PatchConfig.parse(yaml.safe_load(f"moe_patch: {text}")["moe_patch"]) == expected
    ((_, node),) = yaml.compose(f"moe_patch: {text}").value
    assert PatchConfig.parse(node) == expected


def test_yaml_reads_a_bare_off_as_false():
    parsed = yaml.safe_load("fuse_lora: off")
    assert parsed == {"fuse_lora": False}
    assert PatchConfig.parse(parsed).fuse_lora == "off"
    assert PatchConfig.parse(yaml.compose("fuse_lora: off")).fuse_lora == "off"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("backends", "backend"),
        ("fuse-lora", "fuse_lora"),
        ("selfcheck", "self_check"),
        ("tie", "ties"),
        (7, None),
    ],
)
def test_unknown_key_names_the_nearest(key, nearest):
    with pytest.raises(UnsupportedOptionError) as raised:
        PatchConfig.parse({key: True})
    message = str(raised.value)
    assert repr(key) in message
    if nearest is not None:
        assert f"did you mean {nearest!r}" in message
    else:
        assert all(name in message for name in DEFAULTS)


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ({"backend": "cuda"}, "auto, torch, triton"),
        ({"fuse_lora": "on"}, "auto, require, off"),
        ({"fuse_lora": True}, "auto, require, off"),
        ({"ties": "upper"}, "lower, torch"),
        ({"strict": "no"}, "true, false"),
        ({"recompute": 1}, "true, false"),
        ({"chunk_tokens": -1}, "a number of tokens"),
        ({"chunk_tokens": "off"}, "0 to run all tokens at once"),
        ({"chunk_tokens": 1.5}, "an int or a string"),
        ({"self_check": None}, "true, false"),
        ({"include": 3}, "glob pattern"),
        ({"exclude": ["a", 1]}, "glob pattern"),
        ({"shadow_check": True}, "an int"),
        ({"shadow_check": "5"}, "an int"),
        ({"shadow_check": -1}, "a number of steps"),
        ({"debug_dir": 3}, "a string"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_value_lists_what_is_accepted(options, accepted):
    ((key, value),) = options.items()
    with pytest.raises(UnsupportedOptionError) as raised:
        PatchConfig.parse(options)
    assert key in str(raised.value)
    assert repr(value) in str(raised.value)
    assert accepted in str(raised.value)
    assert isinstance(raised.value, MoePatchError)


@pytest.mark.parametrize("value", ["yes please", 3, ["backend"]], ids=repr)
def test_wrong_type_altogether(value):
    with pytest.raises(UnsupportedOptionError, match="true, false or a mapping"):
        PatchConfig.parse(value)


@pytest.mark.parametrize(
    "options", [{"backend": "cuda"}, {"strict": 0}, {"ties": ["lower"]}, {"include": 3}], ids=str
)
def test_construction_checks_as_well(options):
    with pytest.raises(UnsupportedOptionError):
        PatchConfig(**options)


@pytest.mark.parametrize("patterns", ["*.mlp", ["*.mlp"], ("*.mlp",)], ids=repr)
def test_patterns_become_a_tuple_however_they_are_given(patterns):
    assert PatchConfig(include=patterns).include == ("*.mlp",)
    assert PatchConfig(exclude=patterns) == PatchConfig.parse({"exclude": patterns})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"compute": "fp8", "chunk_tokens": 4096}, "FP8 products run all tokens at once"),
        ({"compute": "fp8_copy", "offload_experts": True}, "need the experts on the card"),
    ],
)
def test_options_that_fp8_products_exclude(options, why):
    with pytest.raises(UnsupportedOptionError, match=why):
        PatchConfig(**options)
    one = dict([options.popitem()])
    assert PatchConfig(**one) != PatchConfig(**options)
