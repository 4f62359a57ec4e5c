"""Kernels launched directly get what Triton would give them; see tests/offline_launches.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch.ops.experts import definition as reference
from moe_patch.ops.experts.op import experts_mlp
from moe_patch.types import ExpertWeights, Glu
from tests.limits import HANG_S
from tests.numerics import assert_bits

SILU = Glu("silu")


@pytest.fixture(scope="module")
def launches() -> dict:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("offline_launches.py"))],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_the_same_compiled_kernels_with_the_same_arguments(launches: dict) -> None:
    """Aligned and not, decode and training, with factors and without."""
    assert launches["different"] == []


def test_known_releases_are_launched_directly_and_others_are_not(launches: dict) -> None:
    from moe_patch.kernels.common.versions import tested

    assert (launches["direct"] > 0) == tested().direct
    if tested().direct:
        assert launches["by_triton"] == [], "each of them takes the host 10 to 20 µs more"


def test_descriptors_are_encoded_here_where_kernels_are_launched_directly(launches: dict) -> None:
    assert (launches["descriptors"] > 0) == (launches["direct"] > 0)
    assert launches["encoded"] >= launches["descriptors"]


def test_a_descriptor_is_encoded_anew_for_an_address_a_shape_or_strides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And only then, however often it comes back; the most that is kept is bounded."""
    from moe_patch.kernels.common import launcher

    asked: list[tuple] = []

    def encode(descriptor: Any, kind: str) -> list:
        asked.append((descriptor.base.data_ptr(), descriptor.shape, descriptor.strides, kind))
        return [len(asked)]

    def encoded(box: launcher.Box) -> list:
        _, handles = launcher._read([box, here], -1)
        return launcher._encode(box, handles[0], "kind", kept)

    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", encode, raising=False)
    monkeypatch.setattr(launcher, "_MOST_ENCODED", 4)
    here, there = torch.zeros(64), torch.zeros(64)
    boxes = [
        launcher.Box(here, (8, 8), (8, 1), (4, 4)),
        launcher.Box(here, (4, 8), (8, 1), (4, 4)),
        launcher.Box(here, (4, 8), (4, 1), (4, 4)),
        launcher.Box(there, (8, 8), (8, 1), (4, 4)),
    ]
    kept: dict = {}
    first = [encoded(box) for box in boxes]
    assert first == [[1], [2], [3], [4]]
    assert [encoded(box) for box in boxes] == first
    assert asked == [(b.base.data_ptr(), [*b.shape], [*b.strides], "kind") for b in boxes]
    assert encoded(launcher.Box(there, (2, 4), (4, 1), (2, 4))) == [5]
    assert len(kept) <= 4


def test_a_hook_is_called_for_every_kernel(launches: dict) -> None:
    """A chain or any other function; None is no hook."""
    by_chain, by_function, by_none = launches["hooked"]
    assert len(by_chain) == len(by_function) == len(by_none) > 0
    assert all(by_chain)
    assert all(by_function)
    assert not any(by_none)


@pytest.mark.gpu
def test_gpu_a_tensor_on_the_host_is_refused_at_every_call() -> None:
    """By the driver, once the kernel is known too: its address would be read on the device."""
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    w = ExpertWeights(torch.randn(8, 64, 64, **bf16), torch.randn(8, 64, 32, **bf16))
    x_TD, weights_TK = torch.randn(3, 64, **bf16), torch.rand(3, 2, **bf16)
    ids_TK = torch.tensor([[5, 2], [0, 1], [7, 3]], device="cuda")
    out_TD = experts_mlp(x_TD, ids_TK, weights_TK, w, SILU, backend="triton")
    for _ in range(2):
        with pytest.raises(ValueError, match="cpu tensor"):
            experts_mlp(x_TD, ids_TK, weights_TK.cpu(), w, SILU, backend="triton")
    assert_bits(experts_mlp(x_TD, ids_TK, weights_TK, w, SILU, backend="triton"), out_TD)


@pytest.mark.gpu
def test_gpu_alignment_and_types_choose_the_kernel(poisoned_memory: None) -> None:
    """Calls that differ in nothing but these, in turns: each meets a kernel that reads them."""
    E, K, D, F = 8, 2, 64, 32
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    at_2_bytes = torch.randn(D + 1, **bf16)[1:][None]
    weights_TK = torch.rand(1, K, **bf16)
    ids_TK = torch.tensor([[5, 2]], device="cuda")
    w = ExpertWeights(torch.randn(E, 2 * F, D, **bf16) / 8, torch.randn(E, D, F, **bf16) / 6)
    outs = [
        experts_mlp(x_TD, ids, weights, w, SILU, backend="triton")
        for _ in range(2)
        for x_TD in (at_2_bytes.clone(), at_2_bytes)
        for ids in (ids_TK, ids_TK.int())
        for weights in (weights_TK, weights_TK.float())
    ]
    for out in outs:
        assert_bits(out, outs[0])
    wide = ExpertWeights(*(t.double() for t in w[:2]))
    expected = reference.experts(at_2_bytes.double(), ids_TK, weights_TK.double(), wide, SILU)
    assert (outs[0] - expected).norm() < 0.01 * expected.norm()
