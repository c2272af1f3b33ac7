# mypy: ignore-errors
"""Products that lose nothing of a float32 weight although the tensor cores multiply bfloat16.

A float32 number is the sum of two bfloat16 numbers up to its 16th bit. So a tile of bfloat16
inputs times float32 weights is two products in bfloat16 with float32 sums: what one product in
tf32 costs, with six more bits of the weight. An exponential follows: an error of the logit is a
relative error of the feature.
"""

import triton
import triton.language as tl


@triton.jit
def product(a, b, acc, NARROW: tl.constexpr):
    """``acc + a b`` with b in float32 and a in NARROW, the type of the inputs, or in float32."""
    if tl.float32 == NARROW:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        high = b.to(NARROW)
        low = (b - high.to(tl.float32)).to(NARROW)
        a_high = a.to(NARROW)
        acc = tl.dot(a_high, low, acc)
        if a.dtype == tl.float32:
            a_low = (a - a_high.to(tl.float32)).to(NARROW)
            acc = tl.dot(a_low, high, acc)
        acc = tl.dot(a_high, high, acc)
    return acc
