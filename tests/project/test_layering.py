"""Dependencies point down: read from the source by ast, so that nothing needs to be imported.

A new file of the package gets a place in LAYERS. An import that points up or sideways is a design
question, not a line to add here.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import moe_patch

PACKAGE = Path(moe_patch.__file__).parent

# Lowest first. A module imports from lower layers only; inside a folder (trailing dot) it is free.
LAYERS = (
    {"_version", "errors", "types"},
    {"schema", "tensor_file"},
    {"formats."},
    {"kernels."},
    {"ops."},
    {"config"},
    {"runtime."},
    {"families."},
    {"debug."},
    {"patching."},
    {"expert_parallel."},
    {"quant."},
    {"signals."},
    {"tools."},
    {"serving."},
    {"__init__"},
    {"integrations.", "train."},
    {"cli."},
    {"__main__"},
)
HEAVY = {"accelerate", "datasets", "matplotlib", "peft", "transformers", "triton"}
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """ "ops.routing", "kernels.plan.plan"; a package is its own ``__init__``, a folder's drops
    that."""
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name if name == "__init__" else name.removesuffix(".__init__")


NAMES = {name_of(path) for path in FILES}


def layer_of(name: str) -> tuple[int, str]:
    """Return the layer of a module and the entry of LAYERS that places it."""
    for rank, entries in enumerate(LAYERS):
        if name in entries:
            return rank, name
    for rank, entries in enumerate(LAYERS):
        for entry in entries:
            if entry.endswith(".") and f"{name}.".startswith(entry):
                return rank, entry
    raise AssertionError(
        f"moe_patch/{name.replace('.', '/')}.py has no place in LAYERS of this file"
    )


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each imported dotted name (``module.name`` for from-imports) with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def own_module(dotted: str) -> str | None:
    """Return our file that holds a dotted name, or None for other libraries."""
    parts = dotted.split(".")
    if parts[0] != "moe_patch":
        return None
    parts = parts[1:]
    while parts and ".".join(parts) not in NAMES:
        parts.pop()
    return ".".join(parts) or "__init__"


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@pytest.fixture(scope="module", autouse=True)
def _parsed_once() -> Iterator[None]:
    """Drop the syntax trees, which take a hundred megabytes, after the last test."""
    yield
    parse.cache_clear()


def run_at_import(tree: ast.Module) -> list[ast.stmt]:
    """Yield the statements that run on import, except ``if TYPE_CHECKING``."""
    statements: list[ast.stmt] = []
    todo = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        statements.append(node)
        todo += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
    return statements


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_down(path):
    rank, entry = layer_of(name_of(path))
    for dotted, line in imports(parse(path)):
        target = own_module(dotted)
        if target is None:
            continue
        target_rank, target_entry = layer_of(target)
        inside = entry == target_entry and entry.endswith(".")
        assert target_rank < rank or inside, (
            f"{path}:{line}: {name_of(path)} imports {target}, which is not below"
        )


def test_every_layer_entry_exists():
    for entry in set().union(*LAYERS):
        assert any(
            n == entry or f"{n}.".startswith(entry) and entry.endswith(".") for n in NAMES
        ), entry


LISTED = re.compile(r"^    (\w+(?:\.py|/))  +\S", re.M)
MAPS = [p for p in FILES if p.name == "__init__.py" and LISTED.search(p.read_text("utf-8"))]


@pytest.mark.parametrize("path", MAPS, ids=name_of)
def test_a_map_of_a_folder_has_a_line_for_each_file(path):
    """The docstring of a folder that lists its files lists all of them, and no others."""
    listed = LISTED.findall(ast.get_docstring(parse(path), clean=False))
    files = {f.name for f in path.parent.glob("*.py")} - {"__init__.py"}
    folders = {f"{f.parent.name}/" for f in path.parent.glob("*/__init__.py")}
    assert sorted(listed) == sorted(files | folders)


@pytest.mark.parametrize("path", sorted((PACKAGE / "kernels").rglob("*.py")), ids=name_of)
def test_kernels_know_nothing_of_autograd_modules_transformers_or_peft(path):
    forbidden = (
        "torch.nn",
        "torch.autograd",
        "torch.library",
        "transformers",
        "peft",
        "accelerate",
    )
    tree = parse(path)
    for dotted, line in imports(tree):
        assert not f"{dotted}.".startswith(tuple(f"{name}." for name in forbidden)), (
            f"{path}:{line}: {dotted}"
        )
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            assert not dotted.startswith(("torch.nn.", "torch.autograd.")), (
                f"{path}:{node.lineno}: {dotted}"
            )


@pytest.mark.parametrize(
    "path",
    [p for p in FILES if not name_of(p).startswith(("integrations", "kernels", "train"))],
    ids=name_of,
)
def test_heavy_libraries_are_never_imported_at_module_import(path):
    for statement in run_at_import(parse(path)):
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for dotted, line in imports(statement):
                assert dotted.split(".")[0] not in HEAVY, f"{path}:{line}: {dotted}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_kernels_and_training_are_imported_only_inside_functions(path):
    if name_of(path).startswith(("kernels", "train")):
        return
    for statement in run_at_import(parse(path)):
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            for dotted, line in imports(statement):
                assert not dotted.startswith(("moe_patch.kernels", "moe_patch.train")), (
                    f"{path}:{line}: {dotted}"
                )


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_environment_variable_is_read_at_import(path):
    for statement in run_at_import(parse(path)):
        for node in ast.walk(statement) if not isinstance(statement, ast.ClassDef) else ():
            if isinstance(node, ast.Attribute):
                assert ast.unparse(node) not in ("os.environ", "os.getenv"), f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    ("source", "dotted"),
    [
        ("from moe_patch.train import loop", "train.loop"),
        ("from moe_patch.train.loop import Loop", "train.loop"),
        ("import moe_patch.train.loop", "train.loop"),
        ("from moe_patch import patch_model", "__init__"),
        ("from moe_patch import config", "config"),
        ("def f():\n    from moe_patch.errors import MoePatchError", "errors"),
        ("import torch", None),
    ],
)
def test_the_reader_sees_every_form_of_import(source, dotted):
    ((found, _),) = imports(ast.parse(source))
    assert own_module(found) == dotted
