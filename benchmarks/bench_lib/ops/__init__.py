"""Every op of the benchmark, by name. A new op is a module here and one entry in this table."""

from bench_lib.ops.block import BLOCK
from bench_lib.ops.decode import DECODE
from bench_lib.ops.experts import EXPERTS
from bench_lib.ops.fp8 import FP8
from bench_lib.ops.lora import LORA
from bench_lib.ops.model import MODEL
from bench_lib.ops.plan import PLAN
from bench_lib.ops.product_key import PRODUCT_KEY
from bench_lib.ops.quantised import QUANTISED
from bench_lib.ops.routing import ROUTING
from bench_lib.ops.signals import SIGNALS

_ALL = (ROUTING, PRODUCT_KEY, PLAN, EXPERTS, LORA, BLOCK, DECODE, MODEL, SIGNALS, QUANTISED, FP8)
OPS = {op.name: op for op in _ALL}
