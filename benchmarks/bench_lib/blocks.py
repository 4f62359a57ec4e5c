"""Make the blocks of numbers in README and docs: each is a function of the result files alone.

A document holds ``<!-- bench: NAME -->`` and ``<!-- end of bench -->``; ``bench.py docs`` rewrites
the text between them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from bench_lib import aims
from bench_lib.cells import (
    about_runs,
    floors_cell,
    impls_of,
    markdown,
    number,
    point_cells,
    ratio,
    runs_cell,
    share_cell,
    skips,
    spread,
    time_cell,
)
from bench_lib.newest import (
    OURS,
    Line,
    holds_for,
    lines_of,
    newest_lines,
    one_per_shape,
    provenance,
)
from bench_lib.ops import OPS
from bench_lib.releases import releases
from bench_lib.rows import RowError, read_rows

GIB = 2**30
MARKED = re.compile(r"(<!-- bench: (\w+) -->\n)(.*?)(<!-- end of bench -->)", re.DOTALL)
NOTHING = "No row from a GPU yet.\n"


def times(op_name: str, point: Sequence[str], unit: str = "ms", floors: bool = False) -> Callable:
    """Return a block: a table of one op's times and rate, every peer and our speedup over it."""
    scale = {"ms": 1.0, "µs": 1e3}[unit]

    def block(results: Path) -> str:
        lines = lines_of(op_name, results, each_card=True)
        if not lines:
            return NOTHING
        impls = impls_of(lines, op_name)
        rate = any(line.ours["tflops"] is not None for line in lines)
        names = (*point, "card")
        header = [*names, *(f"{impl}, {unit}" for impl in impls)]
        header += ["TFLOP/s (of bmm)"] if rate else []
        header += [*(["copy floors"] if floors else []), "runs (machines)"]
        body = [
            [
                *point_cells(line, names),
                *(time_cell(line, impl, scale) for impl in impls),
                *([share_cell(line)] if rate else []),
                *([floors_cell(line)] if floors else []),
                runs_cell(line),
            ]
            for line in lines
        ]
        told = f"{about_runs(lines)}{skips(lines)}{provenance(lines)}"
        return f"{markdown(header, body)}\n{told}\n"

    return block


def memory(op_name: str, point: Sequence[str]) -> Callable[[Path], str]:
    """Return a block: memory held from forward to backward, and the peak of both, in GiB."""

    def block(results: Path) -> str:
        lines = [line for line in lines_of(op_name, results) if line.passes == "fwd+bwd"]
        if not lines:
            return NOTHING
        impls = impls_of(lines, op_name)

        def cell(line: Line, impl: str) -> str:
            saved, peak = line.number(impl, "saved_bytes"), line.number(impl, "peak_bytes")
            if saved is None or peak is None:
                return ""
            return f"{saved / GIB:.2f} / {peak / GIB:.2f}"

        body = [
            [*point_cells(line, point), *(cell(line, impl) for impl in impls)] for line in lines
        ]
        return f"{markdown([*point, *impls], body)}\n{provenance(lines)}\n"

    return block


def model(results: Path) -> str:
    """Return step time, tokens per second, time in MoE blocks and peak, unpatched and patched."""
    lines = lines_of("model", results, each_card=True)
    if not lines:
        return NOTHING
    body = []
    for line in lines:
        for impl in impls_of([line], "model"):
            if "skipped" in line.by_impl[impl]:
                body.append([line.shape, line.card, impl, "skipped", "", "", "", "", ""])
            else:
                body.append([line.shape, line.card, impl, *_step(line, impl), runs_cell(line)])
    header = [
        "shape", "card", "impl", "step, ms", "faster", "tokens/s", "in MoE blocks, ms", "peak, GiB",
        "runs (machines)",
    ]  # fmt: skip
    told = f"{about_runs(lines)}{skips(lines)}{provenance(lines)}"
    return f"{markdown(header, body)}\n{told}\n"


def _step(line: Line, impl: str) -> list[str]:
    """Return a training step's time, ratio, rate, time in MoE blocks and peak."""
    fields = ("median_ms", "tokens_per_s", "moe_ms", "peak_bytes")
    step_ms, rate, moe_ms, peak = (line.number(impl, field) for field in fields)
    share = line.quotient((impl, "moe_ms"), (impl, "median_ms"))
    peft = "peft", "median_ms"
    faster = None if impl == "peft" else line.quotient(peft, (impl, "median_ms"))
    return [
        number(step_ms) + spread(line.numbers(impl, "median_ms"), number),
        "" if faster is None else f"{faster:.2f}x",
        f"{rate:.0f}",
        f"{number(moe_ms)} ({share:.0%})",
        "" if peak is None else f"{peak / GIB:.1f}",
    ]


def block(results: Path) -> str:
    """Return wall, host and kernel time of whole blocks, and their peak."""
    lines = lines_of("block", results, each_card=True)
    if not lines:
        return NOTHING
    body = []
    for line in lines:
        for impl in impls_of([line], "block"):
            where = [*point_cells(line, ("T", "R")), line.card, impl]
            if "skipped" in line.by_impl[impl]:
                body.append([*where, "skipped", "", "", "", "", ""])
                continue
            fields = ("median_ms", "host_us", "kernel_ms", "peak_bytes")
            wall_ms, host_us, kernel_ms, peak = (line.number(impl, field) for field in fields)
            faster = line.faster(impl)
            cells = [number(wall_ms), "" if faster is None or impl == OURS else ratio(faster)]
            cells += ["" if v is None else number(v) for v in (host_us, kernel_ms)]
            body.append(
                [*where, *cells, "" if peak is None else f"{peak / GIB:.2f}", runs_cell(line)]
            )
    header = [
        "T", "R", "card", "impl", "pass, ms", "over ours", "host, µs", "kernels, ms", "peak, GiB",
        "runs (machines)",
    ]  # fmt: skip
    told = f"{about_runs(lines)}{skips(lines)}{provenance(lines)}"
    return f"{markdown(header, body)}\n{told}\n"


PORTABLE = f"{OURS}:portable"


def portable(results: Path) -> str:
    """Return times of the kernels for cards without Hopper's instructions, beside torch's."""
    body, used = [], []
    for op_name, peers in (("experts", ("hf_grouped_mm",)), ("lora", ("peft", "split_lora"))):
        path = results / f"{op_name}.jsonl"
        rows = read_rows(path) if path.exists() else []
        ran = {row["run"] for row in rows if row["impl"] == PORTABLE}
        as_ours = [row | {"impl": OURS} for row in rows if row["impl"] == PORTABLE]
        beside = [row for row in rows if row["run"] in ran and row["impl"] in peers]
        op = dataclasses.replace(OPS[op_name], required=peers)
        for line in newest_lines([*as_ours, *beside], op, each_card=True):
            times_ms = [time_cell(line, OURS, 1.0), ", ".join(
                f"{time_cell(line, impl, 1.0)} {impl}" for impl in peers if impl in line.by_impl
            )]  # fmt: skip
            where = point_cells(line, ("shape", "T", "R", "pass", "card"))
            body.append([op_name, *where, *times_ms, share_cell(line), runs_cell(line)])
            used.append(line)
    if not body:
        return NOTHING
    header = ["op", "shape", "T", "R", "pass", "card", "portable, ms", "peers, ms"]
    header += ["TFLOP/s (of bmm)", "runs (machines)"]
    return f"{markdown(header, body)}\n{about_runs(used)}{provenance(used)}\n"


def headline(results: Path) -> str:
    """Return the README's table: forward and backward of each shape with enough runs."""
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
                f"{line.faster(impl):.2f}x{spread(line.ratios(impl), ratio)} {impl}"
                for impl in peers
            )
            where = [what, line.shape, str(line.T), line.card]
            body.append([*where, time_cell(line, OURS, 1.0), cells, runs_cell(line)])
            used.append(line)
    if not body:
        return NOTHING
    header = ["forward + backward", "shape", "tokens", "card", "ms", "times faster than"]
    header.append("runs (machines)")
    first = f"These numbers hold for {holds_for(used)}.\n"
    return f"{first}\n{markdown(header, body)}\n{about_runs(used)}{provenance(used)}\n"


def aims_table(results: Path) -> str:
    """Return a table of every aim that has a row."""
    body = list(aims.table(results, aims.all_aims()))
    header = ["op", "quantity", "at", "card", "aim", "measured", ""]
    return markdown(header, body) if body else NOTHING


PICTURES = {
    "experts": "TFLOP/s of the experts, forward and backward, beside the peers",
    "lora": "TFLOP/s of LoRA on the experts, forward and backward, beside the peers",
    "model": "time of a training step, patched and unpatched",
}


def pictures(results: Path) -> str:
    """Return the charts that ``bench.py chart`` has drawn, for a page in docs/."""
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
    "portable": portable,
    "releases": releases,
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
    """Return a document with every marked block rewritten.

    Raises:
        RowError: a marker names no block.
    """

    def fill(match: re.Match[str]) -> str:
        name = match[2]
        if name not in BLOCKS:
            raise RowError(f"no block {name!r}; there are {', '.join(BLOCKS)}")
        return f"{match[1]}\n{BLOCKS[name](results)}\n{match[4]}"

    return MARKED.sub(fill, text)
