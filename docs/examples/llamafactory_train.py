"""python llamafactory_train.py FILE.yaml: `llamafactory-cli train`, with adapters on experts."""

import functools

from llamafactory.model import adapter
from llamafactory.train.tuner import run_exp

from moe_patch.integrations.trainer import MoePatchCallback

adapter.LoraConfig = functools.partial(  # 0.9.5 has no key for adapters on parameters
    adapter.LoraConfig, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
)

if __name__ == "__main__":
    run_exp(callbacks=[MoePatchCallback()])
