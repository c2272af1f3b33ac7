# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, misc"
"""From projections to heads, a block of positions at a time: convolution to features and back.

A program has one head of queries, keys or values, held as its two halves ``[BT, BH]``, which RoPE
turns into each other. Positions before are loads of the same rows, shifted: the first level of
cache holds them. Queries and keys may go through their learned maps (`hedgehog_features`) before
they are stored; l = z W are a map's logits of the head z.

The backward computes all that again. With u the convolution's sum and du its gradient

    dx_t = sum_j w_j du_{t+j},     dw_j = sum_t du_t x_{t-j},

and rows of du are moved by products with matrices of zeros and ones, since a tile's rows are spread
over threads. A block of BT rows owns the first BT - W + 1, whose successors it has.
"""

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vort.ops.custom import Some, Tensors, custom_op, traced
from vort.ops.gpu.launcher import Tile, dense, launch, power_of_two
from vort.ops.gpu.parts import ON_GPU, fence_loads, fold, uniform

__all__ = ["Inputs", "heads_again", "heads_fused"]

# Positions in a block, for heads of up to 64 and for wider ones, in bfloat16 and in float32.
FORWARD = {2: (Tile(64, 4, 1), Tile(32, 4, 1)), 4: (Tile(32, 4, 1), Tile(32, 8, 1))}
BACKWARD = {2: (Tile(64, 4, 1), Tile(64, 8, 1)), 4: (Tile(32, 4, 1), Tile(32, 8, 1))}
# Programs that share the blocks of a backward: each leaves sums of its own.
PROGRAMS = 1536
NOTED = True
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(u):
    """1 / (1 + exp(-u)): two instructions of the special unit, with no care for tiny numbers."""
    e = u * -LOG2E
    if ON_GPU:
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [e], dtype=tl.float32, is_pure=True, pack=1
        )
        s = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + e], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        s = 1.0 / (1.0 + tl.exp2(e))
    return s


@triton.jit
def load_half(ptr, at, mask, i, HALF: tl.constexpr, BH: tl.constexpr):
    """Half a head of many rows, float32."""
    if BH > HALF:
        mask = mask & (i < HALF)
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_half(ptr, at, value, mask, i, HALF: tl.constexpr, BH: tl.constexpr):
    if BH > HALF:
        mask = mask & (i < HALF)
    tl.store(ptr + at, value.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def tap(taps, i, lag: tl.constexpr, C: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr):
    """A tap of half a head ``[1, BH]``; taps ``[W, C]`` from its first channel on."""
    return tl.load(taps + lag * C + i, mask=i < HALF, other=0.0)


@triton.jit
def earlier(
    x, state, old, t, r, i, end, stride, lag: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr,
):  # fmt: skip
    """Half a head of x, ``lag`` positions before a block's; zero where another sequence is."""
    here = (t >= lag) & (t < end)
    if HAS_AGE:
        here = here & (old >= lag)
    value = load_half(x, (r - lag) * stride + i, here, i, HALF, BH)
    if HAS_STATE:
        if lag > 0:
            before = (t < lag) & (t < end)
            value += load_half(state, (t + (W - 1 - lag)) * C + i, before, i, HALF, BH)
    return value


@triton.jit
def convolve(
    x, taps, state, old, t, r, i, end, stride,
    C: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr,
):  # fmt: skip
    """The sum over taps of half a head."""
    u = tap(taps, i, 0, C, HALF, BH) * earlier(
        x, state, old, t, r, i, end, stride, 0, C, W, HALF, BH, HAS_STATE, HAS_AGE
    )
    for lag in tl.static_range(1, W):
        u += tap(taps, i, lag, C, HALF, BH) * earlier(
            x, state, old, t, r, i, end, stride, lag, C, W, HALF, BH, HAS_STATE, HAS_AGE
        )
    return u


@triton.jit
def convolve_both(
    x, taps, state, old, t, r, i, end, stride,
    C: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr,
):  # fmt: skip
    """The sums over taps of both halves of a head."""
    a = convolve(x, taps, state, old, t, r, i, end, stride, C, W, HALF, BH, HAS_STATE, HAS_AGE)
    b = convolve(
        x + HALF, taps + HALF, state + HALF, old, t, r, i, end, stride, C, W, HALF, BH, HAS_STATE,
        HAS_AGE,
    )  # fmt: skip
    return a, b


@triton.jit
def scale_of(a, b, inside, eps, D: tl.constexpr):
    """What RMS norm multiplies rows by, ``[BT, 1]``."""
    square = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1))[:, None] / D
    return tl.rsqrt(tl.where(inside, square, 1.0) + eps)


@triton.jit
def ask(rows, mask):
    """Have lines brought near that are loaded later; rows: where each begins, ``[BT, 1]``."""
    if ON_GPU:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r", [rows, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def ages(age, t, length, HAS_AGE: tl.constexpr):
    """Positions since a sequence began, of a block."""
    old = t
    if HAS_AGE:
        old = tl.load(age + t, mask=t < length, other=0).to(tl.int32)
    return old


@triton.jit
def map_half(w, h, first, D: tl.constexpr, M: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr,
             BM: tl.constexpr):  # fmt: skip
    """The rows of a head's map that meet half a head, ``[BH, BM]``, as they are kept."""
    i = tl.arange(0, BH)[:, None]
    m = tl.arange(0, BM)[None, :]
    at = (h * D + first + i) * M + m
    return tl.load(w + at, mask=(i < HALF) & (m < M), other=0.0)


@triton.jit
def logits_of(za, zb, wa, wb):
    """``z W`` of a block; a float32 map is met with 16 of its bits where heads have 8."""
    if za.dtype == tl.float32:
        logits = tl.dot(za, wa.to(tl.float32), input_precision="ieee")
        logits = tl.dot(zb, wb.to(tl.float32), logits, input_precision="ieee")
    else:
        high_a, high_b = wa.to(za.dtype), wb.to(za.dtype)
        logits = tl.dot(za, high_a)
        logits = tl.dot(zb, high_b, logits)
        if wa.dtype == tl.float32:
            logits = tl.dot(za, (wa - high_a.to(tl.float32)).to(za.dtype), logits)
            logits = tl.dot(zb, (wb - high_b.to(tl.float32)).to(za.dtype), logits)
    return logits


@triton.jit
def softmaxes(logits, M: tl.constexpr, BM: tl.constexpr):
    """Softmax of the logits and of their negatives over the M real columns; zero in others."""
    scaled = logits * LOG2E
    if BM > M:
        real = (tl.arange(0, BM) < M)[None, :]
        high = tl.where(real, scaled, float("-inf"))
        low = tl.where(real, scaled, float("inf"))
        p = tl.exp2(high - tl.max(high, axis=1)[:, None])
        n = tl.exp2(tl.min(low, axis=1)[:, None] - low)
    else:
        p = tl.exp2(scaled - tl.max(scaled, axis=1)[:, None])
        n = tl.exp2(tl.min(scaled, axis=1)[:, None] - scaled)
    p *= (1.0 / tl.sum(p, axis=1))[:, None]
    n *= (1.0 / tl.sum(n, axis=1))[:, None]
    return p, n


@triton.jit
def plain_product(a, b, acc, NARROW: tl.constexpr):
    """``acc + a b`` in the type of the heads: what a gradient needs."""
    if tl.float32 == NARROW:
        acc = tl.dot(a, b.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(a.to(NARROW), b.to(NARROW), acc)
    return acc


@triton.jit
def set_apart(x, mask):
    """x where the mask of its rows holds, by a detour that keeps a product's layout to itself.

    The compiler gives whatever meets a product the layout of its result, which suits no load.
    """
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    apart = tl.reshape(x, [R, 2, N // 2])
    return tl.reshape(tl.where(mask[:, :, None], apart, 0.0), [R, N])


@triton.jit
def moved(S, b, acc, NARROW: tl.constexpr):
    """``acc + S b`` for a matrix of zeros and ones: exact but for b's rounding to NARROW."""
    if tl.float32 == NARROW:
        acc = tl.dot(S.to(tl.float32), b, acc, input_precision="tf32x3")
    else:
        acc = tl.dot(S.to(NARROW), b.to(NARROW), acc)
    return acc


@triton.jit(do_not_specialize=["length", "units", "batch_units", "blocks", "turn_stride"])  # fmt: skip
def heads_tile_kernel(
    x, taps, state, age, q_norm, k_norm, cos, sin, q_map, k_map, q, k, v, q_turned, k_turned,
    length, units, batch_units, blocks, turn_stride, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, M: tl.constexpr,
    BM: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, VEC: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    MAPPED: tl.constexpr,
):  # fmt: skip
    """A block of one head: stored as it is, or its features; queries and keys turned as well.

    x's strides come in units of VEC numbers, which tells how wide it may be read.
    """
    HALF: tl.constexpr = D // 2
    C: tl.constexpr = (HQ + 2 * HK) * D
    pid = tl.program_id(0)
    n = pid % (HQ + 2 * HK)
    block = pid // (HQ + 2 * HK)
    row = (block // blocks).to(tl.int64)
    t0 = block % blocks * BT
    r = tl.arange(0, BT)[:, None]
    i = tl.arange(0, BH)[None, :]
    t = t0 + r
    inside = t < length
    old = ages(age, t, length, HAS_AGE)
    stride = units * VEC
    xs = x + row * (batch_units * VEC) + t0.to(tl.int64) * stride + n * D
    ws = taps + n * D
    past = xs
    if HAS_STATE:
        past = state + row * ((W - 1) * C) + n * D
    ua, ub = convolve_both(
        xs, ws, past, old, t, r, i, length, stride, C, W, HALF, BH, HAS_STATE, HAS_AGE
    )
    ya = ua * sigmoid(ua)
    yb = ub * sigmoid(ub)
    first = row * length + t0
    if n >= HQ + HK:
        out = v + (first * HK + (n - HQ - HK)) * D
        store_half(out, r * (HK * D) + i, ya, inside, i, HALF, BH)
        store_half(out, r * (HK * D) + HALF + i, yb, inside, i, HALF, BH)
    else:
        query = n < HQ
        heads = tl.where(query, HQ, HK)
        h = tl.where(query, n, n - HQ)
        if NORM:
            scale = scale_of(ya, yb, inside, eps, D)
            norm = tl.where(query, q_norm, k_norm)
            ya *= scale * load_half(norm, i, i < HALF, i, HALF, BH)
            yb *= scale * load_half(norm, i + HALF, i < HALF, i, HALF, BH)
        # turned and mapped from what is stored, so that both parts of a layer see the same head
        za = ya.to(q.dtype.element_ty)
        zb = yb.to(q.dtype.element_ty)
        base = (first * heads + h) * D
        at = r * (heads * D) + i
        if TURN:
            place = (row * turn_stride + old) * HALF + i
            c = load_half(cos, place, inside, i, HALF, BH)
            s = load_half(sin, place, inside, i, HALF, BH)
            turned = tl.where(query, q_turned, k_turned) + base
            a, b = za.to(tl.float32), zb.to(tl.float32)
            store_half(turned, at, a * c - b * s, inside, i, HALF, BH)
            store_half(turned, at + HALF, b * c + a * s, inside, i, HALF, BH)
        out = tl.where(query, q, k)
        if MAPPED:
            w = tl.where(query, q_map, k_map)
            wa = map_half(w, h, 0, D, M, HALF, BH, BM)
            wb = map_half(w, h, HALF, D, M, HALF, BH, BM)
            p, m = softmaxes(logits_of(za, zb, wa, wb), M, BM)
            j = tl.arange(0, BM)[None, :]
            out += (first * heads + h) * (2 * M)
            store_half(out, r * (heads * 2 * M) + j, p, inside, j, M, BM)
            store_half(out, r * (heads * 2 * M) + M + j, m, inside, j, M, BM)
        else:
            store_half(out + base, at, za, inside, i, HALF, BH)
            store_half(out + base, at + HALF, zb, inside, i, HALF, BH)


@triton.jit
def send_back(
    dx, du, taps, old, r, i, own, lagged,
    C: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr,
    HAS_AGE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Half a head of dx from du: position t receives w_j of what its j-th successor has."""
    to = tl.arange(0, BT)[:, None]
    of = tl.arange(0, BT)[None, :]
    acc = tl.zeros([BT, BH], dtype=tl.float32)
    for lag in tl.static_range(W):
        sent = du * tap(taps, i, lag, C, HALF, BH)
        if HAS_AGE:
            sent = tl.where(old >= lag, sent, 0.0)
        acc = moved(of == to + lag, sent, acc, NARROW)
    store_half(dx, r * lagged + i, acc, own, i, HALF, BH)


@triton.jit
def send_back_by_notes(
    dx, du, notes, note_stride, taps, age, t, r, i, length, own, lagged,
    C: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr,
    HAS_AGE: tl.constexpr,
):  # fmt: skip
    """Half a head of dx from du: position t receives w_j of what its j-th successor has."""
    acc = du * tap(taps, i, 0, C, HALF, BH)
    for lag in tl.static_range(1, W):
        there = own
        if HAS_AGE:
            there = own & (ages(age, t + lag, length, True) >= lag)
        sent = tl.load(notes + (r + lag) * note_stride + i, mask=there, other=0.0).to(tl.float32)
        acc += sent * tap(taps, i, lag, C, HALF, BH)
    store_half(dx, r * lagged + i, acc, own, i, HALF, BH)


@triton.jit
def shorten(g, ROWS: tl.constexpr):
    """Sums ``[ROWS, BH]`` of a tile's rows that are ROWS apart: a thread has them all."""
    BT: tl.constexpr = g.shape[0]
    if BT > ROWS:
        g = tl.sum(tl.reshape(g, [BT // ROWS, ROWS, g.shape[1]]), axis=0)
    return g


@triton.jit
def share(
    du, x, state, old, t, r, i, end, stride, lag: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr,
):  # fmt: skip
    """A block's share of the gradient to a tap, ``[ROWS, BH]``."""
    return shorten(
        du * earlier(x, state, old, t, r, i, end, stride, lag, C, W, HALF, BH, HAS_STATE, HAS_AGE),
        ROWS,
    )


@triton.jit
def walk_back(
    x, taps, state, age, norm, cos, sin, w, plain, turned, dx, dtaps, dnorm, dmap, notes,
    n, h, heads, head_units, part, parts, count, blocks, length, units, batch_units, dx_units,
    note_units, map_units, turn_stride, eps,
    C: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, M: tl.constexpr, BM: tl.constexpr,
    W: tl.constexpr, BT: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    MAPPED: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr, NOTED: tl.constexpr,
):  # fmt: skip
    """dx of every parts-th block of a head, and these blocks' share of the other gradients.

    PLAIN: a gradient came back to the head or its features; TURNED: to the turned head, or without
    TURN to the head again.
    """
    HALF: tl.constexpr = D // 2
    OWN: tl.constexpr = BT - W + 1
    NARROW: tl.constexpr = x.dtype.element_ty
    r = tl.arange(0, BT)[:, None]
    i = tl.arange(0, BH)[None, :]
    j = tl.arange(0, BM)[None, :]
    stride = units * VEC
    width = head_units * VEC
    note_stride = note_units * VEC
    ws = taps + n * D
    # the same number, but the compiler does not know: what is loaded twice shall be loaded twice
    again = uniform(length)
    zero = tl.zeros([BT, BH], dtype=tl.float32)
    short = tl.zeros([ROWS, BH], dtype=tl.float32)
    ga0, ga1, ga2, ga3, gb0, gb1, gb2, gb3 = short, short, short, short, short, short, short, short
    na, nb = short, short
    if MAPPED:
        wa = map_half(w, h, 0, D, M, HALF, BH, BM)
        wb = map_half(w, h, HALF, D, M, HALF, BH, BM)
        ma = tl.zeros([BH, BM], dtype=tl.float32)
        mb = tl.zeros([BH, BM], dtype=tl.float32)
    for step in range(tl.cdiv(count - part, parts)):
        block = part + step * parts
        row = (block // blocks).to(tl.int64)
        t0 = block % blocks * OWN
        t = t0 + r
        inside = t < length
        own = inside & (r < OWN)
        first = row * length + t0
        old = ages(age, t, length, HAS_AGE)
        xs = x + row * (batch_units * VEC) + t0.to(tl.int64) * stride + n * D
        past = xs
        if HAS_STATE:
            past = state + row * ((W - 1) * C) + n * D
        at = r * width + i
        base = first * width + h * D
        da, db = zero, zero
        if NORM:
            fa = load_half(norm, i, i < HALF, i, HALF, BH)
            fb = load_half(norm, i + HALF, i < HALF, i, HALF, BH)
        if MAPPED and PLAIN:
            features = plain + first * (map_units * VEC) + h * (2 * M)
            wide = r * (map_units * VEC) + j
            dp = load_half(features, wide, inside, j, M, BM)
            dm = load_half(features, wide + M, inside, j, M, BM)
            za, zb = convolve_both(
                xs, ws, past, old, t, r, i, length, stride, C, W, HALF, BH, HAS_STATE, HAS_AGE
            )
            za, zb = za * sigmoid(za), zb * sigmoid(zb)
            if TURNED:
                ask(turned + base + r * width, inside)
            if NORM:
                scale = scale_of(za, zb, inside, eps, D)
                za, zb = za * (scale * fa), zb * (scale * fb)
            za, zb = za.to(NARROW), zb.to(NARROW)
            fence_loads(step)
            p, m = softmaxes(logits_of(za, zb, wa, wb), M, BM)
            dl = p * (dp - tl.sum(p * dp, axis=1)[:, None])
            dl -= m * (dm - tl.sum(m * dm, axis=1)[:, None])
            none = tl.zeros([BT, BH], dtype=tl.float32)
            da = set_apart(plain_product(dl, tl.trans(wa), none, NARROW), inside)
            db = set_apart(plain_product(dl, tl.trans(wb), none, NARROW), inside)
            dl = tl.where(own, dl, 0.0)
            ma = plain_product(tl.trans(za), dl, ma, NARROW)
            mb = plain_product(tl.trans(zb), dl, mb, NARROW)
        elif PLAIN:
            da = load_half(plain + base, at, inside, i, HALF, BH)
            db = load_half(plain + base, at + HALF, inside, i, HALF, BH)
        if TURNED:
            ta = load_half(turned + base, at, inside, i, HALF, BH)
            tb = load_half(turned + base, at + HALF, inside, i, HALF, BH)
            if TURN:
                place = (row * turn_stride + old) * HALF + i
                c = load_half(cos, place, inside, i, HALF, BH)
                s = load_half(sin, place, inside, i, HALF, BH)
                da += ta * c + tb * s
                db += tb * c - ta * s
            else:
                da += ta
                db += tb
        # for a map all this was there before: kept, it would leave no registers
        ua, ub = convolve_both(
            xs, ws, past, old, t, r, i, again, stride, C, W, HALF, BH, HAS_STATE, HAS_AGE
        )
        sa, sb = sigmoid(ua), sigmoid(ub)
        ya, yb = ua * sa, ub * sb
        # of silu
        slope_a = sa + ya * (1.0 - sa)
        slope_b = sb + yb * (1.0 - sb)
        if NORM:
            if not (MAPPED and PLAIN):
                scale = scale_of(ya, yb, inside, eps, D)
            ya *= scale
            yb *= scale
        if NORM:
            na += shorten(tl.where(own, da * ya, 0.0), ROWS)
            nb += shorten(tl.where(own, db * yb, 0.0), ROWS)
            da *= fa
            db *= fb
            along = (tl.sum(da * ya, axis=1) + tl.sum(db * yb, axis=1))[:, None] / D
            da = scale * (da - along * ya)
            db = scale * (db - along * yb)
        da *= slope_a
        db *= slope_b
        to = dx + first * C + n * D
        if NOTED:
            # two places in turn, so that no thread writes what another has yet to read
            mine = notes + (step % 2) * (2 * BT * BH)
            tl.store(mine + r * note_stride + i, da.to(NARROW))
            tl.store(mine + BT * BH + r * note_stride + i, db.to(NARROW))
            tl.debug_barrier()
            send_back_by_notes(
                to,
                da,
                mine,
                note_stride,
                ws,
                age,
                t,
                r,
                i,
                length,
                own,
                dx_units * VEC,
                C,
                W,
                HALF,
                BH,
                BT,
                HAS_AGE,
            )
            send_back_by_notes(
                to + HALF,
                db,
                mine + BT * BH,
                note_stride,
                ws + HALF,
                age,
                t,
                r,
                i,
                length,
                own,
                dx_units * VEC,
                C,
                W,
                HALF,
                BH,
                BT,
                HAS_AGE,
            )
        else:
            send_back(
                to, da, ws, old, r, i, own, dx_units * VEC, C, W, HALF, BH, BT, HAS_AGE, NARROW
            )
            send_back(
                to + HALF,
                db,
                ws + HALF,
                old,
                r,
                i,
                own,
                dx_units * VEC,
                C,
                W,
                HALF,
                BH,
                BT,
                HAS_AGE,
                NARROW,
            )
        # x once more, from the cache: kept in registers it would leave room for nothing else
        end = tl.minimum(length, t0 + OWN)
        ga0 += share(
            da, xs, past, old, t, r, i, end, stride, 0, C, W, HALF, BH, ROWS, HAS_STATE, HAS_AGE
        )
        gb0 += share(
            db,
            xs + HALF,
            past + HALF,
            old,
            t,
            r,
            i,
            end,
            stride,
            0,
            C,
            W,
            HALF,
            BH,
            ROWS,
            HAS_STATE,
            HAS_AGE,
        )
        ga1 += share(
            da, xs, past, old, t, r, i, end, stride, 1, C, W, HALF, BH, ROWS, HAS_STATE, HAS_AGE
        )
        gb1 += share(
            db,
            xs + HALF,
            past + HALF,
            old,
            t,
            r,
            i,
            end,
            stride,
            1,
            C,
            W,
            HALF,
            BH,
            ROWS,
            HAS_STATE,
            HAS_AGE,
        )
        if W > 2:
            ga2 += share(
                da, xs, past, old, t, r, i, end, stride, 2, C, W, HALF, BH, ROWS, HAS_STATE, HAS_AGE
            )
            gb2 += share(
                db,
                xs + HALF,
                past + HALF,
                old,
                t,
                r,
                i,
                end,
                stride,
                2,
                C,
                W,
                HALF,
                BH,
                ROWS,
                HAS_STATE,
                HAS_AGE,
            )
        if W > 3:
            ga3 += share(
                da, xs, past, old, t, r, i, end, stride, 3, C, W, HALF, BH, ROWS, HAS_STATE, HAS_AGE
            )
            gb3 += share(
                db,
                xs + HALF,
                past + HALF,
                old,
                t,
                r,
                i,
                end,
                stride,
                3,
                C,
                W,
                HALF,
                BH,
                ROWS,
                HAS_STATE,
                HAS_AGE,
            )
    col = tl.arange(0, BH)
    real = col < HALF
    mine = dtaps + (part * C + n * D + col) * W
    tl.store(mine, tl.sum(ga0, axis=0), mask=real)
    tl.store(mine + HALF * W, tl.sum(gb0, axis=0), mask=real)
    tl.store(mine + 1, tl.sum(ga1, axis=0), mask=real)
    tl.store(mine + HALF * W + 1, tl.sum(gb1, axis=0), mask=real)
    if W > 2:
        tl.store(mine + 2, tl.sum(ga2, axis=0), mask=real)
        tl.store(mine + HALF * W + 2, tl.sum(gb2, axis=0), mask=real)
    if W > 3:
        tl.store(mine + 3, tl.sum(ga3, axis=0), mask=real)
        tl.store(mine + HALF * W + 3, tl.sum(gb3, axis=0), mask=real)
    if NORM:
        own_norm = dnorm + (part * heads + h) * D + col
        tl.store(own_norm, tl.sum(na, axis=0), mask=real)
        tl.store(own_norm + HALF, tl.sum(nb, axis=0), mask=real)
    if MAPPED:
        k = tl.arange(0, BH)[:, None]
        own_map = dmap + ((part * heads + h) * D + k) * M + j
        tl.store(own_map, ma, mask=(k < HALF) & (j < M))
        tl.store(own_map + HALF * M, mb, mask=(k < HALF) & (j < M))


@triton.jit(
    do_not_specialize=[
        "parts", "count", "blocks", "length", "units", "batch_units", "dx_units", "q_units",
        "k_units", "note_units", "map_units", "turn_stride",
    ]
)  # fmt: skip
def heads_gradient_kernel(
    x, taps, state, age, q_norm, k_norm, cos, sin, q_map, k_map,
    dq, dk, dv, dq_turned, dk_turned, dv_again,
    dx, dtaps, dq_norm, dk_norm, dq_map, dk_map, notes,
    parts, count, blocks, length, units, batch_units, dx_units, q_units, k_units, note_units, map_units, turn_stride, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, M: tl.constexpr,
    BM: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, VEC: tl.constexpr, ROWS: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    MAPPED: tl.constexpr, NOTED: tl.constexpr,
):  # fmt: skip
    """Blocks ``part, part + parts, ..`` of ``count`` for one head; ``blocks`` lie in a row of x."""
    C: tl.constexpr = (HQ + 2 * HK) * D
    pid = tl.program_id(0)
    n = pid % (HQ + 2 * HK)
    part = pid // (HQ + 2 * HK)
    place = x
    if NOTED:
        place = notes + pid.to(tl.int64) * (4 * BT * BH)
    if n >= HQ + HK:
        walk_back(
            x, taps, state, age, x, x, x, x, dv, dv_again, dx, dtaps, x, x, place,
            n, n - HQ - HK, HK, k_units, part, parts, count, blocks, length, units, batch_units,
            dx_units, note_units, map_units, turn_stride, eps, C, D, BH, M, BM, W, BT, VEC, ROWS,
            HAS_STATE, HAS_AGE, False, False, False, dv is not None, dv_again is not None, NOTED,
        )  # fmt: skip
    else:
        query = n < HQ
        norm, w, plain, turned, dnorm, dmap = x, x, x, x, x, x
        if NORM:
            norm, dnorm = tl.where(query, q_norm, k_norm), tl.where(query, dq_norm, dk_norm)
        if MAPPED:
            w, dmap = tl.where(query, q_map, k_map), tl.where(query, dq_map, dk_map)
        if dq is not None:
            plain = tl.where(query, dq, dk)
        if dq_turned is not None:
            turned = tl.where(query, dq_turned, dk_turned)
        walk_back(
            x, taps, state, age, norm, cos, sin, w, plain, turned, dx, dtaps, dnorm, dmap, place,
            n, tl.where(query, n, n - HQ), tl.where(query, HQ, HK),
            tl.where(query, q_units, k_units), part, parts, count, blocks, length, units,
            batch_units, dx_units, note_units, map_units, turn_stride, eps, C, D, BH, M, BM, W, BT, VEC, ROWS,
            HAS_STATE, HAS_AGE, NORM, TURN, MAPPED, dq is not None, dq_turned is not None, NOTED,
        )  # fmt: skip


class Inputs(NamedTuple):
    """The arguments of `heads_fused`."""

    x: Tensor
    weight: Tensor
    state: Tensor | None
    age: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    q_map: Tensor | None
    k_map: Tensor | None
    num_heads: int
    num_key_value_heads: int
    eps: float
    twice: bool

    @property
    def dim(self) -> int:
        """The size of a head."""
        return self.x.shape[2] // (self.num_heads + 2 * self.num_key_value_heads)

    @property
    def features(self) -> int:
        """Logits of a map; the size of half a head without one."""
        return self.dim // 2 if self.q_map is None else self.q_map.shape[2]


def _constants(inputs: Inputs, tiles: dict[int, Any], widest: int) -> dict[str, Any]:
    """What kernels are compiled for."""
    x, dim = inputs.x, inputs.dim
    unit = gcd(widest, dim // 2, inputs.features, x.stride(0), x.stride(1))
    return {
        "HQ": inputs.num_heads, "HK": inputs.num_key_value_heads, "D": dim,
        "BH": power_of_two(dim // 2), "M": inputs.features, "BM": power_of_two(inputs.features),
        "W": inputs.weight.shape[1], "BT": _tile(inputs, tiles).columns, "VEC": unit,
        "HAS_STATE": inputs.state is not None, "HAS_AGE": inputs.age is not None,
        "NORM": inputs.q_norm is not None, "TURN": inputs.cos is not None,
        "MAPPED": inputs.q_map is not None,
    }  # fmt: skip


def _tile(inputs: Inputs, tiles: dict[int, Any]) -> Tile:
    tile: Tile = tiles[inputs.x.element_size()][inputs.dim > 64]
    return tile


def _turn_stride(inputs: Inputs) -> int:
    """A table of angles for each row is as long as the batch."""
    x, cos = inputs.x, inputs.cos
    apart = cos is not None and cos.shape[0] == x.shape[0] * x.shape[1] and x.shape[0] > 1
    return x.shape[1] if apart else 0


def _rows(inputs: Inputs) -> Inputs:
    """Dense channels; rows and sequences of x may lie apart."""
    x = inputs.x if inputs.x.stride(-1) == 1 else inputs.x.contiguous()
    return Inputs(x, *(dense(t) for t in inputs[1:10]), *inputs[10:])  # type: ignore[arg-type, call-arg]


def _taps(weight: Tensor) -> Tensor:
    """`[W, C]` float32: threads have neighbouring channels."""
    return torch.empty(
        weight.shape[::-1], dtype=torch.float32, device=weight.device
    ).copy_(weight.T)  # fmt: skip


def _shapes(inputs: Inputs) -> Tensors:
    x, sizes = inputs.x, (inputs.num_heads, *[inputs.num_key_value_heads] * 2)
    q, k, v = (x.new_empty(*x.shape[:2], n, inputs.dim) for n in sizes)
    turned = (torch.empty_like(q), torch.empty_like(k)) if inputs.cos is not None else (None, None)
    if inputs.q_map is not None:
        q, k = (x.new_empty(*x.shape[:2], n, 2 * inputs.features) for n in sizes[:2])
    return q, k, v, *turned, None


def _forward(inputs: Inputs) -> Tensors:
    inputs = _rows(inputs)
    x = inputs.x
    batch, length = x.shape[:2]
    constants = _constants(inputs, FORWARD, 8)
    blocks, unit = -(-length // constants["BT"]), constants["VEC"]
    outputs = _shapes(inputs)
    with torch.cuda.device_of(x):  # the GPU that holds the data, whichever is current
        taps = _taps(inputs.weight)
        launch(
            heads_tile_kernel, batch * blocks * (x.shape[2] // inputs.dim), x, taps, *inputs[2:10],
            *outputs[:5], length, x.stride(1) // unit, x.stride(0) // unit, blocks,
            _turn_stride(inputs), inputs.eps, tile=_tile(inputs, FORWARD), **constants,
        )  # fmt: skip
    v = outputs[2]
    again = v.view_as(v) if inputs.twice and v is not None else None
    return *outputs[:5], again, taps


def _pair(a: Tensor | None, b: Tensor | None, like: Sequence[Any]) -> list[Tensor | None]:
    """Both or neither: a gradient that did not come alone is zeros."""
    if a is None and b is None:
        return [None, None]
    return [
        torch.zeros_like(y) if g is None else dense(g) for g, y in zip((a, b), like, strict=True)
    ]


def _backward(inputs: Inputs, kept: Tensors, grads: Tensors, needs: Sequence[bool]) -> Tensors:
    inputs = _rows(inputs)
    x, weight = inputs.x, inputs.weight
    batch, length, channels = x.shape
    dim, heads, kv_heads = inputs.dim, inputs.num_heads, inputs.num_key_value_heads
    constants = _constants(inputs, BACKWARD, 4)
    unit, own = constants["VEC"], constants["BT"] - weight.shape[1] + 1
    tile = _tile(inputs, BACKWARD)
    rows = min(tile.columns, max(1, tile.warps * 32 * unit // constants["BH"]))
    blocks = -(-length // own)
    count = batch * blocks
    parts = min(count, max(1, PROGRAMS // (channels // dim)))
    like: Any = _shapes(inputs) if any(g is None for g in grads[:5]) else grads
    dq, dk = _pair(grads[0], grads[1], like[:2])
    dq_turned, dk_turned = _pair(grads[3], grads[4], like[3:5])
    wide: dict[str, Any] = {"dtype": torch.float32}
    dx = x.new_empty(x.shape)
    sums: list[Tensor | None] = [x.new_empty(parts, channels, weight.shape[1], **wide)]
    for n, norm in ((heads, inputs.q_norm), (kv_heads, inputs.k_norm)):
        sums.append(None if norm is None else x.new_empty(parts * n, dim, **wide))
    for w in (inputs.q_map, inputs.k_map):
        sums.append(None if w is None else x.new_empty(parts, *w.shape, **wide))
    notes = (
        x.new_empty(parts * (channels // dim), 4, tile.columns, constants["BH"]) if NOTED else None
    )
    with torch.cuda.device_of(x):
        taps = kept[0] if kept else _taps(weight)
        launch(
            heads_gradient_kernel, parts * (channels // dim), x, taps, *inputs[2:10], dq, dk,
            dense(grads[2]), dq_turned, dk_turned, dense(grads[5]), dx, *sums, notes, parts, count, blocks,
            length, x.stride(1) // unit, x.stride(0) // unit, channels // unit,
            heads * dim // unit, kv_heads * dim // unit, constants["BH"] // unit,
            2 * heads * inputs.features // unit, _turn_stride(inputs), inputs.eps,
            tile=tile, ROWS=rows, NOTED=NOTED, **constants,
        )  # fmt: skip
        given = (weight, inputs.q_norm, inputs.k_norm, inputs.q_map, inputs.k_map)
        found = [
            None if partial is None or w is None else fold(partial, w.dtype)
            for partial, w in zip(sums, given, strict=True)
        ]
    return dx, *found


_heads = custom_op(
    "vort::heads",
    Inputs,
    _forward,
    _backward,
    _shapes,
    outputs=("q", "k", "v", "q_turned", "k_turned", "v_again"),
    shown=6,
    gradients=("x", "weight", "q_norm", "k_norm", "q_map", "k_map"),
)


def heads_fused(inputs: Inputs) -> Some:
    """Queries, keys and values `[B, T, heads, D]`, the former two turned, or None twice; values.

    x `[B, T, C]`, weight `[C, W]` with W in 2..4, state `[B, W - 1, C]` or None, age `[T]` or None:
    positions since a packed sequence began; q_norm and k_norm `[D]` or None; cos and sin
    `[T or B T, D / 2]` of the angles, or None; q_map and k_map `[heads, D, M]` or None: with them
    queries and keys are features `[B, T, heads, 2 M]`. bfloat16 or float32. No gradient goes to
    the state. twice: values are handed out again, so that gradients from two readers are added in
    the kernel; only where nothing traces, since an operator may not return a tensor twice.
    """
    return _heads(inputs._replace(twice=inputs.twice and not traced(inputs.x)))


def heads_again(inputs: Inputs) -> Some:
    """The same outputs, without a backward."""
    return _forward(inputs)[:6]
