"""What the launcher hands to the driver, beside what Triton hands to it: both on any machine.

A program: the experts run on CPU tensors under a driver that compiles for sm_90 and launches
nothing. Prints one line of JSON: the kernels launched, and where the two ways differ. Of the
releases that are launched directly Triton's own launcher takes part: what is compared is what
reaches its function in C.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch  # noqa: E402
import triton  # noqa: E402
from compile_only import CompileOnly, compiling_for  # noqa: E402

import moe_patch.kernels.experts  # noqa: E402, F401
from moe_patch.kernels.launcher import TRITON_VERSIONS, Launcher  # noqa: E402
from moe_patch.ops import experts_mlp  # noqa: E402
from moe_patch.types import ExpertWeights, Glu, Lora  # noqa: E402

D, F, E, K, R = 256, 128, 8, 2, 16
KNOWN = triton.__version__.startswith(tuple(f"{version}." for version in TRITON_VERSIONS))
HOOKS = slice(10, 13) if KNOWN else slice(6, 9)  # the metadata for hooks, and the hooks
launched: list[tuple[object, str, tuple]] = []


class Recorder:
    """Stands for one compiled kernel."""

    def __init__(self, _src: object, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, *args: Any) -> None:
        launched.append((self, self.name, args))

    launch = __call__


def recording(src: object, metadata: Any) -> object:
    """Triton's launcher over a recorder, or the recorder itself."""
    recorder = Recorder(src, metadata)
    if not KNOWN:
        return recorder
    from triton.backends.nvidia import driver

    with (
        mock.patch.object(driver, "compile_module_from_src", return_value=recorder),
        mock.patch.object(driver, "library_dirs", return_value=[]),
    ):
        return driver.CudaLauncher(src, metadata)


def encoded(*args: Any) -> tuple:
    """In place of a descriptor that the driver encodes."""
    return ("encoded", *args)


def step(T: int, misaligned: bool, lora: bool) -> list[tuple[object, str, tuple]]:
    """The launches of one forward and backward."""
    torch.manual_seed(T)
    q = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)  # noqa: E731
    x_TD = torch.zeros(T * D + 1, dtype=torch.bfloat16)[int(misaligned) :][: T * D].view(T, D)
    x_TD.requires_grad_()
    ids_TK = torch.rand(T, E).argsort(1)[:, :K].contiguous()
    w = ExpertWeights(q(E, 2 * F, D), q(E, D, F), q(E, 2 * F), q(E, D))
    loras = {}
    if lora:
        loras["lora13"] = Lora(q(E, R, D), q(E, 2 * F, R), 2.0)
        loras["lora2"] = Lora(q(E, R, F), q(E, D, R), 2.0)
    launched.clear()
    weights_TK = torch.rand(T, K, requires_grad=True)
    out_TD = experts_mlp(x_TD, ids_TK, weights_TK, w, Glu("silu"), backend="triton", **loras)
    out_TD.backward(torch.ones_like(out_TD))
    return list(launched)


def described(args: tuple) -> list:
    """What the driver reads: of a tensor its address, whichever way it is given."""
    said: list[Any] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            said.append(arg.data_ptr())
        elif hasattr(arg, "base"):
            said.append((arg.base.data_ptr(), arg.shape, arg.strides, arg.block_shape))
        else:
            said.append(arg)
    return said


@contextlib.contextmanager
def launching_twice(pairs: list[tuple]) -> Iterator[None]:
    """Every kernel is launched again by Triton, over the same tensors: (ours, Triton's)."""
    direct_call = Launcher.__call__

    def call(launcher: Launcher, *args: Any, **constants: Any) -> None:
        first = len(launched)
        direct_call(launcher, *args, **constants)
        with mock.patch.object(launcher, "_direct", new=False):
            direct_call(launcher, *args, **constants)
        pairs.append(tuple(launched[first:]))

    with mock.patch.object(Launcher, "__call__", call):
        yield


def differences(case: tuple[int, bool, bool]) -> list[str]:
    step(*case)  # compiles
    pairs: list[tuple] = []
    with launching_twice(pairs):
        step(*case)
    found = [] if pairs else [f"{case}: no launch"]
    for (kernel, name, args), (other, _, others) in pairs:
        if kernel is not other:
            found.append(f"{case}: {name} as compiled for something else")
        before, after = (
            args[: HOOKS.start] + args[HOOKS.stop :],
            others[: HOOKS.start] + others[HOOKS.stop :],
        )
        if described(before) != described(after):
            found.append(f"{case}: arguments of {name}")
    return found


def main() -> None:
    cases = [(T, misaligned, T == 1) for T in (1, 600) for misaligned in (False, True)]
    cases.append((600, False, True))
    launchers = [each for each in gc.get_objects() if isinstance(each, Launcher)]
    with (
        mock.patch("moe_patch.backend.triton_obstacle", return_value=None),
        mock.patch.object(CompileOnly, "launcher_cls", staticmethod(recording)),
        mock.patch.object(CompileOnly.utils, "fill_tma_descriptor", encoded, create=True),
        compiling_for((9, 0), 227 * 1024),
    ):
        different = [said for case in cases for said in differences(case)]
        hooks = triton.knobs.runtime.launch_enter_hook
        steps = [launch for case in cases for launch in step(*case)]
        by_triton = {name for _, name, args in steps if args[HOOKS] != (None,) * 3}
        hooks.add(print)
        hooked = all(args[HOOKS.start] is not None for _, _, args in step(*cases[0]))
        hooks.remove(print)
    direct = sum(bool(each._compiled) for each in launchers)
    descriptors = [
        d for each in launchers for found in each._compiled.values() for d in found.described
    ]
    said = {
        "direct": direct,
        "different": different,
        "by_triton": sorted(by_triton),
        "hooked": hooked,
        "descriptors": len(descriptors),
        "encoded": sum(len(encoded) for *_, encoded in descriptors),
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
