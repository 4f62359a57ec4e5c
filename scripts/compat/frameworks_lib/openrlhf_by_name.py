"""openrlhf_by_name.py RUN NAME: train OpenRLHF's Actor with an experts implementation by name.

Writes RUN/losses.jsonl. Modules that need a card are stubs: the Actor is real, its trainer is not.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path

import peft  # noqa: F401
import torch
import transformers  # noqa: F401

STUBS = (
    "flash_attn", "flash_attn.bert_padding", "flash_attn.utils", "flash_attn.utils.distributed",
    "deepspeed", "deepspeed.utils", "pylatexenc", "pylatexenc.latex2text",
)  # fmt: skip
STEPS = 20


class Stub(types.ModuleType):
    """A module whose every name is a function that does nothing."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def main(run: Path, name: str) -> None:
    for stub in STUBS:
        sys.modules[stub] = Stub(stub)
        sys.modules[stub].__spec__ = importlib.machinery.ModuleSpec(stub, None)
    sys.modules["deepspeed"].utils = sys.modules["deepspeed.utils"]
    from openrlhf.models.actor import Actor

    actor = Actor("tiny", attn_implementation="eager", experts_implementation=name).float()
    optimizer = torch.optim.AdamW(actor.parameters(), lr=0.003)
    ids = torch.randint(4, 200, (2, 32), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(STEPS):
        mask = torch.ones_like(ids)
        loss = -actor(ids, attention_mask=mask, return_logprobs=True).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    run.mkdir()
    (run / "losses.jsonl").write_text("".join(f"{loss}\n" for loss in losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
