# mypy: ignore-errors

"""Outputs of one block of tokens: what the states hold, plus the masked matrix inside the span."""

import triton
import triton.language as tl

from vort.ops.gpu.fence import fence_loads
from vort.ops.gpu.rows import load_column, load_rows, store_rows

from .tiles import (
    causal,
    diagonal_factors,
    load_modes,
    load_normalizer,
    load_rates,
    load_state,
    span_bounds,
)


@triton.jit(do_not_specialize=["T", "SPANS", "rate_h"])
def output_kernel(
    q, k, v, write, read, log_decay, G, b, o, den_out, table, T, SPANS, rate_h, eps,
    H: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, SD: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SPAN: tl.constexpr, BT: tl.constexpr,
    GB: tl.constexpr,
    NORM: tl.constexpr, HAS_READ: tl.constexpr, SELF: tl.constexpr, VARLEN: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """``o`` of BT tokens, BV value columns, one head; ``den_out`` keeps the raw normaliser."""
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
    modes = tl.arange(0, SP)
    slot = (span * H + h).to(tl.int64)
    qt = load_rows(q, t0, n, h, H, 0, K, BT, BK)
    dtype = qt.dtype
    acc = tl.zeros([BT, BV], dtype=tl.float32)
    since = (at + block * BT + 1).to(tl.float32)

    for s in range(S):
        f = tl.exp2(load_rates(log_decay, h, rate_h, s, S) * since)
        if HAS_READ:
            f *= load_column(read, t0, n, h, H, s, S, BT)
        g = load_state(G, slot * S + s, 0, vb * BV, K, V, BK, BV)
        fence_loads(s)
        # scaled after the product: q stays put as an operand, and is not rounded S times
        acc += f[:, None] * tl.dot(qt, g, input_precision=PREC)

    rates = load_rates(log_decay, h, rate_h, modes, S)
    row = tl.exp2(rates[None, :] * at[:, None].to(tl.float32))
    if HAS_READ:
        row *= load_modes(read, t0, n, h, H, modes, S, BT)
    if NORM == 1:
        bt = load_normalizer(b, slot, modes, S, K, BK).to(dtype)
        # not q b^T: see _sums in states.py
        qb = tl.trans(tl.dot(bt, tl.trans(qt), input_precision=PREC))
        den = tl.sum(qb * row * tl.exp2(rates * (block * BT + 1))[None, :], axis=1)
    elif NORM == 2:
        ks = tl.arange(0, BK)
        b0 = tl.load(b + slot * K + ks, mask=ks < K, other=0.0)
        den = tl.sum(qt.to(tl.float32) * b0[None, :], axis=1)
    row = row.to(dtype)

    if BLOCKS > 1:  # a span of one block has no other
        for j in range(block):
            # every pair straddles t0, so both halves of the decay are at most 1
            c0 = start + j * BT
            kt = load_rows(k, c0, BT, h, H, 0, K, BT, BK)
            vt = load_rows(v, c0, BT, h, H, vb * BV, V, BT, BV)
            ahead = ((block - j) * BT - at).to(tl.float32)
            col = tl.exp2(rates[None, :] * ahead[:, None])
            col *= load_modes(write, c0, BT, h, H, modes, S, BT)
            fence_loads(j)
            p = tl.dot(qt, tl.trans(kt), input_precision=PREC)
            if NORM == 2:
                den += tl.sum(p, axis=1)
            p *= tl.dot(row, tl.trans(col.to(dtype)), input_precision=PREC)
            if NORM == 1:
                den += tl.sum(p, axis=1)
            acc = tl.dot(p.to(dtype), vt, acc, input_precision=PREC)

    kt = load_rows(k, t0, n, h, H, 0, K, BT, BK)
    vt = load_rows(v, t0, n, h, H, vb * BV, V, BT, BV)
    wide = tl.arange(0, (BT // GB) * SD) % SD
    drow, dcol, _ = diagonal_factors(load_rates(log_decay, h, rate_h, wide, S), BT, GB, SD)
    if HAS_READ:
        drow *= load_modes(read, t0, n, h, H, wide, S, BT)
    dcol *= load_modes(write, t0, n, h, H, wide, S, BT)
    mask = causal(BT, SELF)
    p = tl.where(mask, tl.dot(qt, tl.trans(kt), input_precision=PREC), 0.0)
    if NORM == 2:
        den += tl.sum(p, axis=1)
    w = tl.dot(drow.to(dtype), tl.trans(dcol.to(dtype)), input_precision=PREC)
    p = tl.where(mask, p * w, 0.0)
    if NORM == 1:
        den += tl.sum(p, axis=1)
    acc = tl.dot(p.to(dtype), vt, acc, input_precision=PREC)

    if NORM > 0:
        acc *= (1.0 / (tl.abs(den) + eps))[:, None]
        if vb == 0:
            tl.store(den_out + (t0 + at) * H + h, den, mask=at < n)
    store_rows(o, acc, t0, n, h, H, vb * BV, V, BT, BV)
