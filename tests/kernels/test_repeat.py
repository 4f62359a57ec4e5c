"""A pass that is repeated gives what it gives call by call (kernels/common/repeat.py).

The kernels here read and write addresses, as those on a card do, and run on any machine. That the
real ones are launched alike is in test_kernels_launcher.py.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
import triton

from moe_patch.formats.packed import PackedWeight
from moe_patch.kernels.common import launcher, recording, repeat, versions
from moe_patch.kernels.common.device import INTERPRETER
from moe_patch.kernels.common.launcher import Box, Launcher
from moe_patch.kernels.common.repeat import repeated
from moe_patch.kernels.common.versions import Gates
from moe_patch.types import ExpertsForward, ExpertWeights, Kept, Plan
from tests.support.numerics import assert_bits

SHAPE = (4, 8)


def _floats(address: int, count: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_float * count).from_address(address), dtype=np.float32)


def _in_c(*args: Any) -> None:
    """out = left + alpha * right, element by element; takes own arguments as one tuple or not."""
    left, right, out, count, alpha = args[-1] if isinstance(args[-1], tuple) else args[-5:]
    assert args[:4] == (count, 1, 1, 7), "grid and stream"
    # In NumPy: torch's operators would be seen.
    _floats(out, count)[:] = _floats(left, count) + np.float32(alpha) * _floats(right, count)


class _Kernel:
    arg_names = ("left", "right", "out", "count", "alpha")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def run(*args: Any) -> object:
            *operands, count, alpha = args
            tensors = [each if isinstance(each, Tensor) else each.base for each in operands]
            _in_c(*grid, 1, 1, 7, *(t.data_ptr() for t in tensors), count, alpha)
            return SimpleNamespace(kernel="compiled")

        return run


class Card:
    """A launcher of the kernel above under a driver that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, as_tuple: bool = False) -> None:
        self.monkeypatch = monkeypatch
        self.launch = Launcher(_Kernel())
        self.launch._direct = True
        self.bodies = 0
        monkeypatch.setattr(launcher, "_RELEASE", versions.TRITON_VERSIONS["3.7"])
        monkeypatch.setattr(
            "triton.backends.nvidia.driver.make_tensordesc_arg",
            lambda descriptor, kind: [descriptor.base.data_ptr()],
            raising=False,
        )
        monkeypatch.setattr(
            launcher, "_launch_in_c",
            lambda _, operands: (
                _in_c, (), as_tuple,
                tuple((at, "kind", {}) for at in (2, 1, 0) if isinstance(operands[at], Box)),
            ),
        )  # fmt: skip
        self.new_driver()

    def new_driver(self) -> None:
        named = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 7))
        for module in (launcher, recording, repeat):
            self.monkeypatch.setattr(module, "driver", named)

    def add(self, left: Any, right: Any, out: Tensor, alpha: float) -> None:
        count = out.numel()
        self.launch((count,), (left, right, out), (count,), (alpha,))


class Given(NamedTuple):
    """Arguments of the passes below."""

    weight: Tensor
    bias: Tensor | None = None


class Made(NamedTuple):
    """Return the results of the calls."""

    out: Tensor
    kept: tuple[Tensor, Tensor, Tensor]
    missing: None = None


def _box(tensor: Tensor, first: int = 0) -> Box:
    return Box(tensor, tuple(tensor.shape), tuple(tensor.stride()), SHAPE, first=first)


def _pass(card: Card) -> Callable[..., Made]:
    """Buffers that live for one launch and longer, a view, a descriptor, a transposed result."""

    def run(x_TD: Tensor, given: Given, *, alpha: float = 1.0, bias: bool = False) -> Made:
        card.bodies += 1
        a, nothing = x_TD.new_empty(x_TD.shape), x_TD.new_empty(0)
        card.add(x_TD, given.weight, a, alpha)
        b = torch.empty_like(a)
        card.add(a, a, b, 2.0)
        kept = torch.empty(x_TD.shape, dtype=x_TD.dtype)
        card.add(_box(b), x_TD, kept, -1.0)
        c = x_TD.new_empty(x_TD.shape)  # where a was
        card.add(kept, b.T, c, 0.5)
        out = x_TD.new_empty(x_TD.shape[::-1])
        card.add(c, given.bias if bias else kept, out, 3.0)
        further = x_TD.new_empty(x_TD.numel() - 4)
        card.add(_box(kept, first=4), given.weight, further, alpha)
        return Made(out.T, (kept, nothing, further))

    return repeated(run)


def _inputs(rows: int = SHAPE[0], bias: bool = True) -> tuple[Tensor, Given]:
    shape = (rows, SHAPE[1])
    return torch.randn(shape), Given(torch.randn(shape), torch.randn(shape) if bias else None)


def _tensors(made: Any) -> list[Tensor]:
    if isinstance(made, tuple):
        return [tensor for each in made for tensor in _tensors(each)]
    return [] if made is None else [made]


def _same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    for mine, theirs in zip(_tensors(one), _tensors(other), strict=True):
        assert_bits(mine, theirs)
        assert mine.stride() == theirs.stride()


@pytest.mark.parametrize("as_tuple", [False, True])
def test_the_same_bits_on_other_addresses(monkeypatch: pytest.MonkeyPatch, as_tuple: bool) -> None:
    """And nothing that was returned is written again."""
    card = Card(monkeypatch, as_tuple)
    run, seen = _pass(card), []
    for _ in range(6):
        x_TD, given = _inputs()
        made = run(x_TD, given, bias=True)
        mine = [tensor.clone() for tensor in _tensors(made)]
        once = run.__wrapped__(x_TD, given, bias=True)
        _same(made, once)
        seen.append((made, mine))
    assert card.bodies == 6 + 2, "the first compiles, the second is recorded"
    for made, mine in seen:
        for tensor, before in zip(_tensors(made), mine, strict=True):
            assert_bits(tensor, before)


def test_a_workspace_holds_what_is_needed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep room for two of three temporaries; an empty one takes none."""
    run = _pass(Card(monkeypatch))
    for _ in range(2):
        run(*_inputs(rows=16))
    (found,) = run.kept.values()
    assert found.workspace == 2 * 16 * SHAPE[1] * 4
    assert [shape for shape, *_ in found.returned] == [(16, 8), (16, 8), (0,), (124,)]


def _changed(card: Card, what: str, x_TD: Tensor, given: Given) -> tuple[tuple, dict[str, Any]]:
    """Arguments that differ from _inputs' in one way."""
    options: dict[str, Any] = {}
    if what == "rows":
        x_TD, given = _inputs(rows=5)
    elif what == "strides":
        given = given._replace(weight=torch.randn(SHAPE[::-1]).T)
    elif what == "alignment":
        x_TD = torch.randn(x_TD.numel() + 1)[1:].view(SHAPE)
    elif what == "none":
        given = given._replace(bias=None)
    elif what == "option":
        options = {"alpha": 2.0}
    elif what == "gates":
        card.monkeypatch.setitem(versions._GATES, triton.__version__, Gates(False, True, "shut"))
    elif what == "device":
        card.monkeypatch.setattr(
            "moe_patch.kernels.common.device.INTERPRETER",
            INTERPRETER._replace(multiprocessors=3),
        )
    else:
        card.new_driver()
    return (x_TD, given), options


CHANGES = ("rows", "strides", "alignment", "none", "option", "gates", "device", "driver")


@pytest.mark.parametrize("what", CHANGES)
def test_what_makes_a_difference_is_told_apart(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    card = Card(monkeypatch)
    run = _pass(card)
    for _ in range(3):
        run(*_inputs())
    assert card.bodies == 2
    args, options = _changed(card, what, *_inputs())
    for _ in range(4):
        _same(run(*args, **options), run.__wrapped__(*args, **options))
    assert card.bodies == 2 + 4 + 2, f"{what}: repeated as something else, or never"


def _sums(card: Card, x_TD: Tensor, given: Given) -> Tensor:
    out = x_TD.new_empty(x_TD.shape)
    card.add(x_TD, given.weight, out, 1.0)
    return out + 1


def _writes(card: Card, x_TD: Tensor, given: Given) -> Tensor:
    out = x_TD.new_empty(x_TD.shape)
    card.add(x_TD, given.weight, out.zero_(), 1.0)
    return out


def _returns_a_part(card: Card, x_TD: Tensor, given: Given) -> Tensor:
    out = x_TD.new_empty(x_TD.shape)
    card.add(x_TD, given.weight, out, 1.0)
    return out[:1]


def _takes_a_row(card: Card, x_TD: Tensor, given: Given) -> Tensor:
    out = x_TD.new_empty(2, SHAPE[1])
    card.add(x_TD[1:3], given.weight, out, 1.0)
    return out


def _one(card: Card, x_TD: Tensor, given: Given) -> Tensor:
    out = x_TD.new_empty(x_TD.shape)
    card.add(x_TD, given.weight, out, 1.0)
    return out


class _Other:
    """An argument of no known kind."""


@pytest.mark.parametrize("run", [_sums, _writes, _returns_a_part, _takes_a_row])
def test_a_pass_that_does_something_else_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., Tensor]
) -> None:
    card, bodies = Card(monkeypatch), []
    function = repeated(lambda *args: bodies.append(1) or run(card, *args))
    for _ in range(4):
        x_TD, given = _inputs()
        assert_bits(function(x_TD, given), run(card, x_TD, given))
    assert len(bodies) == 4


def _by_triton(card: Card, inputs: tuple[Tensor, Given]) -> Sequence[Any]:
    card.launch._direct = False
    return inputs


def _hook(card: Card, inputs: tuple[Tensor, Given]) -> Sequence[Any]:
    card.monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", print)
    card.monkeypatch.setattr(launcher, "hooked", lambda: False)  # nobody launches for it here
    return inputs


LEFT: dict[str, Callable[[Card, tuple[Tensor, Given]], Sequence[Any]]] = {
    "the same memory twice": lambda card, inputs: (inputs[0], Given(inputs[0])),
    "an unknown kind": lambda card, inputs: (*inputs, _Other()),
    "a tensor of a subclass": lambda card, inputs: (
        inputs[0].as_subclass(type("Labelled", (Tensor,), {})), inputs[1],
    ),
    "more tokens than leave the card waiting": lambda card, inputs: _inputs(
        rows=repeat._MOST_TOKENS + 1
    ),
    "launches by Triton": _by_triton,
    "a launch hook": _hook,
}  # fmt: skip


@pytest.mark.parametrize("why", LEFT)
def test_calls_that_are_not_repeated(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    card, bodies = Card(monkeypatch), []
    function = repeated(lambda *args: bodies.append(1) or _one(card, *args[:2]))
    for _ in range(4):
        x_TD, given, *rest = LEFT[why](card, _inputs())
        out = function(x_TD, given, *rest)
        assert_bits(torch.Tensor(out), torch.Tensor(x_TD) + given.weight)
    assert len(bodies) == 4


@pytest.mark.parametrize(
    ("rows", "in_fp8", "repeats"),
    [
        (4, True, True),
        (4, False, False),
        (repeat._MOST_TOKENS_IN_FP8, True, True),
        (repeat._MOST_TOKENS_IN_FP8 + 1, True, False),
    ],
)
def test_experts_multiplied_in_fp8_are_repeated(
    monkeypatch: pytest.MonkeyPatch, rows: int, in_fp8: bool, repeats: bool
) -> None:
    card, bodies = Card(monkeypatch), []

    def run(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, w: ExpertWeights) -> Tensor:
        bodies.append(1)
        w13: Any = w.w13_EHD
        return _one(card, x_TD, Given(w13.scales[0]))

    function = repeated(run)
    for _ in range(4):
        x_TD, scale = torch.randn(rows, 1), torch.randn(rows, 1)
        packed = [torch.zeros(2, 1, 1, dtype=torch.float8_e4m3fn) for _ in range(2)]
        w: Any = [
            PackedWeight("fp8", each, (s,), torch.bfloat16, in_fp8=in_fp8)
            for each, s in zip(packed, (scale, torch.ones(1)), strict=True)
        ]
        ids_TK, weights_TK = torch.zeros(rows, 1), torch.ones(rows, 1)
        assert_bits(function(x_TD, ids_TK, weights_TK, ExpertWeights(*w)), x_TD + scale)
    assert len(bodies) == (2 if repeats else 4)


def test_a_recording_that_ends_in_an_error_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    card, failing = Card(monkeypatch), [False, True, False, False]

    def run(x_TD: Tensor, given: Given) -> Tensor:
        out = _one(card, x_TD, given)
        if failing.pop(0):
            raise ValueError("stop")
        return out

    function = repeated(run)
    function(*_inputs())
    with pytest.raises(ValueError, match="stop"):
        function(*_inputs())
    assert launcher.NOTES.launches is None
    for _ in range(4):
        x_TD, given = _inputs()
        assert_bits(function(x_TD, given), x_TD + given.weight)
    assert failing == [False], "recorded by the third call"


def test_keys_are_bounded_and_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "_MOST_KEYS", 3)
    run = _pass(Card(monkeypatch))
    for rows in (1, 2, 3, 4, 5):
        for _ in range(3):
            x_TD, given = _inputs(rows)
            made = run(x_TD, given)
        assert len(run.kept) <= 3
    held = [weakref.ref(each) for each in (x_TD, given.weight, *_tensors(made))]
    del x_TD, given, made
    gc.collect()
    assert [each() for each in held] == [None] * len(held)


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [False, True])
def test_gpu_experts_repeated(poisoned_memory: None, lora: bool) -> None:
    """Six steps over changing values, with each result and gradient, on two streams."""
    from moe_patch.kernels.experts import experts
    from moe_patch.types import ExpertsNeeds, Glu, Lora

    E, K, T, D, F, R = 16, 4, 100, 256, 128, 16
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    new = lambda *shape: torch.randn(shape, **bf16) / shape[-1] ** 0.5  # noqa: E731
    names = ("x", "weights", "w13", "w2", "lora13_A", "lora13_B", "lora2_A", "lora2_B")
    needs = ExpertsNeeds(**dict.fromkeys(names if lora else names[:4], True))
    versions.gates()  # part of the key, so decide before the first step
    experts.experts_forward.kept.clear()
    experts.experts_backward.kept.clear()
    stream = torch.cuda.Stream()
    for step in range(6):
        w = ExpertWeights(new(E, 2 * F, D), new(E, D, F))
        loras = [Lora(new(E, R, D), new(E, 2 * F, R), 2.0), Lora(new(E, R, F), new(E, D, R), 2.0)]
        loras = loras if lora else [None, None]
        ids_TK = torch.rand(T, E, device="cuda").argsort(1)[:, :K].contiguous()
        x_TD, dout_TD, weights_TK = new(T, D), new(T, D), torch.rand(T, K, device="cuda")
        torch.cuda.synchronize()
        found = []
        with torch.cuda.stream(stream if step % 2 else torch.cuda.current_stream()):
            for unwrap in (False, True):
                forward, backward = experts.experts_forward, experts.experts_backward
                if unwrap:
                    forward, backward = forward.__wrapped__, backward.__wrapped__
                keep = {"save_u13": lora, "save_u2": lora}
                made: ExpertsForward = forward(
                    x_TD, ids_TK, weights_TK, w, Glu("silu"), *loras, **keep
                )
                plan, kept = Plan(*made.plan), Kept(*made.kept)
                h_NH = kept.h_NH.clone()
                grads = backward(
                    dout_TD, x_TD, weights_TK, w, Glu("silu"), *loras, plan, kept, needs,
                    overwrite_h=True,
                )  # fmt: skip
                valid = int(plan.offsets_S[-1])
                rows = [h_NH[:valid], *(each[:valid] for each in kept[1:] if each.numel())]
                found.append([made.out_TD, *plan, *rows, *(g for g in grads if g is not None)])
        torch.cuda.synchronize()
        for mine, theirs in zip(*found, strict=True):
            assert_bits(mine, theirs)
            assert mine.stride() == theirs.stride()
    recorded = [*experts.experts_forward.kept.values(), *experts.experts_backward.kept.values()]
    known = versions.tested().direct and torch.version.hip is None
    assert [type(each) is recording.Recorded for each in recorded] == [known] * 2
