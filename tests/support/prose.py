"""Check the English of docstrings, comments and pages by the rule of CONTRIBUTING.md.

Run `python -m tests.support.prose PATH ...` to list what breaks the rule in files or folders.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# A sentence longer than this has to be split; tables, code and links do not count.
MAX_WORDS = 25
NOT_A_START = re.compile(
    r"\W*(what|whether|which|those|that|these|this|of|as|it|its|their|who|whose|why|how|where|when)\b",
    re.IGNORECASE,
)
# Code has no will and no senses; the field has a word for what is meant in each case.
PEOPLE_ONLY = re.compile(
    r"\b(asks?|asked|asking|hears?|heard|hearing|speaks?|spoken|speaking|serves|meets|knows"
    r"|listens|wants|wishes)\b",
    re.IGNORECASE,
)
# Comments that are read by tools, and shapes such as `# [T, K]`.
NOT_PROSE = re.compile(r"^\W*(noqa|type:|mypy:|ruff:|fmt:|pragma|%%|!|\[|-\*-)")
# A full stop ends a sentence only where what follows starts a new one.
END = re.compile(
    r"(?<=[.!?:;])[\"')\]]*\s+(?=[A-Z`\"'(\[*_0-9])|(?<=[.!?:;])[\"')\]]*$|\n\s*\n"
    r"|\n(?=\s*(?:[-*|>#]|\d+[.)])\s)"
    # Items of "Args:", "Attributes:" and "Raises:".
    r"|\n(?=[ ]{4,}[A-Za-z_*][\w*]*(?:, [A-Za-z_*][\w*]*)*: )"
)
# Columns set apart by spaces.
TABLE = re.compile(r"\S {3,}\S")
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|cf|vs|etc|Fig|Eq|No|approx)\.$")


class Fault(NamedTuple):
    """One place that breaks the rule."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def sentences(text: str) -> list[str]:
    """Split prose into sentences, list items and paragraphs."""
    found: list[str] = []
    for piece in END.split(text):
        if found and ABBREVIATION.search(found[-1]):
            found[-1] += " " + piece
        elif piece and piece.strip():
            found.append(piece.strip())
    return found


def words(sentence: str) -> list[str]:
    """Return the words of a sentence; inline code and a link each count as one."""
    plain = re.sub(r"`+[^`]*`+", "code", sentence)
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", plain)
    return re.findall(r"[A-Za-z][\w'’/-]*", plain)


def without_code(text: str) -> str:
    """Remove indented blocks, tables and formula lines of a docstring."""
    kept = []
    for line in text.split("\n"):
        formula = re.search(r"\s[=<>]=?\s|^\s*>>>", line) and len(words(line)) < 8
        table = line.lstrip().startswith("|") or TABLE.search(line)
        kept.append("" if formula or table else line)
    return "\n".join(kept)


def check_text(path: str, line: int, text: str) -> Iterator[Fault]:
    """Yield long sentences and words that only people can act out."""
    for sentence in sentences(without_code(text)):
        if len(words(sentence)) > MAX_WORDS:
            yield Fault(path, line, f"{len(words(sentence))} words", " ".join(sentence.split()))
    plain = re.sub(r"`+[^`]*`+", "", text)
    for match in PEOPLE_ONLY.finditer(plain):
        around = plain[max(0, match.start() - 40) : match.end() + 30]
        yield Fault(path, line, f"'{match.group()}'", " ".join(around.split()))


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, those of attributes included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for place, statement in enumerate(body):
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_text or not isinstance(statement.value.value, str):
                continue
            owner = isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            )
            if (place == 0 and owner) or isinstance(node, ast.ClassDef | ast.Module):
                yield statement.lineno, statement.value.value


def comments(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line, text and whether it has lines of its own, for each block of comments."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        own_line = not token.line[: token.start[1]].strip()
        text = token.string.lstrip("#").strip()
        if own_line and block and token.start[0] == last + 1:
            block.append(text)
            last = token.start[0]
            continue
        if block:
            yield start, "\n".join(block), True
            block = []
        if own_line:
            block, start, last = [text], token.start[0], token.start[0]
        else:
            yield token.start[0], text, False
    if block:
        yield start, "\n".join(block), True


def check_source(path: Path) -> Iterator[Fault]:
    """Yield the faults of a Python file."""
    source = path.read_text()
    for line, text in docstrings(ast.parse(source)):
        if first := NOT_A_START.match(text):
            yield Fault(
                str(path), line, f"begins with '{first.group(1)}'", text.strip().split("\n")[0]
            )
        yield from check_text(str(path), line, text)
    for line, text, own_line in comments(source):
        if NOT_PROSE.match(text):
            continue
        if own_line and len(words(text)) > 3 and not re.search(r"[.!?:)`]$", text.strip()):
            yield Fault(str(path), line, "comment is no sentence", text.split("\n")[-1])
        yield from check_text(str(path), line, text)


def check_page(path: Path) -> Iterator[Fault]:
    """Yield the faults of a Markdown page, without its code, tables and generated parts."""
    text = path.read_text()
    blank = lambda found: "\n" * found.group().count("\n")  # noqa: E731
    text = re.sub(r"^ *```.*?^ *```$", blank, text, flags=re.M | re.S)
    # Generated parts follow the words of their own scripts.
    text = re.sub(r"^<!-- (bench|generated): .*?^<!-- end of \1", blank, text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", blank, text, flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"^\|.*$", "", text, flags=re.M)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        yield from check_text(str(path), line, paragraph.strip("\n"))
        line += paragraph.count("\n")


def check(path: Path) -> list[Fault]:
    """Return the faults of a file, or of all Python files and pages below a folder."""
    if path.is_dir():
        files = sorted([*path.rglob("*.py"), *path.rglob("*.md")])
        return [fault for file in files for fault in check(file)]
    return list(check_page(path) if path.suffix == ".md" else check_source(path))


if __name__ == "__main__":
    for found in (fault for name in sys.argv[1:] for fault in check(Path(name))):
        print(found)
