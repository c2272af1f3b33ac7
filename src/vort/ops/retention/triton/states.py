# mypy: ignore-errors
"""States between spans: what each span adds, and the scan that carries it along.

The decays are constants, so a span of n tokens multiplies a state by ``exp(l n)``: no gates to scan.
The same two kernels serve forward (k, v, write; left to right) and backward (q, do, read; right to
left).
"""

import triton
import triton.language as tl

from .tiles import load_column, load_modes, load_rates, load_rows, span_bounds


@triton.jit
def _span_normalizer(
    x, weight, log_decay, shift, b, start, length, slot, h, k0, rate_h,
    H: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    SPAN: tl.constexpr, BL: tl.constexpr, NORM: tl.constexpr, REVERSE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_SCALE: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``b[span, h, s]``: every mode at once, as ``[weights]^T x``.

    Not ``x^T [weights]``: for a tile 16 columns wide and 256 rows deep Triton 3.6 reads beyond it
    in shared memory on Hopper.
    """
    SB: tl.constexpr = S if NORM == 1 else 1
    modes = tl.arange(0, SP)
    at = tl.arange(0, BL)
    ks = k0 + tl.arange(0, BK)
    acc = tl.zeros([SP, BK], dtype=tl.float32)
    rates = load_rates(log_decay, h, rate_h, modes, S)
    for part in range(SPAN // BL):
        t0 = start + part * BL
        n = length - part * BL
        xt = load_rows(x, t0, n, h, H, k0, K, BL, BK)
        if NORM == 1:
            if REVERSE:
                lag = at + part * BL + 1
            else:
                lag = tl.maximum(n - 1 - at, 0)
            wt = tl.exp2(rates[None, :] * lag[:, None].to(tl.float32))
            if HAS_WEIGHT:
                wt *= load_modes(weight, t0, n, h, H, modes, S, BL)
        else:
            wt = tl.where(modes[None, :] + at[:, None] * 0 == 0, 1.0, 0.0)
        if HAS_SCALE:
            wt *= load_column(shift, t0, n, h, H, 0, 1, BL)[:, None]
        acc = tl.dot(tl.trans(wt.to(xt.dtype)), xt, acc, input_precision=PREC)
    out = b + slot * (SB * K) + modes[:, None] * K + ks[None, :]
    tl.store(out, acc, mask=(ks[None, :] < K) & (modes[:, None] < SB))


@triton.jit(do_not_specialize=["T", "SPANS", "rate_h"])
def span_kernel(
    x, y, weight, log_decay, scale, shift, G, b, table, T, SPANS, rate_h,
    H: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, SPAN: tl.constexpr, BL: tl.constexpr,
    NORM: tl.constexpr, REVERSE: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_SCALE: tl.constexpr, VARLEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``G[span, h, s] = sum_i decay weight[i, s] scale[i] x_i y_i^T`` over one span.

    Forward the decay runs to the span's last token, backward to the token before its first.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    vb = pid % NV
    kb = (pid // NV) % NK
    h = (pid // (NV * NK)) % H
    span = pid // (NV * NK * H)
    start, end = span_bounds(span, table, T, SPANS, SPAN, VARLEN)
    if start >= end:
        return
    length = (end - start).to(tl.int32)
    at = tl.arange(0, BL)
    slot = (span * H + h).to(tl.int64)
    ks = kb * BK + tl.arange(0, BK)
    vs = vb * BV + tl.arange(0, BV)
    state_mask = (ks[:, None] < K) & (vs[None, :] < V)
    whole: tl.constexpr = SPAN == BL
    if whole:
        x0 = load_rows(x, start, length, h, H, kb * BK, K, BL, BK)
        y0 = load_rows(y, start, length, h, H, vb * BV, V, BL, BV)
        if HAS_SCALE:
            scale0 = load_column(scale, start, length, h, H, 0, 1, BL)

    for s in range(S):
        rate = load_rates(log_decay, h, rate_h, s, S)
        acc = tl.zeros([BK, BV], dtype=tl.float32)
        for part in range(SPAN // BL):
            t0 = start + part * BL
            n = length - part * BL
            if whole:
                xt = x0
                yt = y0
            else:
                xt = load_rows(x, t0, n, h, H, kb * BK, K, BL, BK)
                yt = load_rows(y, t0, n, h, H, vb * BV, V, BL, BV)
            if REVERSE:
                lag = at + part * BL + 1
            else:
                lag = tl.maximum(n - 1 - at, 0)
            w = tl.exp2(rate * lag.to(tl.float32))
            if HAS_WEIGHT:
                w *= load_column(weight, t0, n, h, H, s, S, BL)
            if HAS_SCALE:
                if whole:
                    w *= scale0
                else:
                    w *= load_column(scale, t0, n, h, H, 0, 1, BL)
            yw = yt * w.to(yt.dtype)[:, None]
            acc = tl.dot(tl.trans(xt), yw, acc, input_precision=PREC)
        out = G + (slot * S + s) * (K * V) + ks[:, None] * V + vs[None, :]
        tl.store(out, acc.to(G.dtype.element_ty), mask=state_mask)

    if NORM > 0:
        if vb == 0:
            _span_normalizer(
                x, weight, log_decay, shift, b, start, length, slot, h, kb * BK, rate_h,
                H, S, SP, K, BK, SPAN, min(BL, 64), NORM, REVERSE, HAS_WEIGHT, HAS_SCALE, PREC,
            )  # fmt: skip


@triton.jit
def _decay(rate, j, n_spans, length, SPAN: tl.constexpr, REVERSE: tl.constexpr):
    """Tokens in the j-th span of the walk, and the decay over them."""
    if REVERSE:
        p = n_spans - 1 - j
    else:
        p = j
    n = tl.minimum(length - p * SPAN, SPAN).to(tl.float32)
    return n, tl.exp2(rate * n)


@triton.jit
def _scan(
    ptr, other, first, last, base, edge, rate, n_spans, length, offs, mask,
    STRIDE: tl.constexpr, SPAN: tl.constexpr, REVERSE: tl.constexpr, HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr, DECAY_GRAD: tl.constexpr,
):  # fmt: skip
    """Replace what spans add by what they start (backward: end) with, four spans in flight.

    The only mask is one the compiler knows by heart: a mask on the span would cost wide loads.
    """
    if HAS_FIRST:
        carry = tl.load(first + edge + offs, mask=mask, other=0.0).to(tl.float32)
    else:
        carry = tl.zeros_like(offs).to(tl.float32)
    grad = tl.zeros_like(offs).to(tl.float32)
    step: tl.constexpr = -STRIDE if REVERSE else STRIDE
    out_type = ptr.dtype.element_ty
    ptr += base
    if DECAY_GRAD:
        other += base
    quads = n_spans // 4
    for quad in range(0, quads):
        x0 = tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)
        x1 = tl.load(ptr + step + offs, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(ptr + 2 * step + offs, mask=mask, other=0.0).to(tl.float32)
        x3 = tl.load(ptr + 3 * step + offs, mask=mask, other=0.0).to(tl.float32)
        n0, d0 = _decay(rate, 4 * quad, n_spans, length, SPAN, REVERSE)
        n1, d1 = _decay(rate, 4 * quad + 1, n_spans, length, SPAN, REVERSE)
        n2, d2 = _decay(rate, 4 * quad + 2, n_spans, length, SPAN, REVERSE)
        n3, d3 = _decay(rate, 4 * quad + 3, n_spans, length, SPAN, REVERSE)
        if DECAY_GRAD:
            g0 = tl.load(other + offs, mask=mask, other=0.0).to(tl.float32)
            g1 = tl.load(other + step + offs, mask=mask, other=0.0).to(tl.float32)
            g2 = tl.load(other + 2 * step + offs, mask=mask, other=0.0).to(tl.float32)
            g3 = tl.load(other + 3 * step + offs, mask=mask, other=0.0).to(tl.float32)
        c1 = carry * d0 + x0
        c2 = c1 * d1 + x1
        c3 = c2 * d2 + x2
        tl.store(ptr + offs, carry.to(out_type), mask=mask)
        tl.store(ptr + step + offs, c1.to(out_type), mask=mask)
        tl.store(ptr + 2 * step + offs, c2.to(out_type), mask=mask)
        tl.store(ptr + 3 * step + offs, c3.to(out_type), mask=mask)
        if DECAY_GRAD:
            grad += (n0 * d0) * carry * g0 + (n1 * d1) * c1 * g1
            grad += (n2 * d2) * c2 * g2 + (n3 * d3) * c3 * g3
            other += 4 * step
        ptr += 4 * step
        carry = c3 * d3 + x3
    for j in range(4 * quads, n_spans):
        x = tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)
        n, d = _decay(rate, j, n_spans, length, SPAN, REVERSE)
        tl.store(ptr + offs, carry.to(out_type), mask=mask)
        if DECAY_GRAD:
            g = tl.load(other + offs, mask=mask, other=0.0).to(tl.float32)
            grad += (n * d) * carry * g
            other += step
        ptr += step
        carry = carry * d + x
    if HAS_LAST:
        tl.store(last + edge + offs, carry, mask=mask)
    return tl.sum(grad, axis=0)


@triton.jit(do_not_specialize=["T", "SPANS", "rate_h"])
def scan_kernel(
    G, b, G_other, b_other, G_first, b_first, G_last, b_last, log_decay, grad,
    cu, seq_span, T, SPANS, rate_h,
    H: tl.constexpr, S: tl.constexpr, SB: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BE: tl.constexpr,
    SPAN: tl.constexpr, NORM: tl.constexpr, REVERSE: tl.constexpr, HAS_FIRST: tl.constexpr,
    HAS_LAST: tl.constexpr, DECAY_GRAD: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Scan G and b of one (sequence, head, mode) in place, in parallel over state entries.

    ``grad[n, h, s, block]``: the part of the gradient to log_decay owed to decay over whole spans.
    """
    NE: tl.constexpr = (K * V + BE - 1) // BE
    NB: tl.constexpr = ((K + BE - 1) // BE) if NORM > 0 else 0
    pid = tl.program_id(0)
    e = pid % (NE + NB)
    s = (pid // (NE + NB)) % S
    h = (pid // ((NE + NB) * S)) % H
    n = pid // ((NE + NB) * S * H)
    if VARLEN:
        length = (tl.load(cu + n + 1) - tl.load(cu + n)).to(tl.int32)
        first_span = tl.load(seq_span + n).to(tl.int64)
    else:
        length = T
        first_span = n.to(tl.int64) * SPANS
    n_spans = (length + SPAN - 1) // SPAN
    if REVERSE:
        first_span += n_spans - 1
    rate = load_rates(log_decay, h, rate_h, s, S)
    if e < NE:
        offs = e * BE + tl.arange(0, BE)
        total = _scan(
            G, G_other, G_first, G_last, ((first_span * H + h) * S + s) * (K * V),
            ((n * H + h).to(tl.int64) * S + s) * (K * V), rate, n_spans, length,
            offs, offs < K * V,
            H * S * K * V, SPAN, REVERSE, HAS_FIRST, HAS_LAST, DECAY_GRAD,
        )  # fmt: skip
        if DECAY_GRAD:
            tl.store(grad + pid, total)
    if NORM > 0:
        if (e >= NE) & (s < SB):
            offs = (e - NE) * BE + tl.arange(0, BE)
            if NORM == 2:
                rate = rate * 0.0
            total = _scan(
                b, b_other, b_first, b_last, ((first_span * H + h) * SB + s) * K,
                ((n * H + h).to(tl.int64) * SB + s) * K, rate, n_spans, length,
                offs, offs < K,
                H * SB * K, SPAN, REVERSE, HAS_FIRST, HAS_LAST, DECAY_GRAD and NORM == 1,
            )  # fmt: skip
            if DECAY_GRAD:
                tl.store(grad + pid, total)
