# mypy: ignore-errors
"""Which keys a query sees, and the numbers in which scores are kept."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# The score of a key out of sight. Finite, because 0 * MASKED must be 0.
MASKED = tl.constexpr(-1.0e20)
# The least maximum a row may have: exp2(MASKED - FLOOR) is 0 even where a row sees no key.
FLOOR = tl.constexpr(-1.0e10)


@triton.jit
def first_seen(start, t0, shift, window, HAS_START: tl.constexpr):
    """The first key that any of the queries from t0 on may see."""
    first = tl.maximum(t0 + shift - window + 1, 0)
    if HAS_START:  # starts do not decrease
        first = tl.maximum(first, tl.load(start + t0).to(tl.int32))
    return first


@triton.jit
def in_sight(
    queries, keys, start, valid, b, T, shift, window,
    HAS_START: tl.constexpr, HAS_VALID: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Mask ``[queries, keys]``, or ``[keys, queries]`` where TRANSPOSED.

    Query t stands at key ``t + shift`` of ``T + shift``. Rows beyond T may come out as anything:
    nothing of them is kept.
    """
    at = queries + shift
    if TRANSPOSED:
        row = at[None, :]
        col = keys[:, None]
    else:
        row = at[:, None]
        col = keys[None, :]
    sight = (col <= row) & (col > row - window)
    if HAS_START:
        begin = tl.load(start + queries, mask=queries < T, other=0).to(tl.int32)
        if TRANSPOSED:
            sight &= col >= begin[None, :]
        else:
            sight &= col >= begin[:, None]
    if HAS_VALID:
        real = tl.load(valid + b.to(tl.int64) * (T + shift) + keys, mask=keys < T + shift, other=0)
        if TRANSPOSED:
            sight &= (real != 0)[:, None]
        else:
            sight &= (real != 0)[None, :]
    return sight
