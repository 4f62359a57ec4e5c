"""The blocks of numbers in README and docs: each a function of the result files, no hand between.

A document holds ``<!-- bench: NAME -->`` and ``<!-- end of bench -->``; ``bench.py docs`` rewrites
what is between them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from bench_lib import aims
from bench_lib.newest import (
    ENOUGH_MACHINES,
    ENOUGH_RUNS,
    OURS,
    Line,
    lines_of,
    one_per_shape,
    provenance,
)
from bench_lib.ops import OPS
from bench_lib.rows import RowError

GIB = 2**30
MARKED = re.compile(r"(<!-- bench: (\w+) -->\n)(.*?)(<!-- end of bench -->)", re.DOTALL)
NOTHING = "No row from a GPU yet.\n"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _spread(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """The least and the most of several runs; nothing of one."""
    return f" [{shown(values[0])}, {shown(values[-1])}]" if len(values) > 1 else ""


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _time(line: Line, impl: str, scale: float) -> str:
    if impl not in line.by_impl:
        return ""
    time_ms, faster = line.time(impl), line.faster(impl)
    if time_ms is None:
        return "skipped"
    cell = _number(time_ms * scale)
    if impl == OURS:
        every = [value * scale for value in line.numbers(OURS, "median_ms")]
        return cell + _spread(every, _number)
    return cell if faster is None else f"{cell} ({faster:.2f}x)"


def _share(line: Line) -> str:
    rate, share = line.number(OURS, "tflops"), aims.share(line, ())
    if rate is None:
        return ""
    return f"{rate:.0f}" if share is None else f"{rate:.0f} ({share:.2f})"


def _floors(line: Line) -> str:
    found = aims.floors(line, ())
    return "" if found is None else f"{found:.1f}"


def _runs(line: Line) -> str:
    """How many runs stand behind a line, and in brackets on how many machines."""
    return f"{len(line.runs)} ({line.machines})" + ("" if line.enough else " \\*")


def _about_runs(lines: Sequence[Line]) -> str:
    """What brackets and stars mean, where there are any."""
    said = []
    if any(len(line.runs) > 1 for line in lines):
        said.append("Of several runs the median [least, most], of ratios too, each within its run.")
    if not all(line.enough for line in lines):
        said.append(f"\\* Fewer than {ENOUGH_RUNS} runs or {ENOUGH_MACHINES} machines.")
    return f"{' '.join(said)}\n\n" if said else ""


def _impls(lines: Sequence[Line], op_name: str) -> list[str]:
    present = {impl for line in lines for impl in line.by_impl}
    return [impl for impl in OPS[op_name].names() if impl in present]


def _point(line: Line, names: Sequence[str]) -> list[str]:
    values = {
        "shape": line.shape, "T": line.T, "R": line.R, "dtype": line.dtype, "pass": line.passes,
        "card": line.card,
    }  # fmt: skip
    return ["–" if values[name] is None else str(values[name]) for name in names]


def _markdown(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *body]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _skips(lines: Sequence[Line]) -> str:
    reasons: dict[tuple[str, str], list[str]] = {}
    for line in lines:
        for impl, row in line.by_impl.items():
            if "skipped" in row:
                where = f"{line.shape} T={line.T} {line.passes} ({line.card})"
                reasons.setdefault((impl, row["skipped"]), []).append(where)
    listed = "".join(
        f"- {impl} skipped at {', '.join(places)}: {reason}\n"
        for (impl, reason), places in reasons.items()
    )
    return listed and f"{listed}\n"


def times(op_name: str, point: Sequence[str], unit: str = "ms", floors: bool = False) -> Callable:
    """A table of one op's times: ours, its rate, every peer and how many times faster ours is."""
    scale = {"ms": 1.0, "µs": 1e3}[unit]

    def block(results: Path) -> str:
        lines = lines_of(op_name, results, each_card=True)
        if not lines:
            return NOTHING
        impls = _impls(lines, op_name)
        rate = any(line.ours["tflops"] is not None for line in lines)
        names = (*point, "card")
        header = [*names, *(f"{impl}, {unit}" for impl in impls)]
        header += ["TFLOP/s (of bmm)"] if rate else []
        header += [*(["copy floors"] if floors else []), "runs (machines)"]
        body = [
            [
                *_point(line, names),
                *(_time(line, impl, scale) for impl in impls),
                *([_share(line)] if rate else []),
                *([_floors(line)] if floors else []),
                _runs(line),
            ]
            for line in lines
        ]
        told = f"{_about_runs(lines)}{_skips(lines)}{provenance(lines)}"
        return f"{_markdown(header, body)}\n{told}\n"

    return block


def memory(op_name: str, point: Sequence[str]) -> Callable[[Path], str]:
    """What is held from forward to backward, and the peak of both, in GiB."""

    def block(results: Path) -> str:
        lines = [line for line in lines_of(op_name, results) if line.passes == "fwd+bwd"]
        if not lines:
            return NOTHING
        impls = _impls(lines, op_name)

        def cell(line: Line, impl: str) -> str:
            saved, peak = line.number(impl, "saved_bytes"), line.number(impl, "peak_bytes")
            if saved is None or peak is None:
                return ""
            return f"{saved / GIB:.2f} / {peak / GIB:.2f}"

        body = [[*_point(line, point), *(cell(line, impl) for impl in impls)] for line in lines]
        return f"{_markdown([*point, *impls], body)}\n{provenance(lines)}\n"

    return block


def model(results: Path) -> str:
    """Step time, tokens per second, time in MoE blocks and peak, unpatched and patched."""
    lines = lines_of("model", results, each_card=True)
    if not lines:
        return NOTHING
    body = []
    for line in lines:
        for impl, row in sorted(line.by_impl.items(), reverse=True):
            if "skipped" in row:
                body.append([line.shape, line.card, impl, "skipped", "", "", "", "", ""])
            else:
                body.append([line.shape, line.card, impl, *_step(line, impl), _runs(line)])
    header = [
        "shape", "card", "impl", "step, ms", "faster", "tokens/s", "in MoE blocks, ms", "peak, GiB",
        "runs (machines)",
    ]  # fmt: skip
    told = f"{_about_runs(lines)}{_skips(lines)}{provenance(lines)}"
    return f"{_markdown(header, body)}\n{told}\n"


def _step(line: Line, impl: str) -> list[str]:
    """A training step's time, ratio, rate, time in MoE blocks and peak."""
    fields = ("median_ms", "tokens_per_s", "moe_ms", "peak_bytes")
    step_ms, rate, moe_ms, peak = (line.number(impl, field) for field in fields)
    share = line.quotient((impl, "moe_ms"), (impl, "median_ms"))
    peft = "peft", "median_ms"
    faster = None if impl == "peft" else line.quotient(peft, (impl, "median_ms"))
    return [
        _number(step_ms) + _spread(line.numbers(impl, "median_ms"), _number),
        "" if faster is None else f"{faster:.2f}x",
        f"{rate:.0f}",
        f"{_number(moe_ms)} ({share:.0%})",
        "" if peak is None else f"{peak / GIB:.1f}",
    ]


def block(results: Path) -> str:
    """Wall, host and kernel time of whole blocks, and their peak."""
    lines = lines_of("block", results, each_card=True)
    if not lines:
        return NOTHING
    body = []
    for line in lines:
        for impl in _impls([line], "block"):
            where = [*_point(line, ("T", "R")), line.card, impl]
            if "skipped" in line.by_impl[impl]:
                body.append([*where, "skipped", "", "", "", "", ""])
                continue
            fields = ("median_ms", "host_us", "kernel_ms", "peak_bytes")
            wall_ms, host_us, kernel_ms, peak = (line.number(impl, field) for field in fields)
            faster = line.faster(impl)
            cells = [_number(wall_ms), "" if faster is None or impl == OURS else _ratio(faster)]
            cells += ["" if v is None else _number(v) for v in (host_us, kernel_ms)]
            body.append([*where, *cells, "" if peak is None else f"{peak / GIB:.2f}", _runs(line)])
    header = [
        "T", "R", "card", "impl", "pass, ms", "over ours", "host, µs", "kernels, ms", "peak, GiB",
        "runs (machines)",
    ]  # fmt: skip
    told = f"{_about_runs(lines)}{_skips(lines)}{provenance(lines)}"
    return f"{_markdown(header, body)}\n{told}\n"


def headline(results: Path) -> str:
    """The README's table: forward and backward of each shape that enough runs stand behind."""
    body, used = [], []
    parts = {
        "experts": "experts, every weight trained",
        "lora": "experts, LoRA r = 16",
        "model": "training step of 12 layers, LoRA",
    }
    for op_name, what in parts.items():
        lines = [
            line
            for line in lines_of(op_name, results)
            if line.enough and line.passes == "fwd+bwd" and (op_name == "experts" or line.R)
        ]
        for line in one_per_shape(lines):
            peers = [i for i in OPS[op_name].required if line.faster(i) is not None]
            cells = ", ".join(
                f"{line.faster(impl):.2f}x{_spread(line.ratios(impl), _ratio)} {impl}"
                for impl in peers
            )
            where = [what, line.shape, str(line.T), line.card]
            body.append([*where, _time(line, OURS, 1.0), cells, _runs(line)])
            used.append(line)
    if not body:
        return NOTHING
    header = ["forward + backward", "shape", "tokens", "card", "ms", "times faster than"]
    header.append("runs (machines)")
    return f"{_markdown(header, body)}\n{_about_runs(used)}{provenance(used)}\n"


def aims_table(results: Path) -> str:
    """Every aim that there is a row for."""
    body = list(aims.table(results, aims.all_aims()))
    header = ["op", "quantity", "at", "card", "aim", "measured", ""]
    return _markdown(header, body) if body else NOTHING


PICTURES = {
    "experts": "TFLOP/s of the experts, forward and backward, beside the peers",
    "lora": "TFLOP/s of LoRA on the experts, forward and backward, beside the peers",
    "model": "time of a training step, patched and unpatched",
}


def pictures(results: Path) -> str:
    """The charts that ``bench.py chart`` has drawn, for a page in docs/."""
    folder = results.parent.parent / "docs" / "img"
    drawn = [name for name in PICTURES if (folder / f"bench_{name}.svg").exists()]
    return "".join(f"![{PICTURES[name]}](img/bench_{name}.svg)\n" for name in drawn) or NOTHING


POINT = ("shape", "T", "pass")
BLOCKS: dict[str, Callable[[Path], str]] = {
    "headline": headline,
    "experts": times("experts", POINT),
    "experts_memory": memory("experts", ("shape", "T")),
    "lora": times("lora", ("shape", "T", "R", "pass")),
    "lora_memory": memory("lora", ("shape", "T", "R")),
    "block": block,
    "decode": times("decode", ("shape", "T"), "µs"),
    "model": model,
    "quantised": times("quantised", ("shape", "T", "dtype")),
    "quantised_memory": memory("quantised", ("shape", "T", "dtype")),
    "signals": times("signals", POINT),
    "routing": times("routing", ("shape", "T", "dtype", "pass"), "µs", floors=True),
    "product_key": times("product_key", POINT, "µs"),
    "plan": times("plan", ("shape", "T"), "µs", floors=True),
    "aims": aims_table,
    "pictures": pictures,
}


def rewrite(text: str, results: Path) -> str:
    """A document with every marked block made anew.

    Raises:
        RowError: a marker names no block.
    """

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in BLOCKS:
            raise RowError(f"no block {name!r}; there are {', '.join(BLOCKS)}")
        return f"{match[1]}\n{BLOCKS[name](results)}\n{match[4]}"

    return MARKED.sub(fill, text)
