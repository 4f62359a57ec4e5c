"""Classes of transformers as another release might have them: unlike their family entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen2_moe import modeling_qwen2_moe as qwen2_moe

# The cases change this family as well, which transformers before 5.15 does not have.
step3p7 = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")

Block = qwen2_moe.Qwen2MoeSparseMoeBlock
Router = qwen2_moe.Qwen2MoeTopKRouter
Experts = qwen2_moe.Qwen2MoeExperts
StepRouter = step3p7.Step3p7TopKRouter
ROUTER, BLOCK, EXPERTS = Router.forward, Block.forward, Experts.forward.__wrapped__
ROUTER_INIT, BLOCK_INIT = Router.__init__, Block.__init__
MLP, STEP_ROUTER = qwen2_moe.Qwen2MoeMLP.forward, StepRouter.forward


def flat(hidden_states):
    return hidden_states.view(-1, hidden_states.shape[-1])


def finish(self, hidden_states, weights, ids):
    """Compute the block's output from the router's choice."""
    x = flat(hidden_states)
    shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
    return (self.experts(x, ids, weights) + shared).view(hidden_states.shape)


def router_of_two_values(self, hidden_states):
    return ROUTER(self, hidden_states)[1:]


def block_of_two_values(self, hidden_states):
    return finish(self, hidden_states, *self.gate(flat(hidden_states)))


def router_of_another_order(self, hidden_states):
    logits, weights, ids = ROUTER(self, hidden_states)
    return logits, ids, weights


def block_of_another_order(self, hidden_states):
    _, ids, weights = self.gate(flat(hidden_states))
    return finish(self, hidden_states, weights, ids)


def router_with_an_argument(self, hidden_states, scale):
    logits, weights, ids = ROUTER(self, hidden_states)
    return logits, scale * weights, ids


def block_with_an_argument(self, hidden_states):
    _, weights, ids = self.gate(flat(hidden_states), 2.0)
    return finish(self, hidden_states, weights, ids)


def router_init_of_another_flag(self, config):
    ROUTER_INIT(self, config)
    self.normalise = self.__dict__.pop("norm_topk_prob")


def router_of_another_flag(self, hidden_states):
    logits = nn.functional.linear(hidden_states, self.weight)
    weights, ids = logits.softmax(-1).topk(self.top_k)
    return logits, weights / weights.sum(-1, keepdim=True) if self.normalise else weights, ids


def router_init_of_a_list(self, config):
    ROUTER_INIT(self, config)
    self.top_k = [self.top_k]


def router_of_a_list(self, hidden_states):
    logits = nn.functional.linear(hidden_states, self.weight)
    weights, ids = logits.softmax(-1).topk(self.top_k[0])
    return logits, weights / weights.sum(-1, keepdim=True) if self.norm_topk_prob else weights, ids


def block_init_with_a_plain_gate(self, config):
    BLOCK_INIT(self, config)
    self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)


def block_with_a_plain_gate(self, hidden_states):
    return finish(self, hidden_states, *self.gate(flat(hidden_states)).softmax(-1).topk(2))


def block_init_of_another_name(self, config):
    BLOCK_INIT(self, config)
    self.shared_mlp = self._modules.pop("shared_expert")


def block_of_another_name(self, hidden_states):
    x = flat(hidden_states)
    _, weights, ids = self.gate(x)
    shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_mlp(x)
    return (self.experts(x, ids, weights) + shared).view(hidden_states.shape)


def block_that_returns_logits(self, hidden_states):
    return BLOCK(self, hidden_states), self.gate(flat(hidden_states))[0]


def block_with_a_mask(self, hidden_states, mask):
    return BLOCK(self, hidden_states) * mask


def mlp_with_an_argument(self, x, scale):
    return scale * MLP(self, x)


def block_with_a_scaled_mlp(self, hidden_states):
    x = flat(hidden_states)
    _, weights, ids = self.gate(x)
    shared = torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x, 2.0)
    return (self.experts(x, ids, weights) + shared).view(hidden_states.shape)


def router_with_a_batch(self, hidden_states):
    logits, weights, ids = STEP_ROUTER(self, hidden_states)
    return logits[None], weights, ids


def doubled_experts(self, *args):
    return 2 * EXPERTS(self, *args)


def experts_without_weights(self, hidden_states, top_k_index):
    return EXPERTS(self, hidden_states, top_k_index, torch.ones_like(top_k_index))


def doubled_weights(self, hidden_states):
    logits, weights, ids = ROUTER(self, hidden_states)
    return logits, 2 * weights, ids


def one_expert_more(self, hidden_states):
    logits = nn.functional.linear(hidden_states, self.weight)
    return logits, *logits.softmax(-1).topk(self.top_k + 1)


# Changes that another release may make, and the reason given for each.
CHANGES: dict[str, tuple[dict[tuple[type, str], Any], str]] = {
    "two values": (
        {(Router, "forward"): router_of_two_values, (Block, "forward"): block_of_two_values},
        r"TopKRouter: .* it returns \(float32 \(48, 2\), int64 \(48, 2\)\), its entry \(float32",
    ),
    "another order": (
        {(Router, "forward"): router_of_another_order, (Block, "forward"): block_of_another_order},
        r"TopKRouter: .* it returns \(float32 \(48, 8\), int64 \(48, 2\), float32 \(48, 2\)\)",
    ),
    "another argument": (
        {(Router, "forward"): router_with_an_argument, (Block, "forward"): block_with_an_argument},
        r"TopKRouter: .* its forward takes \(self, hidden_states, scale\), the entry calls it",
    ),
    "another flag": (
        {
            (Router, "__init__"): router_init_of_another_flag,
            (Router, "forward"): router_of_another_flag,
        },
        "TopKRouter has no attribute 'norm_topk_prob': its family entry",
    ),
    "a list for a number": (
        {(Router, "__init__"): router_init_of_a_list, (Router, "forward"): router_of_a_list},
        r"TopKRouter: .*\): the entry's code fails on it \(TypeError: ",
    ),
    "no router class": (
        {
            (Block, "__init__"): block_init_with_a_plain_gate,
            (Block, "forward"): block_with_a_plain_gate,
        },
        "SparseMoeBlock: .* there is no Qwen2MoeTopKRouter in the block",
    ),
    "another name of the shared expert": (
        {
            (Block, "__init__"): block_init_of_another_name,
            (Block, "forward"): block_of_another_name,
        },
        "SparseMoeBlock has no attribute 'shared_expert': its family entry",
    ),
    "shared expert with another argument": (
        {
            (qwen2_moe.Qwen2MoeMLP, "forward"): mlp_with_an_argument,
            (Block, "forward"): block_with_a_scaled_mlp,
        },
        r"SparseMoeBlock: .*: the entry's code fails on it \(TypeError: .*'scale'",
    ),
    "block returns logits": (
        {(Block, "forward"): block_that_returns_logits},
        r"SparseMoeBlock: .* it returns \{'block output 0'.*'block output 1'.* its entry \{",
    ),
    "block with another argument": (
        {(Block, "forward"): block_with_a_mask},
        r"SparseMoeBlock: .* its forward takes \(self, hidden_states, mask\), the entry calls it",
    ),
}
SEEN_BEFORE_A_CALL = ("another flag", "no router class", "another name of the shared expert")
