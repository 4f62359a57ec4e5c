"""Kernels launched directly get the arguments that Triton would pass (offline_launches.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)

from moe_patch.ops.experts import definition as reference
from moe_patch.ops.experts.op import experts_mlp
from moe_patch.types import ExpertWeights, Glu
from tests.support import SUPPORT
from tests.support.limits import HANG_S
from tests.support.numerics import assert_bits

SILU = Glu("silu")


@pytest.fixture(scope="module")
def launches() -> dict:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(SUPPORT / "offline_launches.py")],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_the_same_compiled_kernels_with_the_same_arguments(launches: dict) -> None:
    """Arguments agree: aligned or not, decode and training, with factors and without."""
    assert launches["different"] == []


def test_known_releases_are_launched_directly_and_others_are_not(launches: dict) -> None:
    from moe_patch.kernels.common.versions import tested

    assert (launches["direct"] > 0) == tested().direct
    if tested().direct:
        assert launches["by_triton"] == [], "each of them takes the host 10 to 20 µs more"


def test_passes_of_the_experts_are_repeated(launches: dict) -> None:
    """Forward and backward, with the launches of a call that is not (see ``different``)."""
    from moe_patch.kernels.common.versions import tested

    found, two = launches["repeated"], 2 * tested().direct
    plain = ("1 tokens", "1 tokens, misaligned", "600 tokens", "600 tokens, misaligned")
    assert [found[case] for case in (*plain, "600 tokens, adapters")] == [two] * 5
    assert found["600 tokens over nf4"] == 0, "its buffers are torch's work too"


def test_descriptors_are_encoded_here_where_kernels_are_launched_directly(launches: dict) -> None:
    assert (launches["descriptors"] > 0) == (launches["direct"] > 0)
    assert launches["encoded"] >= launches["descriptors"]


def test_a_descriptor_is_encoded_anew_for_an_address_a_shape_or_strides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Encode only then, however often a descriptor recurs; the cache is bounded."""
    from moe_patch.kernels.common import launcher
    from moe_patch.kernels.common.versions import Tested

    asked: list[tuple] = []

    def encode(descriptor: Any, kind: str) -> list:
        asked.append((descriptor.base.data_ptr(), descriptor.shape, descriptor.strides, kind))
        return [len(asked)]

    def encoded(box: launcher.Box) -> list:
        _, handles = launcher._read([box, here], -1)
        return launcher.encode(box, handles[0], "kind", kept)

    monkeypatch.setattr("triton.backends.nvidia.driver.make_tensordesc_arg", encode, raising=False)
    monkeypatch.setattr(launcher, "_RELEASE", Tested(hopper=True, direct=True))
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


class Compiled:
    """Stand-in for a compiled kernel of a known release; records its arguments and their path."""

    packed_metadata, function = (4, 1, 0), 77

    def __init__(self, run: object, metadata: object, got: list[tuple]) -> None:
        self.run, self.metadata, self.got = run, metadata, got

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *args, stream=None: self.got.append(("Triton", grid, *args))


def encoding(launcher: Callable) -> Callable:
    """Wrap the function in C, like Triton's function that encodes descriptors."""
    return lambda *args: launcher(*args)


def encoding_renamed(in_c: Callable) -> Callable:
    """Wrap the function in C under another name in the closure."""
    return lambda *args: in_c(*args)


# Arguments of make_tensordesc_arg, and of the function in C for a kernel's own arguments.
IN_C: dict[str, tuple[Callable, Callable]] = {
    "3.6": (
        lambda descriptor, kind: ["encoded"],
        lambda own: (False, True, None, None, (4, 1, 0), None, None, None, *own),
    ),
    "3.7": (
        lambda descriptor, kind: ["encoded"],
        lambda own: (
            False, True, (4, 1, 0), None, None, None, None, None, "annotations", "signature", own
        ),
    ),
}  # fmt: skip
IN_C["3.8"] = (lambda descriptor, kind, before: ["encoded"], IN_C["3.7"][1])
GONE = ["", "CudaLauncher", "make_tensordesc_arg", "closure", "launch", "launch_pdl", "meta"]
CASES = [(release, gone) for release in IN_C for gone in GONE]
CASES += [("3.7", "arg_annotations"), ("3.7", "kernel_signature"), ("3.8", "instrumented")]


@pytest.mark.parametrize(("release", "gone"), CASES)
def test_where_triton_lacks_a_private_name_it_launches_itself(
    monkeypatch: pytest.MonkeyPatch, release: str, gone: str
) -> None:
    """Launch through Triton if a private name is missing, else through the function in C."""
    from moe_patch.kernels.common import launcher
    from moe_patch.kernels.common.versions import TRITON_VERSIONS

    got: list[tuple] = []
    launcher_in_c = lambda *args: got.append(("C", *args))  # noqa: E731
    make_tensordesc_arg, in_c = IN_C[release]
    monkeypatch.setattr(launcher, "_RELEASE", TRITON_VERSIONS[release])

    class CudaLauncher:
        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid, launch_pdl = False, True
        launch = staticmethod(encoding_renamed(launcher_in_c))
        gsan_enabled = gone == "instrumented"
        if release != "3.6":
            arg_annotations, kernel_signature = "annotations", "signature"

    if gone != "closure":
        CudaLauncher.launch = staticmethod(encoding(launcher_in_c))
    nvidia = "triton.backends.nvidia.driver"
    monkeypatch.setattr(f"{nvidia}.CudaLauncher", CudaLauncher, raising=False)
    monkeypatch.setattr(f"{nvidia}.make_tensordesc_arg", make_tensordesc_arg, raising=False)
    metadata = SimpleNamespace(tensordesc_meta=["kind"])
    compiled = Compiled(CudaLauncher(), metadata, got)
    if gone in ("CudaLauncher", "make_tensordesc_arg"):
        monkeypatch.delattr(f"{nvidia}.{gone}")
    elif gone == "meta":
        del metadata.tensordesc_meta
    elif hasattr(CudaLauncher, gone):
        delattr(CudaLauncher, gone)
    active = SimpleNamespace(get_current_stream=lambda device: 0)
    monkeypatch.setattr(launcher, "driver", SimpleNamespace(active=active))

    class Kernel:
        arg_names = ("in_ptr", "out_ptr", "T", "N", "BLOCK")

        def __getitem__(self, grid: tuple) -> Callable:
            return lambda *args, **constants: compiled

    launch = launcher.Launcher(Kernel())
    launch._direct = True
    here = torch.zeros(64)
    box = launcher.Box(here, (8, 8), (8, 1), (4, 4))
    for T in (3, 3, 5):
        launch((2,), (box, here), (T,), (8,), BLOCK=16)
    if not gone:
        own = [("encoded", here.data_ptr(), T, 8, 16) for T in (3, 5)]
        assert got == [("C", 2, 1, 1, 0, 77, *in_c(each)) for each in own]
        return
    assert [each[:2] for each in got] == [("Triton", (2, 1, 1))] * 2
    for (_, _, descriptor, tensor, *numbers), T in zip(got, (3, 5), strict=True):
        assert descriptor.base is here
        assert tensor is here
        assert numbers == [T, 8, 16]


def test_a_hook_is_called_for_every_kernel(launches: dict) -> None:
    """Call a hook that is a chain or any other function; None is no hook."""
    by_chain, by_function, by_none = launches["hooked"]
    assert len(by_chain) == len(by_function) == len(by_none) > 0
    assert all(by_chain)
    assert all(by_function)
    assert not any(by_none)


@pytest.mark.gpu
def test_gpu_a_tensor_on_the_host_is_refused_at_every_call() -> None:
    """Raise the driver's error, also for a cached kernel: the device would read a host address."""
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
    """Alternate calls that differ only in alignment and types; each runs a kernel that fits."""
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
