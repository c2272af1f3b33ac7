# mypy: ignore-errors
"""All gradients of local attention in one walk: scores are computed once for the three of them.

A program walks over the blocks of keys of one head, from left to right. A window reaches into at
most REACH blocks after a block of keys: those blocks' queries meet its keys, and what they receive
stays in registers until the walk has come to their own keys. Every tensor is so read from memory
once (what is read again soon is in a cache) and written once, scores are computed once, and nothing
is added atomically. A walk begins REACH blocks early, for what keys there add to its queries, and
keeps nothing else of them.

Mathematics and names as in `kernels.py`.
"""

import triton
import triton.language as tl

from vort.ops.gpu.parts import (
    LN2,
    LOG2E,
    ask,
    fence_loads,
    finished,
    load_column,
    load_rows,
    store_rows,
    uniform,
)

from .kernels import MASKED, row_at


@triton.jit
def ask_rows(ptr, token, left, h, H: tl.constexpr, D: tl.constexpr, B: tl.constexpr):
    """Have a block's rows brought near: they are loaded a step later."""
    r = tl.arange(0, B)[:, None]
    ask(ptr + (token * H + h) * D + r * (H * D), r < left)


@triton.jit
def numbers_of(ptr, t0, left, B: tl.constexpr):
    """One number for each of a block of queries, which may lie beyond the last."""
    return tl.load(ptr + t0 + tl.arange(0, B), mask=tl.arange(0, B) < left, other=0.0)


@triton.jit
def slopes_of(
    o, dots, entropy, dot, dentropy, token, t0, left, h,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, B: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """``do·o + dH H`` and ``dH`` in base 2 of a block of queries; without dH the first twice.

    dots: ``do·o`` of the head's queries, where o is not there.
    """
    if o is None:
        shared = numbers_of(dots, t0, left, B)
    else:
        ot = load_rows(o, token, left, h, H, 0, V, B, BV)
        shared = tl.sum(ot.to(tl.float32) * dot.to(tl.float32), axis=1)
    slope = shared
    if ENTROPY:
        slope = load_column(dentropy, token, left, h, H, 0, 1, B)
        shared += slope * load_column(entropy, token, left, h, H, 0, 1, B)
        slope *= LN2
    return shared, slope


@triton.jit
def scores_back(
    qt, dot, kt, vt, total, shared, slope, t0, j0, start, T, window, scale,
    B: tl.constexpr, CAUSAL: tl.constexpr, BOUND: tl.constexpr, HAS_START: tl.constexpr,
    ENTROPY: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """p and ds ``[queries, keys]`` of queries from t0 and keys from j0 on, both as factors.

    CAUSAL: some keys may come after a query; BOUND: some may be out of its window.
    """
    s = tl.dot(qt, tl.trans(kt), input_precision=PREC)
    ds = tl.dot(dot, tl.trans(vt), input_precision=PREC) - shared[:, None]
    s = s * (scale * LOG2E) - total[:, None]
    row = tl.arange(0, B)
    if CAUSAL:
        s = tl.where(row[None, :] <= row[:, None], s, MASKED)
    if BOUND or HAS_START:
        out = row + (t0 - j0 - window)
        if HAS_START:
            begin = tl.load(start + t0 + row, mask=t0 + row < T, other=0).to(tl.int32)
            out = tl.maximum(out, begin - j0 - 1)
        s = tl.where(row[None, :] > out[:, None], s, MASKED)
    if ENTROPY:
        ds -= slope[:, None] * s
    p = tl.exp2(s)
    return p.to(dot.dtype), (ds * p).to(qt.dtype)


@triton.jit(do_not_specialize=["T", "window", "run"])
def attended_walk_kernel(
    q, k, v, start, o, dots, lse, entropy, do, dentropy, dq, dk, dv, T, window, run, scale,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    B: tl.constexpr, REACH: tl.constexpr, LONG: tl.constexpr, HAS_START: tl.constexpr,
    ENTROPY: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """``dq``, ``dk`` and ``dv`` of ``run`` blocks of B tokens, one head.

    dots: ``do·o``, which lie as lse does, instead of o.
    REACH: blocks after its own that a block of keys is seen from, 1 or 2; LONG: all of them but
    the last see all of it.
    """
    pid = tl.program_id(0)
    h = pid % H
    runs = tl.cdiv(tl.cdiv(T, B), run)
    first = (pid // H) % runs * run
    b = pid // (H * runs)
    begin = b.to(tl.int64) * T
    lse += row_at(b, h, 0, T, H, B)
    if dots is not None:
        dots += row_at(b, h, 0, T, H, B)

    # the first queries have seen keys of blocks before
    block0 = tl.maximum(first - REACH, 0)
    t0 = block0 * B
    dot = load_rows(do, begin + t0, T - t0, h, H, 0, V, B, BV)
    shared0, slope0 = slopes_of(
        o, dots, entropy, dot, dentropy, begin + t0, t0, T - t0, h, H, V, BV, B, ENTROPY
    )
    shared1, slope1 = shared0, slope0
    if REACH == 2:
        t0 += B
        dot = load_rows(do, begin + t0, T - t0, h, H, 0, V, B, BV)
        shared1, slope1 = slopes_of(
            o, dots, entropy, dot, dentropy, begin + t0, t0, T - t0, h, H, V, BV, B, ENTROPY
        )
    dq0 = tl.zeros([B, BD], dtype=tl.float32)
    dq1 = tl.zeros([B, BD], dtype=tl.float32)
    for block in range(block0, tl.minimum(first + run, tl.cdiv(T, B))):
        # not as the loop's own number: addresses would be carried on, and registers are short
        j0 = uniform(block) * B
        token = begin + j0
        left = T - j0
        kt = load_rows(k, token, left, h, H, 0, D, B, BD)
        vt = load_rows(v, token, left, h, H, 0, V, B, BV)
        qt = load_rows(q, token, left, h, H, 0, D, B, BD)
        dot = load_rows(do, token, left, h, H, 0, V, B, BV)
        # what is new to the next step
        ask_rows(k, token + B, left - B, h, H, D, B)
        ask_rows(v, token + B, left - B, h, H, V, B)
        ask_rows(q, token + (REACH + 1) * B, left - (REACH + 1) * B, h, H, D, B)
        ask_rows(do, token + (REACH + 1) * B, left - (REACH + 1) * B, h, H, V, B)
        if o is not None:
            ask_rows(o, token + (REACH + 1) * B, left - (REACH + 1) * B, h, H, V, B)
        dkt = tl.zeros([B, BD], dtype=tl.float32)
        dvt = tl.zeros([B, BV], dtype=tl.float32)
        fence_loads(block)
        p, ds = scores_back(
            qt, dot, kt, vt, numbers_of(lse, j0, left, B), shared0, slope0, j0, j0, start,
            T, window, scale, B, True, not LONG, HAS_START, ENTROPY, PREC,
        )  # fmt: skip
        dvt = tl.dot(tl.trans(p), dot, dvt, input_precision=PREC)
        dkt = tl.dot(tl.trans(ds), qt, dkt, input_precision=PREC)
        dq0 = tl.dot(ds, kt, dq0, input_precision=PREC)
        kept = tl.where(block >= first, left, 0)
        store_rows(dq, dq0 * scale, token, kept, h, H, 0, D, B, BD)
        if REACH == 2:
            left -= B
            t0 = j0 + B
            qt = load_rows(q, begin + t0, left, h, H, 0, D, B, BD)
            dot = load_rows(do, begin + t0, left, h, H, 0, V, B, BV)
            p, ds = scores_back(
                qt, dot, kt, vt, numbers_of(lse, t0, left, B), shared1, slope1, t0, j0, start,
                T, window, scale, B, False, not LONG, HAS_START, ENTROPY, PREC,
            )  # fmt: skip
            dvt = tl.dot(tl.trans(p), dot, dvt, input_precision=PREC)
            dkt = tl.dot(tl.trans(ds), qt, dkt, input_precision=PREC)
            # kept apart from the product, or the assembler waits for each of its parts
            dq0 = finished(tl.dot(ds, kt, dq1, input_precision=PREC))
            shared0, slope0 = finished(shared1), finished(slope1)
        left = T - j0 - REACH * B
        t0 = j0 + REACH * B
        qt = load_rows(q, begin + t0, left, h, H, 0, D, B, BD)
        dot = load_rows(do, begin + t0, left, h, H, 0, V, B, BV)
        shared1, slope1 = slopes_of(
            o, dots, entropy, dot, dentropy, begin + t0, t0, left, h, H, V, BV, B, ENTROPY
        )
        p, ds = scores_back(
            qt, dot, kt, vt, numbers_of(lse, t0, left, B), shared1, slope1, t0, j0, start,
            T, window, scale, B, False, True, HAS_START, ENTROPY, PREC,
        )  # fmt: skip
        dvt = tl.dot(tl.trans(p), dot, dvt, input_precision=PREC)
        dkt = tl.dot(tl.trans(ds), qt, dkt, input_precision=PREC)
        dq1 = tl.dot(ds, kt, tl.zeros([B, BD], dtype=tl.float32), input_precision=PREC)
        dq1 = finished(dq1)
        if REACH == 1:
            dq0, shared0, slope0 = dq1, shared1, slope1
        store_rows(dk, dkt * scale, token, kept, h, H, 0, D, B, BD)
        store_rows(dv, dvt, token, kept, h, H, 0, V, B, BV)
