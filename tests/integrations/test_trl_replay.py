"""TRL's GRPOTrainer with replay_rollouts: the experts of the rollout run in every pass.

The rollout stands in for an engine: it samples tokens at random, and its experts are a function of
token and layer. So what has to run at a token follows from the token alone, however TRL buffers,
shuffles and splits the batch. Needs TRL and datasets, which only the extra `dev` installs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import HTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_patch import PatchStateError, UnsupportedOptionError, patch_model, record, record_routing
from moe_patch.integrations.trainer import MoePatchCallback
from moe_patch.integrations.trl_engines import returning_experts
from moe_patch.integrations.trl_replay import WRAPPED, replay_rollouts
from tests.support import tiny_models
from tests.support.adapters import EXPERTS, attention, lora_config
from tests.support.dist_helpers import run_ranks
from tests.support.numerics import assert_bits
from tests.support.signals_cases import listening
from tests.support.trl_engine import Engine, K, StandInLLM, drawn, experts_of, returned

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets", reason="datasets is not installed")

from tests.integrations.test_trl import COMMON, rows, texts, tokenizer  # noqa: E402


def word_numbers(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between almost any two completions."""
    return [sum(float(word[1:]) for word in text.split()) for text in completions]


def rollout(prompts: list, trainer: Any) -> dict[str, list]:
    """Random completions of 2 to 6 tokens, and the engine's uint8 array for each."""
    prompt_ids = [trainer.processing_class(text)["input_ids"] for text in prompts]
    completions = [drawn() for _ in prompts]
    pairs = zip(prompt_ids, completions, strict=True)
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": completions,
        "logprobs": [[-4.0] * len(c) for c in completions],
        "routed_experts": [returned(prompt + completion) for prompt, completion in pairs],
    }


def own_routing(prompts: list, trainer: Any) -> dict[str, list]:
    """The same completions with the policy's own routing, each sequence alone."""
    made = rollout(prompts, trainer)
    pairs = zip(made["prompt_ids"], made["completion_ids"], strict=True)
    made["routed_experts"] = []
    for prompt, completion in pairs:
        with record_routing(trainer.model) as capture, torch.no_grad():
            trainer.model(input_ids=torch.tensor([prompt + completion]))
        made["routed_experts"].append(capture.trace().ids_TLK[:-1].numpy())
    return made


def grpo(folder: Any, function: Any = rollout, lora: bool = False, **options: Any) -> Any:
    model = tiny_models.build("qwen3_moe", output_router_logits=False)
    model.generation_config.update(pad_token_id=0, eos_token_id=2)
    config = lora_config(EXPERTS, attention("qwen3_moe"), lora_dropout=0.0) if lora else None
    changed = COMMON | {
        "num_generations": 2, "max_completion_length": 6, "beta": 0.04 if lora else 0.0,
        "gradient_accumulation_steps": 2, "num_iterations": 2,
    } | options  # fmt: skip
    torch.manual_seed(0)
    prompts = [" ".join(text.split()[: 2 + i % 3]) for i, text in enumerate(texts(16, 4, 0))]
    return trl.GRPOTrainer(
        model=model,
        args=trl.GRPOConfig(str(folder), **changed),
        train_dataset=rows(prompt=prompts),
        reward_funcs=word_numbers,
        processing_class=tokenizer(),
        peft_config=config,
        callbacks=[MoePatchCallback()],
        rollout_func=function,
    )


@pytest.fixture
def colocated(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Options of a trainer that generates with a stand-in for an engine in its own process.

    TRL sets a rank's environment for vLLM, and with it the next trainer starts a group of one
    process. Both end here.
    """
    from trl.generation import vllm_generation

    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", StandInLLM, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
    monkeypatch.setattr(vllm_generation.VLLMGeneration, "sync_weights", lambda _: None)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)
    yield {"use_vllm": True, "vllm_mode": "colocate"}
    AcceleratorState._reset_state(reset_partial_state=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Options of a trainer that generates on the stand-in server, by TRL's real client."""
    from trl.generation import vllm_client, vllm_generation

    for module in (vllm_client, vllm_generation):
        monkeypatch.setattr(module, "is_vllm_available", lambda: True)
    # Weights travel by NCCL between cards, which no CPU has.
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda *_, **__: None)
    monkeypatch.setattr(vllm_generation.VLLMGeneration, "sync_weights", lambda _: None)
    engine = HTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=engine.serve_forever, daemon=True)
    thread.start()
    yield {
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_base_url": f"http://127.0.0.1:{engine.server_port}",
    }
    engine.shutdown()
    engine.server_close()
    thread.join()


def watch(trainer: Any, recorder: Any) -> list[bool]:
    """Compare the ids of every forward with those of its tokens; one entry per forward."""
    seen: list[bool] = []

    def after(module: Any, args: tuple, inputs: dict[str, Tensor], out: Any) -> None:
        ids_BS, mask_BS = inputs["input_ids"], inputs["attention_mask"].bool()
        last_B = mask_BS.shape[1] - 1 - mask_BS.flip(1).int().argmax(1)
        mask_BS = mask_BS.clone()
        mask_BS[torch.arange(len(last_B)), last_B] = False
        for index, layer in enumerate(recorder.layers.values()):
            used = layer.ids.reshape(*ids_BS.shape, K)[mask_BS]
            assert torch.equal(used.long(), experts_of(ids_BS[mask_BS])[:, index])
        seen.append(torch.is_grad_enabled())

    trainer.model.register_forward_hook(after, with_kwargs=True)
    return seen


def logged(trainer: Any, name: str) -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_rollouts_experts_run_in_every_pass(lora, tmp_path) -> None:
    """Old policy, reference and policy; two iterations of a shuffled and split batch."""
    trainer = grpo(tmp_path, lora=lora)
    replay_rollouts(trainer)
    gates = {n: p.clone() for n, p in trainer.model.named_parameters() if n.endswith("gate.weight")}
    with record(trainer.model) as recorder:
        seen = watch(trainer, recorder)
        trainer.train()
    per_rollout = 2 if not lora else 4  # chunks of two sequences, twice with a reference
    assert seen.count(True) == 3 * 2
    assert seen.count(False) == 2 * per_rollout
    if not lora:
        for name, gate in gates.items():
            assert not torch.equal(trainer.model.get_parameter(name), gate)
    assert all(0.3 < value < 1 for value in logged(trainer, "moe/replay_disagreement"))
    assert len(logged(trainer, "moe/replay_disagreement")) == 3
    assert set(logged(trainer, "moe/replay_free_tokens")) == {1.0}
    assert all(value > 0 for value in logged(trainer, "moe/rollout_kl"))


def test_a_vllm_servers_answers_are_replayed(server, tmp_path, monkeypatch) -> None:
    """TRL's own client and parsing; then a server that returns no routing."""
    trainer = grpo(tmp_path, None, **server)
    generate = trainer.vllm_generation.generate
    handle = replay_rollouts(trainer)
    with record(trainer.model) as recorder:
        seen = watch(trainer, recorder)
        trainer.train()
    assert seen.count(True) == 3 * 2
    assert seen.count(False) == 2 * 2
    assert set(logged(trainer, "moe/replay_free_tokens")) == {1.0}
    assert len(logged(trainer, "moe/rollout_kl")) == 2
    handle.undo()
    assert trainer.vllm_generation.generate == generate
    assert "_post" not in vars(trainer.vllm_generation.vllm_client)
    monkeypatch.setattr(Engine, "experts", False)
    trainer = grpo(tmp_path, None, **server)
    replay_rollouts(trainer)
    with pytest.raises(UnsupportedOptionError, match="the engine returned no routing"):
        trainer.train()


def test_a_colocated_engines_outputs_are_replayed(colocated, tmp_path) -> None:
    """An engine that returns its routing, and one built as TRL builds it."""
    from trl.generation import vllm_generation

    with returning_experts():
        trainer = grpo(tmp_path, None, **colocated)
    assert vllm_generation.LLM is StandInLLM
    llm, generation = trainer.vllm_generation.llm, trainer.vllm_generation
    before = dict(vars(llm)), dict(vars(generation))
    handle = replay_rollouts(trainer)
    with record(trainer.model) as recorder:
        seen = watch(trainer, recorder)
        trainer.train()
    assert seen.count(True) == 3 * 2
    assert seen.count(False) == 2 * 2
    assert set(logged(trainer, "moe/replay_free_tokens")) == {1.0}
    assert len(logged(trainer, "moe/rollout_kl")) == 2
    handle.undo()
    assert (vars(llm), vars(generation)) == before
    trainer = grpo(tmp_path, None, **colocated)
    replay_rollouts(trainer)
    with pytest.raises(UnsupportedOptionError, match="the engine returned no routing"):
        trainer.train()


def test_without_vllm_no_engine_can_be_asked_for_its_routing() -> None:
    with pytest.raises(UnsupportedOptionError, match="TRL found no vLLM"), returning_experts():
        pass


def shard_by_fsdp2(trainer: Any) -> None:
    """Let the trainer prepare its model by accelerate's FSDP2 plugin; on a CPU it would use DDP."""
    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3MoeDecoderLayer"], cpu_ram_efficient_loading=False,
    )  # fmt: skip


def rank_of(rank: int, kind: str, folder: str) -> tuple[list[bool], dict, dict, str]:
    """Train on one of two ranks; return its forwards, logs and weights, and what wrapped them."""
    torch.manual_seed(rank)
    trainer = grpo(folder, seed=3 + rank, gradient_checkpointing=kind == "ddp")
    if kind == "fsdp2":
        shard_by_fsdp2(trainer)
    replay_rollouts(trainer)
    with record(trainer.model) as recorder:
        seen = watch(trainer, recorder)
        trainer.train()
    names = ("moe/replay_disagreement", "moe/rollout_kl")
    weights = trainer.model.state_dict()
    full = {n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in weights.items()}
    wrapped = type(trainer.model_wrapped).__name__
    return seen, {name: logged(trainer, name) for name in names}, full, wrapped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "wrapper"), [("ddp", "DistributedDataParallel"), ("fsdp2", "FSDPQwen3MoeForCausalLM")]
)
def test_two_ranks_replay_their_own_rollouts(kind, wrapper, tmp_path) -> None:
    """Each forward of a rank runs the experts of its own tokens; weights and logs are shared."""
    first, second = run_ranks(rank_of, kind, str(tmp_path))
    for seen, logs, _, wrapped in (first, second):
        assert wrapped == wrapper
        assert (seen.count(True), seen.count(False)) == (3 * 2, 2 * 2)
        assert logs == first[1]
        assert all(0.3 < value < 1 for value in logs["moe/replay_disagreement"])
    for name, weight in first[2].items():
        assert_bits(weight, second[2][name], name)


def trained(trainer: Any, replay: bool) -> dict[str, Tensor]:
    if replay:
        replay_rollouts(trainer)
    trainer.train()
    return {n: p.detach() for n, p in trainer.model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_recomputes_use_the_same_experts(lora, tmp_path) -> None:
    """Weights after training with and without checkpointing.

    Reentrant checkpoints lose the gradient of transformers' load-balancing loss, so it is off.
    """
    common = {"lora": lora, "router_aux_loss_coef": 0.0}
    expected = trained(grpo(tmp_path, gradient_checkpointing=False, **common), replay=True)
    for reentrant in (False, True):
        kind = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        found = trained(grpo(tmp_path, **kind, **common), replay=True)
        for name, value in expected.items():
            assert_bits(found[name], value)


def test_the_policys_own_routing_changes_no_bit(tmp_path) -> None:
    """With one iteration, in which the policy is that of the rollout."""
    expected = trained(grpo(tmp_path, own_routing_dropped, num_iterations=1), replay=False)
    trainer = grpo(tmp_path, own_routing, num_iterations=1)
    found = trained(trainer, replay=True)
    for name, value in expected.items():
        assert_bits(found[name], value)
    assert set(logged(trainer, "moe/replay_disagreement")) == {0.0}


def own_routing_dropped(prompts: list, trainer: Any) -> dict[str, list]:
    made = own_routing(prompts, trainer)
    del made["routed_experts"]
    return made


def test_undo_leaves_nothing(tmp_path) -> None:
    trainer = grpo(tmp_path, own_routing_dropped)
    own = trainer._generate
    trainer._generate = own  # somebody's attribute of the instance
    before = dict(vars(trainer))
    handle = replay_rollouts(trainer)
    with pytest.raises(PatchStateError, match="already replays"):
        replay_rollouts(trainer)
    handle.undo()
    assert vars(trainer) == before
    del trainer._generate
    trainer.rollout_func = rollout
    handle = replay_rollouts(trainer)
    trainer.train()
    assert not listening(trainer.model)
    assert not trainer.model._forward_pre_hooks
    handle.undo()
    assert {*WRAPPED}.isdisjoint(vars(trainer))
    trainer.rollout_func = own_routing_dropped
    trainer.train()


def wrong(change: Any) -> Any:
    def function(prompts: list, trainer: Any) -> dict[str, list]:
        made = rollout(prompts, trainer)
        change(made)
        return made

    return function


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: made.pop("routed_experts"), "the rollout returned none"),
        (lambda made: made["routed_experts"].pop(), "returned 3 entries .* for 4 completions"),
        (lambda made: made["routed_experts"].reverse(), "sequence [0-3]: routing of shape"),
        (
            lambda made: made["routed_experts"].__setitem__(2, np.full((3, 2, 2), 9)),
            "sequence 2: routing of shape|sequence 2, .*mlp: row 0 has the ids",
        ),
    ],
    ids=["none", "too few", "other sequences", "other ids"],
)
def test_routing_that_does_not_fit_stops_the_training(change, message, tmp_path) -> None:
    trainer = grpo(tmp_path, wrong(change))
    replay_rollouts(trainer)
    with pytest.raises(UnsupportedOptionError, match=message):
        trainer.train()
    assert not listening(trainer.model)


def test_trainers_that_cannot_replay_are_refused(tmp_path) -> None:
    trainer = grpo(tmp_path, None)
    with pytest.raises(UnsupportedOptionError, match="rollout_func=None"):
        replay_rollouts(trainer)
    trainer = grpo(tmp_path)
    trainer.ref_model = tiny_models.build("qwen3_moe")
    with pytest.raises(PatchStateError, match="call patch_model first"):
        replay_rollouts(trainer)
    patch_model(trainer.ref_model, self_check=False)
    replay_rollouts(trainer).undo()
