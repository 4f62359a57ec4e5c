#!/usr/bin/env python3
"""Compare a trainer with its rollout engine, with and without a replay of the engine's routing.

    python benchmarks/studies/replay_study.py                 random weights, a CPU, one minute
    python benchmarks/studies/replay_study.py --steps 150     after a short training, six minutes
    python benchmarks/studies/replay_study.py --steps 60 --updates 14     policy gradient, ten
    python benchmarks/studies/replay_report.py                table and picture of the rows

The trainer is a tiny model in fp32, patched, with random weights or after a short training on
sequences of a random grammar. The engine has the same weights in bf16, its routers included, under
transformers' own experts; bf16 can hold them exactly. Nothing is perturbed. The engine samples
token by token with a cache. KL(trainer || rollout) is over the vocabulary, in nats, per completion
token. Each model and seed gives one row in benchmarks/studies/results/replay_study.jsonl.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from bench_lib import rows as bench_rows  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, OlmoeConfig, Qwen3MoeConfig  # noqa: E402

from moe_patch import patch_model, record_routing, replay_routing  # noqa: E402
from moe_patch.signals.engines import EngineLayers, EngineRows, engine_trace  # noqa: E402
from moe_patch.signals.trace import RoutingTrace  # noqa: E402

RESULTS = ROOT / "benchmarks" / "studies" / "results" / "replay_study.jsonl"
VOCABULARY, PROMPT, NEW = 128, 8, 40
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 128, "initializer_range": 0.2, "use_cache": True,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CONFIGS = {
    "olmoe": OlmoeConfig(
        **SIZES, intermediate_size=32, num_key_value_heads=4, num_experts=32, num_experts_per_tok=4
    ),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, intermediate_size=128, moe_intermediate_size=32, num_key_value_heads=2,
        head_dim=16, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True,
    ),
}  # fmt: skip


def grammar(seed: int) -> Tensor:
    """Return probabilities of the next token, [4 topics, VOCABULARY, VOCABULARY]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, VOCABULARY, VOCABULARY, generator=generator)
    return (3 * logits).softmax(-1)


def sentences(table: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Draw sequences [count, length]; each has one topic."""
    topic_N = torch.randint(4, (count,), generator=generator)
    ids = [torch.randint(VOCABULARY, (count,), generator=generator)]
    for _ in range(length - 1):
        ids.append(torch.multinomial(table[topic_N, ids[-1]], 1, generator=generator).squeeze(1))
    return torch.stack(ids, dim=1)


def trained(name: str, seed: int, steps: int) -> tuple[Any, Tensor]:
    """Return a patched model with weights that bf16 can hold, and prompts for it."""
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[name])
    model = patch_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    table, generator = grammar(seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(steps):
        ids_BS = sentences(table, 16, PROMPT + NEW, generator)
        model(input_ids=ids_BS, labels=ids_BS).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model.eval(), sentences(table, 32, PROMPT, generator)


@dataclass(frozen=True)
class Rollout:
    """A batch as an engine returns it.

    Attributes:
        ids_BS: prompts and completions.
        logprobs_BNV: log-probabilities from which each completion token was drawn, fp32.
        experts_BRLK: routing of all tokens but the last, which was not forwarded.
    """

    ids_BS: Tensor
    logprobs_BNV: Tensor
    experts_BRLK: Tensor


class Engine:
    """The trainer's weights in bf16, under transformers' own experts."""

    def __init__(self, trainer: Any, implementation: str = "batched_mm") -> None:
        config = copy.deepcopy(trainer.config)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.model.set_experts_implementation(implementation)
        self.load(trainer)

    def load(self, trainer: Any) -> None:
        """Copy the trainer's weights."""
        self.model.load_state_dict(trainer.state_dict())

    @contextmanager
    def _routing(self) -> Iterator[list[list[Tensor]]]:
        """Yield a list per layer, to which each forward adds its ids."""
        gates = [layer.mlp.gate for layer in self.model.model.layers]
        seen: list[list[Tensor]] = [[] for _ in gates]
        handles = [
            gate.register_forward_hook(lambda _, __, out, kept=kept: kept.append(out[2]))
            for gate, kept in zip(gates, seen, strict=True)
        ]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def sample(self, prompts_BP: Tensor, new: int, generator: torch.Generator) -> Rollout:
        """Draw completions token by token, as an engine decodes."""
        B = prompts_BP.shape[0]
        ids_BS, part, cache, logprobs = prompts_BP, prompts_BP, None, []
        with self._routing() as seen:
            for _ in range(new):
                out = self.model(input_ids=part, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                logprobs.append(out.logits[:, -1].float().log_softmax(-1))
                part = torch.multinomial(logprobs[-1].exp(), 1, generator=generator)
                ids_BS = torch.cat([ids_BS, part], dim=1)
        layers = [torch.cat([ids.view(B, -1, ids.shape[-1]) for ids in kept], 1) for kept in seen]
        return Rollout(ids_BS, torch.stack(logprobs, 1), torch.stack(layers, 2))


def trace_of(layers: EngineLayers, rollout: Rollout) -> RoutingTrace:
    """Return the engine's routing in the trainer's batch."""
    rows = [
        EngineRows(ids_RLK.numpy().astype("uint8"), rollout.ids_BS.shape[1])
        for ids_RLK in rollout.experts_BRLK
    ]
    return engine_trace(layers, rows, torch.ones_like(rollout.ids_BS)).trace


def kl(logits_BSV: Tensor, rollout: Rollout) -> Tensor:
    """Return KL(trainer || rollout) at each completion token, [B, N]."""
    mine_BNV = logits_BSV[:, PROMPT - 1 : -1].double().log_softmax(-1)
    return (mine_BNV.exp() * (mine_BNV - rollout.logprobs_BNV.double())).sum(-1)


def wrong_traces(trace: RoutingTrace, batch: int, generator: torch.Generator) -> dict[str, Any]:
    """Return traces that must not help: of another sample, and shuffled within each layer."""
    T, L = trace.ids_TLK.shape[:2]
    given_T = (trace.ids_TLK >= 0).flatten(1).all(1)
    at = given_T.nonzero().squeeze(1)
    shuffled = trace.ids_TLK.clone()
    for layer in range(L):
        order = at[torch.randperm(len(at), generator=generator)]
        shuffled[at, layer] = trace.ids_TLK[order, layer]
    other = trace.ids_TLK.view(batch, T // batch, L, -1).roll(1, 0).flatten(0, 1)
    return {
        "another sample": dataclasses.replace(trace, ids_TLK=other),
        "shuffled": dataclasses.replace(trace, ids_TLK=shuffled),
    }


def compare(trainer: Any, engine: Engine, prompts_BP: Tensor, seed: int) -> dict[str, Any]:
    """Return disagreement and KL of one batch, for each trace."""
    generator = torch.Generator().manual_seed(1000 + seed)
    rollout = engine.sample(prompts_BP, NEW, generator)
    trace = trace_of(EngineLayers.of(trainer), rollout)
    ids = {"input_ids": rollout.ids_BS}
    found: dict[str, Any] = {"kl": {}}
    with torch.no_grad():
        with record_routing(trainer) as capture:
            plain = trainer(**ids).logits
        with replay_routing(trainer, capture.trace()):
            found["own ids change no bit"] = torch.equal(trainer(**ids).logits, plain)
        traces = {"engine": trace} | wrong_traces(trace, len(prompts_BP), generator)
        found["kl"]["no replay"] = kl(plain, rollout).mean().item()
        for name, each in traces.items():
            with replay_routing(trainer, each, compare=True) as replay:
                found["kl"][name] = kl(trainer(**ids).logits, rollout).mean().item()
            if name == "engine":
                prescribed, other = replay.counts().tolist()
                found["disagreement of choices, replayed"] = other / prescribed
    found |= disagreement(capture.trace().ids_TLK, trace.ids_TLK)
    found["entropy"] = -(rollout.logprobs_BNV.exp() * rollout.logprobs_BNV).sum(-1).mean().item()
    return found


def disagreement(mine_TLK: Tensor, engine_TLK: Tensor) -> dict[str, float]:
    """Return the shares of choices, routings and tokens in which the two differ."""
    given_T = (engine_TLK >= 0).flatten(1).all(1)
    mine, theirs = mine_TLK[given_T], engine_TLK[given_T]
    other_TLK = (theirs.unsqueeze(-1) != mine.unsqueeze(-2)).all(-1)
    return {
        "disagreement of choices": other_TLK.float().mean().item(),
        "disagreement of routings": other_TLK.any(-1).float().mean().item(),
        "tokens that differ in a layer": other_TLK.flatten(1).any(1).float().mean().item(),
    }


def learn(name: str, seed: int, replay: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Train by policy gradient on the engine's samples; return reward and KL by step.

    The reward is the share of even tokens in a completion. Advantages are normalised per group of
    four, and each token's loss is weighted by the ratio to the rollout's probability, at most 2.
    """
    trainer, prompts_BP = trained(name, seed, options.steps)
    engine, layers = Engine(trainer), EngineLayers.of(trainer)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3, weight_decay=0.0)
    found: dict[str, Any] = {"reward": [], "kl": []}
    for step in range(options.updates):
        start = 8 * step % len(prompts_BP)
        groups_BP = prompts_BP[start : start + 8].repeat_interleave(4, 0)
        rollout = engine.sample(groups_BP, NEW, generator)
        tokens_BN = rollout.ids_BS[:, PROMPT:]
        reward_B = (tokens_BN % 2 == 0).float().mean(1)
        group_G4 = reward_B.view(-1, 4)
        advantage_B = group_G4 - group_G4.mean(1, keepdim=True)
        advantage_B = (advantage_B / (group_G4.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        trace = trace_of(layers, rollout)
        with replay_routing(trainer, trace) if replay else nullcontext():
            logits_BSV = trainer(input_ids=rollout.ids_BS).logits
            mine_BNV = logits_BSV[:, PROMPT - 1 : -1].log_softmax(-1)
            mine_BN, theirs_BN = (
                each.gather(-1, tokens_BN.unsqueeze(-1)).squeeze(-1)
                for each in (mine_BNV, rollout.logprobs_BNV)
            )
            ratio_BN = (mine_BN - theirs_BN).exp().clamp(max=2.0)
            (-ratio_BN * advantage_B).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        engine.load(trainer)
        found["reward"].append(reward_B.mean().item())
        found["kl"].append(kl(logits_BSV.detach(), rollout).mean().item())
    return found


def rows_of(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row per model, seed and kind of measurement."""
    run, date = bench_rows.new_run()
    where = {
        "run": run, "date": date, "commit": options.commit or bench_rows.commit_of(ROOT),
        **bench_rows.machine("cpu"), "steps": options.steps,
    }  # fmt: skip
    for name in options.models:
        for seed in options.seeds:
            row = where | {"model": name, "seed": seed}
            if not options.updates:
                trainer, prompts_BP = trained(name, seed, options.steps)
                yield row | compare(trainer, Engine(trainer), prompts_BP, seed)
                continue
            for replay in (False, True):
                yield row | {"replay": replay, "learn": learn(name, seed, replay, options)}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line described at the top of this file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=sorted(CONFIGS), default=sorted(CONFIGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=0, help="training before the comparison")
    parser.add_argument("--updates", type=int, default=0, help="train by policy gradient instead")
    parser.add_argument("--commit", help="full SHA, where there is no git")
    parser.add_argument("--rows", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for row in rows_of(options):
        line = json.dumps(row)
        print(line, flush=True)
        with options.rows.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
