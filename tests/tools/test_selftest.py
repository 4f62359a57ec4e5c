"""The self-test passes here, and fails where an operator is wrong."""

from __future__ import annotations

import json
import os

import pytest
import torch

import moe_patch.tools.selftest
import moe_patch.tools.selftest_checks
from moe_patch import UnsupportedOptionError
from moe_patch.errors import MoePatchError
from moe_patch.tools.selftest import SelfTest, selftest


@pytest.fixture(scope="module")
def result() -> SelfTest:
    """Outcome of the self-test on a CPU, in one process."""
    return selftest("cpu", progress=False)


def test_passes_on_a_cpu_and_says_what_that_does_not_cover(result: SelfTest) -> None:
    assert result.passed, [check for check in result.checks if not check.passed]
    assert (result.device, result.backend) == ("cpu", "torch")
    assert "only the torch backend was tested" in result.note
    said = json.loads(json.dumps(result.as_dict()))
    names = {check["name"] for check in said["checks"]}
    assert {"routing softmax bf16", "experts fp16", "experts bf16 lora"} <= names
    assert "plan" not in names


def test_processes_share_the_checks(result: SelfTest) -> None:
    shared = selftest("cpu", progress=False, jobs=2).checks
    assert [check[:3] for check in shared] == [check[:3] for check in result.checks]


def _die(device: torch.device, index: int) -> None:
    os._exit(3)


def test_a_process_that_dies_is_a_named_error(monkeypatch) -> None:
    monkeypatch.setattr(moe_patch.tools.selftest, "_run_group", _die)
    with pytest.raises(MoePatchError, match="a process that ran checks died; jobs=1"):
        selftest("cpu", progress=False, jobs=2)


def test_a_wrong_gradient_fails_by_name(monkeypatch) -> None:
    original = moe_patch.tools.selftest_checks.experts_mlp

    class Bent(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.view_as(weight)

        @staticmethod
        def backward(ctx, grad):
            return grad * 1.02

    def bent(x, ids, weights, w, glu, **options):
        return original(x, ids, weights, w._replace(w2_EDF=Bent.apply(w.w2_EDF)), glu, **options)

    monkeypatch.setattr(moe_patch.tools.selftest_checks, "experts_mlp", bent)
    result = selftest("cpu", progress=False)
    failed = {check.name: check.detail for check in result.checks if not check.passed}
    assert not result.passed
    assert set(failed) == {
        check.name
        for check in result.checks
        if check.name.startswith("experts") and "identical" not in check.name
    }
    assert all(detail.startswith("w2 is ") for detail in failed.values())


def test_a_missing_device_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(UnsupportedOptionError, match="no CUDA device"):
        selftest("cuda", progress=False)


@pytest.mark.gpu
def test_gpu_passes() -> None:
    from moe_patch.kernels.common.versions import gates

    result = selftest("cuda", progress=False)
    assert result.passed, [check for check in result.checks if not check.passed]
    assert result.backend == "triton"
    # On an untested Triton the portable kernels are tested on a Hopper card, which the report says.
    assert result.note in ("", gates().reason)
    assert result.checks[0].name == "plan"
