"""Keep the routing that TRL's vLLM engines return (read and tested with TRL 1.16.0).

TRL's ``VLLMGeneration.generate`` reads tokens and log-probabilities from an engine's answers and
drops the rest. :class:`EngineRouting` wraps that method on the trainer's instance. While it runs:

- server: the client's ``_post`` is wrapped on the first rank. The answers of
  ``vllm serve --enable-return-routed-experts`` hold ``routed_experts``.
- colocated: ``LLM.generate`` is wrapped on every rank. Each ``CompletionOutput`` has
  ``routed_experts`` if the engine was built with ``enable_return_routed_experts=True``. TRL builds
  the engine without it, unless the trainer is built inside :func:`returning_experts`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moe_patch.errors import UnsupportedOptionError

FIELD = "routed_experts"
MODES = ("server", "colocate")


class Wrapper(functools.partial):
    """A wrapper on an instance, told apart from attributes that others set."""


@contextmanager
def returning_experts() -> Iterator[None]:
    """Let the vLLM engine of a trainer that is built inside return its routing (colocated mode).

        with returning_experts():
            trainer = GRPOTrainer(..., args=GRPOConfig(use_vllm=True, vllm_mode="colocate"))

    TRL has no option for this. Its module's name for ``vllm.LLM`` is replaced inside the ``with``.

    Raises:
        UnsupportedOptionError: vLLM is not installed, so that TRL has no such name.
    """
    from trl.generation import vllm_generation

    if "LLM" not in vars(vllm_generation):
        raise UnsupportedOptionError(
            "returning_experts: TRL found no vLLM; accepted: an environment with vLLM, or a "
            "rollout_func that returns routed_experts"
        )
    own = vllm_generation.LLM
    vllm_generation.LLM = functools.partial(own, enable_return_routed_experts=True)
    try:
        yield
    finally:
        vllm_generation.LLM = own


class EngineRouting:
    """The routing of a trainer's vLLM engine, by generation.

    Args:
        trainer: GRPOTrainer with ``use_vllm=True``.

    Attributes:
        generation: TRL's VLLMGeneration.
    """

    def __init__(self, trainer: Any) -> None:
        self.accelerator, self.generation = trainer.accelerator, trainer.vllm_generation
        self._kept: list[Any] | None = None
        ways = {"server": self._from_server, "colocate": self._from_llm}
        own = self.generation.generate
        self.generation.generate = Wrapper(self._generate, ways[trainer.vllm_mode], own)

    def undo(self) -> None:
        """Remove the wrapper."""
        del self.generation.generate

    def take(self) -> list[Any] | None:
        """Return the routing of the newest completions, and forget it."""
        kept, self._kept = self._kept, None
        return kept

    def _generate(
        self, way: Callable[..., Any], own: Callable[..., Any], *, prompts: list, **options: Any
    ) -> Any:
        if options["images"] is not None:
            raise UnsupportedOptionError(
                "replay_rollouts: the prompts have images; accepted: text, or a rollout_func"
            )
        return way(own, prompts=prompts, **options)

    def _from_server(self, own: Callable[..., Any], *, prompts: list, **options: Any) -> Any:
        """Keep the routing in the answers that TRL's client reads on the first rank."""
        from accelerate.utils import broadcast_object_list

        kept: list[Any] = []

        def read(answer: Any) -> None:
            kept.extend(choice.get(FIELD) for choice in answer.get("choices", ()))

        # Other ranks have no client.
        client = self.generation.vllm_client if self.accelerator.is_main_process else None
        with _watched(client, "_post", read):
            made = own(prompts=prompts, **options)
        everyone = [kept]
        broadcast_object_list(everyone, from_process=0)
        start = self.accelerator.process_index * len(prompts)
        self._kept = everyone[0][start : start + len(prompts)]
        return made

    def _from_llm(self, own: Callable[..., Any], *, prompts: list, **options: Any) -> Any:
        """Keep the routing in the outputs of the engine in this process."""
        kept: list[Any] = []

        def read(outputs: Any) -> None:
            kept.extend(one.routed_experts for output in outputs for one in output.outputs)

        with _watched(self.generation.llm, "generate", read):
            made = own(prompts=prompts, **options)
        # Ranks that share an engine get the outputs of all, in the order of their ranks.
        rank = self.accelerator.process_index % self.generation.tensor_parallel_size
        self._kept = kept[rank * len(prompts) :][: len(prompts)]
        return made


@contextmanager
def _watched(owner: Any, name: str, read: Callable[[Any], None]) -> Iterator[None]:
    """Pass each result of a method of one instance to ``read``; do nothing without an owner."""
    if owner is None:
        yield
        return
    own, before = getattr(owner, name), dict(vars(owner))

    def call(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        read(result)
        return result

    setattr(owner, name, call)
    try:
        yield
    finally:
        if name in before:
            setattr(owner, name, before[name])
        else:
            delattr(owner, name)
