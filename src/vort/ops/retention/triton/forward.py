# mypy: ignore-errors

"""Outputs of one block of tokens: what the states hold, plus the masked matrix inside the span."""

import triton
import triton.language as tl

from vort.ops.gpu.parts import (
    fence_loads,
    finished,
    keep_branch,
    load_rows,
    narrow,
    store_rows,
    widen,
)

from .tiles import (
    column_factors,
    column_of,
    later,
    load_normalizer,
    load_rates,
    load_scales,
    load_state,
    remembered,
    row_factors,
    same,
    span_bounds,
    with_itself,
)


@triton.jit(do_not_specialize=["T", "SPANS", "rate_h"])
def output_kernel(
    q, k, v, write, read, log_decay, G, b, o, den_out, table, wanted, T, SPANS, rate_h, eps,
    H: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SPAN: tl.constexpr, BT: tl.constexpr,
    NORM: tl.constexpr, HAS_READ: tl.constexpr, SELF: tl.constexpr, VARLEN: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """``o`` of BT tokens, BV value columns, one head; ``den_out`` keeps the raw normaliser.

    ``wanted``: 0 for blocks that nobody looks at; they get zeros, and a normaliser of 1.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    BLOCKS: tl.constexpr = SPAN // BT
    pid = tl.program_id(0)
    vb = pid % NV
    block = (pid // NV) % BLOCKS
    h = (pid // (NV * BLOCKS)) % H
    span = pid // (NV * BLOCKS * H)
    start, end = span_bounds(span, table, T, SPANS, SPAN, VARLEN)
    t0 = start + block * BT
    if t0 >= end:
        return
    n = (end - t0).to(tl.int32)
    at = tl.arange(0, BT)
    if wanted is not None:
        if tl.load(wanted + span * BLOCKS + block) == 0:
            if NORM > 0:
                if vb == 0:
                    ones = tl.full([BT], 1.0, dtype=tl.float32)
                    tl.store(den_out + (t0 + at) * H + h, ones, mask=at < n)
            nothing = tl.zeros([BT, BV], dtype=tl.float32)
            store_rows(o, nothing, t0, n, h, H, vb * BV, V, BT, BV)
            return
    scales = tl.arange(0, SP)
    slot = (span * H + h).to(tl.int64)
    qt = load_rows(q, t0, n, h, H, 0, K, BT, BK)
    dtype = qt.dtype
    acc = tl.zeros([BT, BV], dtype=tl.float32)
    since = (at + block * BT + 1).to(tl.float32)

    rates = load_rates(log_decay, h, rate_h, scales, S)
    # what comes after the states is asked for before them
    if NORM == 1:
        bt = load_normalizer(b, slot, scales, S, K, BK).to(dtype)
    fades = tl.exp2(rates[None, :] * since[:, None])
    if HAS_READ:
        readt = load_scales(read, t0, n, h, H, scales, S, BT)
        fades *= readt
    for s in range(remembered(rates, block * BT, S, SP)):
        f = column_of(fades, s, SP)
        g = load_state(G, slot * S + s, 0, vb * BV, K, V, BK, BV)
        fence_loads(s)
        # scaled after the product: q stays put as an operand, and is not rounded S times
        acc += f[:, None] * tl.dot(qt, g, input_precision=PREC)

    den = tl.zeros([BT], dtype=tl.float32)
    row = row_factors(rates, 0, BT)
    if HAS_READ:
        row *= readt
    if NORM == 1:
        # not q b^T: see _sums in states.py
        qb = tl.trans(tl.dot(bt, tl.trans(qt), input_precision=PREC))
        den += tl.sum(qb * fades, axis=1)
    elif NORM == 2:
        ks = tl.arange(0, BK)
        b0 = tl.load(b + slot * K + ks, mask=ks < K, other=0.0)
        den += tl.sum(qt.to(tl.float32) * b0[None, :], axis=1)
    row = row.to(dtype)

    # blocks of the span up to its own
    for j in range(block + 1):
        c0 = start + j * BT
        m = (end - c0).to(tl.int32)
        kt = load_rows(k, c0, m, h, H, 0, K, BT, BK)
        vt = load_rows(v, c0, m, h, H, vb * BV, V, BT, BV)
        writet = load_scales(write, c0, m, h, H, scales, S, BT)
        col = (column_factors(rates, (block - j) * BT, BT, BT) * writet).to(dtype)
        fence_loads(j)
        p = tl.dot(qt, tl.trans(kt), input_precision=PREC)
        w = tl.dot(row, tl.trans(col), input_precision=PREC)
        if NORM == 2:
            plain = p
        if j == block:
            keep_branch(j)
            own = writet
            if HAS_READ:
                own = writet * readt
            w = with_itself(w, own, later(BT), SELF, BT)
            if NORM == 2:
                plain = tl.where(later(BT) | (same(BT) & SELF), p, 0.0)
        # rounded before it is summed: the normaliser and the values see the same weights
        a = narrow(p * w, dtype)
        if NORM == 1:
            den += tl.sum(widen(a), axis=1)
        elif NORM == 2:
            den += tl.sum(plain, axis=1)
        acc += finished(tl.dot(a, vt, input_precision=PREC))

    if NORM > 0:
        acc *= (1.0 / (tl.abs(den) + eps))[:, None]
        if vb == 0:
            tl.store(den_out + (t0 + at) * H + h, den, mask=at < n)
    store_rows(o, acc, t0, n, h, H, vb * BV, V, BT, BV)
