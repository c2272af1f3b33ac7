# mypy: ignore-errors

"""Gradients of one block of tokens: query side (q, read) and key side (k, v, write).

With ``o = num / (|den| + eps)`` the normaliser is one more value column of ones, so its gradient
rides along: ``do / (|den| + eps)`` takes the place of ``do``, and ``shift = d loss / d den`` is
added to ``do v^T``. Of forward ``o`` and ``den`` are kept, and states where they are small; others
are built again.

The gradient to a log_decay is lag-weighted. Lags through a state are split at the edges of spans,
so that each kernel adds non-negative distances and nothing cancels at long T; those inside a span
are left to the queries' kernel.
"""

import triton
import triton.language as tl

from vort.ops.gpu.parts import (
    fence_loads,
    keep_branch,
    load_column,
    load_rows,
    narrow,
    store_rows,
    widen,
)

from .tiles import (
    column_factors,
    later,
    load_normalizer,
    load_rates,
    load_scales,
    load_state,
    remembered,
    row_factors,
    same,
    span_bounds,
    wanted_blocks,
    with_itself,
)


@triton.jit
def normalized(ot, dot, d, eps):
    """``scaled`` and ``shift`` of some rows."""
    part = narrow(widen(dot) * (1.0 / (tl.abs(d) + eps))[:, None], dot.dtype)
    # of what is handed on, rounded as it is: the two nearly cancel where values have a mean
    sign = tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, 0.0))
    return part, -sign * tl.sum(widen(ot) * widen(part), axis=1)


@triton.jit(do_not_specialize=["rows"])
def normalizer_kernel(
    o, do, den, scaled, shift, rows, eps,
    V: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """``scaled`` and ``shift`` of BR (token, head) rows."""
    at = tl.program_id(0) * BR + tl.arange(0, BR)
    vs = tl.arange(0, BV)
    mask = at < rows
    where = at.to(tl.int64)[:, None] * V + vs[None, :]
    tile = mask[:, None] & (vs[None, :] < V)
    ot = tl.load(o + where, mask=tile, other=0.0)
    dot = tl.load(do + where, mask=tile, other=0.0)
    d = tl.load(den + at, mask=mask, other=1.0)
    part, moved = normalized(ot, dot, d, eps)
    tl.store(scaled + where, part, mask=tile)
    tl.store(shift + at, moved, mask=mask)


@triton.jit(do_not_specialize=["T", "SPANS", "rate_h"])
def query_kernel(
    q, k, v, write, read, log_decay, G, b, o, do, den, scaled, shift, shift_out, dq, dread,
    dlog_decay, table, wanted, T, SPANS, rate_h, eps,
    H: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SPAN: tl.constexpr, BT: tl.constexpr,
    NORM: tl.constexpr, HAS_READ: tl.constexpr, DECAY_GRAD: tl.constexpr, SELF: tl.constexpr,
    VARLEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``dq`` and ``dread`` of BT tokens, one head.

    ``dlog_decay`` gets the lags within the span, and through a state those from the span's start.
    ``shift_out``: the shift by spans, ``[slots, H, SPAN]``, where the keys' kernel finds neighbours
    side by side. ``o``: given where values are few, and with it ``do`` as it came; what
    :func:`normalizer_kernel` would write is then written here, for the kernels after this one.
    ``wanted``: 0 for blocks whose ``do`` is zero; they get zeros, and ``dlog_decay`` nothing.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    BLOCKS: tl.constexpr = SPAN // BT
    BY_SCALE: tl.constexpr = HAS_READ or DECAY_GRAD
    pid = tl.program_id(0)
    block = pid % BLOCKS
    h = (pid // BLOCKS) % H
    span = pid // (BLOCKS * H)
    start, end = span_bounds(span, table, T, SPANS, SPAN, VARLEN)
    t0 = start + block * BT
    if t0 >= end:
        return
    n = (end - t0).to(tl.int32)
    at = tl.arange(0, BT)
    slot = (span * H + h).to(tl.int64)
    if wanted is not None:
        if tl.load(wanted + span * BLOCKS + block) == 0:
            if NORM > 0:
                still = tl.zeros([BT], dtype=tl.float32)
                tl.store(shift_out + slot * SPAN + block * BT + at, still)
                if o is not None:
                    tl.store(shift + (t0 + at) * H + h, still, mask=at < n)
                    nothing = tl.zeros([BT, BV], dtype=tl.float32)
                    store_rows(scaled, nothing, t0, n, h, H, 0, V, BT, BV)
            store_rows(dq, tl.zeros([BT, BK], dtype=tl.float32), t0, n, h, H, 0, K, BT, BK)
            if HAS_READ:
                store_rows(dread, tl.zeros([BT, SP], dtype=tl.float32), t0, n, h, H, 0, S, BT, SP)
            return
    scales = tl.arange(0, SP)
    qt = load_rows(q, t0, n, h, H, 0, K, BT, BK)
    dtype = qt.dtype
    if NV == 1:
        dot = load_rows(do, t0, n, h, H, 0, V, BT, BV)
    if NORM > 0:
        if o is None:
            shiftt = load_column(shift, t0, n, h, H, 0, 1, BT)
        else:
            ot = load_rows(o, t0, n, h, H, 0, V, BT, BV)
            dot, shiftt = normalized(ot, dot, load_column(den, t0, n, h, H, 0, 1, BT), eps)
            store_rows(scaled, dot, t0, n, h, H, 0, V, BT, BV)
            tl.store(shift + (t0 + at) * H + h, shiftt, mask=at < n)
        tl.store(shift_out + slot * SPAN + block * BT + at, shiftt)
    rates = load_rates(log_decay, h, rate_h, scales, S)
    since = (at + block * BT + 1).to(tl.float32)
    dqt = tl.zeros([BT, BK], dtype=tl.float32)
    dr = tl.zeros([BT, SP], dtype=tl.float32)
    dlog = tl.zeros([SP], dtype=tl.float32)

    for s in range(remembered(rates, block * BT, S, SP)):
        f = tl.exp2(load_rates(log_decay, h, rate_h, s, S) * since)
        z = tl.zeros([BT, BK], dtype=tl.float32)
        if NV == 1:
            g = load_state(G, slot * S + s, 0, 0, K, V, BK, BV)
            fence_loads(s)
            z = tl.dot(dot, tl.trans(g), z, input_precision=PREC)
        else:
            for vb in range(NV):
                dov = load_rows(do, t0, n, h, H, vb * BV, V, BT, BV)
                g = load_state(G, slot * S + s, 0, vb * BV, K, V, BK, BV)
                fence_loads(vb)
                z = tl.dot(dov, tl.trans(g), z, input_precision=PREC)
        # scaled after the sums over features: one product less for each element
        if BY_SCALE:
            found = f * tl.sum(qt.to(tl.float32) * z, axis=1)
            dr += tl.where(scales[None, :] == s, found[:, None], 0.0)
        if HAS_READ:
            f *= load_column(read, t0, n, h, H, s, S, BT)
        dqt += f[:, None] * z

    if HAS_READ:
        readt = load_scales(read, t0, n, h, H, scales, S, BT)
    if NORM == 1:
        bw = load_normalizer(b, slot, scales, S, K, BK)
        bt = bw.to(dtype)
        f2 = tl.exp2(rates[None, :] * since[:, None]) * shiftt[:, None]
        if BY_SCALE:
            dr += f2 * tl.trans(tl.dot(bt, tl.trans(qt), input_precision=PREC))
        if HAS_READ:
            f2 *= readt
        ft = f2.to(dtype)
        dqt = tl.dot(ft, bt, dqt, input_precision=PREC)
        if dtype != tl.float32:
            # where values have a mean this nearly cancels what the states add: it needs more bits
            dqt = tl.dot(ft, (bw - bt.to(tl.float32)).to(dtype), dqt, input_precision=PREC)
            dqt = tl.dot((f2 - ft.to(tl.float32)).to(dtype), bt, dqt, input_precision=PREC)
    elif NORM == 2:
        ks = tl.arange(0, BK)
        b0 = tl.load(b + slot * K + ks, mask=ks < K, other=0.0)
        dqt += shiftt[:, None] * b0[None, :]
    if DECAY_GRAD:
        lagged = dr * since[:, None]
        if HAS_READ:
            lagged *= readt
        dlog += tl.sum(lagged, axis=0)

    row = row_factors(rates, 0, BT)
    rowr = row
    if HAS_READ:
        rowr = row * readt
    rowr = rowr.to(dtype)
    # blocks of the span up to its own
    for j in range(block + 1):
        c0 = start + j * BT
        m = (end - c0).to(tl.int32)
        kt = load_rows(k, c0, m, h, H, 0, K, BT, BK)
        da = tl.zeros([BT, BT], dtype=tl.float32)
        if NV == 1:
            vt = load_rows(v, c0, m, h, H, 0, V, BT, BV)
            fence_loads(j)
            da = tl.dot(dot, tl.trans(vt), da, input_precision=PREC)
        else:
            for vb in range(NV):
                dov = load_rows(do, t0, n, h, H, vb * BV, V, BT, BV)
                vt = load_rows(v, c0, m, h, H, vb * BV, V, BT, BV)
                fence_loads(vb)
                da = tl.dot(dov, tl.trans(vt), da, input_precision=PREC)
        if NORM == 1:
            da += shiftt[:, None]
        writet = load_scales(write, c0, m, h, H, scales, S, BT)
        col = (column_factors(rates, (block - j) * BT, BT, BT) * writet).to(dtype)
        w = tl.dot(rowr, tl.trans(col), input_precision=PREC)
        if j == block:
            keep_branch(j)
            own = writet
            if HAS_READ:
                own = writet * readt
            w = with_itself(w, own, later(BT), SELF, BT)
        dp = da * w
        if NORM == 2:
            plain = tl.zeros([BT, BT], dtype=tl.float32) + shiftt[:, None]
            if j == block:
                plain = tl.where(later(BT) | (same(BT) & SELF), plain, 0.0)
            dp += plain
        dqt = tl.dot(dp.to(dtype), kt, dqt, input_precision=PREC)
        if BY_SCALE:
            dw = da * tl.dot(qt, tl.trans(kt), input_precision=PREC)
            if j == block:
                keep_branch(j)
                if SELF:
                    dr += tl.sum(tl.where(same(BT), dw, 0.0), axis=1)[:, None] * writet
                dw = tl.where(later(BT), dw, 0.0)
            dr += row * tl.dot(dw.to(dtype), col, input_precision=PREC)
            if DECAY_GRAD:
                lag = ((block - j) * BT + at[:, None] - at[None, :]).to(tl.float32)
                lagged = row * tl.dot((dw * lag).to(dtype), col, input_precision=PREC)
                if HAS_READ:
                    lagged *= readt
                dlog += tl.sum(lagged, axis=0)
    if DECAY_GRAD:
        where = ((span * BLOCKS + block).to(tl.int64) * H + h) * SP + scales
        tl.store(dlog_decay + where, dlog)

    store_rows(dq, dqt, t0, n, h, H, 0, K, BT, BK)
    if HAS_READ:
        store_rows(dread, dr, t0, n, h, H, 0, S, BT, SP)


@triton.jit
def query_columns(
    qt, dot, kt, vt, writet, own, own_sum, rowr, row, rates, shiftt, lead, dqt, dr,
    BT: tl.constexpr, CT: tl.constexpr, NORM: tl.constexpr, HAS_READ: tl.constexpr,
    SELF: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``dqt`` and ``dr`` of a block of rows, with what CT columns add to them.

    lead: tokens from the first column to the first row. own: write weights of the rows, and own_sum
    their sums over scales, times read weights; None where columns come before all rows.
    """
    dtype = qt.dtype
    lags = lead + tl.arange(0, BT)[:, None] - tl.arange(0, CT)[None, :]
    da = tl.dot(dot, tl.trans(vt), input_precision=PREC)
    col = (column_factors(rates, lead, BT, CT) * writet).to(dtype)
    w = tl.dot(rowr, tl.trans(col), input_precision=PREC)
    if NORM == 1:
        da += shiftt[:, None]
    if own is not None:
        w = tl.where(lags > 0, w, 0.0)
        if SELF:
            w = tl.where(lags == 0, own_sum[:, None], w)
    dp = da * w
    if NORM == 2:
        plain = tl.zeros([BT, CT], dtype=tl.float32) + shiftt[:, None]
        if own is not None:
            plain = tl.where((lags > 0) | ((lags == 0) & SELF), plain, 0.0)
        dp += plain
    dqt = tl.dot(dp.to(dtype), kt, dqt, input_precision=PREC)
    if HAS_READ:
        dw = da * tl.dot(qt, tl.trans(kt), input_precision=PREC)
        if own is not None:
            if SELF:
                dr += tl.sum(tl.where(lags == 0, dw, 0.0), axis=1)[:, None] * own
            dw = tl.where(lags > 0, dw, 0.0)
        dr += row * tl.dot(dw.to(dtype), col, input_precision=PREC)
    return dqt, dr


@triton.jit(do_not_specialize=["T", "SPANS", "rate_h"])
def lean_query_kernel(
    q, k, v, write, read, log_decay, G, b, o, do, den, scaled, shift, shift_out, dq, dread,
    dlog_decay, table, wanted, T, SPANS, rate_h, eps,
    H: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SPAN: tl.constexpr, BT: tl.constexpr,
    NORM: tl.constexpr, HAS_READ: tl.constexpr, DECAY_GRAD: tl.constexpr, SELF: tl.constexpr,
    VARLEN: tl.constexpr, PREC: tl.constexpr, WHOLE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """:func:`query_kernel` where V is at most BV and decays have no gradient.

    WHOLE: every span is full. PARTS: of a block of columns, 1 or 2; products of half a block need
    fewer registers, so that more programs run at once.
    """
    tl.static_assert(V <= BV)
    tl.static_assert(not DECAY_GRAD)
    BLOCKS: tl.constexpr = SPAN // BT
    CT: tl.constexpr = BT // PARTS
    pid = tl.program_id(0)
    block = pid % BLOCKS
    h = (pid // BLOCKS) % H
    span = pid // (BLOCKS * H)
    start, end = span_bounds(span, table, T, SPANS, SPAN, VARLEN)
    t0 = start + block * BT
    if not WHOLE:
        if t0 >= end:
            return
    n = (end - t0).to(tl.int32)
    limit = n  # None: no mask for tokens
    if WHOLE:
        limit = None
    state_rows = None  # a state is K rows of V numbers
    if K < BK:
        state_rows = K
    at = tl.arange(0, BT)
    slot = (span * H + h).to(tl.int64)
    if wanted is not None:
        if tl.load(wanted + span * BLOCKS + block) == 0:
            if NORM > 0:
                still = tl.zeros([BT], dtype=tl.float32)
                tl.store(shift_out + slot * SPAN + block * BT + at, still)
                if o is not None:
                    tl.store(shift + (t0 + at) * H + h, still, mask=at < n)
                    nothing = tl.zeros([BT, BV], dtype=tl.float32)
                    store_rows(scaled, nothing, t0, n, h, H, 0, V, BT, BV)
            store_rows(dq, tl.zeros([BT, BK], dtype=tl.float32), t0, n, h, H, 0, K, BT, BK)
            if HAS_READ:
                store_rows(dread, tl.zeros([BT, SP], dtype=tl.float32), t0, n, h, H, 0, S, BT, SP)
            return
    scales = tl.arange(0, SP)
    qt = load_rows(q, t0, limit, h, H, 0, K, BT, BK)
    dtype = qt.dtype
    dot = load_rows(do, t0, limit, h, H, 0, V, BT, BV)
    shiftt = None
    if NORM > 0:
        if o is None:
            shiftt = load_column(shift, t0, limit, h, H, 0, 1, BT)
        else:
            ot = load_rows(o, t0, limit, h, H, 0, V, BT, BV)
            dot, shiftt = normalized(ot, dot, load_column(den, t0, limit, h, H, 0, 1, BT), eps)
            store_rows(scaled, dot, t0, limit, h, H, 0, V, BT, BV)
            tl.store(shift + (t0 + at) * H + h, shiftt, mask=at < n)
        tl.store(shift_out + slot * SPAN + block * BT + at, shiftt)
    rates = load_rates(log_decay, h, rate_h, scales, S)
    since = (at + block * BT + 1).to(tl.float32)
    dqt = tl.zeros([BT, BK], dtype=tl.float32)
    dr = tl.zeros([BT, SP], dtype=tl.float32)

    for s in range(remembered(rates, block * BT, S, SP)):
        f = tl.exp2(load_rates(log_decay, h, rate_h, s, S) * since)
        if HAS_READ:
            r = load_column(read, t0, limit, h, H, s, S, BT)
        g = load_rows(G, (slot * S + s) * K, state_rows, 0, 1, 0, V, BK, BV)
        fence_loads(s)
        z = tl.dot(dot, tl.trans(g), input_precision=PREC)
        # scaled after the sums over features: one product less for each element
        if HAS_READ:
            found = f * tl.sum(widen(qt) * z, axis=1)
            dr += tl.where(scales[None, :] == s, found[:, None], 0.0)
            f *= r
        dqt += f[:, None] * z

    if HAS_READ:
        readt = load_scales(read, t0, limit, h, H, scales, S, BT)
    if NORM == 1:
        bw = load_normalizer(b, slot, scales, S, K, BK)
        bt = bw.to(dtype)
        f2 = tl.exp2(rates[None, :] * since[:, None]) * shiftt[:, None]
        if HAS_READ:
            dr += f2 * tl.trans(tl.dot(bt, tl.trans(qt), input_precision=PREC))
            f2 *= readt
        ft = f2.to(dtype)
        dqt = tl.dot(ft, bt, dqt, input_precision=PREC)
        if dtype != tl.float32:
            # where values have a mean this nearly cancels what the states add: it needs more bits
            dqt = tl.dot(ft, (bw - bt.to(tl.float32)).to(dtype), dqt, input_precision=PREC)
            dqt = tl.dot((f2 - ft.to(tl.float32)).to(dtype), bt, dqt, input_precision=PREC)
    elif NORM == 2:
        ks = tl.arange(0, BK)
        b0 = tl.load(b + slot * K + ks, mask=ks < K, other=0.0)
        dqt += shiftt[:, None] * b0[None, :]

    row = row_factors(rates, 0, BT)
    rowr = row
    if HAS_READ:
        rowr = row * readt
    rowr = rowr.to(dtype)
    # blocks of the span before its own, which are full
    for j in range(block * PARTS):
        c0 = start + j * CT
        kj = load_rows(k, c0, None, h, H, 0, K, CT, BK)
        vj = load_rows(v, c0, None, h, H, 0, V, CT, BV)
        wj = load_scales(write, c0, None, h, H, scales, S, CT)
        fence_loads(j)
        dqt, dr = query_columns(
            qt, dot, kj, vj, wj, None, None, rowr, row, rates, shiftt, block * BT - j * CT,
            dqt, dr, BT, CT, NORM, HAS_READ, SELF, PREC,
        )  # fmt: skip
    # its own; read weights are loaded again, so that they need no registers above
    own = load_scales(write, t0, limit, h, H, scales, S, BT)
    own_sum = own
    if HAS_READ:
        readt = load_scales(read, t0, limit, h, H, scales, S, BT)
        own_sum *= readt
    own_sum = tl.sum(own_sum, axis=1)
    kt = load_rows(k, t0, limit, h, H, 0, K, CT, BK)
    vt = load_rows(v, t0, limit, h, H, 0, V, CT, BV)
    wt = load_scales(write, t0, limit, h, H, scales, S, CT)
    if PARTS == 2:
        c0 = t0 + CT
        rest = limit
        if not WHOLE:
            rest = n - CT
        k2 = load_rows(k, c0, rest, h, H, 0, K, CT, BK)
        v2 = load_rows(v, c0, rest, h, H, 0, V, CT, BV)
        w2 = load_scales(write, c0, rest, h, H, scales, S, CT)
    dqt, dr = query_columns(
        qt, dot, kt, vt, wt, own, own_sum, rowr, row, rates, shiftt, 0,
        dqt, dr, BT, CT, NORM, HAS_READ, SELF, PREC,
    )  # fmt: skip
    if PARTS == 2:
        dqt, dr = query_columns(
            qt, dot, k2, v2, w2, own, own_sum, rowr, row, rates, shiftt, -CT,
            dqt, dr, BT, CT, NORM, HAS_READ, SELF, PREC,
        )  # fmt: skip

    store_rows(dq, dqt, t0, limit, h, H, 0, K, BT, BK)
    if HAS_READ:
        store_rows(dread, dr, t0, n, h, H, 0, S, BT, SP)


@triton.jit(do_not_specialize=["T", "SPANS", "rate_h"])
def key_kernel(
    q, k, v, write, read, log_decay, R, rb, do, shift, dk, dv, dwrite, dlog_decay, table,
    wanted, T, SPANS, rate_h,
    H: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SPAN: tl.constexpr, BT: tl.constexpr,
    NORM: tl.constexpr, HAS_READ: tl.constexpr, DECAY_GRAD: tl.constexpr, SELF: tl.constexpr,
    VARLEN: tl.constexpr, PREC: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """``dk``, ``dv`` and ``dwrite`` of BT tokens, one head.

    ``dlog_decay`` gets the lags through a state to the span's last token.
    Everything is transposed, ``[i, t]``, so that products chain without moving accumulators.
    KEYS alone walks over value blocks; VALUES alone has one program for each of them.
    ``wanted``: 0 for blocks whose ``do`` is zero; no sum begins or ends with one.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    PV: tl.constexpr = NV if not KEYS else 1
    BLOCKS: tl.constexpr = SPAN // BT
    pid = tl.program_id(0)
    own_v = (pid % PV) * BV
    block = (pid // PV) % BLOCKS
    h = (pid // (PV * BLOCKS)) % H
    span = pid // (PV * BLOCKS * H)
    start, end = span_bounds(span, table, T, SPANS, SPAN, VARLEN)
    c0 = start + block * BT
    if c0 >= end:
        return
    n = (end - c0).to(tl.int32)
    at = tl.arange(0, BT)
    scales = tl.arange(0, SP)
    slot = (span * H + h).to(tl.int64)
    kt = load_rows(k, c0, n, h, H, 0, K, BT, BK)
    dtype = kt.dtype
    rates = load_rates(log_decay, h, rate_h, scales, S)
    until = tl.maximum(n - 1 - at, 0).to(tl.float32)
    dkt = tl.zeros([BT, BK], dtype=tl.float32)
    dvt = tl.zeros([BT, BV], dtype=tl.float32)
    dw = tl.zeros([BT, SP], dtype=tl.float32)
    dlog = tl.zeros([SP], dtype=tl.float32)
    if KEYS and NV == 1:
        vt = load_rows(v, c0, n, h, H, 0, V, BT, BV)

    for s in range(remembered(rates, tl.maximum(n - BT, 0), S, SP)):
        f = tl.exp2(load_rates(log_decay, h, rate_h, s, S) * until)
        fw = f * load_column(write, c0, n, h, H, s, S, BT)
        # both products first, so that neither waits for the other
        if NV == 1 or not KEYS:
            g = load_state(R, slot * S + s, 0, own_v, K, V, BK, BV)
            fence_loads(s)
        if KEYS:
            z = tl.zeros([BT, BK], dtype=tl.float32)
            if NV == 1:
                z = tl.dot(vt, tl.trans(g), z, input_precision=PREC)
            else:
                for vb in range(NV):
                    vv = load_rows(v, c0, n, h, H, vb * BV, V, BT, BV)
                    gg = load_state(R, slot * S + s, 0, vb * BV, K, V, BK, BV)
                    fence_loads(vb)
                    z = tl.dot(vv, tl.trans(gg), z, input_precision=PREC)
        if VALUES:
            y = tl.dot(kt, g, input_precision=PREC)
        if KEYS:
            found = f * tl.sum(kt.to(tl.float32) * z, axis=1)
            dw += tl.where(scales[None, :] == s, found[:, None], 0.0)
            dkt += fw[:, None] * z
        if VALUES:
            dvt += fw[:, None] * y

    writet = load_scales(write, c0, n, h, H, scales, S, BT)
    if KEYS:
        if NORM == 1:
            rbt = load_normalizer(rb, slot, scales, S, K, BK).to(dtype)
            f2 = tl.exp2(rates[None, :] * until[:, None])
            dw += f2 * tl.trans(tl.dot(rbt, tl.trans(kt), input_precision=PREC))
            dkt = tl.dot((f2 * writet).to(dtype), rbt, dkt, input_precision=PREC)
        elif NORM == 2:
            ks = tl.arange(0, BK)
            dkt += tl.load(rb + slot * K + ks, mask=ks < K, other=0.0)[None, :]
        if DECAY_GRAD:
            dlog += tl.sum(dw * writet * until[:, None], axis=0)

    col = column_factors(rates, 0, BT, BT)
    colw = (col * writet).to(dtype)
    # blocks of the span from its own on
    first, last = block, tl.cdiv(n, BT) + block
    if wanted is not None:
        first, last = wanted_blocks(wanted, span, block, BLOCKS)
    for i in range(first, last):
        t0 = start + i * BT
        m = (end - t0).to(tl.int32)
        qt = load_rows(q, t0, m, h, H, 0, K, BT, BK)
        if VALUES or NV == 1:
            dot = load_rows(do, t0, m, h, H, own_v, V, BT, BV)
        if KEYS and NORM > 0:
            shiftt = tl.load(shift + slot * SPAN + i * BT + at)
        row = row_factors(rates, (i - block) * BT, BT)
        if HAS_READ:
            readt = load_scales(read, t0, m, h, H, scales, S, BT)
            row *= readt
        row = row.to(dtype)
        fence_loads(i)
        p = tl.dot(kt, tl.trans(qt), input_precision=PREC)
        w = tl.dot(colw, tl.trans(row), input_precision=PREC)
        if i == block:
            keep_branch(i)
            own = writet
            if HAS_READ:
                own = writet * readt
            w = with_itself(w, own, tl.trans(later(BT)), SELF, BT)
        if VALUES:
            dvt = tl.dot((p * w).to(dtype), dot, dvt, input_precision=PREC)
        if KEYS:
            da = tl.zeros([BT, BT], dtype=tl.float32)
            if NV == 1:
                da = tl.dot(vt, tl.trans(dot), da, input_precision=PREC)
            else:
                for vb in range(NV):
                    vv = load_rows(v, c0, n, h, H, vb * BV, V, BT, BV)
                    dov = load_rows(do, t0, m, h, H, vb * BV, V, BT, BV)
                    fence_loads(vb)
                    da = tl.dot(vv, tl.trans(dov), da, input_precision=PREC)
            if NORM == 1:
                da += shiftt[None, :]
            dp = da * w
            if NORM == 2:
                plain = tl.zeros([BT, BT], dtype=tl.float32) + shiftt[None, :]
                if i == block:
                    plain = tl.where(tl.trans(later(BT)) | (same(BT) & SELF), plain, 0.0)
                dp += plain
            dkt = tl.dot(dp.to(dtype), qt, dkt, input_precision=PREC)
            a = p * da
            if i == block:
                keep_branch(i)
                if SELF:
                    own = tl.sum(tl.where(same(BT), a, 0.0), axis=1)[:, None]
                    if HAS_READ:
                        dw += own * readt
                    else:
                        dw += own
                a = tl.where(tl.trans(later(BT)), a, 0.0)
            dw += col * tl.dot(a.to(dtype), row, input_precision=PREC)

    if KEYS:
        store_rows(dk, dkt, c0, n, h, H, 0, K, BT, BK)
        store_rows(dwrite, dw, c0, n, h, H, 0, S, BT, SP)
        if DECAY_GRAD:
            where = ((span * BLOCKS + block).to(tl.int64) * H + h) * SP + scales
            tl.store(dlog_decay + where, dlog)
    if VALUES:
        store_rows(dv, dvt, c0, n, h, H, own_v, V, BT, BV)
