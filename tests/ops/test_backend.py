"""The choice of a backend, for devices that this machine need not have (REQUIREMENTS R23)."""

import importlib.util
import sys
import types
import warnings

import pytest
import torch

import moe_patch.ops.backend
from moe_patch import UnsupportedOptionError, patch_model, patch_report
from moe_patch.ops.backend import choose_backend
from tests.support import tiny_models

CUDA = torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch):
    """Return a function that pretends a card of a compute capability, with or without triton."""

    def pretend(capability, triton=True, hip=None):
        monkeypatch.setattr(moe_patch.ops.backend, "capability_of", lambda device: capability)
        monkeypatch.setattr(torch.version, "hip", hip)
        if triton:
            monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
        else:
            monkeypatch.delitem(sys.modules, "triton", raising=False)
            monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    return pretend


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_auto_takes_triton_from_8_0_on(card, capability, dtype):
    card(capability)
    assert choose_backend("auto", CUDA, dtype).name == "triton"


def test_an_older_card_runs_torch_and_says_so(card):
    card((7, 5))
    choice = choose_backend("auto", CUDA, torch.bfloat16)
    assert choice.name == "torch"
    assert "7.5" in choice.reason
    with pytest.raises(UnsupportedOptionError, match=r"7\.5.*backend='auto'"):
        choose_backend("triton", CUDA, torch.bfloat16)


def test_fp64_runs_torch_and_says_so(card):
    card((9, 0))
    choice = choose_backend("auto", CUDA, torch.float64)
    assert choice.name == "torch"
    assert "float64" in choice.reason


def test_without_triton_torch_runs_and_says_so(card):
    card((9, 0), triton=False)
    choice = choose_backend("auto", CUDA, torch.bfloat16)
    assert (choice.name, choice.reason) == ("torch", "triton is not installed")


def test_hip_runs_triton_only_when_asked_for(card):
    card((9, 4), hip="7.0")
    choice = choose_backend("auto", CUDA, torch.bfloat16)
    assert choice.name == "torch"
    assert "backend='triton'" in choice.reason
    assert choose_backend("triton", CUDA, torch.bfloat16).name == "triton"


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_an_interpreter_on_a_cuda_machine_is_named_and_torch_runs(card, value, monkeypatch):
    """Choose torch: the interpreter runs kernels on the host, and Hopper kernels not at all."""
    card((9, 0))
    monkeypatch.setenv("TRITON_INTERPRET", value)
    moe_patch.ops.backend._read_once.cache_clear()
    try:
        with pytest.warns(UserWarning, match="using the torch backend: TRITON_INTERPRET is set"):
            choice = choose_backend("auto", CUDA, torch.bfloat16)
        assert choice.name == "torch"
        assert "TRITON_INTERPRET is set" in choice.reason
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert choose_backend("auto", CUDA, torch.float16) == choice
        with pytest.raises(UnsupportedOptionError, match="TRITON_INTERPRET.*backend='auto'"):
            choose_backend("triton", CUDA, torch.bfloat16)
    finally:
        moe_patch.ops.backend._read_once.cache_clear()


def test_triton_reads_the_same_values(monkeypatch):
    triton = pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
    for value in ("", "0", "1", "true", "yes", "on", "y", "off", "False", "ON"):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert moe_patch.ops.backend._set_to_interpret() == triton.knobs.runtime.interpret, value


@pytest.mark.parametrize("device", ["cpu", "mps", "xpu"])
def test_other_devices_run_torch(device):
    choice = choose_backend("auto", torch.device(device), torch.float32)
    assert choice.name == "torch"
    assert device in choice.reason


def test_triton_asked_for_on_a_cpu_is_refused_before_anything_is_bound():
    model = tiny_models.build("qwen3_moe")
    with pytest.raises(UnsupportedOptionError, match="no Triton kernels on cpu"):
        patch_model(model, backend="triton")
    assert not patch_report(model)


def test_another_word_is_no_backend():
    with pytest.raises(
        UnsupportedOptionError, match="backend is 'cuda'; accepted: auto, torch, tr"
    ):
        choose_backend("cuda", torch.device("cpu"), torch.float32)


def test_training_and_evaluation_use_the_same_backend():
    model = patch_model(tiny_models.build("qwen3_moe"), backend="torch")
    batch = tiny_models.inputs(model)
    model.eval()
    with torch.no_grad():
        evaluated = model(**batch).loss
    model.train()
    loss = model(**batch).loss
    loss.backward()
    assert torch.equal(loss, evaluated)
    assert all(p.grad is not None for n, p in model.named_parameters() if ".mlp." in n)
    assert {row.experts_backend for row in patch_report(model)} == {"torch"}
