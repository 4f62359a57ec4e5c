"""Op ``decode``: the experts' forward for a handful of tokens, nothing recorded for backward."""

from __future__ import annotations

import dataclasses

from bench_lib.impls.hf import HF_BATCHED_MM, HF_GROUPED_MM
from bench_lib.impls.ours import BATCH_INVARIANT, EXPERTS_IMPLS
from bench_lib.ops.experts import EXPERTS

DECODE = dataclasses.replace(
    EXPERTS,
    name="decode",
    tokens=(1, 2, 4, 8, 16, 32, 64),
    passes=("fwd",),
    timer="cudagraph",
    grad=False,
    impls=(
        # Tiles depend on the number of tokens when it is this small.
        *(dataclasses.replace(i, compiles="sizes") for i in (EXPERTS_IMPLS[0], BATCH_INVARIANT)),
        HF_BATCHED_MM,
        HF_GROUPED_MM,
    ),
    required=("hf_batched_mm", "hf_grouped_mm"),
)
