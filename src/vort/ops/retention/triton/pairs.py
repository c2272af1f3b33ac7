# mypy: ignore-errors

"""Retention at a few places, pair by pair: no states, each reader meets the tokens before it.

A reader is a place asked for. Readers are sorted, and tokens lie in blocks of BT, so that the
readers who stand in a block follow each other, and after them come those to whom all of it is past.
For the latter (far) a weight Σ_s read_s e^{l_s (t - i)} write_s has the block's end e in the middle
of its exponent, (t - e) + (e - i), both at least 0: a product over scales. For the former (near) it
is summed scale by scale, with no exponent above 0 either.

Forward: far blocks, part by part; near ones, which are one more part; the parts' sums. Backward: to
readers from far blocks, part by part; to tokens, and to readers from near blocks; the parts' sums.
Weights and scores are computed again. Nothing is added atomically, and launches depend on shapes
alone.

Of a reader that comes twice the second has no place, and adds nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vort.ops.custom import Some, Tensors, custom_op
from vort.ops.gpu.launcher import Tile, dense, launch, power_of_two
from vort.ops.gpu.parts import (
    fence_loads,
    load_column,
    load_rows,
    narrow,
    store_rows,
    uniform,
    widen,
)
from vort.ops.retention.inputs import Inputs

from .backward import normalized
from .spans import NORMALIZER_CODES, cdiv, rate_stride
from .tiles import load_rates, load_scales

__all__ = ["pairs_pay", "retention_pairs"]

# Readers that are looked at together where they are near, and where tokens look at them.
NEAR, AFTER = 16, 32
# Readers whose parts are summed together.
SETTLED = 4
# Programs of a walk over tokens for a large GPU.
RESIDENT = 1050
# Keys and values of a head, and scales, that the tokens' kernel has registers for: beyond so many
# scales in small tiles.
WIDEST, MOST_SCALES, SCALES_IN_LARGE_TILES = 64, 256, 32
# Readers of a row up to which pairs are always the cheaper way.
FEW = 64


@triton.jit
def load_readers(spots, r0, end, corner, BR: tl.constexpr):
    """Where BR readers from r0 on stand in their row ``[BR]``; -1: nobody, or one already seen.

    corner: the spot of the row's first token.
    """
    r = r0 + tl.arange(0, BR)
    spot = tl.load(spots + r, mask=r < end, other=0)
    before = tl.load(spots + r - 1, mask=(r < end) & (r > 0), other=-1)
    return tl.where((r < end) & (spot != before), (spot - corner).to(tl.int32), -1)


@triton.jit
def load_at(ptr, row, t, h, H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Rows t of a ``[tokens, H, D]`` tensor, counted from token ``row``; zero where t is -1."""
    cols = tl.arange(0, BD)
    base = ptr + ((row + t) * H + h) * D
    mask = (t[:, None] >= 0) & (cols[None, :] < D)
    return tl.load(base[:, None] + cols[None, :], mask=mask, other=0.0)


@triton.jit
def arriving(rates, t, end):
    """``[readers, scales]``: what is left at t of what was there at a block's end; 0 before it."""
    since = t - end
    f = tl.exp2(rates[None, :] * tl.maximum(since, 0).to(tl.float32)[:, None])
    return tl.where(since[:, None] >= 0, f, 0.0)


@triton.jit
def leaving(rates, BT: tl.constexpr):
    """``[BT, scales]``: what is left at a block's end of what its tokens wrote."""
    ages = (BT - tl.arange(0, BT)).to(tl.float32)
    return tl.exp2(rates[None, :] * ages[:, None])


@triton.jit
def near_lags(t, c0, SELF: tl.constexpr, BT: tl.constexpr):
    """Lags to the BT tokens from c0 on, no less than 0, and which of them are looked at.

    ``[readers, BT]`` for t ``[readers]``, ``[BT]`` for a single t.
    """
    lag = t - (c0 + tl.arange(0, BT))
    return tl.maximum(lag, 0).to(tl.float32), lag >= (0 if SELF else 1)


@triton.jit
def whose(pid, first, BLOCKS, PARTS, STRIDES, H: tl.constexpr):
    """Of a program that walks over a part: head, turn, part, row, the row's first reader and end.

    It takes every STRIDES-th block of the row's readers, from its turn on.
    """
    h = pid % H
    turn = (pid // H) % STRIDES
    part = (pid // (H * STRIDES)) % PARTS
    b = (pid // (H * STRIDES * PARTS)).to(tl.int64)
    begin = tl.load(first + b * BLOCKS)
    end = uniform(tl.load(first + (b + 1) * BLOCKS))
    return h, turn, part, b, begin, end


@triton.jit(do_not_specialize=["T", "N", "rate_h", "BLOCKS", "PARTS", "PART", "STRIDES"])
def far_kernel(
    q, k, v, write, read, log_decay, spots, first, num, den,
    T, N, rate_h, BLOCKS, PARTS, PART, STRIDES,
    H: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, NORM: tl.constexpr,
    HAS_READ: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """What readers of one head get from the far blocks of one part: ``num`` and ``den``.

    Those are ``[PARTS, N, H, V]`` and ``[PARTS, N, H]``. A program takes every STRIDES-th BR of a
    row's readers; parts that begin after a reader's blocks are left out.
    """
    pid = tl.program_id(0)
    h, turn, part, b, begin, end = whose(pid, first, BLOCKS, PARTS, STRIDES, H)
    scales = tl.arange(0, SP)
    rates = load_rates(log_decay, h, rate_h, scales, S)
    leave = leaving(rates, BT)
    for r0 in range(uniform(begin) + turn * BR, end, STRIDES * BR):
        t = load_readers(spots, r0, end, b * BLOCKS * BT, BR)
        stop = uniform(tl.minimum(tl.max(t, axis=0) // BT, (part + 1) * PART))
        if part * PART < stop:
            qt = load_at(q, b * T, t, h, H, K, BK)
            dtype = qt.dtype
            if HAS_READ:
                readt = load_at(read, b * T, t, h, H, S, SP).to(tl.float32)
            acc = tl.zeros([BR, BV], dtype=tl.float32)
            total = tl.zeros([BR], dtype=tl.float32)
            for n in range(part * PART, stop):
                token = b * T + n * BT
                kt = load_rows(k, token, BT, h, H, 0, K, BT, BK)
                vt = load_rows(v, token, BT, h, H, 0, V, BT, BV)
                col = leave * load_scales(write, token, BT, h, H, scales, S, BT)
                row = arriving(rates, t, (n + 1) * BT)
                if HAS_READ:
                    row *= readt
                fence_loads(n)
                w = tl.dot(row, tl.trans(col), input_precision=PREC)
                p = tl.dot(qt, tl.trans(kt), input_precision=PREC)
                # rounded before it is summed: the normaliser and the values see the same weights
                a = narrow(p * w, dtype)
                if NORM == 1:
                    total += tl.sum(widen(a), axis=1)
                elif NORM == 2:
                    total += tl.sum(tl.where(t[:, None] >= (n + 1) * BT, p, 0.0), axis=1)
                acc = tl.dot(a, vt, acc, input_precision=PREC)
            place = part * N.to(tl.int64) + r0
            store_rows(num, acc, place, end - r0, h, H, 0, V, BR, BV)
            if NORM > 0:
                at = tl.arange(0, BR)
                tl.store(den + (place + at) * H + h, total, mask=at < end - r0)


@triton.jit(do_not_specialize=["T", "N", "rate_h", "BLOCKS", "PARTS"])
def near_kernel(
    q, k, v, write, read, log_decay, spots, first, num, den, T, N, rate_h, BLOCKS, PARTS,
    H: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, NORM: tl.constexpr,
    HAS_READ: tl.constexpr, SELF: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """What the readers who stand in one block get from it, one head: the part after the last."""
    pid = tl.program_id(0)
    h = pid % H
    n = (pid // H) % BLOCKS
    b = (pid // (H * BLOCKS)).to(tl.int64)
    begin = uniform(tl.load(first + b * BLOCKS + n))
    end = uniform(tl.load(first + b * BLOCKS + n + 1))
    if begin >= end:
        return
    token = b * T + n * BT
    left = T - n * BT
    kt = load_rows(k, token, left, h, H, 0, K, BT, BK)
    vt = load_rows(v, token, left, h, H, 0, V, BT, BV)
    dtype = kt.dtype
    scales = tl.arange(0, SP)
    rates = load_rates(log_decay, h, rate_h, scales, S)
    writet = load_scales(write, token, left, h, H, scales, S, BT)
    corner = b * BLOCKS * BT
    at = tl.arange(0, BR)
    for r0 in range(begin, end, BR):
        t = load_readers(spots, r0, end, corner, BR)
        qt = load_at(q, b * T, t, h, H, K, BK)
        w = tl.zeros([BR, BT], dtype=tl.float32)
        for r in range(r0, tl.minimum(r0 + BR, end)):
            own = (tl.load(spots + r) - corner).to(tl.int32)
            lag, seen = near_lags(own, n * BT, SELF, BT)
            f = tl.exp2(rates[None, :] * lag[:, None]) * writet
            if HAS_READ:
                where = read + ((b * T + own) * H + h) * S + scales
                f *= tl.load(where, mask=scales < S, other=0.0).to(tl.float32)[None, :]
            weight = tl.where(seen, tl.sum(f, axis=1), 0.0)
            w = tl.where((r0 + at == r)[:, None], weight[None, :], w)
        p = tl.dot(qt, tl.trans(kt), input_precision=PREC)
        a = narrow(p * w, dtype)
        total = tl.zeros([BR], dtype=tl.float32)
        if NORM == 1:
            total += tl.sum(widen(a), axis=1)
        elif NORM == 2:
            total += tl.sum(tl.where(near_lags(t[:, None], n * BT, SELF, BT)[1], p, 0.0), axis=1)
        acc = tl.dot(a, vt, input_precision=PREC)
        place = PARTS * N.to(tl.int64) + r0
        store_rows(num, acc, place, end - r0, h, H, 0, V, BR, BV)
        if NORM > 0:
            tl.store(den + (place + at) * H + h, total, mask=at < end - r0)


@triton.jit(do_not_specialize=["B", "T", "N", "BLOCKS", "PARTS", "PART"])
def settle_kernel(
    x, den, spots, out, kept, den_out, B, T, N, BLOCKS, PARTS, PART, eps,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr,
    UNROLL: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The sum of BR readers' parts ``[PARTS + 1, N, H, D]``, one head, put in their places.

    With a normaliser, divided by the sum of ``den``; ``kept`` ``[N, H, D]`` has it unrounded, and
    ``den_out`` the normaliser. What was left out by others, since it is 0, is left out here.
    """
    pid = tl.program_id(0)
    h = pid % H
    r = pid // H * BR + tl.arange(0, BR)
    spot = tl.load(spots + r, mask=r < N, other=-1)
    before = tl.load(spots + r - 1, mask=(r < N) & (r > 0), other=-1)
    whole = BLOCKS.to(tl.int64) * BT
    real = (spot != before) & (spot >= 0) & (spot < B * whole)
    row = spot // whole
    t = spot - row * whole
    blocks = tl.where(real, t // BT, 0)
    cols = tl.arange(0, BD)
    at = ((r.to(tl.int64) * H + h) * D)[:, None] + cols[None, :]
    mask = real[:, None] & (cols[None, :] < D)
    far = N.to(tl.int64) * H
    acc = tl.load(x + PARTS * far * D + at, mask=mask, other=0.0)
    total = tl.zeros([BR], dtype=tl.float32)
    if NORM > 0:
        total += tl.load(den + PARTS * far + r * H + h, mask=real, other=0.0)
    for part in range(0, PARTS, UNROLL):
        for i in tl.static_range(UNROLL):
            there = (part + i) * PART < blocks
            acc += tl.load(x + (part + i) * far * D + at, mask=mask & there[:, None], other=0.0)
            if NORM > 0:
                total += tl.load(den + (part + i) * far + r * H + h, mask=there, other=0.0)
    if NORM > 0:
        acc *= (1.0 / (tl.abs(total) + eps))[:, None]
        tl.store(den_out + r * H + h, total, mask=real)
        tl.store(kept + at, acc, mask=mask)
    place = ((row * T + t) * H + h) * D
    tl.store(out + place[:, None] + cols[None, :], acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "N", "rate_h", "BLOCKS", "PARTS", "PART", "STRIDES"])
def reader_kernel(
    q, k, v, write, read, log_decay, spots, first, o, den, do, qs, reads, scaled, shift,
    dq, dread, dlog_decay, T, N, rate_h, BLOCKS, PARTS, PART, STRIDES, eps,
    H: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, NORM: tl.constexpr,
    HAS_READ: tl.constexpr, DECAY_GRAD: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """What goes back to readers of one head from the far blocks of one part; as `far_kernel`.

    ``dq`` and ``dread`` are ``[PARTS, N, H, .]``. ``dlog_decay`` gets the lags from a block's end
    to the reader, and in the tokens' kernel those up to there: nothing cancels. ``qs``, ``reads``,
    ``scaled`` and ``shift``: readers' rows side by side for that kernel, the last two as
    :func:`normalized` has them.
    """
    BY_SCALE: tl.constexpr = HAS_READ or DECAY_GRAD
    pid = tl.program_id(0)
    h, turn, part, b, begin, end = whose(pid, first, BLOCKS, PARTS, STRIDES, H)
    at = tl.arange(0, BR)
    scales = tl.arange(0, SP)
    rates = load_rates(log_decay, h, rate_h, scales, S)
    leave = leaving(rates, BT)
    dlog = tl.zeros([SP], dtype=tl.float32)
    for r0 in range(uniform(begin) + turn * BR, end, STRIDES * BR):
        t = load_readers(spots, r0, end, b * BLOCKS * BT, BR)
        stop = uniform(tl.minimum(tl.max(t, axis=0) // BT, (part + 1) * PART))
        if (part == 0) | (part * PART < stop):
            qt = load_at(q, b * T, t, h, H, K, BK)
            dtype = qt.dtype
            dot = load_at(do, b * T, t, h, H, V, BV)
            if NORM > 0:
                # of one already seen nothing was kept
                ot = load_rows(o, r0, end - r0, h, H, 0, V, BR, BV)
                ot = tl.where(t[:, None] >= 0, ot, 0.0)
                d = tl.load(den + (r0 + at) * H + h, mask=t >= 0, other=1.0)
                dot, shiftt = normalized(ot, dot, d, eps)
            if HAS_READ:
                readt = load_at(read, b * T, t, h, H, S, SP)
            if part == 0:
                store_rows(qs, qt, r0, end - r0, h, H, 0, K, BR, BK)
                store_rows(scaled, dot, r0, end - r0, h, H, 0, V, BR, BV)
                if NORM > 0:
                    tl.store(shift + (r0 + at) * H + h, shiftt, mask=at < end - r0)
                if HAS_READ:
                    store_rows(reads, readt, r0, end - r0, h, H, 0, S, BR, SP)
            dqt = tl.zeros([BR, BK], dtype=tl.float32)
            dr = tl.zeros([BR, SP], dtype=tl.float32)
            for n in range(part * PART, stop):
                token = b * T + n * BT
                kt = load_rows(k, token, BT, h, H, 0, K, BT, BK)
                vt = load_rows(v, token, BT, h, H, 0, V, BT, BV)
                col = leave * load_scales(write, token, BT, h, H, scales, S, BT)
                arrive = arriving(rates, t, (n + 1) * BT)
                row = arrive
                if HAS_READ:
                    row = arrive * readt.to(tl.float32)
                fence_loads(n)
                w = tl.dot(row, tl.trans(col), input_precision=PREC)
                da = tl.dot(dot, tl.trans(vt), input_precision=PREC)
                if NORM == 1:
                    da += shiftt[:, None]
                dp = da * w
                if NORM == 2:
                    dp += tl.where(t >= (n + 1) * BT, shiftt, 0.0)[:, None]
                dqt = tl.dot(dp.to(dtype), kt, dqt, input_precision=PREC)
                if BY_SCALE:
                    dw = da * tl.dot(qt, tl.trans(kt), input_precision=PREC)
                    met = tl.dot(dw, col, input_precision=PREC)
                    dr += arrive * met
                    if DECAY_GRAD:
                        since = tl.maximum(t - (n + 1) * BT, 0).to(tl.float32)
                        dlog += tl.sum(row * met * since[:, None], axis=0)
            if part * PART < stop:
                place = part * N.to(tl.int64) + r0
                store_rows(dq, dqt, place, end - r0, h, H, 0, K, BR, BK)
                if HAS_READ:
                    store_rows(dread, dr, place, end - r0, h, H, 0, S, BR, SP)
    if DECAY_GRAD:
        tl.store(dlog_decay + pid.to(tl.int64) * SP + scales, dlog)


@triton.jit(do_not_specialize=["T", "N", "rate_h", "BLOCKS", "PARTS"])
def token_kernel(
    k, v, write, log_decay, spots, first, qs, reads, scaled, shift, dq, dk, dv, dwrite, dread,
    dlog_decay, T, N, rate_h, BLOCKS, PARTS,
    H: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BR: tl.constexpr, NEAR: tl.constexpr,
    NORM: tl.constexpr, HAS_READ: tl.constexpr, DECAY_GRAD: tl.constexpr, SELF: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """``dk``, ``dv`` and ``dwrite`` of one block, one head, from readers in it and after it.

    What goes back to those in it is the part of ``dq`` and ``dread`` after the last.
    """
    pid = tl.program_id(0)
    h = pid % H
    n = (pid // H) % BLOCKS
    b = (pid // (H * BLOCKS)).to(tl.int64)
    begin = uniform(tl.load(first + b * BLOCKS + n))
    middle = uniform(tl.load(first + b * BLOCKS + n + 1))
    end = uniform(tl.load(first + (b + 1) * BLOCKS))
    scales = tl.arange(0, SP)
    token = b * T + n * BT
    left = T - n * BT
    dkt = tl.zeros([BT, BK], dtype=tl.float32)
    dvt = tl.zeros([BT, BV], dtype=tl.float32)
    dwt = tl.zeros([BT, SP], dtype=tl.float32)
    dlog = tl.zeros([SP], dtype=tl.float32)
    corner = b * BLOCKS * BT
    if begin < end:
        kt = load_rows(k, token, left, h, H, 0, K, BT, BK)
        vt = load_rows(v, token, left, h, H, 0, V, BT, BV)
        dtype = kt.dtype
        rates = load_rates(log_decay, h, rate_h, scales, S)
        leave = leaving(rates, BT)
        writet = load_scales(write, token, left, h, H, scales, S, BT)
        col = leave * writet
        # transposed, [i, t], so that products chain without moving accumulators
        for r0 in range(middle, end, BR):
            t = load_readers(spots, r0, end, corner, BR)
            qt = load_rows(qs, r0, end - r0, h, H, 0, K, BR, BK)
            dot = load_rows(scaled, r0, end - r0, h, H, 0, V, BR, BV)
            row = arriving(rates, t, (n + 1) * BT)
            if HAS_READ:
                row *= load_scales(reads, r0, end - r0, h, H, scales, S, BR)
            fence_loads(r0)
            w = tl.dot(col, tl.trans(row), input_precision=PREC)
            p = tl.dot(kt, tl.trans(qt), input_precision=PREC)
            da = tl.dot(vt, tl.trans(dot), input_precision=PREC)
            dvt = tl.dot((p * w).to(dtype), dot, dvt, input_precision=PREC)
            if NORM > 0:
                shiftt = load_column(shift, r0, end - r0, h, H, 0, 1, BR)
            if NORM == 1:
                da += shiftt[None, :]
            dp = da * w
            if NORM == 2:
                dp += shiftt[None, :]
            dkt = tl.dot(dp.to(dtype), qt, dkt, input_precision=PREC)
            dwt += leave * tl.dot(da * p, row, input_precision=PREC)
        if DECAY_GRAD:
            ages = (BT - tl.arange(0, BT)).to(tl.float32)
            dlog += tl.sum(dwt * writet * ages[:, None], axis=0)

        for r0 in range(begin, middle, NEAR):
            t = load_readers(spots, r0, middle, corner, NEAR)
            qt = load_rows(qs, r0, middle - r0, h, H, 0, K, NEAR, BK)
            dot = load_rows(scaled, r0, middle - r0, h, H, 0, V, NEAR, BV)
            p = tl.dot(kt, tl.trans(qt), input_precision=PREC)
            da = tl.dot(vt, tl.trans(dot), input_precision=PREC)
            if NORM > 0:
                shiftt = load_column(shift, r0, middle - r0, h, H, 0, 1, NEAR)[None, :]
            if NORM == 1:
                da += shiftt
            dw = da * p
            w = tl.zeros([BT, NEAR], dtype=tl.float32)
            dr = tl.zeros([NEAR, SP], dtype=tl.float32)
            for r in range(r0, tl.minimum(r0 + NEAR, middle)):
                at = r0 + tl.arange(0, NEAR) == r
                own = (tl.load(spots + r) - corner).to(tl.int32)
                lag, seen = near_lags(own, n * BT, SELF, BT)
                dwr = tl.where(seen, tl.sum(tl.where(at[None, :], dw, 0.0), axis=1), 0.0)
                f = tl.exp2(rates[None, :] * lag[:, None])
                if HAS_READ:
                    found = tl.sum(dwr[:, None] * f * writet, axis=0)
                    dr = tl.where(at[:, None], found[None, :], dr)
                    where = reads + (r * H + h) * S + scales
                    f *= tl.load(where, mask=scales < S, other=0.0).to(tl.float32)[None, :]
                weight = tl.where(seen, tl.sum(f * writet, axis=1), 0.0)
                w = tl.where(at[None, :], weight[:, None], w)
                f *= dwr[:, None]
                dwt += f
                if DECAY_GRAD:
                    dlog += tl.sum(f * writet * lag[:, None], axis=0)
            dvt = tl.dot((p * w).to(dtype), dot, dvt, input_precision=PREC)
            dp = da * w
            if NORM == 2:
                dp += tl.where(tl.trans(near_lags(t[:, None], n * BT, SELF, BT)[1]), shiftt, 0.0)
            dpt = dp.to(dtype)
            dkt = tl.dot(dpt, qt, dkt, input_precision=PREC)
            dqt = tl.dot(tl.trans(kt), dpt, input_precision=PREC)
            if dtype != tl.float32:
                # the largest terms of a sum that nearly cancels where keys have a mean: more bits
                rest = (dp - dpt.to(tl.float32)).to(dtype)
                dqt = tl.dot(tl.trans(kt), rest, dqt, input_precision=PREC)
            dqt = tl.trans(dqt)
            place = PARTS * N.to(tl.int64) + r0
            store_rows(dq, dqt, place, middle - r0, h, H, 0, K, NEAR, BK)
            if HAS_READ:
                store_rows(dread, dr, place, middle - r0, h, H, 0, S, NEAR, SP)

    store_rows(dk, dkt, token, left, h, H, 0, K, BT, BK)
    store_rows(dv, dvt, token, left, h, H, 0, V, BT, BV)
    store_rows(dwrite, dwt, token, left, h, H, 0, S, BT, SP)
    if DECAY_GRAD:
        tl.store(dlog_decay + pid.to(tl.int64) * SP + scales, dlog)


def pairs_pay(inputs: Inputs) -> bool:
    """Whether pairs are the way: nothing but outputs at few places is wanted.

    What a token costs grows with its row's readers, on average here, since nobody knows more
    before the kernels run; where states are kept it grows with S K V.
    """
    if inputs.asked is None or inputs.cu_seqlens is not None:
        return False
    if inputs.G is not None or inputs.output_final_state:
        return False
    (batch, _, _, keys), values = inputs.k.shape, inputs.v.shape[3]
    scales, more = inputs.write.shape[3], inputs.asked.shape[0] - FEW * batch
    if max(keys, values) > WIDEST or scales > MOST_SCALES:
        return False
    return 4 * more * (keys + values + 2 * scales) <= batch * scales * keys * values


def retention_pairs(inputs: Inputs) -> Tensor:
    """The output of `retention`, 0 at places not asked for; `pairs_pay` says for which calls."""
    return _pairs(inputs)[0]


class Cut(NamedTuple):
    """How one call is cut.

    tokens: of a block; blocks: of a row; readers: that a program of a walk takes at once; strides:
    programs that share a row's readers; part: blocks of one; parts: of a row.
    """

    tokens: int
    blocks: int
    readers: int
    strides: int
    part: int
    parts: int

    @classmethod
    def of(cls, inputs: Inputs) -> "Cut":
        """By shapes alone."""
        batch, length, heads, _ = inputs.k.shape
        count = inputs.asked.shape[0]
        # ieee products run on plain multiply-adds, and want small tiles
        tokens, readers = (32, 16) if inputs.q.dtype == torch.float32 else (64, 64)
        if inputs.write.shape[3] > SCALES_IN_LARGE_TILES:
            tokens, readers = 16, min(readers, 32)
        blocks = cdiv(length, tokens)
        strides = max(1, cdiv(count, max(batch, 1) * readers))
        parts = max(1, min(blocks, RESIDENT // max(1, batch * heads * strides)))
        part = max(1, cdiv(blocks, parts))
        return cls(tokens, blocks, readers, strides, part, cdiv(blocks, part))


def _readers(inputs: Inputs, cut: Cut) -> tuple[Tensor, Tensor]:
    """Spots of readers in their order, and the first reader of each block, of all rows' `[n + 1]`.

    A spot is a place in rows that are filled up to whole blocks.
    """
    length, whole = inputs.k.shape[1], cut.blocks * cut.tokens
    spots = inputs.asked + inputs.asked // max(length, 1) * (whole - length)
    spots = spots.sort().values
    end = inputs.k.shape[0] * whole + 1
    starts = torch.arange(0, end, cut.tokens, device=spots.device)
    return spots, torch.searchsorted(spots, starts, out_int32=True)


def _constants(inputs: Inputs, cut: Cut) -> dict[str, object]:
    """What every kernel is told at compile time."""
    _, _, heads, keys = inputs.k.shape
    values, scales = inputs.v.shape[3], inputs.write.shape[3]
    return {
        "H": heads,
        "S": scales,
        "SP": power_of_two(scales),
        "K": keys,
        "V": values,
        "BK": power_of_two(keys),
        "BV": power_of_two(values),
        "BT": cut.tokens,
        "NORM": NORMALIZER_CODES[inputs.normalizer],
        "HAS_READ": inputs.read is not None,
        "PREC": "ieee" if inputs.q.dtype == torch.float32 else "tf32",
    }


def _tile(inputs: Inputs, stages: int) -> Tile:
    large = inputs.q.dtype == torch.float32 or inputs.write.shape[3] > SCALES_IN_LARGE_TILES
    return Tile(0, 8, 1) if large else Tile(0, 4, stages)


def _dense(inputs: Inputs) -> Inputs:
    return Inputs._make((*map(dense, inputs[:6]), *inputs[6:]))


def _settle(
    parts: Tensor,
    spots: Tensor,
    out: Tensor,
    cut: Cut,
    normalizer: Tensors = (None, None, None),
    eps: float = 0.0,
) -> None:
    """Sums of parts to their places in `out`; normaliser: its parts, then what they make."""
    (batch, length, heads, size), count = out.shape, len(spots)
    den, kept, den_out = normalizer
    launch(
        settle_kernel, cdiv(count, SETTLED) * heads,
        parts, den, spots, out, kept, den_out, batch, length, count, cut.blocks, cut.parts,
        cut.part, eps, H=heads, D=size, BD=power_of_two(size), BT=cut.tokens, BR=SETTLED,
        UNROLL=8, NORM=int(den is not None), tile=Tile(0, 1, 1),
    )  # fmt: skip


def _forward(inputs: Inputs) -> Tensors:
    """Outputs; then by reader outputs and raw normaliser, and who the readers are."""
    inputs = _dense(inputs)
    q, k, v, write, log_decay, read, *_ = inputs
    cut = Cut.of(inputs)
    o, o_out, den_out, *_ = _shapes(inputs)
    o.zero_()
    spots, first = _readers(inputs, cut)
    (batch, length, heads, value_dim), count = v.shape, len(spots)
    num = v.new_empty(cut.parts + 1, count, heads, value_dim, dtype=torch.float32)
    den = None if den_out is None else num.new_empty(cut.parts + 1, count, heads)
    rate_h, common = rate_stride(log_decay), _constants(inputs, cut)
    launch(
        far_kernel, batch * cut.parts * cut.strides * heads,
        q, k, v, write, read, log_decay, spots, first, num, den, length, count, rate_h,
        cut.blocks, cut.parts, cut.part, cut.strides,
        BR=cut.readers, tile=_tile(inputs, 3), **common,
    )  # fmt: skip
    launch(
        near_kernel, batch * cut.blocks * heads,
        q, k, v, write, read, log_decay, spots, first, num, den, length, count, rate_h,
        cut.blocks, cut.parts, BR=NEAR, SELF=inputs.include_self, tile=_tile(inputs, 1), **common,
    )  # fmt: skip
    _settle(num, spots, o, cut, (den, o_out, den_out), inputs.eps)
    return o, o_out, den_out, spots, first


def _shapes(inputs: Inputs) -> Tensors:
    v, asked, cut = inputs.v, inputs.asked, Cut.of(inputs)
    o_out = den_out = None
    if inputs.normalizer != "none":
        shape = (asked.shape[0], *v.shape[2:])
        o_out = v.new_empty(shape, dtype=torch.float32)
        den_out = v.new_empty(shape[:2], dtype=torch.float32)
    first = asked.new_empty(v.shape[0] * cut.blocks + 1, dtype=torch.int32)
    o = torch.empty_like(v, memory_format=torch.contiguous_format)
    return o, o_out, den_out, torch.empty_like(asked), first


def _backward(inputs: Inputs, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    """Gradients to q, k, v, write, log_decay and read; None where absent."""
    o, den, spots, first = kept
    do = dense(grads[0])
    inputs = _dense(inputs)
    q, k, v, write, log_decay, read, *_ = inputs
    cut, decay_grad, rate_h = Cut.of(inputs), needs[4], rate_stride(log_decay)
    (batch, length, heads, _), count = k.shape, len(spots)
    common = _constants(inputs, cut) | {"DECAY_GRAD": decay_grad}

    def rows(like: Tensor | None, *lead: int, dtype: torch.dtype | None = None) -> Tensor | None:
        """Room for a row of `like` for each reader."""
        if like is None:
            return None
        return like.new_empty(*lead, count, *like.shape[2:], dtype=dtype)

    qs, reads, scaled = rows(q), rows(read), rows(v)
    shift = None if den is None else torch.empty_like(den)
    dq_parts = rows(q, cut.parts + 1, dtype=torch.float32)
    dread_parts = rows(read, cut.parts + 1, dtype=torch.float32)
    walks, blocks = batch * cut.parts * cut.strides, batch * cut.blocks
    far = near = None
    if decay_grad:
        far = q.new_empty(walks, heads, common["SP"], dtype=torch.float32)
        near = q.new_empty(blocks, heads, common["SP"], dtype=torch.float32)
    launch(
        reader_kernel, walks * heads,
        q, k, v, write, read, log_decay, spots, first, o, den, do, qs, reads, scaled, shift,
        dq_parts, dread_parts, far, length, count, rate_h, cut.blocks, cut.parts, cut.part,
        cut.strides, inputs.eps, BR=cut.readers, tile=_tile(inputs, 3), **common,
    )  # fmt: skip
    dk, dv, dwrite = torch.empty_like(k), torch.empty_like(v), torch.empty_like(write)
    launch(
        token_kernel, blocks * heads,
        k, v, write, log_decay, spots, first, qs, reads, scaled, shift, dq_parts, dk, dv, dwrite,
        dread_parts, near, length, count, rate_h, cut.blocks, cut.parts,
        BR=min(cut.readers, AFTER), NEAR=NEAR, SELF=inputs.include_self, tile=_tile(inputs, 2),
        **common,
    )  # fmt: skip
    dq, dread = torch.zeros_like(q), None if read is None else torch.zeros_like(read)
    _settle(dq_parts, spots, dq, cut)
    if dread is not None:
        _settle(dread_parts, spots, dread, cut)
    dlog_decay = None
    if far is not None and near is not None:
        dlog_decay = (far.sum(0) + near.sum(0))[:, : write.shape[3]]
        dlog_decay = dlog_decay.sum(0) if log_decay.dim() == 1 else dlog_decay
        dlog_decay = dlog_decay.to(log_decay.dtype)
    return dq, dk, dv, dwrite, dlog_decay, dread


_pairs = custom_op(
    "vort::retention_pairs_forward",
    Inputs,
    _forward,
    _backward,
    _shapes,
    outputs=("o", "o_out", "den_out", "spots", "first"),
    saved=("o_out", "den_out", "spots", "first"),
    gradients=("q", "k", "v", "write", "log_decay", "read"),
)
