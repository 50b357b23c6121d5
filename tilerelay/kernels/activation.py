"""Bias and activation of a finished tile, in fp32, before it is rounded and stored."""

import triton
import triton.language as tl

NONE = tl.constexpr(0)
RELU = tl.constexpr(1)
GELU = tl.constexpr(2)
SILU = tl.constexpr(3)
CODES = {"none": 0, "relu": 1, "gelu": 2, "silu": 3}


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """relu, gelu (exact, with erf) or silu of fp32 values, as torch.nn.functional defines them."""
    if ACTIVATION == RELU:
        return tl.maximum(x, 0.0)
    elif ACTIVATION == GELU:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == SILU:
        return x / (1.0 + tl.exp(-x))
    else:
        return x
