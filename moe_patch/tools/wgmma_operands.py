"""Find registers that are written while Hopper's asynchronous matrix instructions may read them.

``wgmma`` takes its left operand from shared memory or from registers, and may read them until a
``wgmma.wait_group``. PTX requires the compiler, here Triton, not to write such registers before
that. Triton may let products of one iteration run into the next. If the next then decodes its
operand into the same registers, results are sometimes wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_LABEL = re.compile(r"^(\$L__BB\w+):")
_REGISTER = re.compile(r"%[a-z]+\d+")
_PRODUCT = re.compile(r"^wgmma\.mma_async\S*\s+\{[^}]*\},\s*(\{([^}]*)\}|%\w+)")
_NO_RESULT = (
    "st.", "bra", "brx", "bar", "wgmma", "cp.", "mbarrier", "fence", "ret", "red.", "setmaxnreg",
    "prefetch", "stmatrix", "membar", "griddepcontrol", "exit", "trap", "nanosleep", "barrier",
)  # fmt: skip
# Groups in flight that are distinguished; no kernel keeps so many.
_MOST = 12

_Groups = tuple[frozenset[str], ...]


class _Line(NamedTuple):
    number: int
    text: str


def overwritten_operands(ptx: str) -> list[str]:
    """Return one line per instruction that writes a register which a product may still read.

    Args:
        ptx: code of one kernel.
    """
    blocks, following = _blocks(ptx)
    first = next(iter(blocks))
    waiting: list[tuple[str, _Groups]] = [(first, ())]
    seen, found = set(waiting), {}
    while waiting:
        name, groups = waiting.pop()
        for line in blocks[name]:
            groups, bad = _step(line, groups)
            if bad:
                found[line.number] = f"line {line.number}: {line.text[:60]} writes {bad}"
        for target in following[name]:
            if (target, groups) not in seen:
                seen.add((target, groups))
                waiting.append((target, groups))
    return [found[number] for number in sorted(found)]


def _step(line: _Line, groups: _Groups) -> tuple[_Groups, str]:
    """Return the groups that may be in flight after a line, newest last, and what it overwrites.

    A group is the set of registers that its products read; Triton commits each product as a group.
    """
    text = line.text
    if product := _PRODUCT.match(text):
        read = frozenset(_REGISTER.findall(product.group(2) or ""))
        return (*groups, read)[-_MOST:], ""
    if text.startswith("wgmma.wait_group"):
        left = int(text.rstrip("; ").split()[-1])
        return groups[len(groups) - left :] if left < len(groups) else groups, ""
    in_flight = frozenset().union(*groups)
    return groups, " ".join(sorted(_written(text) & in_flight))


def _written(text: str) -> frozenset[str]:
    text = re.sub(r"^@!?%p\d+\s+", "", text)
    if text.startswith(_NO_RESULT):
        return frozenset()
    _, _, operands = text.partition(" ")
    target = operands.strip()
    end = target.find("}") if target.startswith("{") else target.find(",")
    return frozenset(_REGISTER.findall(target[: end if end >= 0 else None]))


def _blocks(ptx: str) -> tuple[dict[str, list[_Line]], dict[str, list[str]]]:
    """Return the basic blocks of a kernel's body by label, and the successors of each."""
    blocks: dict[str, list[_Line]] = {"entry": []}
    following: dict[str, list[str]] = {"entry": []}
    tables: dict[str, list[str]] = {}
    name, open_ended, parts = "entry", True, 0
    for line in _body(ptx):
        if label := _LABEL.match(line.text):
            if open_ended:
                following[name].append(label.group(1))
            name, open_ended = label.group(1), True
            blocks[name], following[name] = [], []
        elif table := re.match(r"^(\$\w+):\s*\.branchtargets(.*)", line.text, re.DOTALL):
            tables[table.group(1)] = re.findall(r"\$L__BB\w+", table.group(2))
        elif jump := re.search(r"^(@!?%p\d+\s+)?(bra|brx)\S*\s.*?(\$\w+);?$", line.text):
            target = jump.group(3)
            following[name] += tables.get(target, [target])
            open_ended = jump.group(1) is not None
            if open_ended:  # execution continues here if the jump is not taken
                parts += 1
                following[name].append(f"{name}+{parts}")
                name = f"{name}+{parts}"
                blocks[name], following[name] = [], []
        elif re.match(r"^(ret|exit);", line.text):
            open_ended = False
        else:
            blocks[name].append(line)
    return blocks, following


def _body(ptx: str) -> Iterator[_Line]:
    """Yield instructions, labels and branch tables one by one, without comments and directives."""
    text, number = "", 0
    in_body = False
    for count, raw in enumerate(ptx.splitlines(), 1):
        line = raw.split("//", 1)[0].strip()
        in_body = in_body or line == "{"
        if not in_body or not line or line in "{}" or line.startswith((".loc", ".reg", ".pragma")):
            continue
        number = number if text else count
        text = f"{text} {line}".strip()
        # Inline assembly may put several instructions on a line; operands may span lines.
        if line.endswith((";", ":")):
            for part in re.split(r"(?<=;)\s*", text.strip("{} ")):
                if part.strip("{} "):
                    yield _Line(number, part.strip())
            text = ""
