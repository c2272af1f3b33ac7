# mypy: ignore-errors
"""Output and entropy of one block of queries, in one walk over the keys of its window.

With m the largest score so far, l = sum exp(s - m) and u = sum exp(s - m) (s - m), the row's
entropy is log l - u / l: one more sum beside those of a softmax on the fly, and no cancellation,
since m is the maximum. Scores are in base 2.
"""

import triton
import triton.language as tl

from vort.ops.gpu.parts import fence_loads, load_rows, store_rows

from .sight import FLOOR, LN2, LOG2E, MASKED, first_seen, in_sight


@triton.jit(do_not_specialize=["T", "shift", "window"])
def attend_kernel(
    q, k, v, start, valid, o, lse, entropy, T, shift, window, scale,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_START: tl.constexpr,
    HAS_VALID: tl.constexpr, ENTROPY: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``o``, ``entropy`` and the base-2 log of the softmax's sum of BM queries, one head."""
    pid = tl.program_id(0)
    h = pid % H
    blocks = tl.cdiv(T, BM)
    t0 = (pid // H) % blocks * BM
    b = pid // (H * blocks)
    queries = t0 + tl.arange(0, BM)
    token = b.to(tl.int64) * T + t0
    key_token = b.to(tl.int64) * (T + shift)
    qt = load_rows(q, token, T - t0, h, H, 0, D, BM, BD)
    m = tl.full([BM], FLOOR, dtype=tl.float32)
    l = tl.zeros([BM], dtype=tl.float32)
    u = tl.zeros([BM], dtype=tl.float32)
    acc = tl.zeros([BM, BV], dtype=tl.float32)
    first = first_seen(start, t0, shift, window, HAS_START) // BN * BN
    last = tl.minimum(t0 + BM, T) + shift
    for j in range(first, last, BN):
        kt = load_rows(k, key_token + j, last - j, h // (H // HKV), HKV, 0, D, BN, BD)
        vt = load_rows(v, key_token + j, last - j, h // (H // HKV), HKV, 0, V, BN, BV)
        sight = in_sight(
            queries, j + tl.arange(0, BN), start, valid, b, T, shift, window,
            HAS_START, HAS_VALID, False,
        )  # fmt: skip
        fence_loads(j)
        s = tl.dot(qt, tl.trans(kt), input_precision=PREC) * (scale * LOG2E)
        s = tl.where(sight, s, MASKED)
        higher = tl.maximum(m, tl.max(s, axis=1))
        fade = tl.exp2(m - higher)
        s -= higher[:, None]
        p = tl.exp2(s)
        if ENTROPY:
            u = (u + (m - higher) * l) * fade + tl.sum(p * s, axis=1)
        l = l * fade + tl.sum(p, axis=1)
        m = higher
        acc = tl.dot(p.to(vt.dtype), vt, acc * fade[:, None], input_precision=PREC)
    # a row that sees no key has no output and no entropy
    one = tl.where(l > 0, l, 1.0)
    acc *= (1.0 / one)[:, None]
    store_rows(o, acc, token, T - t0, h, H, 0, V, BM, BV)
    rows = (token + tl.arange(0, BM)) * H + h
    tl.store(lse + rows, m + tl.log2(one), mask=queries < T)
    if ENTROPY:
        tl.store(entropy + rows, (tl.log2(one) - u / one) * LN2, mask=queries < T)
