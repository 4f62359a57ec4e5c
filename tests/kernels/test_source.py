"""Rules that no run can show, read from the kernels' source.

TF32, atomics, tuning, synchronisation. Also: scripts/tiles/compile_tiles.py reports the faults
that it exists to find.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import moe_patch

PACKAGE = Path(moe_patch.__file__).parent
KERNELS = sorted((PACKAGE / "kernels").rglob("*.py"))
# Code between a block's input and its output, forward and backward, on a card.
HOT = [
    *KERNELS,
    *(
        PACKAGE / "ops" / f"{name}.py"
        for name in ("experts/op", "experts/schema", "routing_op", "product_key", "balance_loss")
    ),
    *(PACKAGE / "runtime" / f"{name}.py" for name in ("forward", "adapters", "experts")),
]
WAITING = ("item", "tolist", "cpu", "nonzero", "numpy", "synchronize", "unique", "masked_select")


def calls(source: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))


def called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def tf32(source: str) -> list[str]:
    """Return products without ``input_precision="ieee"`` whose operands may be fp32."""
    dots = [call for call in calls(source) if ast.unparse(call.func) == "tl.dot"]
    exact = "input_precision='ieee'"
    return [ast.unparse(c) for c in dots if exact not in map(ast.unparse, c.keywords)]


def atomics(source: str) -> list[str]:
    return [ast.unparse(call) for call in calls(source) if "atomic" in called(call)]


def tuned(source: str) -> list[str]:
    names = ast.walk(ast.parse(source))
    attributes = (ast.unparse(n) for n in names if isinstance(n, (ast.Attribute, ast.Name)))
    return [name for name in attributes if name.rpartition(".")[2] in ("autotune", "do_bench")]


def waiting(source: str) -> list[str]:
    """Return calls that synchronise with the device, by their usual names."""
    return [
        ast.unparse(call)
        for call in calls(source)
        if isinstance(call.func, ast.Attribute) and called(call) in WAITING
    ]


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_products_are_exact_in_fp32(path) -> None:
    assert tf32(read(path)) == []


def test_no_kernel_adds_atomically() -> None:
    assert [(path.name, call) for path in KERNELS for call in atomics(read(path))] == []


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: ".".join(path.parts[-2:])
)
def test_nothing_is_tuned_at_run_time(path) -> None:
    assert tuned(read(path)) == []


@pytest.mark.parametrize("path", HOT, ids=lambda path: path.stem)
def test_nothing_waits_for_the_device(path) -> None:
    assert waiting(read(path)) == []


@pytest.mark.parametrize(
    ("reader", "source"),
    [
        (tf32, "tl.dot(a, b, acc)"),
        (tf32, "tl.dot(a, b, input_precision='tf32')"),
        (atomics, "tl.atomic_add(grad_ptr + at, value)"),
        (tuned, "@triton.autotune(configs=[])\ndef kernel(): ..."),
        (tuned, "from triton.testing import do_bench\nbest = do_bench(run)"),
        (waiting, "counts_E.tolist()"),
        (waiting, "torch.cuda.synchronize()"),
        (waiting, "if (ids_TK < 0).any().item(): ..."),
    ],
)
def test_the_readers_find_what_they_are_for(reader, source) -> None:
    assert len(reader(source)) == 1


@pytest.fixture
def compile_tiles(monkeypatch) -> ModuleType:
    pytest.importorskip("triton", reason="triton is not installed", exc_type=ImportError)
    monkeypatch.syspath_prepend(str(PACKAGE.parent / "scripts" / "tiles"))
    before = set(sys.modules)
    yield importlib.import_module("compile_tiles")
    for name in ("compile_tiles", "compile_only", "compile_others"):
        if name not in before:
            sys.modules.pop(name, None)


def test_compile_tiles_complains_of_what_does_not_fit_or_spills(compile_tiles) -> None:
    kib = {cap: size >> 10 for cap, size in compile_tiles.SHARED_MEMORY.items()}
    assert kib == {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
    assert compile_tiles.HOT == ("up", "down", "dh", "dx", "dw2", "dw13")
    sound = compile_tiles.Usage("kernel", registers=128, stack=0, shared=1, descriptors=False)

    def complaint(capability: tuple[int, int], op: str = "up", **changes: object) -> str:
        return compile_tiles.complaint(sound._replace(**changes), capability, op)

    for capability, size in compile_tiles.SHARED_MEMORY.items():
        assert complaint(capability, shared=size) == ""
        assert "shared memory" in complaint(capability, shared=size + 1)
        assert ("descriptors" in complaint(capability, descriptors=True)) == (capability < (9, 0))
        for op in compile_tiles.HOT:
            assert complaint(capability, op, stack=1 << 10) == "spills"
