"""One process of host_block.py: builds blocks of one source tree and times them on request.

    python host_block_child.py TREE JSON    JSON: the options of host_block.py

Reads one request per line, ``[what, variant, passes]``, and answers each with one line of JSON:

    count      Python and C calls of one pass, by part, under sys.setprofile
    time       microseconds of each pass, until the call returns, without waiting for the card
    ladder     microseconds of each part in each pass, without the parts inside it
    profile    the frames that take longest, as text
"""

from __future__ import annotations

import contextlib
import cProfile
import functools
import gc
import importlib
import io
import json
import pstats
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

TREE, OPTIONS = Path(sys.argv[1]).resolve(), json.loads(sys.argv[2])
sys.path[:0] = [str(TREE), str(TREE / "scripts" / "tiles"), str(TREE / "tests" / "support")]
CARD = OPTIONS["device"] == "cuda"
# (D, F, E, K) of Qwen3-30B on a card; elsewhere the smallest that use the same kernels.
D, F, E, K = (2048, 768, 128, 8) if CARD else (16, 16, 2, 2)
# On the CPU backward runs in this thread, and other processes do not count.
CLOCK = time.perf_counter_ns if CARD else time.thread_time_ns
WARM_UP = 30
PROJECTIONS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_EXPERTS = "moe_patch.kernels.experts.experts"
# Functions that count as parts if a tree has them, beside modules and autograd functions.
FUNCTIONS = {
    "routing: the operator": ("moe_patch.ops.routing_op", "route"),
    "routing: kernel's caller, forward": ("moe_patch.kernels.routing.route", "route_forward"),
    "routing: kernel's caller, backward": ("moe_patch.kernels.routing.route", "route_backward"),
    "experts: the operator": ("moe_patch.runtime.experts", "experts_mlp"),
    "experts: kernels' callers, forward": (_EXPERTS, "experts_forward"),
    "experts: kernels' callers, backward": (_EXPERTS, "experts_backward"),
}


class Case:
    """One block with its inputs; a variant is "patched", "grouped_mm" or "eager", or "X lora"."""

    def __init__(self, variant: str) -> None:
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        implementation, _, lora = variant.partition(" ")
        config = Qwen3MoeConfig(
            hidden_size=D, moe_intermediate_size=F, num_experts=E, num_experts_per_tok=K,
            num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8,
            vocab_size=32, intermediate_size=16, mlp_only_layers=[], norm_topk_prob=True,
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(OPTIONS["device"] if CARD else "cpu"):
            model: Any = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
        self.block = model.model.layers[0].mlp
        if implementation != "patched":
            model.set_experts_implementation(implementation)
        if lora:
            model = _with_adapters(model)
        if implementation == "patched":
            import moe_patch

            # Without kernels that run, there is nothing to compare.
            backend = "auto" if CARD else "triton"
            moe_patch.patch_model(model, backend=backend, self_check=CARD)
        self.model = model.train()
        like = {"dtype": torch.bfloat16, "device": self.block.gate.weight.device}
        shape = (1, OPTIONS["tokens"], D)
        self.x, self.grad = torch.randn(shape, **like).requires_grad_(), torch.randn(shape, **like)
        for _ in range(WARM_UP):
            self.prepare()
            self.run()

    def prepare(self) -> None:
        """Remove gradients and pending work of an earlier pass."""
        self.x.grad = None
        for parameter in self.block.parameters():
            parameter.grad = None
        if CARD:
            torch.cuda.synchronize()

    def run(self) -> None:
        """Run one pass, forward and backward."""
        out = self.block(self.x)
        out.backward(self.grad)

    def parts(self) -> dict[str, tuple[Any, str]]:
        """Return the functions and modules that are parts: name -> owner and attribute."""
        found: dict[str, tuple[Any, str]] = {
            "block: transformers' own": (self.block, "forward"),
            "router: module": (self.block.gate, "forward"),
            "backward: autograd's engine": (torch.Tensor, "backward"),
            "router: torch's linear": (torch.nn.functional, "linear"),
        }
        module, level = self.block.experts, 1
        while hasattr(module, "base_layer"):
            found[f"adapters: wrapper {level}"] = (module, "forward")
            module, level = module.base_layer, level + 1
        found["experts: module"] = (module, "forward")
        for name, (path, attribute) in FUNCTIONS.items():
            with contextlib.suppress(ImportError):
                owner = importlib.import_module(path)
                if hasattr(owner, attribute):
                    found[name] = (owner, attribute)
        for path, loaded in list(sys.modules.items()):
            if path.startswith("moe_patch.") and loaded is not None:
                found |= dict(_of_module(path, loaded))
        return found


def _with_adapters(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=[],
        target_parameters=PROJECTIONS,
        init_lora_weights=False,
    )
    return get_peft_model(model, config, autocast_adapter_dtype=OPTIONS["adapters"] == "float32")


def _of_module(path: str, module: Any) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield autograd functions and launchers of one module of the tree."""
    for name, value in list(vars(module).items()):
        if not isinstance(value, type) or value.__module__ != path:
            continue
        if issubclass(value, torch.autograd.Function):
            short = path.rpartition(".")[2]
            yield f"{short}.{name}, forward", (value, "forward")
            yield f"{short}.{name}, backward", (value, "backward")
        if name == "Launcher":
            yield "launches", (value, "__call__")


class Spans:
    """The time of each part in a pass, without the parts inside it."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.taken: dict[str, int] = defaultdict(int)
        self.since = 0

    def enter(self, name: str) -> None:
        """Begin a part."""
        now = CLOCK()
        if self.open:
            self.taken[self.open[-1]] += now - self.since
        self.open.append(name)
        self.since = CLOCK()

    def leave(self) -> None:
        """End the innermost part."""
        self.taken[self.open.pop()] += CLOCK() - self.since
        self.since = CLOCK()

    @contextlib.contextmanager
    def around(self, parts: dict[str, tuple[Any, str]]) -> Iterator[None]:
        """Watch the parts."""
        with contextlib.ExitStack() as stack:
            for name, (owner, attribute) in parts.items():
                held = vars(owner).get(attribute, getattr(owner, attribute))
                static = isinstance(held, staticmethod)
                watched: Any = self._watched(name, held.__func__ if static else held)
                new = staticmethod(watched) if static else watched
                stack.enter_context(mock.patch.object(owner, attribute, new))
            yield

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.enter(name)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return call


def count(case: Case, _: int) -> dict[str, list[int]]:
    """Count Python and C calls by part."""
    spans, found = Spans(), defaultdict(lambda: [0, 0])

    def seen(frame: Any, event: str, _: Any) -> None:
        own = frame.f_code.co_filename == __file__ or not spans.open
        if not own and event in ("call", "c_call"):
            found[spans.open[-1]][event == "c_call"] += 1

    with spans.around(case.parts()), torch.autograd.set_multithreading_enabled(False):
        case.prepare()
        case.run()
        case.prepare()
        sys.setprofile(seen)
        case.run()
        sys.setprofile(None)
    return dict(found)


def timed(case: Case, passes: int) -> list[float]:
    """Return the microseconds of each pass."""
    found = []
    for _ in range(passes):
        case.prepare()
        start = CLOCK()
        case.run()
        found.append((CLOCK() - start) / 1e3)
    return found


def ladder(case: Case, passes: int) -> list[dict[str, float]]:
    """Return the microseconds of each part, for each pass."""
    spans, found = Spans(), []
    with spans.around(case.parts()):
        for _ in range(passes):
            case.prepare()
            spans.taken.clear()
            case.run()
            found.append({name: taken / 1e3 for name, taken in spans.taken.items()})
    return found


def profile(case: Case, passes: int) -> str:
    """Return the frames that take longest, by own time and by cumulative time."""
    watch = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(passes):
            case.prepare()
            watch.enable()
            case.run()
            watch.disable()
    text = io.StringIO()
    stats = pstats.Stats(watch, stream=text).strip_dirs()
    stats.sort_stats("tottime").print_stats(45)
    stats.sort_stats("cumtime").print_stats(60)
    return text.getvalue()


def _nothing(*_: Any, **__: Any) -> None:
    """Replace a function that takes time or refuses; a mock would add to the measured time."""


@contextlib.contextmanager
def nothing_launched() -> Iterator[None]:
    """Compile for Hopper on any machine, and launch nothing."""
    from triton.backends.nvidia.compiler import CUDABackend

    with mock.patch.object(CUDABackend, "make_cubin", lambda *_: b"none"):  # noqa: PT008
        import compile_only
        import offline_launches as offline

        silent = type("Silent", (offline.Recorder,), {"__call__": _nothing, "launch": _nothing})
        recording = staticmethod(offline.recording)
        with (
            mock.patch.object(compile_only, "usage_of", _nothing),
            mock.patch.object(offline, "Recorder", silent),
            mock.patch("moe_patch.ops.backend.why_not_triton", _nothing),
            mock.patch.object(offline.CompileOnly, "launcher_cls", recording),
            mock.patch.multiple(offline.CompileOnly.utils, create=True, **offline.IN_C),
            offline.compiling_for((9, 0), 227 * 1024),
        ):
            yield


def main() -> None:
    """Answer requests until the input ends."""
    torch.set_num_threads(1)
    cases: dict[str, Case] = {}
    does = {"count": count, "time": timed, "ladder": ladder, "profile": profile}
    with contextlib.nullcontext() if CARD else nothing_launched():
        import moe_patch

        assert Path(moe_patch.__file__).is_relative_to(TREE), moe_patch.__file__
        for line in sys.stdin:
            what, variant, passes = json.loads(line)
            if variant not in cases:
                cases[variant] = Case(variant)
            gc.collect()
            gc.disable()
            answer = does[what](cases[variant], passes)
            gc.enable()
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
