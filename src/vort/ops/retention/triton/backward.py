# mypy: ignore-errors

"""Gradients of one block of tokens: query side (q, read) and key side (k, v, write).

With ``o = num / (|den| + eps)`` the normaliser is one more value column of ones, so its gradient
rides along: ``inv = 1 / (|den| + eps)`` scales ``do`` and ``shift = d loss / d den`` is added to
``do v^T``. Nothing is kept from forward but ``o`` and ``den``: states are built again.

The gradient to a log_decay is lag-weighted. Each pair's lag is split at the same token as its decay
factors, so the two kernels each add a part of small, mostly non-negative distances and nothing
cancels at long T.
"""

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


@triton.jit(do_not_specialize=["rows"])
def normalizer_kernel(
    o, do, den, inv_out, shift_out, rows, eps,
    V: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """``inv`` and ``shift`` of BR (token, head) rows."""
    at = tl.program_id(0) * BR + tl.arange(0, BR)
    vs = tl.arange(0, BV)
    mask = at < rows
    where = at.to(tl.int64)[:, None] * V + vs[None, :]
    tile = mask[:, None] & (vs[None, :] < V)
    ot = tl.load(o + where, mask=tile, other=0.0).to(tl.float32)
    dot = tl.load(do + where, mask=tile, other=0.0).to(tl.float32)
    d = tl.load(den + at, mask=mask, other=1.0)
    inv = 1.0 / (tl.abs(d) + eps)
    sign = tl.where(d > 0, 1.0, tl.where(d < 0, -1.0, 0.0))
    tl.store(inv_out + at, inv, mask=mask)
    tl.store(shift_out + at, -sign * tl.sum(ot * dot, axis=1) * inv, mask=mask)


@triton.jit(do_not_specialize=["T", "SPANS", "rate_h"])
def query_kernel(
    q, k, v, write, read, log_decay, G, b, do, inv, shift, dq, dread, drate, table,
    T, SPANS, rate_h,
    H: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SPAN: tl.constexpr, BT: tl.constexpr,
    GB: tl.constexpr,
    NORM: tl.constexpr, HAS_READ: tl.constexpr, DECAY_GRAD: tl.constexpr, SELF: tl.constexpr,
    VARLEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``dq`` and ``dread`` of BT tokens, one head; ``drate`` the row halves of the lags."""
    NV: tl.constexpr = (V + BV - 1) // BV
    BLOCKS: tl.constexpr = SPAN // BT
    MODES: tl.constexpr = HAS_READ or DECAY_GRAD
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
    modes = tl.arange(0, SP)
    slot = (span * H + h).to(tl.int64)
    qt = load_rows(q, t0, n, h, H, 0, K, BT, BK)
    dtype = qt.dtype
    if NV == 1:
        dot = load_rows(do, t0, n, h, H, 0, V, BT, BV)
    if NORM > 0:
        invt = load_column(inv, t0, n, h, H, 0, 1, BT)
        shiftt = load_column(shift, t0, n, h, H, 0, 1, BT)
    rates = load_rates(log_decay, h, rate_h, modes, S)
    since = (at + block * BT + 1).to(tl.float32)
    dqt = tl.zeros([BT, BK], dtype=tl.float32)
    dr = tl.zeros([BT, SP], dtype=tl.float32)
    drates = tl.zeros([SP], dtype=tl.float32)

    for s in range(S):
        f = tl.exp2(load_rates(log_decay, h, rate_h, s, S) * since)
        if NORM > 0:
            f *= invt
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
        z *= f[:, None]
        if MODES:
            dr += tl.where(modes[None, :] == s, tl.sum(qt.to(tl.float32) * z, axis=1)[:, None], 0.0)
        if HAS_READ:
            z *= load_column(read, t0, n, h, H, s, S, BT)[:, None]
        dqt += z

    if HAS_READ:
        readt = load_modes(read, t0, n, h, H, modes, S, BT)
    if NORM == 1:
        bw = load_normalizer(b, slot, modes, S, K, BK)
        bt = bw.to(dtype)
        f2 = tl.exp2(rates[None, :] * since[:, None]) * shiftt[:, None]
        if MODES:
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
        drates += tl.sum(lagged, axis=0)

    rexp = tl.exp2(rates[None, :] * at[:, None].to(tl.float32))
    row = rexp
    if HAS_READ:
        row = rexp * readt
    if BLOCKS > 1:  # a span of one block has no other
        for j in range(block):
            c0 = start + j * BT
            kt = load_rows(k, c0, BT, h, H, 0, K, BT, BK)
            da = tl.zeros([BT, BT], dtype=tl.float32)
            if NV == 1:
                vt = load_rows(v, c0, BT, h, H, 0, V, BT, BV)
                fence_loads(j)
                da = tl.dot(dot, tl.trans(vt), da, input_precision=PREC)
            else:
                for vb in range(NV):
                    dov = load_rows(do, t0, n, h, H, vb * BV, V, BT, BV)
                    vt = load_rows(v, c0, BT, h, H, vb * BV, V, BT, BV)
                    fence_loads(vb)
                    da = tl.dot(dov, tl.trans(vt), da, input_precision=PREC)
            if NORM > 0:
                da *= invt[:, None]
            if NORM == 1:
                da += shiftt[:, None]
            ahead = ((block - j) * BT - at).to(tl.float32)
            col = tl.exp2(rates[None, :] * ahead[:, None])
            col = (col * load_modes(write, c0, BT, h, H, modes, S, BT)).to(dtype)
            dp = da * tl.dot(row.to(dtype), tl.trans(col), input_precision=PREC)
            if NORM == 2:
                dp += shiftt[:, None]
            dqt = tl.dot(dp.to(dtype), kt, dqt, input_precision=PREC)
            if MODES:
                dw = da * tl.dot(qt, tl.trans(kt), input_precision=PREC)
                x = rexp * tl.dot(dw.to(dtype), col, input_precision=PREC)
                dr += x
                if DECAY_GRAD:
                    lagged = x * at[:, None].to(tl.float32)
                    if HAS_READ:
                        lagged *= readt
                    drates += tl.sum(lagged, axis=0)

    kt = load_rows(k, t0, n, h, H, 0, K, BT, BK)
    da = tl.zeros([BT, BT], dtype=tl.float32)
    if NV == 1:
        vt = load_rows(v, t0, n, h, H, 0, V, BT, BV)
        da = tl.dot(dot, tl.trans(vt), da, input_precision=PREC)
    else:
        for vb in range(NV):
            dov = load_rows(do, t0, n, h, H, vb * BV, V, BT, BV)
            vt = load_rows(v, t0, n, h, H, vb * BV, V, BT, BV)
            fence_loads(vb)
            da = tl.dot(dov, tl.trans(vt), da, input_precision=PREC)
    if NORM > 0:
        da *= invt[:, None]
    if NORM == 1:
        da += shiftt[:, None]
    NC: tl.constexpr = BT // GB
    wide = tl.arange(0, NC * SP) % SP
    drow, dcol, behind = diagonal_factors(load_rates(log_decay, h, rate_h, wide, S), BT, GB, SP)
    dcol = (dcol * load_modes(write, t0, n, h, H, wide, S, BT)).to(dtype)
    rowr = drow
    if HAS_READ:
        rowr = drow * load_modes(read, t0, n, h, H, wide, S, BT)
    rowr = rowr.to(dtype)
    w = tl.dot(rowr, tl.trans(dcol), input_precision=PREC)
    mask = causal(BT, SELF)
    dp = tl.where(mask, da * w, 0.0)
    if NORM == 2:
        dp += tl.where(mask, shiftt[:, None], 0.0)
    dqt = tl.dot(dp.to(dtype), kt, dqt, input_precision=PREC)
    if MODES:
        dw = tl.where(mask, da * tl.dot(qt, tl.trans(kt), input_precision=PREC), 0.0)
        x = tl.dot(dw.to(dtype), dcol, input_precision=PREC)
        dr += tl.sum(tl.reshape(drow * x, [BT, NC, SP]), axis=1)
        if DECAY_GRAD:
            # with the rounded factors of key_kernel, so that the two parts of lag 0 cancel
            lagged = tl.sum(tl.reshape(rowr.to(tl.float32) * x * behind, [BT, NC, SP]), axis=1)
            drates += tl.sum(lagged, axis=0)
            where = ((span * BLOCKS + block).to(tl.int64) * H + h) * SP + modes
            tl.store(drate + where, drates)

    store_rows(dq, dqt, t0, n, h, H, 0, K, BT, BK)
    if HAS_READ:
        store_rows(dread, dr, t0, n, h, H, 0, S, BT, SP)


@triton.jit(do_not_specialize=["T", "SPANS", "rate_h"])
def key_kernel(
    q, k, v, write, read, log_decay, R, rb, do, inv, shift, dk, dv, dwrite, drate, table,
    T, SPANS, rate_h,
    H: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SPAN: tl.constexpr, BT: tl.constexpr,
    GB: tl.constexpr,
    NORM: tl.constexpr, HAS_READ: tl.constexpr, DECAY_GRAD: tl.constexpr, SELF: tl.constexpr,
    VARLEN: tl.constexpr, PREC: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """``dk``, ``dv`` and ``dwrite`` of BT tokens, one head; ``drate`` the column part of lags.

    Everything is transposed, ``[i, t]``, so that products chain without moving accumulators.
    KEYS alone walks over value blocks; VALUES alone has one program for each of them.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    PV: tl.constexpr = NV if not KEYS else 1
    BLOCKS: tl.constexpr = SPAN // BT
    NC: tl.constexpr = BT // GB
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
    modes = tl.arange(0, SP)
    slot = (span * H + h).to(tl.int64)
    kt = load_rows(k, c0, n, h, H, 0, K, BT, BK)
    dtype = kt.dtype
    rates = load_rates(log_decay, h, rate_h, modes, S)
    until = tl.maximum(n - 1 - at, 0).to(tl.float32)
    dkt = tl.zeros([BT, BK], dtype=tl.float32)
    dvt = tl.zeros([BT, BV], dtype=tl.float32)
    dw = tl.zeros([BT, SP], dtype=tl.float32)
    drates = tl.zeros([SP], dtype=tl.float32)
    if KEYS and NV == 1:
        vt = load_rows(v, c0, n, h, H, 0, V, BT, BV)

    for s in range(S):
        f = tl.exp2(load_rates(log_decay, h, rate_h, s, S) * until)
        w = load_column(write, c0, n, h, H, s, S, BT)
        if KEYS:
            z = tl.zeros([BT, BK], dtype=tl.float32)
            if NV == 1:
                g = load_state(R, slot * S + s, 0, 0, K, V, BK, BV)
                fence_loads(s)
                z = tl.dot(vt, tl.trans(g), z, input_precision=PREC)
            else:
                for vb in range(NV):
                    vv = load_rows(v, c0, n, h, H, vb * BV, V, BT, BV)
                    gg = load_state(R, slot * S + s, 0, vb * BV, K, V, BK, BV)
                    fence_loads(vb)
                    z = tl.dot(vv, tl.trans(gg), z, input_precision=PREC)
            z *= f[:, None]
            dw += tl.where(modes[None, :] == s, tl.sum(kt.to(tl.float32) * z, axis=1)[:, None], 0.0)
            dkt += z * w[:, None]
        if VALUES:
            if not KEYS:
                g = load_state(R, slot * S + s, 0, own_v, K, V, BK, BV)
                fence_loads(s)
            dvt += (f * w)[:, None] * tl.dot(kt, g, input_precision=PREC)

    writet = load_modes(write, c0, n, h, H, modes, S, BT)
    if KEYS:
        if NORM == 1:
            rbt = load_normalizer(rb, slot, modes, S, K, BK).to(dtype)
            f2 = tl.exp2(rates[None, :] * until[:, None])
            dw += f2 * tl.trans(tl.dot(rbt, tl.trans(kt), input_precision=PREC))
            dkt = tl.dot((f2 * writet).to(dtype), rbt, dkt, input_precision=PREC)
        elif NORM == 2:
            ks = tl.arange(0, BK)
            dkt += tl.load(rb + slot * K + ks, mask=ks < K, other=0.0)[None, :]
        if DECAY_GRAD:
            drates += tl.sum(dw * writet * until[:, None], axis=0)

    # the diagonal block
    qt = load_rows(q, c0, n, h, H, 0, K, BT, BK)
    wide = tl.arange(0, NC * SP) % SP
    drow, dcol, behind = diagonal_factors(load_rates(log_decay, h, rate_h, wide, S), BT, GB, SP)
    if HAS_READ:
        drow *= load_modes(read, c0, n, h, H, wide, S, BT)
    drow = drow.to(dtype)
    writew = load_modes(write, c0, n, h, H, wide, S, BT)
    mask = tl.trans(causal(BT, SELF))
    p = tl.where(mask, tl.dot(kt, tl.trans(qt), input_precision=PREC), 0.0)
    colr = (dcol * writew).to(dtype)
    w = tl.dot(colr, tl.trans(drow), input_precision=PREC)
    w = tl.where(mask, w, 0.0)
    if NORM > 0:
        invt = load_column(inv, c0, n, h, H, 0, 1, BT)
        shiftt = load_column(shift, c0, n, h, H, 0, 1, BT)
    if VALUES:
        a = p * w
        if NORM > 0:
            a *= invt[None, :]
        dot = load_rows(do, c0, n, h, H, own_v, V, BT, BV)
        dvt = tl.dot(a.to(dtype), dot, dvt, input_precision=PREC)
    if KEYS:
        da = tl.zeros([BT, BT], dtype=tl.float32)
        if NV == 1:
            if not VALUES:
                dot = load_rows(do, c0, n, h, H, 0, V, BT, BV)
            da = tl.dot(vt, tl.trans(dot), da, input_precision=PREC)
        else:
            for vb in range(NV):
                vv = load_rows(v, c0, n, h, H, vb * BV, V, BT, BV)
                dov = load_rows(do, c0, n, h, H, vb * BV, V, BT, BV)
                fence_loads(vb)
                da = tl.dot(vv, tl.trans(dov), da, input_precision=PREC)
        if NORM > 0:
            da *= invt[None, :]
        if NORM == 1:
            da += shiftt[None, :]
        dp = da * w
        if NORM == 2:
            dp += tl.where(mask, shiftt[None, :], 0.0)
        dkt = tl.dot(dp.to(dtype), qt, dkt, input_precision=PREC)
        x = tl.dot((p * da).to(dtype), drow, input_precision=PREC)
        dw += tl.sum(tl.reshape(dcol * x, [BT, NC, SP]), axis=1)
        if DECAY_GRAD:
            lagged = tl.sum(tl.reshape(colr.to(tl.float32) * x * -behind, [BT, NC, SP]), axis=1)
            drates += tl.sum(lagged, axis=0)

    # later blocks of the span; a single block has none, but without this loop do takes the place of
    # k in shared memory, and ptxas 12.8 mixes up the addresses of two such tiles of different width
    if BLOCKS > 1 or BK != BV:
        for i in range(block + 1, tl.cdiv(n, BT) + block):
            t0 = start + i * BT
            m = (end - t0).to(tl.int32)
            qi = load_rows(q, t0, m, h, H, 0, K, BT, BK)
            row = tl.exp2(rates[None, :] * at[:, None].to(tl.float32))
            if HAS_READ:
                row *= load_modes(read, t0, m, h, H, modes, S, BT)
            row = row.to(dtype)
            ahead = ((i - block) * BT - at).to(tl.float32)
            cexp = tl.exp2(rates[None, :] * ahead[:, None])
            fence_loads(i)
            pi = tl.dot(kt, tl.trans(qi), input_precision=PREC)
            wi = tl.dot((cexp * writet).to(dtype), tl.trans(row), input_precision=PREC)
            if NORM > 0:
                invi = load_column(inv, t0, m, h, H, 0, 1, BT)
                shifti = load_column(shift, t0, m, h, H, 0, 1, BT)
            if VALUES:
                ai = pi * wi
                if NORM > 0:
                    ai *= invi[None, :]
                doi = load_rows(do, t0, m, h, H, own_v, V, BT, BV)
                dvt = tl.dot(ai.to(dtype), doi, dvt, input_precision=PREC)
            if KEYS:
                dai = tl.zeros([BT, BT], dtype=tl.float32)
                if NV == 1:
                    if not VALUES:
                        doi = load_rows(do, t0, m, h, H, 0, V, BT, BV)
                    dai = tl.dot(vt, tl.trans(doi), dai, input_precision=PREC)
                else:
                    for vb in range(NV):
                        vv = load_rows(v, c0, BT, h, H, vb * BV, V, BT, BV)
                        dov = load_rows(do, t0, m, h, H, vb * BV, V, BT, BV)
                        fence_loads(vb)
                        dai = tl.dot(vv, tl.trans(dov), dai, input_precision=PREC)
                if NORM > 0:
                    dai *= invi[None, :]
                if NORM == 1:
                    dai += shifti[None, :]
                dpi = dai * wi
                if NORM == 2:
                    dpi += shifti[None, :]
                dkt = tl.dot(dpi.to(dtype), qi, dkt, input_precision=PREC)
                xi = cexp * tl.dot((pi * dai).to(dtype), row, input_precision=PREC)
                dw += xi
                if DECAY_GRAD:
                    drates += tl.sum(xi * writet * ahead[:, None], axis=0)

    if KEYS:
        store_rows(dk, dkt, c0, n, h, H, 0, K, BT, BK)
        store_rows(dwrite, dw, c0, n, h, H, 0, S, BT, SP)
        if DECAY_GRAD:
            where = ((span * BLOCKS + block).to(tl.int64) * H + h) * SP + modes
            tl.store(drate + where, drates)
    if VALUES:
        store_rows(dv, dvt, c0, n, h, H, own_v, V, BT, BV)
