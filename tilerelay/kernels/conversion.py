"""Conversions between fp32 and 16-bit values that are right under Triton's interpreter too.

Triton 3.6's interpreter cuts fp32 off to bf16 where the GPU rounds to the nearest even value, and makes wrong
numbers of subnormals. There the bits are put together by hand; compiled, these are plain conversions.
"""

import triton
import triton.language as tl

from tilerelay.kernels.sync import INTERPRETED


@triton.jit
def widen(x):
    """fp32 of bf16 or fp16 values, exact."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """bf16 or fp16 of fp32 values, rounded to the nearest, ties to even; NaN stays NaN."""
    if INTERPRETED and DTYPE == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x != x, 0x7FC0, rounded).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)
