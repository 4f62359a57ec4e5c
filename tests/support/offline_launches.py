"""Arguments that our launcher and Triton pass to the driver, compared on any machine.

A program: the experts run on CPU tensors under a driver that compiles for sm_90 and launches
nothing. Prints one line of JSON: the kernels launched, and where the two ways differ. On releases
that we launch directly, Triton's own launcher runs too, and the arguments of its C function are
compared. The Hopper kernels take part there, whether a card has run them or not.
For a Triton other than the installed one, put its folder first on PYTHONPATH.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "tiles")]

import torch  # noqa: E402
import triton  # noqa: E402
from compile_only import CompileOnly, compiling_for  # noqa: E402

from moe_patch.kernels.common.versions import TRITON_VERSIONS, tested  # noqa: E402

# Before the modules that import the Hopper kernels by this table.
TRITON_VERSIONS.update({k: v._replace(hopper=v.direct) for k, v in TRITON_VERSIONS.items()})

from moe_patch.formats import mxfp4  # noqa: E402
from moe_patch.formats.packed import READABLE, PackedWeight, pack  # noqa: E402
from moe_patch.kernels.common.launcher import Launcher  # noqa: E402
from moe_patch.kernels.common.recording import Recorded  # noqa: E402
from moe_patch.kernels.experts import experts  # noqa: E402
from moe_patch.kernels.experts.call import Call  # noqa: E402
from moe_patch.kernels.packed import dequant  # noqa: E402
from moe_patch.kernels.routing import route, weights_at  # noqa: E402
from moe_patch.ops.experts.op import Signals, experts_mlp  # noqa: E402
from moe_patch.types import (  # noqa: E402
    ExpertWeights,
    Glu,
    Lora,
    RouteSpec,
)

D, F, E, K, R = 256, 128, 8, 2, 16
Launch = tuple[object, str, tuple]
KNOWN, AS_TUPLE = tested().direct, tested().as_tuple
# The metadata for hooks, and the hooks.
HOOKS = slice(6, 9) if not KNOWN else slice(8, 11) if AS_TUPLE else slice(10, 13)
launched: list[Launch] = []
compared: dict[str, list[int]] = {}  # arguments of each launch, by kernel


class Annotation(NamedTuple):
    """Stand-in for the type of one argument in the C extension, since 3.7."""

    nested_tuple: list | None
    type: str


class Recorder:
    """Stand-in for one compiled kernel."""

    def __init__(self, _src: object, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, *args: Any) -> None:
        launched.append((self, self.name, args))

    launch = __call__


def recording(src: object, metadata: Any) -> object:
    """Return Triton's launcher over a recorder, or the recorder itself."""
    recorder = Recorder(src, metadata)
    if not KNOWN:
        return recorder
    from triton.backends.nvidia import driver

    replaced = {"library_dirs": list}
    if AS_TUPLE:
        replaced = {f"ARG_{kind}": kind for kind in ("CONSTEXPR", "KERNEL", "TUPLE")}
        replaced["PyKernelArg"] = Annotation
    else:
        replaced["compile_module_from_src"] = lambda **_: recorder
    with (
        mock.patch.multiple(driver, **replaced),
        mock.patch.object(CompileOnly.utils, "launch", recorder, create=True),
    ):
        return driver.CudaLauncher(src, metadata)


def encoded(*args: Any) -> tuple:
    """Stand-in for a descriptor that the driver encodes."""
    return ("encoded", *args)


def signed(signature: list[str]) -> tuple:
    """Stand-in for the bytes by which the function in C reads its arguments."""
    return ("signature", *signature)


IN_C = {
    "fill_tma_descriptor": encoded,
    "fill_tma_descriptor_tiled": encoded,  # since 3.7
    "build_signature_metadata": signed,
}


def trained(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)


def step(T: int, misaligned: bool, lora: bool, stored: str = "", norms: bool = False) -> None:
    """Run one forward and backward of the experts, with weights stored in bf16 or packed."""
    torch.manual_seed(T)
    x_TD = torch.zeros(T * D + 1, dtype=torch.bfloat16)[int(misaligned) :][: T * D].view(T, D)
    x_TD.requires_grad_()
    ids_TK = torch.rand(T, E).argsort(1)[:, :K].contiguous()
    w13, w2 = trained(E, 2 * F, D), trained(E, D, F)
    if stored:
        w13, w2 = (pack(each.detach(), stored, each.device, "a weight") for each in (w13, w2))
    loras = {}
    if lora:
        loras["lora13"] = Lora(trained(E, R, D), trained(E, 2 * F, R), 2.0)
        loras["lora2"] = Lora(trained(E, R, F), trained(E, D, R), 2.0)
    w = ExpertWeights(w13, w2, trained(E, 2 * F), trained(E, D))
    weights_TK = torch.rand(T, K, requires_grad=True)
    signals = Signals(torch.empty(3, T, K)) if norms else None
    out_TD = experts_mlp(
        x_TD, ids_TK, weights_TK, w, Glu("silu"), backend="triton", signals=signals, **loras
    )
    out_TD.backward(torch.ones_like(out_TD))


def routed(T: int, dtype: torch.dtype, bias: bool) -> None:
    """Run one forward and backward of the router."""
    spec = RouteSpec(K, score="sigmoid" if bias else "softmax", renormalize=True, eps=1e-20)
    logits_TE, bias_E = torch.zeros(T, E, dtype=dtype), torch.zeros(E) if bias else None
    made = route.route_forward(logits_TE, spec, bias_E)
    route.route_backward(made.weights_TK, logits_TE, made.ids_TK, spec)
    weights_at.weights_at(logits_TE, made.ids_TK, spec, bias)


def dequantised(stored: str) -> None:
    """Experts into a buffer."""
    if stored == "mxfp4":
        packed = torch.zeros(E, D, F // 2, dtype=torch.uint8)
        scales = torch.zeros(E, D, F // mxfp4.BLOCK, dtype=torch.uint8)
        weight = PackedWeight(stored, packed, (scales,), torch.bfloat16)
    else:
        weight = pack(trained(E, D, F).detach(), stored, torch.device("cpu"), "a weight")
    offsets_S = torch.zeros(E + 1, dtype=torch.int32)
    dequant.dequantize_into(torch.empty(2, D, F, dtype=torch.bfloat16), weight, offsets_S, 4)


def cases() -> dict[str, Callable[[], None]]:
    """Return the calls that are launched in both ways, by name."""
    found: dict[str, Callable[[], None]] = {}
    for T in (1, 600):
        for misaligned in (False, True):
            found[f"{T} tokens{', misaligned' * misaligned}"] = partial(step, T, misaligned, T == 1)
        for stored in ("nf4", "fp8"):
            found[f"{T} tokens over {stored}"] = partial(step, T, False, True, stored)
        found[f"{T} tokens routed by softmax"] = partial(routed, T, torch.bfloat16, False)
        found[f"{T} tokens routed by sigmoid"] = partial(routed, T, torch.float32, True)
    found["600 tokens, adapters"] = partial(step, 600, False, True)
    found["600 tokens, norms"] = partial(step, 600, False, True, norms=True)
    return found | {f"{stored} alone": partial(dequantised, stored) for stored in READABLE}


def launches_of(run: Callable[[], None]) -> list[Launch]:
    launched.clear()
    run()
    return list(launched)


def described(args: tuple) -> list:
    """Return the values that the driver reads; a tensor, however passed, counts as its address."""
    said: list[Any] = []
    for arg in (*args[:-1], *args[-1]) if AS_TUPLE else args:
        if isinstance(arg, torch.Tensor):
            said.append(arg.data_ptr())
        elif hasattr(arg, "base"):
            said.append((arg.base.data_ptr(), arg.shape, arg.strides, arg.block_shape))
        else:
            said.append(arg)
    return said


@contextlib.contextmanager
def launching_twice(pairs: list[tuple]) -> Iterator[None]:
    """Launch every kernel again by Triton, on the same tensors, and keep (ours, Triton's)."""
    direct_call = Launcher.__call__

    def call(launcher: Launcher, *args: Any, **constants: Any) -> None:
        first = len(launched)
        direct_call(launcher, *args, **constants)
        with mock.patch.object(launcher, "_direct", new=False):
            direct_call(launcher, *args, **constants)
        pairs.append(tuple(launched[first:]))

    with mock.patch.object(Launcher, "__call__", call):
        yield


def told(hook: Any, run: Callable[[], None]) -> list[bool]:
    """Return for each launch whether it passes a launch hook to the driver."""
    with mock.patch.object(triton.knobs.runtime, "launch_enter_hook", hook):
        return [args[HOOKS.start] is not None for *_, args in launches_of(run)]


def differences(case: str, run: Callable[[], None]) -> list[str]:
    run()  # compiles
    pairs: list[tuple] = []
    with launching_twice(pairs):
        run()
    found = [] if pairs else [f"{case}: no launch"]
    for (kernel, name, args), (other, _, others) in pairs:
        if kernel is not other:
            found.append(f"{case}: {name} as compiled for something else")
        before, after = (
            args[: HOOKS.start] + args[HOOKS.stop :],
            others[: HOOKS.start] + others[HOOKS.stop :],
        )
        compared.setdefault(name, []).append(len(described(after)))
        if described(before) != described(after):
            found.append(f"{case}: arguments of {name}")
    return found


def without_addresses(args: Any) -> Any:
    if isinstance(args, (tuple, list)):
        return [without_addresses(each) for each in args]
    return "an address" if isinstance(args, int) and args >= 1 << 40 else args


def repeated(case: str, run: Callable[[], None]) -> tuple[int, list[str]]:
    """Return how many passes repeat at the third call, and their differences from the second."""
    kept = experts.experts_forward.kept, experts.experts_backward.kept
    for each in kept:
        each.clear()
    run()
    once, again = launches_of(run), launches_of(run)
    found = [] if len(once) == len(again) else [f"{case}: {len(again)} launches of {len(once)}"]
    for (kernel, name, args), (other, _, others) in zip(once, again, strict=False):
        if kernel is not other or without_addresses(args) != without_addresses(others):
            found.append(f"{case}: {name} repeated")
    return sum(type(each) is Recorded for passes in kept for each in passes.values()), found


def main() -> None:
    runs = cases()
    launchers = [each for each in gc.get_objects() if isinstance(each, Launcher)]
    with (
        mock.patch("moe_patch.ops.backend.why_not_triton", return_value=None),
        mock.patch.object(CompileOnly, "launcher_cls", staticmethod(recording)),
        mock.patch.multiple(CompileOnly.utils, create=True, **IN_C),
        # The plan is not written by a kernel here.
        mock.patch.object(Call, "_gathered", lambda call, t: t.new_zeros(call.tiles.count, D)),
        compiling_for((9, 0), 227 * 1024, measured=False),
    ):
        different = [said for case, run in runs.items() for said in differences(case, run)]
        steps = [launch for run in runs.values() for launch in launches_of(run)]
        by_triton = {name for _, name, args in steps if args[HOOKS] != (None,) * 3}
        first = next(iter(runs.values()))
        again = {case: repeated(case, run) for case, run in runs.items()}
        different += [said for _, found in again.values() for said in found]
        chain = triton.knobs.HookChain()
        chain.add(print)
        hooked = [told(hook, first) for hook in (chain, print, None)]
    direct = sum(bool(each._compiled) for each in launchers)
    descriptors = [
        d for each in launchers for found in each._compiled.values() for d in found.described
    ]
    said = {
        "direct": direct,
        "different": different,
        "kernels": len(compared),
        "launches": sum(len(each) for each in compared.values()),
        "arguments": sum(sum(each) for each in compared.values()),
        "by_triton": sorted(by_triton),
        "hooked": hooked,
        "repeated": {case: count for case, (count, _) in again.items()},
        "descriptors": len(descriptors),
        "encoded": sum(len(encoded) for *_, encoded in descriptors),
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
