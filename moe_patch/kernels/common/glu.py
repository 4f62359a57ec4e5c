"""Device functions of the gated activations and their derivatives, in fp32.

The formulas are those of ``moe_patch.types.Glu``. Clamps are comparisons, so that NaN stays NaN:
min and max on the GPU would drop it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe_patch.types import Glu

LOG2_E = tl.constexpr(1.4426950408889634)
SQRT_HALF = tl.constexpr(0.7071067811865476)
INV_SQRT_2PI = tl.constexpr(0.3989422804014327)
# gelu_tanh(x) = x * sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)): the same function, one exponential.
TANH_SCALE = tl.constexpr(1.5957691216057308)
TANH_CUBE = tl.constexpr(0.044715)


def glu_constants(glu: Glu, *, fast: bool) -> dict[str, object]:
    """Return the compile-time arguments that select the activation in a kernel.

    Args:
        glu: the activation.
        fast: approximate exponential and division (2 ulp of fp32, far below a 16-bit rounding).
    """
    return {
        "KIND": glu.kind,
        "GATED": glu.gated,
        "INTERLEAVED": glu.interleaved,
        "ALPHA": glu.alpha,
        "LIMIT": glu.limit,
        "CLAMPED": glu.gated and glu.limit != float("inf"),
        "FAST": fast,
    }


@triton.jit
def rounded(x, dtype: tl.constexpr, FAST: tl.constexpr):
    """Round fp32 x to ``dtype`` and back, two values at a time: single ones are a bottleneck."""
    if FAST and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2;"
            " shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }",
            "=r,=r,r,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    if FAST and dtype == tl.float16:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 pair; .reg .b16 low, high; cvt.rn.f16x2.f32 pair, $3, $2;"
            " mov.b32 {low, high}, pair; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
            "=f,=f,f,f", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    return x.to(dtype).to(tl.float32)


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """Return 1 / (1 + exp(-x)); an exact division costs more than the rest of the epilogue."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + tl.exp2(x * (-LOG2_E))],
            dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def act(x, KIND: tl.constexpr, FAST: tl.constexpr):
    """Apply the elementwise activation."""
    if KIND == "silu":
        return x * sigmoid(x, FAST)
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    elif KIND == "gelu_tanh":
        return x * sigmoid((x + x * x * x * TANH_CUBE) * TANH_SCALE, FAST)
    elif KIND == "relu":
        return tl.where(x < 0, 0.0, x)
    else:
        tl.static_assert(KIND == "relu2")
        kept = tl.where(x < 0, 0.0, x)
        return kept * kept


@triton.jit
def act_and_slope(x, KIND: tl.constexpr, FAST: tl.constexpr):
    """Return (act(x), act'(x)), which share the expensive part."""
    if KIND == "silu":
        s = sigmoid(x, FAST)
        value = x * s
        return value, s + value * (1.0 - s)
    elif KIND == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * SQRT_HALF))
        return x * cdf, cdf + x * INV_SQRT_2PI * tl.exp(-0.5 * x * x)
    elif KIND == "gelu_tanh":
        s = sigmoid((x + x * x * x * TANH_CUBE) * TANH_SCALE, FAST)
        slope = s + x * s * (1.0 - s) * (1.0 + x * x * (3.0 * TANH_CUBE)) * TANH_SCALE
        return x * s, slope
    elif KIND == "relu":
        return tl.where(x < 0, 0.0, x), tl.where(x > 0, 1.0, 0.0)
    else:
        tl.static_assert(KIND == "relu2")
        kept = tl.where(x < 0, 0.0, x)
        return kept * kept, 2.0 * kept


@triton.jit
def glu_forward(
    gate, up, KIND: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    CLAMPED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Compute a from gate and up; without a gate, pass h as ``gate``."""
    if not GATED:
        return act(gate, KIND, FAST)
    if CLAMPED:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if KIND == "swiglu_oai":
        return (up + 1.0) * gate * sigmoid(ALPHA * gate, FAST)
    else:  # Triton compiles code after a constexpr return, and act() rejects this kind.
        return act(gate, KIND, FAST) * up


@triton.jit
def glu_backward(
    gate, up, da, KIND: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    CLAMPED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Compute (dgate, dup) from gate, up and the gradient of a; without a gate, dgate is dh."""
    if not GATED:
        value, slope = act_and_slope(gate, KIND, FAST)
        return da * slope, da
    if CLAMPED:
        keep_gate = tl.where(gate > LIMIT, 0.0, 1.0)
        keep_up = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, 1.0)
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if KIND == "swiglu_oai":
        s = sigmoid(ALPHA * gate, FAST)
        dgate = da * (up + 1.0) * (s + ALPHA * gate * s * (1.0 - s))
        dup = da * gate * s
    else:
        value, slope = act_and_slope(gate, KIND, FAST)
        dgate = da * up * slope
        dup = da * value
    if CLAMPED:
        dgate = dgate * keep_gate
        dup = dup * keep_up
    return dgate, dup
