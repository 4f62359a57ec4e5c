"""A user's MoE family outside of transformers: decorated experts, a router and a block."""

from __future__ import annotations

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.integrations.moe import use_experts_implementation


class ToyConfig(PreTrainedConfig):
    model_type = "toy_moe"


class ToyRouter(nn.Module):
    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.chosen = 2
        self.weight = nn.Parameter(torch.randn(experts, hidden) * 0.5)

    def forward(self, hidden_states):
        logits = nn.functional.linear(hidden_states, self.weight)
        weights, ids = logits.softmax(-1, dtype=torch.float32).topk(self.chosen)
        return logits, weights / weights.sum(-1, keepdim=True), ids


@use_experts_implementation
class ToyExperts(nn.Module):
    def __init__(self, config, experts: int, hidden: int, width: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * width, hidden) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, width) * 0.3)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            token, slot = (top_k_index == e).nonzero(as_tuple=True)
            gate, up = (hidden_states[token] @ self.gate_up_proj[e].T).chunk(2, dim=-1)
            y = (self.act_fn(gate) * up) @ self.down_proj[e].T
            out = out.index_add(0, token, y * top_k_weights[token, slot, None])
        return out


class ToyBlock(nn.Module):
    def __init__(self, config) -> None:
        super().__init__()
        self.picker = ToyRouter(4, 8)
        self.experts = ToyExperts(config, 4, 8, 6)
        self.shared = nn.Linear(8, 8)

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, ids = self.picker(x)
        return (self.experts(x, ids, weights) + self.shared(x)).view(hidden_states.shape)


class ToyModel(nn.Module):
    """Two blocks and a residual; forward takes the batch of tests.support.adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.config = ToyConfig(experts_implementation="eager")
        self.layers = nn.ModuleList(ToyBlock(self.config) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return transformers.utils.ModelOutput(logits=x, loss=x.square().mean())
