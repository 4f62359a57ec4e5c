"""The option compute of verify and plan, and what inspect says about it; no card is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_patch.cli import CHECK_FAILED, main
from moe_patch.cli.output import bytes_text
from moe_patch.ops import backend
from moe_patch.runtime import experts
from moe_patch.runtime.fp8 import in_fp8
from tests.support.cli_calls import answer, error_of, only_config

LIMITS = {"expert choice": 0.3, "loss": 0.2, "logits": 0.2, "router logits": 0.2, "gradients": 0.4}
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return only_config(tmp_path_factory.mktemp("tiny"), "qwen3_moe", **SIZES)


def test_verify_has_limits_for_fp8_and_says_where_experts_are_decoded(capsys, folder):
    command = ("verify", folder, "--device", "cpu", "--compute", "fp8_copy")
    found = answer(capsys, *command)
    assert (found["passed"], found["compute"]) == (True, "fp8_copy")
    limits = {check["name"]: check["limit"] for check in found["checks"]}
    assert LIMITS.items() <= limits.items()
    reasons = {block["reason"] for block in found["blocks"]}
    assert reasons == {
        "compute='fp8_copy' has no effect: experts on the torch backend and cpu are decoded"
    }
    assert main([*command]) == 0
    assert reasons.pop() in capsys.readouterr().out.splitlines()


def test_verify_finds_wrong_products(capsys, folder, monkeypatch):
    def halved(w, compute, *args):
        w = in_fp8(w, compute, *args)
        if compute == "decoded":
            return w
        scales = (w.w13_EHD.scales[0] * 0.5,)
        return w._replace(w13_EHD=replace(w.w13_EHD, scales=scales))

    monkeypatch.setattr(experts, "in_fp8", halved)
    command = ("verify", folder, "--device", "cpu", "--compute", "fp8", "--random")
    found = answer(capsys, *command, status=CHECK_FAILED)
    assert "gradients" in {check["name"] for check in found["checks"] if not check["passed"]}


def test_inspect_and_plan_say_the_memory_of_a_transposed_copy(capsys, folder):
    """Both copies together take what bf16 takes, apart from scales."""
    inspected = answer(capsys, "inspect", folder, "--dtype", "bfloat16")
    once = inspected["expert_bytes_quantised"]["fp8"]
    assert 0.5 < once / inspected["expert_bytes"] < 0.501
    main(["inspect", folder, "--dtype", "bfloat16"])
    lines = capsys.readouterr().out.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("experts in fp8")]
    assert "compute: fp8_copy" in lines[at + 1]
    assert lines[at + 1].endswith(f": {bytes_text(2 * once)}")
    assert (inspected["fp8_copy_bytes"], inspected["fp8_decoded"]) == (once, "")
    plan = ("plan", folder, "--dtype", "bfloat16", "--storage", "fp8")
    assert answer(capsys, *plan, "--compute", "fp8")["weights"]["experts"] == once
    found = answer(capsys, *plan, "--compute", "fp8_copy", "--memory", "80GB")
    assert found["weights"]["experts"] == 2 * once
    assert found["recipe"]["moe_patch"] == {"compute": "fp8_copy"}
    assert main([*plan, "--compute", "fp8_copy"]) == 0
    assert "experts in fp8 (compute: fp8_copy)" in capsys.readouterr().out
    said = error_of(capsys, *plan, "--compute", "fp8", "--offload")
    assert "offload_experts=True with compute='fp8'" in said


def test_no_copy_is_counted_where_experts_are_decoded(capsys, folder, tmp_path):
    """Widths that are no multiples of 128, and fp32, have no copy."""
    other = only_config(tmp_path, "qwen3_moe", **(SIZES | {"moe_intermediate_size": 192}))
    for config, dtype, why in (
        (other, "bfloat16", "multiples of 128, found 128 and 192"),
        (folder, "float32", "found torch.float32"),
    ):
        found = answer(capsys, "inspect", config, "--dtype", dtype)
        assert found["fp8_copy_bytes"] == 0
        assert why in found["fp8_decoded"]
        main(["inspect", config, "--dtype", dtype])
        lines = capsys.readouterr().out.splitlines()
        assert not any("transposed" in line for line in lines)
        assert any("compute: fp8 decodes" in line and why in line for line in lines)
        plan = ("plan", config, "--dtype", dtype, "--storage", "fp8", "--compute")
        copied, once = (answer(capsys, *plan, compute) for compute in ("fp8_copy", "decoded"))
        assert copied["weights"] == once["weights"]
        assert [why in note for note in copied["notes"]] == [True]
        assert once["notes"] == []


def test_inspect_describes_a_card(capsys, folder, monkeypatch):
    """The weights are on the meta device, for which torch has no autocast."""
    triton = pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
    from moe_patch.kernels.common import device, versions

    hopper = device.Device((9, 0), 227 << 10, 132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device, "_cuda_device", lambda index: hopper)
    monkeypatch.setattr(backend, "capability_of", lambda device: hopper.capability)
    gates = versions.Gates(True, True, fp8=True)
    monkeypatch.setitem(versions._GATES, triton.__version__, gates)
    found = answer(capsys, "inspect", folder, "--dtype", "bfloat16")
    assert found["device"] == "cuda"
    assert {(b["experts_backend"], b["reason"]) for b in found["blocks"]} == {("triton", "")}
    assert found["fp8_copy_bytes"] == found["expert_bytes_quantised"]["fp8"]
    (block, *_) = answer(capsys, "inspect", folder, "--dtype", "float32")["blocks"]
    assert "float32" in block["reason"]
    hopper = device.Device((8, 9), 99 << 10, 128)
    found = answer(capsys, "inspect", folder, "--dtype", "bfloat16")
    assert (found["fp8_copy_bytes"], "found 8.9" in found["fp8_decoded"]) == (0, True)
