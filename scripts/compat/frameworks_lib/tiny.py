"""Make a tiny model, a tokenizer of bytes, and rows of every kind of data: tiny.py FOLDER FAMILY.

Runs in a framework's own environment. Random weights, fp32; nothing comes from a hub.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pyarrow.json
import pyarrow.parquet
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<pad>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHARED = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512,
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 3, "num_experts_per_tok": 2,
}  # fmt: skip
FAMILIES = {
    "qwen3_moe": {
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 0, "kv_lora_rank": 16, "q_lora_rank": 24,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    },
}  # fmt: skip
WORDS = ["river", "engine", "garden", "number", "window", "planet", "letter", "winter"]


def tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate(SPECIAL + alphabet)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=SPECIAL[0], eos_token=SPECIAL[2], pad_token=SPECIAL[3],
        model_max_length=512,
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    return fast


def rows(kind: str) -> list[dict]:
    """Make one hundred rows for "sft", "dpo" or "grpo"."""
    draw = random.Random(0)
    made = []
    for place in range(100):
        a, b, n = draw.choice(WORDS), draw.choice(WORDS), draw.randrange(100)
        ask = [{"role": "user", "content": f"Row {place}: what of the {a} and the {b}?"}]
        good, bad = (
            [{"role": "assistant", "content": text}]
            for text in (f"The {a} has {n}, the {b} {100 - n}.", f"No {b} has {n} of the {a}.")
        )
        forms = {
            "sft": {"messages": ask + good},
            "dpo": {"prompt": ask, "chosen": good, "rejected": bad},
            "grpo": {"prompt": ask},
        }
        made.append(forms[kind])
    return made


def main(folder: Path, family: str) -> None:
    fast = tokenizer()
    fast.save_pretrained(folder / "tiny")
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHARED, **FAMILIES[family], vocab_size=len(fast))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Routers of the default size choose almost at random; larger weights spread the scores.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                parameter.normal_(0, 0.5)
    model.save_pretrained(folder / "tiny")
    for kind in ("sft", "dpo", "grpo"):
        (folder / kind).mkdir(exist_ok=True)
        text = "".join(json.dumps(row) + "\n" for row in rows(kind))
        (folder / kind / "train.jsonl").write_text(text)
    table = pyarrow.json.read_json(folder / "sft" / "train.jsonl")
    pyarrow.parquet.write_table(table, folder / "sft.parquet")
    (folder / "rewards.py").write_text(
        "def even(completions, **_):\n"
        '    texts = [c[-1]["content"] for c in completions]\n'
        "    return [sum(ord(x) % 2 == 0 for x in t) / max(1, len(t)) for t in texts]\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
