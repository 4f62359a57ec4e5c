"""Text for training: its sources, a tokenizer trained on it, and blocks of token ids."""

from __future__ import annotations

import ast
import dataclasses
import json
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from moe_patch.errors import UnsupportedOptionError, first_line
from moe_patch.train.config import DataConfig
from moe_patch.train.text_file import read_text

DOCSTRINGS = "python-stdlib-docstrings"
END_OF_TEXT = "<|endoftext|>"
# Folders that are no documentation of the standard library, or not installed everywhere.
SKIPPED_FOLDERS = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class TokenBlocks(Dataset[dict[str, Tensor]]):
    """Examples of equal length for a causal language model.

    Args:
        ids_NL: int64 token ids, one example a row.
    """

    def __init__(self, ids_NL: Tensor) -> None:
        self.ids_NL = ids_NL

    def __len__(self) -> int:
        return len(self.ids_NL)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        # transformers shifts the labels itself.
        return {"input_ids": self.ids_NL[index], "labels": self.ids_NL[index]}


def read_texts(data: DataConfig) -> list[str]:
    """Read the documents that a DataConfig names, in a fixed order, without empty ones.

    Raises:
        UnsupportedOptionError: a missing or unreadable file, a missing field, no text at all, or a
            field, subset or split that the source does not have.
    """
    path = Path(data.source)
    _check_unused(data, path)
    if data.source == DOCSTRINGS:
        texts = list(stdlib_docstrings())
    elif path.is_file():
        texts = _read_file(path, data.text_field)
    elif path.suffix in (".txt", ".md", ".json", ".jsonl") or path.is_absolute() or path.is_dir():
        raise UnsupportedOptionError(f"data: no such file: {path}")
    else:
        texts = _read_datasets(data)
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise UnsupportedOptionError(f"data: {data.source} holds no text")
    return texts


def _check_unused(data: DataConfig, path: Path) -> None:
    """Refuse options that select rows of a dataset if the source is a text."""
    if data.source != DOCSTRINGS and not path.is_file():
        return
    given = {"subset": data.subset, "split": data.split}
    if path.suffix not in (".json", ".jsonl"):
        given["text_field"] = data.text_field
    defaults = {f.name: f.default for f in dataclasses.fields(DataConfig)}
    for name, value in given.items():
        if value != defaults[name]:
            raise UnsupportedOptionError(
                f"data.{name} is {value!r}, but {data.source} has none; leave it out"
            )


def stdlib_docstrings() -> Iterator[str]:
    """Yield every docstring of this interpreter's standard library, one or two megabytes of text.

    Files are parsed, never imported, in the order of their sorted paths.

    Raises:
        UnsupportedOptionError: the library is not installed as source files (a zipped Python).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    ]
    if not files:
        raise UnsupportedOptionError(f"data: no Python source files in {root}; name a text file")
    for path in files:
        with warnings.catch_warnings():
            # Old modules contain invalid escapes, which do not concern users who train a model.
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(path.read_bytes(), filename=str(path))
        for node in _statements(tree):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                yield text


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield what ast.walk does, in its order, but no expression: these hold no docstring."""
    found: list[ast.AST] = [tree]
    for node in found:
        yield node
        for name in ("body", "orelse", "handlers", "finalbody", "cases"):
            inside = vars(node).get(name)
            found += inside if isinstance(inside, list) else ()


def _read_file(path: Path, text_field: str) -> list[str]:
    text = read_text(path, "data: cannot read")
    if path.suffix not in (".json", ".jsonl"):
        return [text]
    texts = []
    for where, row in _rows(path, text):
        if not isinstance(row, dict) or not isinstance(row.get(text_field), str):
            raise UnsupportedOptionError(
                f"data: {path}, {where}: no text in the field {text_field!r}; set data.text_field"
            )
        texts.append(row[text_field])
    return texts


def _rows(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield each JSON row and its position: lines, or in a .json file the items of one array."""
    if path.suffix == ".json" and text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise UnsupportedOptionError(f"data: {path}: {error}") from error
        yield from ((f"item {number}", row) for number, row in enumerate(rows, start=1))
        return
    # Do not use splitlines: JSON strings may contain U+2028 and other separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"line {number}", json.loads(line)
        except json.JSONDecodeError as error:
            raise UnsupportedOptionError(f"data: {path}, line {number}: {error}") from error


def _read_datasets(data: DataConfig) -> list[str]:
    try:
        import datasets
    except ImportError as error:
        raise UnsupportedOptionError(
            f"data: {data.source!r} is no local file, and the package datasets, which could load "
            "it as a data set, is not installed: pip install 'moe-patch[train]'"
        ) from error
    try:
        rows = datasets.load_dataset(data.source, data.subset, split=data.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UnsupportedOptionError(
            f"data: {data.source!r} is neither a local file nor a data set that can be loaded: "
            f"{first_line(error)}"
        ) from error
    if data.text_field not in rows.column_names:
        raise UnsupportedOptionError(
            f"data: {data.source} has no field {data.text_field!r}; "
            f"set data.text_field to one of: {', '.join(rows.column_names)}"
        )
    return list(rows[data.text_field])


def train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer, which can encode any text, of at most ``vocab_size``."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    if vocab_size < 257:
        raise UnsupportedOptionError(
            f"tokenizer.vocab_size is {vocab_size}; at least 257 (all bytes and an end token)"
        )
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size=vocab_size, special_tokens=[END_OF_TEXT], show_progress=False
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def make_blocks(texts: list[str], tokenizer: Any, block_size: int) -> TokenBlocks:
    """Join the documents by the end token and cut them into rows of ``block_size`` ids.

    Raises:
        UnsupportedOptionError: the tokenizer has no end token, or the text does not fill one row.
    """
    if tokenizer.eos_token_id is None:
        raise UnsupportedOptionError("tokenizer: it has no end-of-text token to join documents by")
    ids: list[int] = []
    # verbose=False: documents longer than the model's context need no warning, they are cut here.
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    for document in encoded:
        ids += [*document, tokenizer.eos_token_id]
    rows = len(ids) // block_size
    if rows == 0:
        raise UnsupportedOptionError(
            f"data: {len(ids)} tokens do not fill one block of data.block_size = {block_size}"
        )
    return TokenBlocks(torch.tensor(ids[: rows * block_size]).view(rows, block_size))
