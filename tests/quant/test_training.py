"""The key ``quantize_experts`` of a training file."""

from __future__ import annotations

from typing import Any

import pytest

from moe_patch import UnsupportedOptionError
from moe_patch.train.config import make_config

NODE = {
    "model": {"model_type": "qwen3_moe"},
    "tokenizer": "train",
    "data": "python-stdlib-docstrings",
    "output_dir": "out",
    "lora": {"r": 4},
}


def test_a_storage_is_taken() -> None:
    assert make_config(NODE).quantize_experts is None
    for storage in ("nf4", "fp8", "mxfp4"):
        assert make_config({**NODE, "quantize_experts": storage}).quantize_experts == storage


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"quantize_experts": "nf3"}, "did you mean 'nf4'"),
        ({"quantize_experts": True}, "quantize_experts"),
        ({"quantize_experts": "nf4", "lora": None}, "it needs `lora`"),
        ({"quantize_experts": "fp8", "moe_patch": False}, "not `moe_patch: false`"),
    ],
    ids=str,
)
def test_what_cannot_hold_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=said):
        make_config({**NODE, **values})
