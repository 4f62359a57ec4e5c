"""The code blocks of README.md, CONTRIBUTING.md and docs/*.md.

A comment above a block marks it, as in `<!-- test: network -->`:

- `gpu` runs on a CUDA device only;
- `slow` takes more than a few seconds;
- `network` needs the internet and is only parsed;
- `interpreted` is a file with CASES that runs under Triton's interpreter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
LANGUAGES = ("python", "bash", "yaml")
MARKS = ("gpu", "slow", "network", "interpreted")
# Plain output, pictures and tables of characters.
OTHERS = ("text", "mermaid", "json")
FENCE = re.compile(
    r"^(?:<!-- test: ([a-z ]+) -->\n)?```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page, path: the file's name and path.
        line: of the opening fence.
        language: the word after the fence.
        marks: the words of the comment above it.
        text: the text between the fences.
    """

    page: str
    path: str
    line: int
    language: str
    marks: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return every fenced block of a page; a block without a language has the language ""."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        marks, language, code = (match[1] or "").split(), match[2].strip(), match[3]
        line = text.count("\n", 0, match.start(2)) + 1
        found.append(Block(page.name, str(page), line, language, tuple(marks), code))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands(text: str) -> list[str]:
    """Return the commands of a shell block, with comments dropped and continued lines joined."""
    joined = text.replace("\\\n", " ")
    lines = (line.split("  #")[0].strip() for line in joined.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
