"""Which training and serving stacks the patch was proven inside: run the tests, keep the rows.

    python scripts/compat.py                    run every proof that this machine can run
    python scripts/compat.py --rows ep tp       some of them
    python scripts/compat.py --table            only write docs/compatibility.md from the rows

A proof is a selection of tests. Each run appends one line to benchmarks/results/compat.jsonl; the
table shows the newest line of each proof.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The checkout comes before an installed moe_patch; scripts/ itself is on the path already.
sys.path.insert(1, str(ROOT))

from bench_lib.rows import commit_of, machine, new_run  # noqa: E402

ROWS = ROOT / "benchmarks" / "results" / "compat.jsonl"
DOC = ROOT / "docs" / "compatibility.md"
PACKAGES = ("transformers", "peft", "accelerate")
TIMEOUT_S = 600
FIELDS = (
    "row", "test", "command", "card", "world", "torch", "triton", *PACKAGES, "commit", "result",
    "seconds", "date",
)  # fmt: skip


@dataclass(frozen=True)
class Proof:
    """One line of the table.

    Attributes:
        row: what it belongs to, as in the table.
        shows: what the tests show, in words.
        file, select: a test file and the -k expression in it ("" = the whole file).
        world: number of processes that the tests start.
        good: what it means if the tests pass, "pass" or "refused" (by name, at patch time).
    """

    row: str
    shows: str
    file: str
    select: str = ""
    world: int = 1
    good: str = "pass"

    @property
    def test(self) -> str:
        """The selection as one text."""
        return f"tests/{self.file}" + (f" -k '{self.select}'" if self.select else "")


PROOFS = (
    Proof("checkpointing", "exact ties, 20 steps, both kinds; early stop; a raising forward; "
          "selective", "test_stack_checkpointing.py"),
    Proof("checkpointing", "adapters, both wrap orders", "test_lora_training.py", "checkpointing"),
    Proof("checkpointing", "frozen base", "test_block_training.py", "checkpointing"),
    Proof("compile", "fullgraph block and model, dynamic T, patch before and after",
          "test_stack_compile.py"),
    Proof("compile", "blocks with adapters", "test_lora_training.py", "compiled"),
    Proof("compile", "blocks of special families", "test_special_contracts.py", "compiles"),
    Proof("autocast", "casts after patching, bias dtypes, training under autocast",
          "test_stack_dtypes.py"),
    Proof("autocast", "mixed dtypes in one block", "test_block_training.py",
          "mixed_dtypes or autocast"),
    Proof("autocast", "adapters", "test_lora_training.py", "autocast"),
    Proof("ddp", "ranks that use different experts; full and LoRA", "test_stack_ranks.py", "ddp",
          world=2),
    Proof("ddp", "the training command under torchrun", "test_train.py", "two_processes", world=2),
    Proof("ddp", "accelerate launch with configs/accelerate/ddp_cpu.yaml", "test_stack_launch.py",
          world=2),
    Proof("fsdp2", "layers, experts, accelerate's plugin; full and LoRA; saved state; bf16 policy",
          "test_stack_ranks.py", "fsdp2", world=2),
    Proof("fsdp2", "through transformers' distributed config", "test_stack_parallel.py",
          "fsdp and not refused", world=2),
    Proof("zero3", "partitioned weights are not read when patched (no training)",
          "test_stack_loading.py", "no_size"),
    Proof("ep", "all-to-all and all-reduce with sentinels, with FSDP; generate",
          "test_stack_parallel.py", "ep and not refused", world=2),
    Proof("ep", "adapters on experts that live on another rank (PEFT alone fails too)",
          "test_stack_parallel.py", "refused and qwen3_moe", world=2, good="refused"),
    Proof("ep", "closures around the experts' forward, adapters", "test_lora_training.py",
          "closure or local_weight"),
    Proof("tp", "loss, gradients, generate", "test_stack_parallel.py", "tp and not refused",
          world=2),
    Proof("tp", "experts that transformers does not decorate (llama4)",
          "test_stack_parallel.py", "refused and llama4", world=2, good="refused"),
    Proof("device_map", "meta before weights load, disk, from_pretrained", "test_stack_loading.py",
          "not no_size"),
    Proof("device_map", "cpu_offload", "test_wrappers.py", "cpu_offload"),
    Proof("generate", "greedy, sampling, beam, static cache, no cache", "test_stack_generate.py"),
    Proof("generate", "each experts implementation", "test_wrappers.py", "generate"),
    Proof("trainer", "MoePatchCallback: losses, best model, resume, accumulation; EMA",
          "test_stack_trainer.py"),
    Proof("trainer", "the training command: resume", "test_train.py", "resume"),
    Proof("axolotl", "the plugin against the documented interface", "test_stack_axolotl.py"),
    Proof("lifecycle", "patch, undo, hooks, shared configs", "test_lifecycle.py"),
    Proof("lifecycle", "every family", "test_lifecycle_all.py"),
    Proof("lifecycle", "deepcopy, pickle, saved files", "test_copies.py"),
    Proof("lifecycle", "hooks fire once", "test_families.py", "fire_once"),
    Proof("conflicts", "forwards replaced as Liger and hub kernels do (stand-ins), nn.DataParallel",
          "test_stack_conflicts.py", good="refused"),
    Proof("conflicts", "experts kept as a ModuleList", "test_refusals.py", "module_list",
          good="refused"),
)  # fmt: skip

NOT_RUN = (
    ("checkpointing", "device memory at step 50 against step 5", "needs a GPU"),
    ("compile", "no host sync after warm-up (sync debug mode); inductor", "needs a GPU"),
    ("ddp, fsdp2", "NCCL; configs/accelerate/ddp.yaml and fsdp2.yaml", "needs two GPUs"),
    ("zero3", "training, saving, LoRA, leaf modules", "DeepSpeed is not installed here"),
    ("ep, tp", "four ranks; throughput at 1, 2 and 4", "needs four GPUs"),
    ("device_map", "a block on another device than the current one", "needs two GPUs"),
    ("generate", "compiled decode, CUDA-graph capture at T = 1 and 8", "needs a GPU"),
    ("trl", "SFT, DPO, GRPO", "TRL is not installed here"),
    ("axolotl", "a training run", "axolotl pins an older transformers than the one tested here"),
)


def run(proof: Proof, where: dict[str, Any], commit: str, date: str) -> dict[str, Any]:
    """One proof in a process of its own, as a row."""
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{proof.file}"]
    command += ["-k", proof.select] if proof.select else []
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        good, output = done.returncode == 0, done.stdout
    except subprocess.TimeoutExpired:
        good, output = False, f"stopped after {TIMEOUT_S} s"
    print(f"{proof.row:14} {proof.test}: {output.strip().splitlines()[-1]}", flush=True)
    if not good:
        print(output)
    values = {
        "row": proof.row,
        "test": proof.test,
        "command": f"python -m pytest -q {proof.test}",
        "world": proof.world,
        "commit": commit,
        "result": proof.good if good else "fail",
        "seconds": round(time.monotonic() - start, 1),
        "date": date,
    } | where
    return {name: values[name] for name in FIELDS}


def environment() -> dict[str, Any]:
    """The card and the versions."""
    place = machine("cpu")
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {name: place[name] for name in ("card", "torch", "triton")} | versions


def stored() -> list[dict[str, Any]]:
    """All rows so far."""
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]


def document(rows: list[dict[str, Any]]) -> str:
    """docs/compatibility.md: the newest row of every proof, and what was not run."""
    newest = {(row["row"], row["test"]): row for row in rows}
    lines = [
        "# Compatibility", "",
        "Written by `scripts/compat.py` from `benchmarks/results/compat.jsonl`; do not edit.", "",
        "`refused`: an error that names the module, when the model is patched; for adapters under "
        "`ep`, at the first call.", "",
        "| row | shown | result | ranks | transformers | torch | on | commit | tests |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for proof in PROOFS:
        row = newest.get((proof.row, proof.test))
        if row is None:
            cells = [proof.row, proof.shows, "not run", *[""] * 5, f"`{proof.test}`"]
        else:
            cells = [
                proof.row, proof.shows, row["result"], str(row["world"]), row["transformers"],
                row["torch"], row["card"].partition(",")[0], row["commit"][:7], f"`{proof.test}`",
            ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += _versions(newest.values())
    lines += ["", "## Not run", "", "| row | what | why |", "|---|---|---|"]
    lines += [f"| {' | '.join(entry)} |" for entry in NOT_RUN]
    return "\n".join([*lines, "", NOTES])


def _versions(rows: Iterable[dict[str, Any]]) -> list[str]:
    """The whole suite on the oldest and newest versions (scripts/matrix.py)."""
    names = ("test", "torch", *PACKAGES, "result", "seconds", "commit")
    lines = ["", "## Versions", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in rows:
        if row["row"] == "versions":
            cells = [str(row[name]) for name in names[:-1]] + [row["commit"][:7]]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


NOTES = """\
## Notes

- **Launch lines** for several processes are the first line of each file in `configs/accelerate/`.
- **axolotl**: the tests use its documented hooks, since it pins another transformers. Its own
  plugin manager, 0.19.0 from the unpacked wheel, was run by hand: it loads the plugin and calls it.
- **An `experts_implementation` that the user chose** is no error: the patch wins until undo, and
  one warning says so. Liger, the kernels library and DeepSpeed are not installed here.
- **Trainer**: `Trainer(..., callbacks=[MoePatchCallback()])` patches before wrapping. With
  `use_liger_kernel` pass `liger_kernel_config={"swiglu": False}`: Liger would replace the experts.
- **Expert parallelism before `ep_size`** (transformers 5.17 checked by hand): transformers wraps
  the router as well; the router stays its own, the experts are ours (tier `experts`).
- **Behaviour of transformers 5.24 that a patch does not change**, seen on unpatched twins: under
  reentrant checkpointing the auxiliary loss loses its gradient; a static cache fails with
  `output_router_logits`; its eager experts fail on the sentinel ids of all-reduce expert
  parallelism (ours take them); after `generate` under its FSDP config the next step has no
  right gradient for `norm` and `lm_head`; a full fine-tuning resumed from a checkpoint does not
  repeat the losses of the whole run (the resumed losses are equal with and without the patch).
"""


def main() -> int:
    """Run and store, or only write the table."""
    parser = argparse.ArgumentParser(description="Prove compatibility rows and write the table.")
    names = sorted({proof.row for proof in PROOFS})
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW")
    parser.add_argument("--table", action="store_true", help="write the table, run nothing")
    options = parser.parse_args()
    failed = 0
    if not options.table:
        commit, where, (_, date) = commit_of(ROOT), environment(), new_run()
        if commit is None:
            parser.error(f"{ROOT} is not a git checkout; rows name the commit")
        ROWS.parent.mkdir(parents=True, exist_ok=True)
        for proof in (p for p in PROOFS if p.row in options.rows):
            row = run(proof, where, commit, date)
            failed += row["result"] == "fail"
            with ROWS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    DOC.write_text(document(stored()), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
