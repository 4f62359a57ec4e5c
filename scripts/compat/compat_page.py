"""Make docs/compatibility.md from the rows of compat.py, matrix.py and bench_parallel.py."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from compat_proofs import INTRODUCTION, NOT_RUN, NOTES, PROOFS, Proof


def several_cards(rows: list[dict[str, Any]]) -> list[str]:
    """Return tokens per second on several cards, from the newest run on each number of cards."""
    adapted = [row for row in rows if "lora" in row]
    rows = [row for row in rows if not {"lora", "storage"} & row.keys()]
    if not rows:
        return lora_on_cards(adapted) + scaling(adapted)
    runs = {row["world"]: row["run"] for row in rows}
    shown = [row for row in rows if row["run"] == runs[row["world"]]]
    last = shown[-1]
    lines = [
        "", "## Several cards", "",
        f"`benchmarks/studies/bench_parallel.py` on {last['card']}: "
        f"forward and backward of {last['layers']} layers of Qwen3-30B-A3B's sizes, bf16. "
        f"One batch has {last['sequences']} x {last['tokens'] // last['sequences']} tokens "
        f"(`fsdp`: one batch per card). torch {last['torch']}, "
        f"transformers {last['transformers']}, commit "
        f"{short(last['commit'])}. `transformers`: its own experts (`grouped_mm`) in the same "
        "processes. `ep` spreads the experts alone: all else is computed on every card.", "",
        "| cards | spread by | tokens/s, moe_patch | tokens/s, transformers | ratio |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    speed = {(row["world"], row["layout"], row["impl"]): row["tokens_per_s"] for row in shown}
    for world, layout, impl in sorted(speed):
        theirs = speed.get((world, layout, "hf_grouped_mm"))
        if impl == "moe_patch" and theirs is not None:
            ours = speed[world, layout, impl]
            lines.append(f"| {world} | {layout} | {ours} | {theirs} | {ours / theirs:.2f} |")
    return lines + lora_on_cards(adapted) + scaling(adapted)


def lora_on_cards(rows: list[dict[str, Any]]) -> list[str]:
    """Return tokens per second of LoRA on experts, from the newest row of each case."""
    shown = newest_of(
        [row for row in rows if "step_tokens" not in row],
        ("world", "layers", "checkpointing", "tokens", "layout", "impl"),
    )
    if not shown:
        return []
    last = shown[-1]
    lines = [
        "", "## LoRA on several cards", "",
        f"`benchmarks/studies/bench_parallel_lora.py` on {last['card']}: forward and backward with "
        f"adapters of rank {last['lora']} on the experts; torch {last['torch']}. `ep`: each expert "
        "on one card, and FSDP2 around the dense layers. `ep_tp`: tensor parallelism there, so "
        "that cards share a batch. `ep_fsdp2`: two copies of the experts. Other layouts have a "
        "batch per card. `peft`: PEFT on transformers' own experts.", "",
        "| cards | layers | checkpointing | tokens in a batch | spread by | implementation "
        "| tokens/s | peak GB on rank 0 | transformers | commit |",
        "|---" * 10 + "|",
    ]  # fmt: skip
    for row in shown:
        peak = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f}"
        cells = [
            row["world"], row["layers"], "yes" if row.get("checkpointing") else "no",
            row["tokens"], row["layout"], row["impl"], row["tokens_per_s"], peak,
            row["transformers"], short(row["commit"]),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def scaling(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of strong scaling, from the newest row of each layout and world."""
    shown = newest_of([row for row in rows if "step_tokens" in row], ("layout", "impl", "world"))
    if not shown:
        return []
    alone = {row["impl"]: row["median_ms"] for row in shown if row["world"] == 1}
    last = shown[-1]
    lines = [
        "", f"A LoRA step of {last['step_tokens']} tokens on {last['layers']} layers, in batches "
        f"of {last['tokens']}, by number of cards (`--step-tokens`). `efficiency` is the time on "
        "one card over cards times time. The other columns split a profiled step of rank 0: "
        "kernels run, only NCCL runs, nothing runs.", "",
        "| cards | spread by | ms | efficiency | computing | NCCL alone | idle | commit |",
        "|---" * 8 + "|",
    ]  # fmt: skip
    for row in shown:
        one = alone.get(row["impl"])
        part = row["split"][0] if row.get("split") else {}
        cells = [
            row["world"], row["layout"], round(row["median_ms"]),
            f"{one / row['world'] / row['median_ms']:.2f}" if one else "–",
            *(round(part[k]) if part else "–" for k in ("compute_ms", "exposed_ms", "idle_ms")),
            short(row["commit"]),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def newest_of(rows: list[dict[str, Any]], names: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the newest row of each combination of the fields ``names``, in order of those."""
    newest = {tuple(str(row.get(name) or 0) for name in names): row for row in rows}
    return sorted(
        newest.values(), key=lambda row: [(type(v := row.get(n) or 0).__name__, v) for n in names]
    )


def qlora_on_cards(rows: list[dict[str, Any]]) -> list[str]:
    """Return tokens per second and memory of QLoRA, from the newest row of each case."""
    names = ("world", "layers", "tokens", "layout", "transformers")
    shown = newest_of([row for row in rows if "storage" in row], names)
    if not shown:
        return []
    last = shown[-1]
    lines = [
        "", "## QLoRA on several cards", "",
        f"`benchmarks/studies/bench_qlora_ranks.py` on {last['card']}. A step is forward, backward "
        f"and AdamW with checkpointing, with experts in {last['storage']} and adapters of rank "
        f"{last['rank']}; torch {last['torch']}.",
        "", "| cards | layers | tokens of a card | | tokens/s | GiB before the first step "
        "| GiB at the peak | transformers | commit |",
        "|---" * 9 + "|",
    ]  # fmt: skip
    for row in shown:
        cells = [
            row["world"], row["layers"], row["tokens"], row["layout"].removeprefix("qlora "),
            row["tokens_per_s"], row["held_gib"], row["peak_gib"], row["transformers"],
            short(row["commit"]),
        ]  # fmt: skip
        lines.append("| " + " | ".join("–" if c is None else str(c) for c in cells) + " |")
    return lines


def short(commit: str) -> str:
    """Return a commit's first digits, and a plus if the tree had further changes."""
    return commit[:7] + ("+" if commit.endswith("+dirty") else "")


def place_of(row: dict[str, Any]) -> str:
    """Return the card of a row by its name in the table."""
    card = row["card"].partition(",")[0]
    return card if card.startswith("CPU") or row["world"] == 1 else f"{row['world']} x {card}"


def lines_of(proof: Proof, rows: Iterable[dict[str, Any]]) -> list[str]:
    """Return a proof's lines of the table: one per place and result, with all releases tested.

    A run on cards replaces an older one on cards of another kind.
    """
    newest = {
        (row["card"].startswith("CPU"), row["transformers"], row["torch"]): row
        for row in rows
        if (row["row"], row["test"]) == (proof.row, proof.test)
    }
    if not newest:
        cells = [proof.row, proof.shows, "not run", str(proof.world), *[""] * 5, f"`{proof.test}`"]
        return [f"| {' | '.join(cells)} |"]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in newest.values():
        groups.setdefault((place_of(row), row["result"]), []).append(row)
    lines = []
    for (place, result), group in groups.items():
        releases = (
            ", ".join(sorted({row[name] for row in group})) for name in ("transformers", "torch")
        )
        last = group[-1]
        cells = [
            proof.row, proof.shows, result, str(last["world"]), *releases, last["stack"] or "",
            place, short(last["commit"]), f"`{proof.test}`",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def document(
    rows: list[dict[str, Any]],
    parallel: list[dict[str, Any]] | None = None,
    window: list[dict[str, Any]] | None = None,
) -> str:
    """Return docs/compatibility.md: the newest rows of every proof, and what was not run.

    Args:
        rows: rows of compat.py, and of matrix.py's oldest and newest versions.
        parallel: rows of bench_parallel.py.
        window: rows of matrix.py's combinations of releases.
    """
    lines = [
        INTRODUCTION, "",
        "| row | shown | result | ranks | transformers | torch | with | on | commit | tests |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for proof in PROOFS:
        lines += lines_of(proof, rows)
    lines += several_cards(parallel or [])
    lines += qlora_on_cards(parallel or [])
    lines += versions(rows)
    lines += combinations(window or [])
    lines += ["", "## Not run", "", "| row | what | why |", "|---|---|---|"]
    lines += [f"| {' | '.join(entry)} |" for entry in NOT_RUN]
    return "\n".join([*lines, "", NOTES])


def versions(rows: list[dict[str, Any]]) -> list[str]:
    """Return the results of the whole suite on oldest and newest versions (scripts/matrix.py)."""
    names = ("test", "torch", "transformers", "peft", "accelerate", "result", "seconds", "commit")
    lines = ["", "## Versions", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    newest = {row["test"]: row for row in rows if row["row"] == "versions"}
    for row in newest.values():
        cells = [str(row[name]) for name in names[:-1]] + [short(row["commit"])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


WINDOW = """\
`python scripts/matrix.py window` runs the tests marked `versions`: families, patch, adapters and
registry. It combines transformers 5.9, 5.13, 5.16, 5.20 and the newest with PEFT 0.18, 0.20 and the
newest. With `--whole` all tests that need no GPU run. Two processes ran on two cores that other
work shared. `seconds` is wall time, and `CPU seconds` is what the processes used. Tests of a family
that a release lacks are left out; tests of other missing features are counted as `skipped`."""


def combinations(rows: list[dict[str, Any]]) -> list[str]:
    """The newest run of each combination of transformers and PEFT (scripts/matrix.py)."""
    if not rows:
        return []
    names = ("transformers", "peft", "tests", "result", "passed", "failed", "skipped", "seconds")
    names = (*names, "CPU seconds", "commit")
    lines = ["", "## Releases of transformers and PEFT", "", WINDOW, ""]
    lines += [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    newest = {(row["suite"], row["transformers"], row["peft"]): row for row in rows}
    for row in sorted(newest.values(), key=_place):
        cells = [str(row[name]) for name in names[:-2] if name != "tests"]
        cells.insert(2, {"window": "marked", "whole": "all"}[row["suite"]])
        lines.append(f"| {' | '.join([*cells, str(row['cpu_seconds']), short(row['commit'])])} |")
    return lines


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    """Order by suite, then by release."""
    releases = ([int(part) for part in row[name].split(".")] for name in ("transformers", "peft"))
    return row["suite"] == "whole", *releases
