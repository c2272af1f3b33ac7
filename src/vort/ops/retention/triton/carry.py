# mypy: ignore-errors
"""What each segment of a sequence starts from, out of what every part of a segment adds.

One pass over the parts, element by element: the walk over states then reads one state to start
from, instead of the sums of all parts before it, and backward can start from the same ones.
"""

import triton
import triton.language as tl

from .tiles import load_rates


@triton.jit
def _tokens(j, count, n_spans, length, SPAN: tl.constexpr, REVERSE: tl.constexpr):
    """Tokens in ``count`` spans of the walk from the j-th on."""
    lo = tl.minimum(j, n_spans)
    hi = tl.minimum(j + count, n_spans)
    if REVERSE:
        total = tl.minimum((n_spans - lo) * SPAN, length) - tl.minimum(
            (n_spans - hi) * SPAN, length
        )
    else:
        total = tl.minimum(hi * SPAN, length) - tl.minimum(lo * SPAN, length)
    return total.to(tl.float32)


@triton.jit
def _fold(
    pid, sums, first, carry, log_decay, cu, T, rate_h,
    H: tl.constexpr, S: tl.constexpr, M: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
    SPAN: tl.constexpr, SEGMENTS: tl.constexpr, FINE: tl.constexpr, FADES: tl.constexpr,
    REVERSE: tl.constexpr, HAS_FIRST: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """BC of the C numbers of one mode: ``[N, H, parts, M, C]`` to ``[N, H, SEGMENTS, M, C]``."""
    NC: tl.constexpr = (C + BC - 1) // BC
    c = pid % NC * BC + tl.arange(0, BC)
    m = (pid // NC) % M
    row = (pid // (NC * M)).to(tl.int64)
    h = (row % H).to(tl.int32)
    if VARLEN:
        n = row // H
        length = (tl.load(cu + n + 1) - tl.load(cu + n)).to(tl.int32)
    else:
        length = h * 0 + T
    n_spans = (length + SPAN - 1) // SPAN
    per = (n_spans + SEGMENTS * FINE - 1) // (SEGMENTS * FINE)
    rate = 0.0
    if FADES:
        rate = load_rates(log_decay, h, rate_h, m, S)
    acc = tl.zeros([BC], dtype=tl.float32)
    if HAS_FIRST:
        acc += tl.load(first + (row * M + m) * C + c, mask=c < C, other=0.0).to(tl.float32)
    out = carry + (row * SEGMENTS * M + m) * C + c
    tl.store(out, acc, mask=c < C)
    parts = sums + (row * ((SEGMENTS - 1) * FINE) * M + m) * C + c
    for seg in range(SEGMENTS - 1):
        for fine in tl.static_range(FINE):
            g = seg * FINE + fine
            more = tl.load(parts + g * (M * C), mask=c < C, other=0.0)
            acc = acc * tl.exp2(rate * _tokens(g * per, per, n_spans, length, SPAN, REVERSE)) + more
        tl.store(out + (seg + 1) * (M * C), acc, mask=c < C)


@triton.jit(do_not_specialize=["T", "rate_h", "matrices"])
def carry_kernel(
    G_sums, b_sums, G_first, b_first, G_carry, b_carry, log_decay, cu, T, rate_h, matrices,
    H: tl.constexpr, S: tl.constexpr, SB: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BC: tl.constexpr, SPAN: tl.constexpr, SEGMENTS: tl.constexpr, FINE: tl.constexpr,
    NORM: tl.constexpr, REVERSE: tl.constexpr, HAS_FIRST: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """The first ``matrices`` programs fold G, those after them b."""
    pid = tl.program_id(0)
    if pid < matrices:
        _fold(
            pid, G_sums, G_first, G_carry, log_decay, cu, T, rate_h,
            H, S, S, K * V, BC, SPAN, SEGMENTS, FINE, True, REVERSE, HAS_FIRST, VARLEN,
        )  # fmt: skip
    else:
        if NORM > 0:
            _fold(
                pid - matrices, b_sums, b_first, b_carry, log_decay, cu, T, rate_h,
                H, S, SB, K, BC, SPAN, SEGMENTS, FINE, NORM == 1, REVERSE, HAS_FIRST, VARLEN,
            )  # fmt: skip
