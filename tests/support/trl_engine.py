"""Stand-ins for a vLLM server and a vLLM engine: experts are a function of token and layer."""

from __future__ import annotations

import base64
import io
import json
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

E, L, K = 8, 2, 2


def experts_of(token_N: Tensor) -> Tensor:
    """The stand-in engine's experts, [N, L, K]."""
    first_NL = token_N.unsqueeze(-1) * 3 + torch.arange(L)
    return torch.stack([first_NL, first_NL + 1 + token_N.unsqueeze(-1) % 3], -1) % E


def drawn() -> list[int]:
    """Return a random completion of 2 to 6 tokens."""
    return torch.randint(4, 80, (int(torch.randint(2, 7, ())),)).tolist()


def returned(sequence: list[int]) -> np.ndarray:
    """Return the engine's array: no row for the last token."""
    return experts_of(torch.tensor(sequence))[:-1].numpy().astype("uint8")


class StandInLLM:
    """The part of ``vllm.LLM`` that TRL's colocated mode uses; returns routing only on request."""

    def __init__(self, enable_return_routed_experts: bool = False, **_: Any) -> None:
        self.experts = enable_return_routed_experts

    def generate(self, prompts: list, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        return [self.output(prompt["prompt_token_ids"]) for prompt in prompts]

    def output(self, prompt: list[int]) -> Any:
        completion = drawn()
        completed = SimpleNamespace(
            token_ids=completion,
            logprobs=[{token: SimpleNamespace(logprob=-4.0, rank=1)} for token in completion],
            routed_experts=returned(prompt + completion) if self.experts else None,
        )
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[completed])


class Engine(BaseHTTPRequestHandler):
    """The routes of a vLLM server that TRL's client calls to generate."""

    experts = True

    def log_message(self, *args: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self.answer(
            {
                "data": [{"id": "tiny"}],
                "vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}},
            }
        )

    def do_POST(self) -> None:
        sent = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions"
        prompts = [prompt for prompt in sent["prompt"] for _ in range(sent["n"])]
        self.answer({"choices": [self.choice(prompt) for prompt in prompts]})

    def choice(self, prompt: list[int]) -> dict[str, Any]:
        completion = drawn()
        names = [f"token_id:{token}" for token in completion]
        made = {
            "prompt_token_ids": prompt,
            "token_ids": completion,
            "logprobs": {
                "tokens": names,
                "token_logprobs": [-4.0] * len(names),
                "top_logprobs": [None] * len(names),
            },
        }
        if self.experts:
            with io.BytesIO() as buffer:
                np.save(buffer, returned(prompt + completion), allow_pickle=False)
                made["routed_experts"] = base64.b64encode(buffer.getvalue()).decode("ascii")
        return made

    def answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
