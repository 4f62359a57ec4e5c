"""Every op of the benchmark, by name. A new op is a module here and one entry in this table."""

from bench_lib.ops.decode import DECODE
from bench_lib.ops.experts import EXPERTS
from bench_lib.ops.lora import LORA

OPS = {op.name: op for op in (EXPERTS, LORA, DECODE)}
