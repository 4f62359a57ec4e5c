"""A small YAML node of the training command, shared by its tests."""

from moe_patch.train.config import TrainConfig, make_config

TEXT = (
    "The quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs.\n" * 60
)


def node(**changes):
    """A small valid YAML node; a change of None removes the key."""
    model = {
        "model_type": "qwen3_moe", "hidden_size": 32, "moe_intermediate_size": 16, "head_dim": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.1,
    }  # fmt: skip
    base = {
        "model": model,
        "tokenizer": {"source": "train", "vocab_size": 300},
        "data": {"source": "python-stdlib-docstrings", "block_size": 16},
        "lora": {
            "r": 4,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
        "training": {"max_steps": 3, "use_cpu": True, "disable_tqdm": True, "learning_rate": 0.01},
        "output_dir": "out",
    }
    merged = {**base, **changes}
    return {key: value for key, value in merged.items() if value is not None}


def small(tmp_path, text_file, **changes) -> TrainConfig:
    """Return the small node on a text file, with its output in ``tmp_path``."""
    source = {"source": str(text_file), "block_size": 16}
    return make_config(node(data=source, output_dir=str(tmp_path / "out"), **changes))
