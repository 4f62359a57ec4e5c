"""The code blocks of README.md, CONTRIBUTING.md and docs/*.md.

A block's first word is its language; further words mark it: `gpu` runs on a CUDA device only,
`slow` takes more than a few seconds, `network` needs the internet and is only parsed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
LANGUAGES = ("python", "bash", "yaml")
MARKS = ("gpu", "slow", "network")
# Plain output, pictures and tables of characters.
OTHERS = ("text", "mermaid", "json")
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        page, path: the file's name and path.
        line: of the opening fence.
        language: the first word after the fence.
        marks: the other words.
        text: what is between the fences.
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
    """Every fenced block of a page; one without a language has the language ""."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        language, *marks = match[1].split() or [""]
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page.name, str(page), line, language, tuple(marks), match[2]))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def commands(text: str) -> list[str]:
    """The commands of a shell block: comments and empty lines dropped, continued lines joined."""
    joined = text.replace("\\\n", " ")
    lines = (line.split("  #")[0].strip() for line in joined.splitlines())
    return [line for line in lines if line and not line.startswith("#")]
