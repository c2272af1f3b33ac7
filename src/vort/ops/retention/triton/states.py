# mypy: ignore-errors

"""States at span starts, forward and backward, built and carried along in one walk.

The decays are constants, so n tokens multiply a state by ``exp(l n)``: no gates to scan.
One program keeps a few value columns of several scales in registers, walks its sequence (or segment
of one) and writes what it holds at every span start; nothing is read back. The same kernel serves
forward (k, v, write; left to right) and backward (q, do, read; right to left).

A long sequence with few heads would leave the GPU empty, so it is cut into segments: a first pass
keeps only what each segment adds, the second starts from the sum of those before it. The first
pass looks no further back from a segment's end than its scales remember, so fast scales cost it
little, and cuts segments finer (FINE parts each), so that programs with work to do spread evenly.
"""

import triton
import triton.language as tl

from vort.ops.gpu.parts import fence_loads, load_column, load_flipped, load_rows, uniform

from .tiles import DEAD, MEMORY, load_rates, load_scales, span_bounds


@triton.jit
def _lags(part, n, BL: tl.constexpr, REVERSE: tl.constexpr):
    """Tokens to the span's last one (forward) or from the one before its first (backward)."""
    at = tl.arange(0, BL)
    if REVERSE:
        lag = at + part * BL + 1
    else:
        lag = tl.maximum(n - 1 - at, 0)
    return lag.to(tl.float32)


@triton.jit(do_not_specialize=["T", "SPANS", "rate_h"])
def weights_kernel(
    log_decay, weight, out, table, T, SPANS, rate_h,
    H: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, SPAN: tl.constexpr, BL: tl.constexpr,
    REVERSE: tl.constexpr, HAS_WEIGHT: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """``out[slot, h, s, at]``: what a token of a span weighs in a state at the span's edge.

    Written down before the walk, which then has nothing to do to a tile but to load it, scale it
    and multiply: Triton scales in the registers a product reads from. With exponentials in between
    it would go through shared memory.
    """
    PARTS: tl.constexpr = SPAN // BL
    pid = tl.program_id(0)
    part = pid % PARTS
    h = (pid // PARTS) % H
    slot = pid // (PARTS * H)
    start, end = span_bounds(slot, table, T, SPANS, SPAN, VARLEN)
    left = (end - start).to(tl.int32) - part * BL
    scales = tl.arange(0, SP)
    at = tl.arange(0, BL)
    rates = load_rates(log_decay, h, rate_h, scales, S)
    w = tl.exp2(rates[None, :] * _lags(part, left, BL, REVERSE)[:, None])
    if HAS_WEIGHT:
        w *= load_scales(weight, start + part * BL, left, h, H, scales, S, BL)
    w = tl.where(at[:, None] < left, w, 0.0)
    where = ((slot * H + h).to(tl.int64) * S + scales[None, :]) * SPAN + part * BL + at[:, None]
    tl.store(out + where, w.to(out.dtype.element_ty), mask=(scales < S)[None, :])


@triton.jit
def _walk(
    it, steps, n_spans, length, first_token, first_span,
    SPAN: tl.constexpr, BL: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Where step ``it`` of the walk is, with 2**steps of them in a span.

    Whether a span begins, part of the span, first token, tokens left, slot. Those steps are the
    parts next to the edge the walk comes to: what lies further from it is forgotten there.
    """
    p = it >> steps
    part = it & ((1 << steps) - 1)
    begins = part == 0
    if REVERSE:
        p = n_spans - 1 - p
    span_length = tl.minimum(length - p * SPAN, SPAN)
    if not REVERSE:
        part += tl.maximum(tl.cdiv(span_length, BL) - (1 << steps), 0)
    t0 = first_token + p * SPAN + part * BL
    return begins, part, t0, span_length - part * BL, span_length.to(tl.float32), first_span + p


@triton.jit
def _memory(rate):
    """Tokens after which a decay in base 2 has forgotten."""
    return (1.0 / tl.maximum(-rate, 1.0e-6) * MEMORY).to(tl.int32) + 1


@triton.jit
def _steps(tokens, SPAN: tl.constexpr, BL: tl.constexpr):
    """The least n so that 2**n parts of BL tokens hold so many, or the whole span."""
    steps = tokens * 0
    for power in tl.static_range(8):
        if (BL << power) < SPAN:
            steps += tl.where(tokens > (BL << power), 1, 0)
    return uniform(steps)


@triton.jit
def _begin(
    first, s, h, n, seg, tile, mask,
    H: tl.constexpr, S: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, SEGMENTS: tl.constexpr, SUMS: tl.constexpr, HAS_FIRST: tl.constexpr,
):  # fmt: skip
    """What one scale holds before the first token of the segment."""
    acc = tl.zeros([BK, BV], dtype=tl.float32)
    if HAS_FIRST and not SUMS:
        at = (((n * H + h).to(tl.int64) * SEGMENTS + seg) * S + s) * (K * V)
        acc += tl.load(first + at + tile, mask=mask, other=0.0).to(tl.float32)
    return acc


@triton.jit
def _mark(
    acc, total, G, other, rate, s, h, slot, span_length, tile, mask,
    H: tl.constexpr, S: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    SUMS: tl.constexpr, DECAY_GRAD: tl.constexpr,
):  # fmt: skip
    """Write down what one scale holds at a span's edge, then let it decay over the span."""
    fade = tl.exp2(rate * span_length)
    if not SUMS:
        at = ((slot * H + h).to(tl.int64) * S + s) * (K * V)
        tl.store(G + at + tile, acc.to(G.dtype.element_ty), mask=mask)
        if DECAY_GRAD:
            o = tl.load(other + at + tile, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(tl.sum(acc * o, axis=1), axis=0) * (span_length * fade)
    return acc * fade, total


@triton.jit
def _add(
    acc, xt, yt, weights, s, h, slot, part,
    H: tl.constexpr, S: tl.constexpr, SPAN: tl.constexpr, BL: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Add BL tokens to one scale."""
    # scales come in pairs: the one beyond an odd S is added to, and stored nowhere
    at = ((slot * H + h).to(tl.int64) * S + tl.minimum(s, S - 1)) * SPAN + part * BL
    # nothing but loads and products, so that Triton scales x in the registers it multiplies from
    w = tl.load(weights + at + tl.arange(0, BL))
    return tl.dot(xt * w.to(xt.dtype)[None, :], yt, acc, input_precision=PREC)


@triton.jit
def _finish(
    acc, total, last, segment_sums, dlog_decay, s, h, n, seg, dlog_at, tile, mask,
    H: tl.constexpr, S: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    SEGMENTS: tl.constexpr, FINE: tl.constexpr, SUMS: tl.constexpr, HAS_LAST: tl.constexpr,
    DECAY_GRAD: tl.constexpr,
):  # fmt: skip
    """Hand on what one scale holds after the last token of the segment."""
    if SUMS:
        at = (((n * H + h).to(tl.int64) * ((SEGMENTS - 1) * FINE) + seg) * S + s) * (K * V)
        tl.store(segment_sums + at + tile, acc, mask=mask)
    else:
        if HAS_LAST:
            if seg == SEGMENTS - 1:
                at = ((n * H + h).to(tl.int64) * S + s) * (K * V)
                tl.store(last + at + tile, acc, mask=mask)
        if DECAY_GRAD:
            tl.store(dlog_decay + dlog_at + s, total, mask=s < S)


@triton.jit
def _values(
    x, y, weights, log_decay, G, other, first, last, segment_sums, dlog_decay,
    h, n, seg, kb, vb, sg, n_spans, length, per, first_token, first_span, rate_h, dlog_at,
    H: tl.constexpr, S: tl.constexpr, SG: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, SPAN: tl.constexpr, BL: tl.constexpr,
    SEGMENTS: tl.constexpr, FINE: tl.constexpr, SUMS: tl.constexpr, REVERSE: tl.constexpr,
    TO_END: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr,
    DECAY_GRAD: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """One or two scales of a [BK, BV] tile of G, each in its own registers.

    Spelled out scale by scale: side by side in one tile, their weights would need a three-axis
    product, which Triton lays out one element to a thread.
    """
    ks = kb * BK + tl.arange(0, BK)
    vs = vb * BV + tl.arange(0, BV)
    tile = ks[:, None] * V + vs[None, :]
    mask = (ks[:, None] < K) & (vs[None, :] < V)
    s0 = sg * SG
    # compared as a column: the interpreter cannot and a block with a scalar truth value
    mask0 = mask & ((ks * 0 + s0)[:, None] < S)
    rate0 = load_rates(log_decay, h, rate_h, s0, S)
    slowest = rate0
    total0 = 0.0
    acc0 = _begin(
        first, s0, h, n, seg, tile, mask0, H, S, K, V, BK, BV, SEGMENTS, SUMS, HAS_FIRST
    )  # fmt: skip
    if SG > 1:
        s1 = s0 + 1
        mask1 = mask & ((ks * 0 + s1)[:, None] < S)
        rate1 = load_rates(log_decay, h, rate_h, s1, S)
        slowest = tl.maximum(slowest, tl.where(s1 < S, rate1, DEAD))
        total1 = 0.0
        acc1 = _begin(
            first, s1, h, n, seg, tile, mask1, H, S, K, V, BK, BV, SEGMENTS, SUMS, HAS_FIRST
        )  # fmt: skip
    begin = seg * per
    end = tl.minimum(begin + per, n_spans)
    if SUMS:
        # what is read is the sum at the end of the whole segment; one span more for the rest of the
        # division, and one because the sequence may end in a short one
        whole = tl.minimum((seg // FINE + 1) * FINE * per, n_spans)
        begin = tl.maximum(begin, whole - _memory(slowest) // SPAN - 2)
    # the last part of a sequence may have few tokens, so that what it ends with needs one more
    steps = _steps(_memory(slowest) + (BL if TO_END and not REVERSE else 0), SPAN, BL)
    for it in range(begin << steps, end << steps):
        begins, part, t0, left, span_length, slot = _walk(
            it, steps, n_spans, length, first_token, first_span, SPAN, BL, REVERSE
        )
        if begins:
            acc0, total0 = _mark(
                acc0, total0, G, other, rate0, s0, h, slot, span_length, tile, mask0,
                H, S, K, V, SUMS, DECAY_GRAD,
            )  # fmt: skip
            if SG > 1:
                acc1, total1 = _mark(
                    acc1, total1, G, other, rate1, s1, h, slot, span_length, tile, mask1,
                    H, S, K, V, SUMS, DECAY_GRAD,
                )  # fmt: skip
        xt = load_flipped(x, t0, left, h, H, kb * BK, K, BL, BK)
        yt = load_rows(y, t0, left, h, H, vb * BV, V, BL, BV)
        fence_loads(it)
        acc0 = _add(acc0, xt, yt, weights, s0, h, slot, part, H, S, SPAN, BL, PREC)
        if SG > 1:
            acc1 = _add(acc1, xt, yt, weights, s1, h, slot, part, H, S, SPAN, BL, PREC)
    _finish(
        acc0, total0, last, segment_sums, dlog_decay, s0, h, n, seg, dlog_at, tile, mask0,
        H, S, K, V, SEGMENTS, FINE, SUMS, HAS_LAST, DECAY_GRAD,
    )  # fmt: skip
    if SG > 1:
        _finish(
            acc1, total1, last, segment_sums, dlog_decay, s1, h, n, seg, dlog_at, tile, mask1,
            H, S, K, V, SEGMENTS, FINE, SUMS, HAS_LAST, DECAY_GRAD,
        )  # fmt: skip


@triton.jit
def _sums(
    x, weights, log_decay, shift, b, other, first, last, segment_sums, dlog_decay,
    h, n, seg, kb, n_spans, length, per, first_token, first_span, rate_h, dlog_at,
    H: tl.constexpr, S: tl.constexpr, SB: tl.constexpr, SP: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, SPAN: tl.constexpr, BL: tl.constexpr, SEGMENTS: tl.constexpr,
    FINE: tl.constexpr, SUMS: tl.constexpr, NORM: tl.constexpr, REVERSE: tl.constexpr,
    HAS_SHIFT: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr,
    DECAY_GRAD: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Every scale of b, as weights times x.

    Not ``x^T weights^T``: for a tile 16 columns wide and 256 rows deep Triton 3.6 reads beyond it
    in shared memory on Hopper. The weights keep more bits than bfloat16, since b sums over signs.
    """
    FINER: tl.constexpr = (SEGMENTS - 1) * FINE
    scales = tl.arange(0, SP)
    ks = kb * BK + tl.arange(0, BK)
    offs = scales[:, None] * K + ks[None, :]
    mask = (scales[:, None] < SB) & (ks[None, :] < K)
    rates = load_rates(log_decay, h, rate_h, scales, S)
    if NORM == 2:
        rates = rates * 0.0
    STATE: tl.constexpr = SB * K
    acc = tl.zeros([SP, BK], dtype=tl.float32)
    gsum = tl.zeros([SP, BK], dtype=tl.float32)
    if HAS_FIRST and not SUMS:
        at = ((n * H + h).to(tl.int64) * SEGMENTS + seg) * STATE
        acc += tl.load(first + at + offs, mask=mask, other=0.0).to(tl.float32)
    begin = seg * per
    end = tl.minimum(begin + per, n_spans)
    steps = _steps(begin * 0 + SPAN, SPAN, BL)
    for it in range(begin << steps, end << steps):
        begins, part, t0, left, span_length, slot = _walk(
            it, steps, n_spans, length, first_token, first_span, SPAN, BL, REVERSE
        )
        fade = tl.exp2(rates * span_length)
        if begins:
            if not SUMS:
                at = (slot * H + h).to(tl.int64) * STATE
                tl.store(b + at + offs, acc, mask=mask)
                if DECAY_GRAD:
                    o = tl.load(other + at + offs, mask=mask, other=0.0)
                    gsum += acc * o * (span_length * fade)[:, None]
            acc *= fade[:, None]
        xt = load_rows(x, t0, left, h, H, kb * BK, K, BL, BK)
        if NORM == 1:
            at = (slot * H + h).to(tl.int64) * (S * SPAN) + part * BL
            where = scales[:, None] * SPAN + tl.arange(0, BL)[None, :]
            w = tl.load(weights + at + where, mask=(scales < S)[:, None], other=0.0)
        else:
            w = tl.where((scales == 0)[:, None], tl.full([SP, BL], 1.0, dtype=tl.float32), 0.0)
        if HAS_SHIFT:
            w *= load_column(shift, t0, left, h, H, 0, 1, BL)[None, :]
        acc = tl.dot(w, xt.to(tl.float32), acc, input_precision=PREC)
    if SUMS:
        at = ((n * H + h).to(tl.int64) * FINER + seg) * STATE
        tl.store(segment_sums + at + offs, acc, mask=mask)
    else:
        if HAS_LAST:
            if seg == SEGMENTS - 1:
                at = (n * H + h).to(tl.int64) * STATE
                tl.store(last + at + offs, acc, mask=mask)
        if DECAY_GRAD and NORM == 1:
            tl.store(dlog_decay + dlog_at + scales, tl.sum(gsum, axis=1), mask=scales < S)


@triton.jit(do_not_specialize=["T", "SPANS", "rate_h"])
def state_kernel(
    x, y, weights, log_decay, shift, G, b, G_other, b_other, G_first, b_first,
    G_last, b_last, G_sums, b_sums, dlog_decay, cu, seq_span, T, SPANS, rate_h,
    H: tl.constexpr, S: tl.constexpr, SB: tl.constexpr, SP: tl.constexpr, SG: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SPAN: tl.constexpr, BL: tl.constexpr, SEGMENTS: tl.constexpr, FINE: tl.constexpr,
    SUMS: tl.constexpr, NORM: tl.constexpr, REVERSE: tl.constexpr, TO_END: tl.constexpr,
    HAS_SHIFT: tl.constexpr, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr,
    DECAY_GRAD: tl.constexpr, VARLEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``G[slot, h, s]`` and ``b[slot, h, s]``: what a span starts (backward: ends) with.

    Forward: ``sum_i exp(l (a-1-i)) weight[i, s] x_i y_i^T`` over tokens before the span's
    first one, a. Backward the same over tokens after the span, to its last one.
    ``dlog_decay[block, h, s]``: the part of it that is owed to decay over whole spans.
    TO_END: the states after the last token are wanted, in this pass or from a later one.
    """
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    NS: tl.constexpr = (S + SG - 1) // SG
    BLOCKS: tl.constexpr = NK * NV * NS + (NK if NORM > 0 else 0)
    pid = tl.program_id(0)
    block = pid % BLOCKS
    h = (pid // BLOCKS) % H
    # nothing starts from the sum of the last segment
    COUNT: tl.constexpr = (SEGMENTS - 1) * FINE if SUMS else SEGMENTS
    seg = (pid // (BLOCKS * H)) % COUNT
    n = pid // (BLOCKS * H * COUNT)
    if VARLEN:
        first_token = tl.load(cu + n).to(tl.int64)
        length = (tl.load(cu + n + 1) - first_token).to(tl.int32)
        first_span = tl.load(seq_span + n).to(tl.int32)
    else:
        first_token = n.to(tl.int64) * T
        length = n * 0 + T
        first_span = n * SPANS
    n_spans = (length + SPAN - 1) // SPAN
    per = (n_spans + SEGMENTS * FINE - 1) // (SEGMENTS * FINE)
    if not SUMS:
        per *= FINE
    # blocks of one (sequence, segment) lie apart, so that each writes its own row
    dlog_at = (((n * SEGMENTS + seg) * BLOCKS + block) * H + h) * S
    if block < NK * NV * NS:
        _values(
            x, y, weights, log_decay, G, G_other, G_first, G_last, G_sums, dlog_decay,
            h, n, seg, block // (NV * NS), block % NV, (block // NV) % NS, n_spans, length, per,
            first_token, first_span, rate_h, dlog_at,
            H, S, SG, K, V, BK, BV, SPAN, BL, SEGMENTS, FINE, SUMS, REVERSE, TO_END,
            HAS_FIRST, HAS_LAST, DECAY_GRAD, PREC,
        )  # fmt: skip
    else:
        if NORM > 0:
            _sums(
                x, weights, log_decay, shift, b, b_other, b_first, b_last, b_sums, dlog_decay,
                h, n, seg, block - NK * NV * NS, n_spans, length, per, first_token, first_span,
                rate_h, dlog_at,
                H, S, SB, SP, K, BK, SPAN, BL, SEGMENTS, FINE, SUMS, NORM, REVERSE,
                HAS_SHIFT, HAS_FIRST, HAS_LAST, DECAY_GRAD, PREC,
            )  # fmt: skip


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
    """BC of the C numbers of one scale: ``[N, H, parts, M, C]`` to ``[N, H, SEGMENTS, M, C]``."""
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
    """What each segment starts from, out of what every part of a segment adds.

    The walk then reads one state to start from, instead of the sums of all parts before it, and
    backward can start from the same ones. The first ``matrices`` programs fold G, those after
    them b.
    """
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
