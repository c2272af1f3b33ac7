# mypy: ignore-errors
"""Attention of one block of queries, and the gradients of a block of queries and of keys.

Forward: one walk over the keys of a block's window. With m the largest score so far,
l = sum exp(s - m) and u = sum exp(s - m) (s - m), the row's entropy is log l - u / l: one more sum
beside those of a softmax on the fly, and no cancellation, since m is the maximum. Scores are in
base 2.

Backward: with p = softmax(s) and H = -sum p log p a row of scores receives

    ds = p (dp - sum p dp - dH (log p + H)),     dp_j = do·v_j,     sum p dp = do·o.

``shared = do·o + dH H`` is one number for each row, the slope dH another; the queries' kernel
leaves them for the keys', in an order in which they are loaded several at once.
Heads that share keys are summed in registers, so nothing is added atomically and two runs agree to
the bit.
"""

import triton
import triton.language as tl

from vort.ops.gpu.parts import (
    LN2,
    LOG2E,
    fence_loads,
    keep_branch,
    load_column,
    load_rows,
    store_rows,
)

# The score of a key out of sight. Finite, because 0 * MASKED must be 0.
MASKED = tl.constexpr(-1.0e20)
# The least maximum a row may have: exp2(MASKED - FLOOR) is 0 even where a row sees no key.
FLOOR = tl.constexpr(-1.0e10)
# The least factor of a product: with it a key out of sight still counts nothing.
LEAST = tl.constexpr(1.0e-15)


@triton.jit
def first_seen(start, t0, shift, window, HAS_START: tl.constexpr):
    """The first key that any of the queries from t0 on may see."""
    first = tl.maximum(t0 + shift - window + 1, 0)
    if HAS_START:  # starts do not decrease
        first = tl.maximum(first, tl.load(start + t0).to(tl.int32))
    return first


@triton.jit
def row_at(b, h, t0, T, H: tl.constexpr, BLOCK: tl.constexpr):
    """Where numbers of queries from t0 on lie in ``[B, H, T]``, T filled up to whole blocks.

    Side by side and at known multiples, so that several are loaded at once; those beyond T exist.
    """
    return (b * H + h).to(tl.int64) * (tl.cdiv(T, BLOCK) * BLOCK) + t0


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
    if queries.shape[0] * keys.shape[0] > 2048:
        sight = (col <= row) & (col > row - window)
    else:
        # one comparison for both ends, where there are registers for it: a key yet to come is far
        # behind, unsigned
        sight = (row - col).to(tl.uint32, bitcast=True) < window.to(tl.uint32, bitcast=True)
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


@triton.jit(do_not_specialize=["T", "shift", "window"])
def attend_kernel(
    q, k, v, start, valid, o, lse, entropy, T, shift, window, scale,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_START: tl.constexpr,
    HAS_VALID: tl.constexpr, ENTROPY: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``o``, ``entropy`` and the base-2 log of the softmax's sum of BM queries, one head.

    The scale is not negative: the greatest product of a row is its greatest score.
    """
    pid = tl.program_id(0)
    h = pid % H
    blocks = tl.cdiv(T, BM)
    t0 = (pid // H) % blocks * BM
    b = pid // (H * blocks)
    queries = t0 + tl.arange(0, BM)
    token = b.to(tl.int64) * T + t0
    key_token = b.to(tl.int64) * (T + shift)
    qt = load_rows(q, token, T - t0, h, H, 0, D, BM, BD)
    unit = tl.maximum(scale * LOG2E, LEAST)
    m = tl.full([BM], FLOOR, dtype=tl.float32)
    l = tl.zeros([BM], dtype=tl.float32)
    u = tl.zeros([BM], dtype=tl.float32)
    acc = tl.zeros([BM, BV], dtype=tl.float32)
    first = first_seen(start, t0, shift, window, HAS_START) // BN * BN
    last = tl.minimum(t0 + BM, T) + shift
    for j in range(first, last, BN):
        kt = load_rows(k, key_token + j, last - j, h // (H // HKV), HKV, 0, D, BN, BD)
        vt = load_rows(v, key_token + j, last - j, h // (H // HKV), HKV, 0, V, BN, BV)
        fence_loads(j)
        s = tl.dot(qt, tl.trans(kt), input_precision=PREC)
        if HAS_START or HAS_VALID:
            sight = in_sight(
                queries, j + tl.arange(0, BN), start, valid, b, T, shift, window,
                HAS_START, HAS_VALID, False,
            )  # fmt: skip
            s = tl.where(sight, s, MASKED)
        else:
            # all queries see most keys: those at the ends of a window alone are asked about
            row = (queries + shift)[:, None]
            col = (j + tl.arange(0, BN))[None, :]
            if j + BN > t0 + shift + 1:
                keep_branch(j)
                s = tl.where(col <= row, s, MASKED)
            if j + window < t0 + shift + BM:
                keep_branch(j)
                s = tl.where(col > row - window, s, MASKED)
        higher = tl.maximum(m, tl.max(s, axis=1))
        lower = (m - higher) * unit
        fade = tl.exp2(lower)
        s = s * unit - (higher * unit)[:, None]
        p = tl.exp2(s)
        if ENTROPY:
            u = (u + lower * l) * fade + tl.sum(p * s, axis=1)
        l = l * fade + tl.sum(p, axis=1)
        m = higher
        acc = tl.dot(p.to(vt.dtype), vt, acc * fade[:, None], input_precision=PREC)
    # a row that sees no key has no output and no entropy
    one = tl.where(l > 0, l, 1.0)
    acc *= (1.0 / one)[:, None]
    store_rows(o, acc, token, T - t0, h, H, 0, V, BM, BV)
    tl.store(lse + row_at(b, h, t0, T, H, BM) + tl.arange(0, BM), m * unit + tl.log2(one))
    if ENTROPY:
        rows = (token + tl.arange(0, BM)) * H + h
        tl.store(entropy + rows, (tl.log2(one) - u / one) * LN2, mask=queries < T)


@triton.jit(do_not_specialize=["T", "shift", "window"])
def attended_query_kernel(
    q, k, v, start, valid, o, lse, entropy, do, dentropy, dq, shared_out, slope_out,
    T, shift, window, scale,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_START: tl.constexpr,
    HAS_VALID: tl.constexpr, ENTROPY: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``dq`` of BM queries, one head, and what their rows share."""
    pid = tl.program_id(0)
    h = pid % H
    blocks = tl.cdiv(T, BM)
    t0 = (pid // H) % blocks * BM
    b = pid // (H * blocks)
    queries = t0 + tl.arange(0, BM)
    token = b.to(tl.int64) * T + t0
    key_token = b.to(tl.int64) * (T + shift)
    qt = load_rows(q, token, T - t0, h, H, 0, D, BM, BD)
    dot = load_rows(do, token, T - t0, h, H, 0, V, BM, BV)
    ot = load_rows(o, token, T - t0, h, H, 0, V, BM, BV)
    rows = row_at(b, h, t0, T, H, BM) + tl.arange(0, BM)
    total = tl.load(lse + rows)
    shared = tl.sum(ot.to(tl.float32) * dot.to(tl.float32), axis=1)
    if ENTROPY:
        dH = load_column(dentropy, token, T - t0, h, H, 0, 1, BM)
        shared += dH * load_column(entropy, token, T - t0, h, H, 0, 1, BM)
        dH *= LN2
        tl.store(slope_out + rows, dH)
    tl.store(shared_out + rows, shared)
    acc = tl.zeros([BM, BD], dtype=tl.float32)
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
        s = tl.where(sight, s - total[:, None], MASKED)
        ds = tl.dot(dot, tl.trans(vt), input_precision=PREC) - shared[:, None]
        if ENTROPY:
            ds -= dH[:, None] * s
        ds *= tl.exp2(s)
        acc = tl.dot(ds.to(kt.dtype), kt, acc, input_precision=PREC)
    store_rows(dq, acc * scale, token, T - t0, h, H, 0, D, BM, BD)


@triton.jit(do_not_specialize=["T", "shift", "window"])
def attended_key_kernel(
    q, k, v, start, valid, lse, shared_rows, slopes, do, dk, dv, T, shift, window, scale,
    H: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, HAS_START: tl.constexpr,
    HAS_VALID: tl.constexpr, ENTROPY: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``dk`` and ``dv`` of BN keys, one head of keys; scores are ``[keys, queries]``."""
    GROUP: tl.constexpr = H // HKV
    pid = tl.program_id(0)
    g = pid % HKV
    blocks = tl.cdiv(T + shift, BN)
    j0 = (pid // HKV) % blocks * BN
    b = pid // (HKV * blocks)
    keys = j0 + tl.arange(0, BN)
    left = T + shift - j0
    key_token = b.to(tl.int64) * (T + shift) + j0
    kt = load_rows(k, key_token, left, g, HKV, 0, D, BN, BD)
    vt = load_rows(v, key_token, left, g, HKV, 0, V, BN, BV)
    dkt = tl.zeros([BN, BD], dtype=tl.float32)
    dvt = tl.zeros([BN, BV], dtype=tl.float32)
    first = tl.maximum(j0 - shift, 0) // BM
    last = tl.maximum(tl.minimum(j0 + BN - 1 - shift + window, T), 0)
    count = tl.maximum(tl.cdiv(last, BM) - first, 0)
    for it in range(count * GROUP):
        h = g * GROUP + it // count
        t0 = (first + it % count) * BM
        token = b.to(tl.int64) * T + t0
        qt = load_rows(q, token, T - t0, h, H, 0, D, BM, BD)
        dot = load_rows(do, token, T - t0, h, H, 0, V, BM, BV)
        rows = row_at(b, h, t0, T, H, BN) + tl.arange(0, BM)
        total = tl.load(lse + rows)
        shared = tl.load(shared_rows + rows)
        queries = t0 + tl.arange(0, BM)
        sight = in_sight(
            queries, keys, start, valid, b, T, shift, window, HAS_START, HAS_VALID, True
        )
        fence_loads(it)
        # queries beyond the last one read as zero: their scores are finite, their do is nothing
        s = tl.dot(kt, tl.trans(qt), input_precision=PREC) * (scale * LOG2E)
        s = tl.where(sight, s - total[None, :], MASKED)
        p = tl.exp2(s)
        dvt = tl.dot(p.to(dot.dtype), dot, dvt, input_precision=PREC)
        ds = tl.dot(vt, tl.trans(dot), input_precision=PREC) - shared[None, :]
        if ENTROPY:
            ds -= tl.load(slopes + rows)[None, :] * s
        ds *= p
        dkt = tl.dot(ds.to(qt.dtype), qt, dkt, input_precision=PREC)
    store_rows(dk, dkt * scale, key_token, left, g, HKV, 0, D, BN, BD)
    store_rows(dv, dvt, key_token, left, g, HKV, 0, V, BN, BV)
