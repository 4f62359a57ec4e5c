"""Op ``block``: router and experts of one layer together, forward and backward, as modules.

A row's ``median_ms`` is the wall time of one pass among many that are issued without a wait, as in
a training step. ``host_us`` is the time until a pass is issued, and ``kernel_ms`` the time of its
kernels on the device; the larger one decides. ``rel_err`` is the distance of the output and of each
gradient from transformers' own block in the same process.
"""

from __future__ import annotations

import gc
import statistics
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench_lib import clocks, moe_block, moe_layer, timers
from bench_lib.measure import Settings, WrongResultError, canonical_grads, run_pass
from bench_lib.ops import experts, lora
from bench_lib.shapes import Point
from bench_lib.spec import Impl, Op, Program, Work

# Duration and largest number of passes issued together, and how often to repeat that.
TOGETHER_MS = 100.0
MOST_TOGETHER = 20
ROUNDS = 5
# Passes before CUDA graphs can be recorded, and the largest blocks for which they are worth it.
WARM_PASSES = 5
MOST_TOKENS_COMPILED = 4096


class _State:
    """Inputs of the current size, and the results of transformers' block for them."""

    def __init__(self) -> None:
        self.size: tuple | None = None
        self.inputs: Any = None
        self.expected: dict[str, Tensor] = {}

    def load(self, point: Point, device: torch.device) -> Any:
        size = point.shape, point.T, point.R, point.dtype
        if size != self.size:
            self.inputs, self.expected = None, {}
            self.size, self.inputs = size, moe_block.make_inputs(point, device)
        return self.inputs


_STATE = _State()


def _error(program: Program, results: tuple, peer: bool) -> float | None:
    """Return the largest distance from transformers' block; keep its results if it ran."""
    out, grads = results
    found = {"out": out.detach(), **canonical_grads(program, grads)}
    if peer:
        _STATE.expected = {name: value.clone() for name, value in found.items()}
        return None
    known = _STATE.expected
    if not known:
        return None
    return max(moe_layer.relative_error(found[name], known[name].double()) for name in found)


def _wall_ms(run: timers.Run, device: torch.device) -> float:
    """Return the median time of a pass among passes issued one after another."""
    together, times = 1, []
    for attempt in range(ROUNDS + 1):
        timers.wait(device)
        start = time.perf_counter()
        for _ in range(together):
            run()
        timers.wait(device)
        one_ms = 1e3 * (time.perf_counter() - start) / together
        if attempt:
            times.append(one_ms)
        else:
            together = max(1, min(MOST_TOGETHER, int(TOGETHER_MS / one_ms)))
    return statistics.median(times)


def measure(impl: Impl, point: Point, device: torch.device, settings: Settings) -> dict[str, Any]:
    """Return one row.

    Raises:
        WrongResultError: a result differs from that of transformers' block.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    inputs = _STATE.load(point, device)
    program = impl.build(inputs, point)
    call = partial(run_pass, BLOCK, point, program, inputs.layer.dout_TD)
    for _ in range(WARM_PASSES):
        results = call()
    error = _error(program, results, peer=impl.name in ("hf_grouped_mm", "peft"))
    del results
    if error is not None and not error <= moe_layer.LIMITS[point.dtype]:
        raise WrongResultError(f"differs from transformers' block by {error:.2e}")
    held = moe_layer.layer_input_bytes(point)
    found: dict[str, Any] = {"rel_err": error}
    found["host_us"], found["peak_bytes"] = timers.host_us_and_peak(call, held, device)
    with moe_block.kernels_timed(device) as kernel_ms:
        call()
    found["kernel_ms"] = kernel_ms[0] if kernel_ms else None
    if device.type == "cuda":
        timers.settle(call, device)
    with clocks.watched(settings.clocks) as seen:
        found["median_ms"] = _wall_ms(call, device)
    return found | seen


def warm(impl: Impl, point: Point, device: torch.device) -> None:
    """Run one pass, which compiles the kernels."""
    inputs = moe_block.make_inputs(point, device)
    run_pass(BLOCK, point, impl.build(inputs, point), inputs.layer.dout_TD)


def work(point: Point) -> Work:
    """Return the work of the experts and of the router's product."""
    s = point.sizes
    known = experts.work(point) if point.R is None else lora.work(point)
    return Work((known.flops or 0) + 6 * point.T * s.D * s.E, 0)


def _full(point: Point) -> bool:
    return point.R is None


def _lora(point: Point) -> bool:
    return point.R is not None


def _compiles(point: Point) -> bool:
    return point.T <= MOST_TOKENS_COMPILED


_MODULES = ("transformers.models.qwen3_moe.modeling_qwen3_moe", "moe_patch")
_UNPATCHED = partial(moe_block.build_module, patched=False)
_PATCHED = partial(moe_block.build_module, patched=True)

BLOCK = Op(
    name="block",
    shapes=("qwen3_30b",),
    tokens=(64, 256, 1024, 4096, 16384, 65536, 262144),
    ranks=(None, 16),
    passes=("fwd+bwd",),
    dtypes=("bf16",),
    timer="wall",
    grad=True,
    impls=(
        # These come first, because the others are compared with their results.
        Impl("hf_grouped_mm", _UNPATCHED, covers=_full, modules=_MODULES),
        Impl("peft", _UNPATCHED, covers=_lora, modules=(*_MODULES, "peft")),
        Impl("split_lora", moe_block.build_split, covers=_lora),
        Impl("moe_patch", _PATCHED, ours=True, compiles="once", modules=_MODULES),
        Impl(
            "moe_patch:cuda_graphs", partial(_PATCHED, compiled=True), ours=True, needs_cuda=True,
            covers=_compiles, modules=_MODULES,
        ),
    ),
    required=("hf_grouped_mm", "peft", "split_lora"),
    work=work,
    measure=measure,
    warm=warm,
)  # fmt: skip
