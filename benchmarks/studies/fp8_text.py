"""Train adapters on real text with FP8 products: gradients beside bf16's, and final losses.

    python benchmarks/studies/fp8_text.py --commit SHA --out rows.jsonl     a Hopper card, minutes
    python benchmarks/studies/fp8_text.py --device cpu --layers 1 --steps 2 --base-steps 4   dry run
    python benchmarks/studies/fp8_text.py --table benchmarks/studies/results/fp8_text.jsonl

A small Qwen3-MoE learns the first half of the standard library's docstrings in bf16 with all
weights. Adapters of rank 16 on attention and experts then learn the second half. The experts are in
bf16 ("bf16"), or the same experts are in FP8 and their products "decoded", "fp8" or "fp8_copy".
Runs with one seed see the same batches and begin with the same adapters.

At the first step and after the last, gradients of the FP8 ways are compared with those of
"decoded", with equal adapters and one batch. A row has the least cosine and the largest relative
error over all adapter tensors. Factors A have no gradient at the first step, because B is zero.
"decoded" is also compared with fp32 arithmetic, and with torch's products, which sum in another
order. "fixed": routers choose what they did in "decoded". "flips": tokens of a layer whose experts
are others than those.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1])]

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from moe_patch import lora_targets, patch_model, patch_report, unpatch_model  # noqa: E402
from moe_patch.patching.discover import discover  # noqa: E402
from moe_patch.quant.surgery import quantize_experts  # noqa: E402
from moe_patch.train.adapters import add_adapters  # noqa: E402
from moe_patch.train.config import DataConfig  # noqa: E402
from moe_patch.train.data import make_blocks, read_texts, train_tokenizer  # noqa: E402

WAYS = ("bf16", "decoded", "fp8", "fp8_copy")
LENGTH, BATCH, VOCABULARY, HELD_OUT = 256, 8, 4096, 32
RANK, RATE, BASE_RATE, WARM_UP = 16, 5e-4, 1e-3, 20
SIZES = {
    "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 16,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "tie_word_embeddings": True,
}  # fmt: skip


def read_blocks(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return token blocks of the first half of the text, of the second, and held-out ones."""
    texts = read_texts(DataConfig("python-stdlib-docstrings"))
    tokenizer = train_tokenizer(texts, VOCABULARY)
    blocks = make_blocks(texts, tokenizer, LENGTH).ids_NL.to(device)
    order = torch.Generator().manual_seed(0)
    middle = len(blocks) // 2
    first, second = (
        half[torch.randperm(len(half), generator=order).to(device)]
        for half in (blocks[:middle], blocks[middle:])
    )
    return first, second[HELD_OUT:], second[:HELD_OUT]


def batches(ids_NL: Tensor, seed: int) -> Any:
    """Yield batches without end, in an order of the seed's."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(ids_NL), generator=generator).to(ids_NL.device)
        for at in range(0, len(order) - BATCH + 1, BATCH):
            yield ids_NL[order[at : at + BATCH]]


def autocast(device: str) -> Any:
    return torch.autocast(device, torch.bfloat16)


def train(model: nn.Module, data: Any, steps: int, rate: float, device: str) -> list[float]:
    """Take steps of AdamW after a linear warm-up; return the losses."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
    losses = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / WARM_UP)
        batch = next(data)
        with autocast(device):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def pretrained(ids_NL: Tensor, options: argparse.Namespace) -> nn.Module:
    """Return a bf16 model that fp32 weights learnt."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=VOCABULARY, num_hidden_layers=options.layers, **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(options.device)
    patch_model(model, self_check=False)
    data = batches(ids_NL, 0)
    losses = train(model, data, options.base_steps, BASE_RATE, options.device)
    print(f"base: loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)
    return unpatch_model(model).to(torch.bfloat16)


def adapted(base: nn.Module, way: str, seed: int) -> nn.Module:
    """Return a patched PeftModel over a copy of the base."""
    model: Any = copy.deepcopy(base)
    if way != "bf16":
        quantize_experts(model, "fp8")
    lora = {"r": RANK, "lora_alpha": 2 * RANK, **lora_targets(model, router=False)}
    model = add_adapters(model, lora, seed)
    compute = "decoded" if way == "bf16" else way
    patch_model(model, self_check=False, fuse_lora="require", compute=compute)
    return model.train()


def gradients(
    model: nn.Module, batch: Tensor, chosen: Any, *, low: bool = True
) -> dict[str, Tensor]:
    """Return the gradients of all adapters.

    Args:
        model: patched.
        batch: token ids.
        chosen: context in which the routers choose.
        low: products in bf16; if False, in fp32.
    """
    model.zero_grad(set_to_none=True)
    context = autocast(batch.device.type) if low else nullcontext()
    with chosen, context:
        model(input_ids=batch, labels=batch).loss.backward()
    found = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


class Choices:
    """Keeps the experts that each router chose in one forward, or makes routers choose them.

    Routing weights are always those of the scores of the call at hand.
    """

    def __init__(self, model: nn.Module) -> None:
        self.routers = [router for block in discover(model) for _, router in block.routers]
        self.ids: list[Tensor] = []

    def kept(self) -> Any:
        return _Hooked(self.routers, self._keep)

    def flips(self, model: nn.Module, run: Any) -> tuple[Any, float]:
        """Run with free choices; return the result, and the share of tokens with other experts."""
        others = Choices(model)
        found = run(others.kept())
        pairs = zip(others.ids, self.ids, strict=True)
        changed = [(one.sort(-1)[0] != two.sort(-1)[0]).any(-1) for one, two in pairs]
        return found, torch.stack(changed).double().mean().item()

    def fixed(self) -> Any:
        return _Hooked(self.routers, self._fix)

    def _keep(self, at: int, out: Any) -> Any:
        self.ids.append(out[2])
        return out

    def _fix(self, at: int, out: Any) -> Any:
        logits_TE, ids_TK = out[0], self.ids[at]
        weights_TK = logits_TE.float().softmax(-1).gather(1, ids_TK.long())
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return logits_TE, weights_TK.to(out[1].dtype), ids_TK


class _Hooked:
    """Context in which a function of (number, output) replaces the routers' outputs."""

    def __init__(self, routers: list[nn.Module], function: Any) -> None:
        self.routers, self.function = routers, function

    def __enter__(self) -> None:
        def hook(at: int) -> Any:
            return lambda module, args, out: self.function(at, out)

        self.hooks = [r.register_forward_hook(hook(at)) for at, r in enumerate(self.routers)]

    def __exit__(self, *_: object) -> None:
        for each in self.hooks:
            each.remove()


def compared(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, Any]:
    """Return the least cosine and largest error over all tensors, and where they are."""
    cosines, errors = {}, {}
    for name, gradient in wanted.items():
        if not gradient.any():
            continue
        mine = found[name]
        cosines[name] = (mine.flatten() @ gradient.flatten() / mine.norm() / gradient.norm()).item()
        errors[name] = ((mine - gradient).norm() / gradient.norm()).item()
    worst = min(cosines, key=lambda name: cosines[name])
    ordered = sorted(cosines.values())
    return {
        "tensors": len(cosines), "cosine": ordered[0], "where": worst,
        "median_cosine": statistics.median(ordered),
        "below_0.998": sum(cosine < 0.998 for cosine in ordered),
        "expert_cosine": min([c for n, c in cosines.items() if "experts" in n]),
        "error": max(errors.values()),
    }  # fmt: skip


def study(model: nn.Module, batch: Tensor, fp32: bool) -> dict[str, Any]:
    """Compare the gradients of each way on one model's adapters and batch."""
    before = torch.get_rng_state()
    found = {}
    choices = Choices(model)
    unpatch_model(model)
    patch_model(model, self_check=False, fuse_lora="require")
    decoded = gradients(model, batch, choices.kept())

    def compare(name: str, other: nn.Module, fixed: Choices, low: bool = True) -> None:
        free, flips = fixed.flips(other, lambda chosen: gradients(other, batch, chosen, low=low))
        found[name] = compared(free, decoded) | {"flips": flips}
        again = gradients(other, batch, fixed.fixed(), low=low)
        found[f"{name}, fixed"] = compared(again, decoded)

    if fp32:
        wide = copy.deepcopy(model).float()
        again = Choices(wide)
        again.ids = choices.ids
        compare("fp32", wide, again, low=False)
        del wide, again
    options = {"decoded, torch": {"backend": "torch"}, "fp8": {"compute": "fp8"}}
    for name, changed in (options | {"fp8_copy": {"compute": "fp8_copy"}}).items():
        unpatch_model(model)
        patch_model(model, self_check=False, fuse_lora="require", **changed)
        compare(name, model, choices)
    torch.set_rng_state(before)
    return found


@torch.no_grad()
def held_out_loss(model: nn.Module, ids_NL: Tensor) -> float:
    model.eval()
    with autocast(ids_NL.device.type):
        losses = [model(input_ids=part, labels=part).loss.item() for part in ids_NL.split(BATCH)]
    model.train()
    return statistics.fmean(losses)


def run(options: argparse.Namespace) -> None:
    """Train every way and seed, and append one row each."""
    begun = time.time()
    first, second, held_out = read_blocks(options.device)
    print(f"{time.time() - begun:6.1f} {len(first)}, {len(second)} blocks", flush=True)
    base = pretrained(first, options)
    print(
        f"{time.time() - begun:6.1f} base held out {held_out_loss(base, held_out):.4f}", flush=True
    )
    for seed in range(options.seeds):
        for way in options.ways:
            model = adapted(base, way, seed)
            row: dict[str, Any] = {"way": way, "seed": seed, "steps": options.steps}
            row["reasons"] = sorted({line.reason for line in patch_report(model)})
            data = batches(second, seed)
            compares = seed == 0 and way in ("fp8", "fp8_copy")
            if compares:
                row["gradients"] = {"0": study(adapted(base, way, seed), next(data), way == "fp8")}
                show(row, begun)
                data = batches(second, seed)
            losses = train(model, data, options.steps, RATE, options.device)
            row["losses"] = [round(loss, 4) for loss in losses]
            row["last_20"] = round(statistics.fmean(losses[-20:]), 5)
            row["held_out"] = round(held_out_loss(model, held_out), 5)
            if compares:
                row["gradients"][str(options.steps)] = study(model, next(data), way == "fp8")
                show(row, begun)
            write(row, options)
            short = {k: v for k, v in row.items() if k not in ("losses", "gradients")}
            print(f"{time.time() - begun:6.1f}", json.dumps(short), flush=True)


def show(row: dict[str, Any], begun: float) -> None:
    """Print the newest gradients of a row."""
    step, ways = list(row["gradients"].items())[-1]
    for name, found in ways.items():
        numbers = {key: value for key, value in found.items() if key != "where"}
        print(f"{time.time() - begun:6.1f} step {step} {name}: {json.dumps(numbers)}", flush=True)


def write(row: dict[str, Any], options: argparse.Namespace) -> None:
    """Append a row with where it was measured."""
    if options.out is None:
        return
    import transformers

    row = row | {
        "layers": options.layers, "base_steps": options.base_steps, "card": options.device,
        "torch": torch.__version__, "transformers": transformers.__version__,
        "commit": options.commit, "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    if options.device == "cuda":
        import triton

        row |= {"card": torch.cuda.get_device_name(), "triton": triton.__version__}
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the tables of each number of layers."""
    counts = sorted({row["layers"] for row in rows})
    return "\n\n".join(
        f"{count} layers\n" + _table([row for row in rows if row["layers"] == count])
        for count in counts
    )


def _table(rows: list[dict[str, Any]]) -> str:
    """Return the gradients by step and way, and the final losses by way and seed."""
    lines = ["step | gradients | least cosine | of experts | median | below 0.998 | largest error"]
    for row in rows:
        for step, ways in row.get("gradients", {}).items():
            for name, found in ways.items():
                if row["way"] != "fp8" and row["way"] not in name:
                    continue
                lines.append(
                    f"{step} of {row['way']} | {name} | {found['cosine']:.5f} | "
                    f"{found['expert_cosine']:.5f} | {found['median_cosine']:.5f} | "
                    f"{found['below_0.998']} of {found['tensors']} | {found['error']:.3f}"
                )
    lines.append("way | held-out loss by seed | mean training loss of the last 20 steps by seed")
    for way in WAYS:
        chosen = [row for row in rows if row["way"] == way]
        if chosen:
            held, last = (
                ", ".join(f"{r[key]:.4f}" for r in chosen) for key in ("held_out", "last_20")
            )
            lines.append(f"{way} | {held} | {last}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to append the rows to")
    parser.add_argument("--commit", default="", help="the commit that runs, for the rows")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--base-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--table", type=Path, help="rows to print instead")
    options = parser.parse_args()
    if options.table is None:
        return run(options)
    lines = options.table.read_text(encoding="utf-8").splitlines()
    print(table([json.loads(line) for line in lines]))


if __name__ == "__main__":
    main()
