# mypy: ignore-errors
"""Gradients of one block of queries (dq) and of one block of keys (dk, dv).

With p = softmax(s) and H = -sum p log p a row of scores receives

    ds = p (dp - sum p dp - dH (log p + H)),     dp_j = do·v_j,     sum p dp = do·o.

``shared = do·o + dH H`` is one number for each row; the queries' kernel leaves it for the keys'.
Heads that share keys are summed in registers, so nothing is added atomically and two runs agree to
the bit.
"""

import triton
import triton.language as tl

from vort.ops.gpu.parts import fence_loads, load_column, load_rows, store_rows

from .sight import LN2, LOG2E, MASKED, first_seen, in_sight


@triton.jit(do_not_specialize=["T", "shift", "window"])
def query_kernel(
    q, k, v, start, valid, o, lse, entropy, do, dentropy, dq, shared_out, T, shift, window, scale,
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
    total = load_column(lse, token, T - t0, h, H, 0, 1, BM)
    shared = tl.sum(ot.to(tl.float32) * dot.to(tl.float32), axis=1)
    if ENTROPY:
        dH = load_column(dentropy, token, T - t0, h, H, 0, 1, BM)
        shared += dH * load_column(entropy, token, T - t0, h, H, 0, 1, BM)
    tl.store(shared_out + (token + tl.arange(0, BM)) * H + h, shared, mask=queries < T)
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
            ds -= (dH * LN2)[:, None] * s
        ds *= tl.exp2(s)
        acc = tl.dot(ds.to(kt.dtype), kt, acc, input_precision=PREC)
    store_rows(dq, acc * scale, token, T - t0, h, H, 0, D, BM, BD)


@triton.jit(do_not_specialize=["T", "shift", "window"])
def key_kernel(
    q, k, v, start, valid, lse, shared_rows, do, dentropy, dk, dv, T, shift, window, scale,
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
        total = load_column(lse, token, T - t0, h, H, 0, 1, BM)
        shared = load_column(shared_rows, token, T - t0, h, H, 0, 1, BM)
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
            dH = load_column(dentropy, token, T - t0, h, H, 0, 1, BM)
            ds -= (dH * LN2)[None, :] * s
        ds *= p
        dkt = tl.dot(ds.to(qt.dtype), qt, dkt, input_precision=PREC)
    store_rows(dk, dkt * scale, key_token, left, g, HKV, 0, D, BN, BD)
    store_rows(dv, dvt, key_token, left, g, HKV, 0, V, BN, BV)
