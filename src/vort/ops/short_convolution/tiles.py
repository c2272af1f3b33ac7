# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, misc"
"""From projections to heads, a block of positions at a time: convolution to features and back.

A program has one head of queries, keys or values, held as its two halves, which RoPE turns into
each other, and a block of BT positions, held as four tiles ``[BT / 4, BH]``: tile p has positions
p, 4 + p, 8 + p, .. of the block. Neighbours in time are then numbers of two tiles in one thread,
and a tap is one multiply-add. Queries and keys may go through their learned maps
(`hedgehog_features`) before they are stored; l = z W are a map's logits of the head z.

The backward computes all that again. With u the convolution's sum and du its gradient

    dx_t = sum_j w_j du_{t+j},     dw_j = sum_t du_t x_{t-j},

and a block owns its first BT - 4 positions, whose successors it has. Where these are another
thread's, du passes from one to the other by way of ``notes``, memory so near that it does not leave
the cache.
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
from vort.ops.gpu.parts import ON_GPU, fence_loads, fold

__all__ = ["Inputs", "heads_again", "heads_fused"]

# Positions in a block, for heads of up to 64 and for wider ones, in bfloat16 and in float32.
FORWARD = {2: (Tile(64, 4, 1), Tile(32, 4, 1)), 4: (Tile(32, 4, 1), Tile(32, 8, 1))}
BACKWARD = {2: (Tile(64, 4, 1), Tile(64, 8, 1)), 4: (Tile(32, 4, 1), Tile(32, 8, 1))}
# Programs that share the blocks of a backward: each leaves sums of its own.
PROGRAMS = 1536
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def power(e):
    """2 to the e: one instruction of the special unit, with no care for tiny numbers."""
    if ON_GPU:
        e = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [e], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        e = tl.exp2(e)
    return e


@triton.jit
def reciprocal(x):
    """Likewise of the inverse."""
    if ON_GPU:
        x = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        x = 1.0 / x
    return x


@triton.jit
def sigmoid(u):
    return reciprocal(1.0 + power(u * -LOG2E))


@triton.jit
def widen(x):
    """To float32; of two bfloat16 numbers that share a register, each is one instruction away."""
    if x.dtype == tl.bfloat16:
        if ON_GPU:
            x = tl.inline_asm_elementwise(
                "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x],
                dtype=tl.float32, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            x = x.to(tl.float32)
    return x


@triton.jit
def load_half(ptr, at, mask, i, HALF: tl.constexpr, BH: tl.constexpr):
    """Half a head of many rows, float32."""
    if BH > HALF:
        mask = mask & (i < HALF)
    return widen(tl.load(ptr + at, mask=mask, other=0.0))


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
def scale_of(a, b, inside, eps, D: tl.constexpr):
    """What RMS norm multiplies rows by, ``[BT, 1]``."""
    square = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1))[:, None] / D
    return tl.rsqrt(tl.where(inside, square, 1.0) + eps)


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
        p = power(high - tl.max(high, axis=1)[:, None])
        n = power(tl.min(low, axis=1)[:, None] - low)
    else:
        p = power(scaled - tl.max(scaled, axis=1)[:, None])
        n = power(tl.min(scaled, axis=1)[:, None] - scaled)
    p *= reciprocal(tl.sum(p, axis=1))[:, None]
    n *= reciprocal(tl.sum(n, axis=1))[:, None]
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
def load_both(ptr, at, mask, i, HALF: tl.constexpr, BH: tl.constexpr):
    """Both halves of a head."""
    return load_half(ptr, at, mask, i, HALF, BH), load_half(ptr, at + HALF, mask, i, HALF, BH)


@triton.jit
def store_both(ptr, at, a, b, mask, i, HALF: tl.constexpr, BH: tl.constexpr):
    store_half(ptr, at, a, mask, i, HALF, BH)
    store_half(ptr, at + HALF, b, mask, i, HALF, BH)


@triton.jit
def input_at(
    x, state, t, at, i, length, C: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr,
    BH: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """A head's inputs at positions t, float32; before the first, those of the state."""
    a, b = load_both(x, at, (t >= 0) & (t < length), i, HALF, BH)
    if HAS_STATE:
        before = (t < 0) & (t > -W)
        sa, sb = load_both(state, (t + (W - 1)) * C + i, before, i, HALF, BH)
        a, b = a + sa, b + sb
    return a, b


@triton.jit
def inputs_around(
    x, state, t, at, i, length, C: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr,
    BH: tl.constexpr, STRIDE: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """A head's inputs at every fourth position, from 3 before to 3 after it, float32."""
    a0, b0 = input_at(x, state, t, at, i, length, C, W, HALF, BH, HAS_STATE)
    am1, bm1 = input_at(x, state, t - 1, at - STRIDE, i, length, C, W, HALF, BH, HAS_STATE)
    am2, bm2, am3, bm3 = am1, bm1, am1, bm1
    if W > 2:
        am2, bm2 = input_at(x, state, t - 2, at - 2 * STRIDE, i, length, C, W, HALF, BH, HAS_STATE)
    if W > 3:
        am3, bm3 = input_at(x, state, t - 3, at - 3 * STRIDE, i, length, C, W, HALF, BH, HAS_STATE)
    a1, b1 = input_at(x, state, t + 1, at + STRIDE, i, length, C, W, HALF, BH, False)
    a2, b2 = input_at(x, state, t + 2, at + 2 * STRIDE, i, length, C, W, HALF, BH, False)
    a3, b3 = input_at(x, state, t + 3, at + 3 * STRIDE, i, length, C, W, HALF, BH, False)
    return am3, bm3, am2, bm2, am1, bm1, a0, b0, a1, b1, a2, b2, a3, b3


@triton.jit
def reach(x, old, lag: tl.constexpr, HAS_AGE: tl.constexpr):
    """x where a position is at least ``lag`` after the first of its sequence, zero elsewhere."""
    if HAS_AGE:
        x = tl.where(old >= lag, x, 0.0)
    return x


@triton.jit
def weigh(
    x0, x1, x2, x3, o1, o2, o3, w0, w1, w2, w3, W: tl.constexpr, HAS_AGE: tl.constexpr
):  # fmt: skip
    """The sum over taps; o: ages of the positions whose reach decides."""
    u = x0 * w0 + reach(x1, o1, 1, HAS_AGE) * w1
    if W > 2:
        u += reach(x2, o2, 2, HAS_AGE) * w2
    if W > 3:
        u += reach(x3, o3, 3, HAS_AGE) * w3
    return u


@triton.jit
def all_taps(taps, i, C: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr):
    """The taps of half a head, ``[1, BH]`` each."""
    w0, w1 = tap(taps, i, 0, C, HALF, BH), tap(taps, i, 1, C, HALF, BH)
    w2, w3 = w1, w1
    if W > 2:
        w2 = tap(taps, i, 2, C, HALF, BH)
    if W > 3:
        w3 = tap(taps, i, 3, C, HALF, BH)
    return w0, w1, w2, w3


@triton.jit
def convolve(
    xm3, xm2, xm1, x0, x1, x2, x3, o0, o1, o2, o3, taps, i,
    C: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, HAS_AGE: tl.constexpr,
):  # fmt: skip
    """The sums over taps of half a head in four tiles."""
    w0, w1, w2, w3 = all_taps(taps, i, C, W, HALF, BH)
    u0 = weigh(x0, xm1, xm2, xm3, o0, o0, o0, w0, w1, w2, w3, W, HAS_AGE)
    u1 = weigh(x1, x0, xm1, xm2, o1, o1, o1, w0, w1, w2, w3, W, HAS_AGE)
    u2 = weigh(x2, x1, x0, xm1, o2, o2, o2, w0, w1, w2, w3, W, HAS_AGE)
    u3 = weigh(x3, x2, x1, x0, o3, o3, o3, w0, w1, w2, w3, W, HAS_AGE)
    return u0, u1, u2, u3


@triton.jit
def gather(g, d0, d1, d2, d3, x0, x1, x2, x3):
    """g and four products: one instruction each, in this order."""
    g += d0 * x0
    g += d1 * x1
    g += d2 * x2
    g += d3 * x3
    return g


@triton.jit
def stack(a, b, c, d):
    """Four tiles one above the other."""
    rows = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), [2, 3, 0, 1])
    return tl.reshape(rows, [4 * a.shape[0], a.shape[1]])


@triton.jit
def unstack(x):
    """The reverse of `stack`."""
    R: tl.constexpr = x.shape[0] // 4
    rows = tl.permute(tl.reshape(x, [2, 2, R, x.shape[1]]), [2, 3, 0, 1])
    ac, bd = tl.split(rows)
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    return a, b, c, d


@triton.jit
def head_of(ua, ub, fa, fb, inside, eps, D: tl.constexpr, NORM: tl.constexpr, NARROW: tl.constexpr):
    """A head as it is stored, from the convolution's sum."""
    a, b = ua * sigmoid(ua), ub * sigmoid(ub)
    if NORM:
        scale = scale_of(a, b, inside, eps, D)
        a, b = a * (scale * fa), b * (scale * fb)
    return a.to(NARROW), b.to(NARROW)


@triton.jit
def store_turned(
    turned, za, zb, cos, sin, at, place, inside, i, HALF: tl.constexpr, BH: tl.constexpr
):  # fmt: skip
    c = load_half(cos, place, inside, i, HALF, BH)
    s = load_half(sin, place, inside, i, HALF, BH)
    a, b = widen(za), widen(zb)
    store_both(turned, at, a * c - b * s, b * c + a * s, inside, i, HALF, BH)


@triton.jit(do_not_specialize=["length", "batch_units", "blocks", "turn_stride"])
def heads_tile_kernel(
    x, taps, state, age, q_norm, k_norm, cos, sin, q_map, k_map, q, k, v, q_turned, k_turned,
    length, batch_units, blocks, turn_stride, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, M: tl.constexpr,
    BM: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, STRIDE: tl.constexpr, UNIT: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    MAPPED: tl.constexpr,
):  # fmt: skip
    """A block of one head: stored as it is, or its features; queries and keys turned as well.

    x's rows lie STRIDE apart: with it known, rows of all tiles are one address and known offsets.
    """
    HALF: tl.constexpr = D // 2
    C: tl.constexpr = (HQ + 2 * HK) * D
    BR: tl.constexpr = BT // 4
    NARROW: tl.constexpr = x.dtype.element_ty
    pid = tl.program_id(0)
    n = pid % (HQ + 2 * HK)
    block = pid // (HQ + 2 * HK)
    row = (block // blocks).to(tl.int64)
    t0 = block % blocks * BT
    r = tl.arange(0, BR)[:, None]
    i = tl.arange(0, BH)[None, :]
    t = t0 + 4 * r
    i0, i1, i2, i3 = t < length, t + 1 < length, t + 2 < length, t + 3 < length
    o0, o1 = ages(age, t, length, HAS_AGE), ages(age, t + 1, length, HAS_AGE)
    o2, o3 = ages(age, t + 2, length, HAS_AGE), ages(age, t + 3, length, HAS_AGE)
    xs = x + row * (batch_units * UNIT) + t0.to(tl.int64) * STRIDE + n * D
    ws = taps + n * D
    past = xs
    if HAS_STATE:
        past = state + row * ((W - 1) * C) + n * D
    am3, bm3, am2, bm2, am1, bm1, a0, b0, a1, b1, a2, b2, a3, b3 = inputs_around(
        xs, past, t, r * (4 * STRIDE) + i, i, length, C, W, HALF, BH, STRIDE, HAS_STATE
    )
    ua0, ua1, ua2, ua3 = convolve(
        am3, am2, am1, a0, a1, a2, a3, o0, o1, o2, o3, ws, i, C, W, HALF, BH, HAS_AGE
    )
    ub0, ub1, ub2, ub3 = convolve(
        bm3, bm2, bm1, b0, b1, b2, b3, o0, o1, o2, o3, ws + HALF, i, C, W, HALF, BH, HAS_AGE
    )
    first = row * length + t0
    if n >= HQ + HK:
        out = v + (first * HK + (n - HQ - HK)) * D
        at = r * (4 * HK * D) + i
        STEP: tl.constexpr = HK * D
        store_both(out, at, ua0 * sigmoid(ua0), ub0 * sigmoid(ub0), i0, i, HALF, BH)
        store_both(out, at + STEP, ua1 * sigmoid(ua1), ub1 * sigmoid(ub1), i1, i, HALF, BH)
        store_both(out, at + 2 * STEP, ua2 * sigmoid(ua2), ub2 * sigmoid(ub2), i2, i, HALF, BH)
        store_both(out, at + 3 * STEP, ua3 * sigmoid(ua3), ub3 * sigmoid(ub3), i3, i, HALF, BH)
    else:
        query = n < HQ
        heads = HQ
        if HQ != HK:
            heads = tl.where(query, HQ, HK)
        h = tl.where(query, n, n - HQ)
        fa, fb = ua0, ub0
        if NORM:
            norm = tl.where(query, q_norm, k_norm)
            fa = tl.load(norm + i, mask=i < HALF, other=0.0).to(tl.float32)
            fb = tl.load(norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
        # turned and mapped from what is stored, so that both parts of a layer see the same head
        za0, zb0 = head_of(ua0, ub0, fa, fb, i0, eps, D, NORM, NARROW)
        za1, zb1 = head_of(ua1, ub1, fa, fb, i1, eps, D, NORM, NARROW)
        za2, zb2 = head_of(ua2, ub2, fa, fb, i2, eps, D, NORM, NARROW)
        za3, zb3 = head_of(ua3, ub3, fa, fb, i3, eps, D, NORM, NARROW)
        base = (first * heads + h) * D
        wide = heads * D
        at = r * (4 * wide) + i
        if TURN:
            turned = tl.where(query, q_turned, k_turned) + base
            place = (row * turn_stride + o0) * HALF + i
            store_turned(turned, za0, zb0, cos, sin, at, place, i0, i, HALF, BH)
            place = (row * turn_stride + o1) * HALF + i
            store_turned(turned, za1, zb1, cos, sin, at + wide, place, i1, i, HALF, BH)
            place = (row * turn_stride + o2) * HALF + i
            store_turned(turned, za2, zb2, cos, sin, at + 2 * wide, place, i2, i, HALF, BH)
            place = (row * turn_stride + o3) * HALF + i
            store_turned(turned, za3, zb3, cos, sin, at + 3 * wide, place, i3, i, HALF, BH)
        out = tl.where(query, q, k)
        if MAPPED:
            w = tl.where(query, q_map, k_map)
            wa = map_half(w, h, 0, D, M, HALF, BH, BM)
            wb = map_half(w, h, HALF, D, M, HALF, BH, BM)
            za, zb = stack(za0, za1, za2, za3), stack(zb0, zb1, zb2, zb3)
            p, m = softmaxes(logits_of(za, zb, wa, wb), M, BM)
            j = tl.arange(0, BM)[None, :]
            g = tl.arange(0, BT)[:, None]
            g = g % BR * 4 + g // BR
            out += (first * heads + h) * (2 * M)
            inside = t0 + g < length
            store_half(out, g * (heads * 2 * M) + j, p, inside, j, M, BM)
            store_half(out, g * (heads * 2 * M) + M + j, m, inside, j, M, BM)
        else:
            out += base
            store_both(out, at, za0, zb0, i0, i, HALF, BH)
            store_both(out, at + wide, za1, zb1, i1, i, HALF, BH)
            store_both(out, at + 2 * wide, za2, zb2, i2, i, HALF, BH)
            store_both(out, at + 3 * wide, za3, zb3, i3, i, HALF, BH)


@triton.jit
def through_head(
    ua, ub, da, db, fa, fb, na, nb, inside, eps, D: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """The gradient to the convolution's sum from that to the head; and to the norm, added."""
    sa, sb = sigmoid(ua), sigmoid(ub)
    a, b = ua * sa, ub * sb
    slope_a, slope_b = sa + a * (1.0 - sa), sb + b * (1.0 - sb)
    if NORM:
        scale = scale_of(a, b, inside, eps, D)
        a, b = a * scale, b * scale
        na += da * a
        nb += db * b
        da, db = da * fa, db * fb
        along = tl.sum(da * a + db * b, axis=1)[:, None] * (1.0 / D)
        da, db = scale * (da - along * a), scale * (db - along * b)
    return da * slope_a, db * slope_b, na, nb


@triton.jit
def came_back(
    da, db, plain, turned, cos, sin, base, at, place, inside, i,
    HALF: tl.constexpr, BH: tl.constexpr, TURN: tl.constexpr, PLAIN: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """The gradient to a head, added: what came back to it, and to the turned head."""
    if PLAIN:
        a, b = load_both(plain + base, at, inside, i, HALF, BH)
        da += a
        db += b
    if TURNED:
        a, b = load_both(turned + base, at, inside, i, HALF, BH)
        if TURN:
            c = load_half(cos, place, inside, i, HALF, BH)
            s = load_half(sin, place, inside, i, HALF, BH)
            da += a * c
            da += b * s
            db += b * c
            db -= a * s
        else:
            da += a
            db += b
    return da, db


@triton.jit
def send_back(
    dx, d0, d1, d2, d3, notes, o0, o1, o2, o3, o4, o5, o6, at, r, i, w0, w1, w2, w3,
    k0, k1, k2, k3, C: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr,
    BR: tl.constexpr, HAS_AGE: tl.constexpr,
):  # fmt: skip
    """Half a head of dx from du: a position receives w_j of what its j-th successor has."""
    below = (r + 1) * BH + i
    there = r < BR - 1
    d4 = widen(tl.load(notes + below, mask=there, other=0.0))
    d5, d6 = d4, d4
    if W > 2:
        d5 = widen(tl.load(notes + BR * BH + below, mask=there, other=0.0))
    if W > 3:
        d6 = widen(tl.load(notes + 2 * BR * BH + below, mask=there, other=0.0))
    x0 = weigh(d0, d1, d2, d3, o1, o2, o3, w0, w1, w2, w3, W, HAS_AGE)
    x1 = weigh(d1, d2, d3, d4, o2, o3, o4, w0, w1, w2, w3, W, HAS_AGE)
    x2 = weigh(d2, d3, d4, d5, o3, o4, o5, w0, w1, w2, w3, W, HAS_AGE)
    x3 = weigh(d3, d4, d5, d6, o4, o5, o6, w0, w1, w2, w3, W, HAS_AGE)
    store_half(dx, at, x0, k0 & there, i, HALF, BH)
    store_half(dx, at + C, x1, k1 & there, i, HALF, BH)
    store_half(dx, at + 2 * C, x2, k2 & there, i, HALF, BH)
    store_half(dx, at + 3 * C, x3, k3 & there, i, HALF, BH)


@triton.jit
def of_own(g):
    """Column sums without the last row, whose positions another block owns."""
    r = tl.arange(0, g.shape[0])[:, None]
    return tl.sum(tl.where(r < g.shape[0] - 1, g, 0.0), axis=0)


@triton.jit
def ask(rows, mask):
    """Have lines brought near that are loaded later; rows: where each begins, ``[BT, 1]``."""
    if ON_GPU:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }",
            "=r,l,r", [rows, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def walk_back(
    x, taps, state, age, norm, cos, sin, w, plain, turned, dx, dtaps, dnorm, dmap, notes,
    n, h, part, parts, count, blocks, length, batch_units, turn_stride, eps,
    H: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, M: tl.constexpr,
    BM: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, STRIDE: tl.constexpr, UNIT: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    MAPPED: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """dx of every parts-th block of a head, and these blocks' share of the other gradients.

    PLAIN: a gradient came back to the head or its features; TURNED: to the turned head, or without
    TURN to the head again.
    """
    HALF: tl.constexpr = D // 2
    BR: tl.constexpr = BT // 4
    OWN: tl.constexpr = BT - 4
    NARROW: tl.constexpr = x.dtype.element_ty
    r = tl.arange(0, BR)[:, None]
    i = tl.arange(0, BH)[None, :]
    j = tl.arange(0, BM)[None, :]
    # rows of four tiles, one above the other
    q = tl.arange(0, BT)[:, None]
    q = q % BR * 4 + q // BR
    ws = taps + n * D
    zero = tl.zeros([BR, BH], dtype=tl.float32)
    ga0, ga1, ga2, ga3, gb0, gb1, gb2, gb3 = zero, zero, zero, zero, zero, zero, zero, zero
    na, nb = zero, zero
    if MAPPED:
        wa = map_half(w, h, 0, D, M, HALF, BH, BM)
        wb = map_half(w, h, HALF, D, M, HALF, BH, BM)
        ma = tl.zeros([BH, BM], dtype=tl.float32)
        mb = tl.zeros([BH, BM], dtype=tl.float32)
    for step in range(tl.cdiv(count - part, parts)):
        block = part + step * parts
        row = (block // blocks).to(tl.int64)
        t0 = block % blocks * OWN
        first = row * length + t0
        t = t0 + 4 * r
        i0, i1, i2, i3 = t < length, t + 1 < length, t + 2 < length, t + 3 < length
        o0, o1 = ages(age, t, length, HAS_AGE), ages(age, t + 1, length, HAS_AGE)
        o2, o3 = ages(age, t + 2, length, HAS_AGE), ages(age, t + 3, length, HAS_AGE)
        xs = x + row * (batch_units * UNIT) + t0.to(tl.int64) * STRIDE + n * D
        past = xs
        if HAS_STATE:
            past = state + row * ((W - 1) * C) + n * D
        at = r * (4 * STRIDE) + i
        if MAPPED and PLAIN:
            inside = t0 + q < length
            features = plain + (first * H + h) * (2 * M)
            dp = load_half(features, q * (H * 2 * M) + j, inside, j, M, BM)
            dm = load_half(features, q * (H * 2 * M) + M + j, inside, j, M, BM)
            if TURNED:
                ask(turned + (first * H + h) * D + q * (H * D), inside)
        am3, bm3, am2, bm2, am1, bm1, a0, b0, a1, b1, a2, b2, a3, b3 = inputs_around(
            xs, past, t, at, i, length, C, W, HALF, BH, STRIDE, HAS_STATE
        )
        ua0, ua1, ua2, ua3 = convolve(
            am3, am2, am1, a0, a1, a2, a3, o0, o1, o2, o3, ws, i, C, W, HALF, BH, HAS_AGE
        )
        ub0, ub1, ub2, ub3 = convolve(
            bm3, bm2, bm1, b0, b1, b2, b3, o0, o1, o2, o3, ws + HALF, i, C, W, HALF, BH, HAS_AGE
        )
        fa, fb = zero, zero
        if NORM:
            fa = tl.load(norm + i, mask=i < HALF, other=0.0).to(tl.float32)
            fb = tl.load(norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
        da0, da1, da2, da3, db0, db1, db2, db3 = zero, zero, zero, zero, zero, zero, zero, zero
        if MAPPED and PLAIN:
            za0, zb0 = head_of(ua0, ub0, fa, fb, i0, eps, D, NORM, NARROW)
            za1, zb1 = head_of(ua1, ub1, fa, fb, i1, eps, D, NORM, NARROW)
            za2, zb2 = head_of(ua2, ub2, fa, fb, i2, eps, D, NORM, NARROW)
            za3, zb3 = head_of(ua3, ub3, fa, fb, i3, eps, D, NORM, NARROW)
            za, zb = stack(za0, za1, za2, za3), stack(zb0, zb1, zb2, zb3)
            fence_loads(step)
            p, m = softmaxes(logits_of(za, zb, wa, wb), M, BM)
            dl = p * (dp - tl.sum(p * dp, axis=1)[:, None])
            dl -= m * (dm - tl.sum(m * dm, axis=1)[:, None])
            none = tl.zeros([BT, BH], dtype=tl.float32)
            da0, da1, da2, da3 = unstack(plain_product(dl, tl.trans(wa), none, NARROW))
            db0, db1, db2, db3 = unstack(plain_product(dl, tl.trans(wb), none, NARROW))
            dl = tl.where(q < OWN, dl, 0.0)
            ma = plain_product(tl.trans(za), dl, ma, NARROW)
            mb = plain_product(tl.trans(zb), dl, mb, NARROW)
        base = (first * H + h) * D
        at = r * (4 * H * D) + i
        place = (row * turn_stride + o0) * HALF + i
        da0, db0 = came_back(
            da0, db0, plain, turned, cos, sin, base, at, place, i0, i, HALF, BH, TURN,
            PLAIN and not MAPPED, TURNED,
        )  # fmt: skip
        da0, db0, na, nb = through_head(
            ua0, ub0, da0, db0, fa, fb, na, nb, i0, eps, D, NORM
        )  # fmt: skip
        place = (row * turn_stride + o1) * HALF + i
        da1, db1 = came_back(
            da1, db1, plain, turned, cos, sin, base, at + H * D, place, i1, i, HALF, BH,
            TURN, PLAIN and not MAPPED, TURNED,
        )  # fmt: skip
        da1, db1, na, nb = through_head(
            ua1, ub1, da1, db1, fa, fb, na, nb, i1, eps, D, NORM
        )  # fmt: skip
        place = (row * turn_stride + o2) * HALF + i
        da2, db2 = came_back(
            da2, db2, plain, turned, cos, sin, base, at + 2 * H * D, place, i2, i, HALF, BH,
            TURN, PLAIN and not MAPPED, TURNED,
        )  # fmt: skip
        da2, db2, na, nb = through_head(
            ua2, ub2, da2, db2, fa, fb, na, nb, i2, eps, D, NORM
        )  # fmt: skip
        place = (row * turn_stride + o3) * HALF + i
        da3, db3 = came_back(
            da3, db3, plain, turned, cos, sin, base, at + 3 * H * D, place, i3, i, HALF, BH,
            TURN, PLAIN and not MAPPED, TURNED,
        )  # fmt: skip
        da3, db3, na, nb = through_head(
            ua3, ub3, da3, db3, fa, fb, na, nb, i3, eps, D, NORM
        )  # fmt: skip
        # two places in turn, so that no thread writes what another has yet to read
        mine = notes + (step % 2) * (6 * BR * BH)
        tl.store(mine + r * BH + i, da0.to(NARROW))
        tl.store(mine + (3 * BR + r) * BH + i, db0.to(NARROW))
        if W > 2:
            tl.store(mine + (BR + r) * BH + i, da1.to(NARROW))
            tl.store(mine + (4 * BR + r) * BH + i, db1.to(NARROW))
        if W > 3:
            tl.store(mine + (2 * BR + r) * BH + i, da2.to(NARROW))
            tl.store(mine + (5 * BR + r) * BH + i, db2.to(NARROW))
        tl.debug_barrier()
        o4, o5, o6 = o0, o0, o0
        if HAS_AGE:
            o4, o5 = ages(age, t + 4, length, True), ages(age, t + 5, length, True)
            o6 = ages(age, t + 6, length, True)
        at = r * (4 * C) + i
        to = dx + first * C + n * D
        w0, w1, w2, w3 = all_taps(ws, i, C, W, HALF, BH)
        send_back(
            to, da0, da1, da2, da3, mine, o0, o1, o2, o3, o4, o5, o6, at, r, i, w0, w1, w2, w3,
            i0, i1, i2, i3, C, W, HALF, BH, BR, HAS_AGE,
        )  # fmt: skip
        w0, w1, w2, w3 = all_taps(ws + HALF, i, C, W, HALF, BH)
        send_back(
            to + HALF, db0, db1, db2, db3, mine + 3 * BR * BH, o0, o1, o2, o3, o4, o5, o6, at,
            r, i, w0, w1, w2, w3, i0, i1, i2, i3, C, W, HALF, BH, BR, HAS_AGE,
        )  # fmt: skip
        if MAPPED:
            # once more, from the cache: kept since above, they would leave no registers for the map
            am3, bm3, am2, bm2, am1, bm1, a0, b0, a1, b1, a2, b2, a3, b3 = inputs_around(
                xs, past, t, r * (4 * STRIDE) + i, i, length, C, W, HALF, BH, STRIDE, HAS_STATE
            )
        ga0 = gather(ga0, da0, da1, da2, da3, a0, a1, a2, a3)
        gb0 = gather(gb0, db0, db1, db2, db3, b0, b1, b2, b3)
        da0, db0 = reach(da0, o0, 1, HAS_AGE), reach(db0, o0, 1, HAS_AGE)
        da1, db1 = reach(da1, o1, 1, HAS_AGE), reach(db1, o1, 1, HAS_AGE)
        da2, db2 = reach(da2, o2, 1, HAS_AGE), reach(db2, o2, 1, HAS_AGE)
        da3, db3 = reach(da3, o3, 1, HAS_AGE), reach(db3, o3, 1, HAS_AGE)
        ga1 = gather(ga1, da0, da1, da2, da3, am1, a0, a1, a2)
        gb1 = gather(gb1, db0, db1, db2, db3, bm1, b0, b1, b2)
        if W > 2:
            da0, db0 = reach(da0, o0, 2, HAS_AGE), reach(db0, o0, 2, HAS_AGE)
            da1, db1 = reach(da1, o1, 2, HAS_AGE), reach(db1, o1, 2, HAS_AGE)
            da2, db2 = reach(da2, o2, 2, HAS_AGE), reach(db2, o2, 2, HAS_AGE)
            da3, db3 = reach(da3, o3, 2, HAS_AGE), reach(db3, o3, 2, HAS_AGE)
            ga2 = gather(ga2, da0, da1, da2, da3, am2, am1, a0, a1)
            gb2 = gather(gb2, db0, db1, db2, db3, bm2, bm1, b0, b1)
        if W > 3:
            da0, db0 = reach(da0, o0, 3, HAS_AGE), reach(db0, o0, 3, HAS_AGE)
            da1, db1 = reach(da1, o1, 3, HAS_AGE), reach(db1, o1, 3, HAS_AGE)
            da2, db2 = reach(da2, o2, 3, HAS_AGE), reach(db2, o2, 3, HAS_AGE)
            da3, db3 = reach(da3, o3, 3, HAS_AGE), reach(db3, o3, 3, HAS_AGE)
            ga3 = gather(ga3, da0, da1, da2, da3, am3, am2, am1, a0)
            gb3 = gather(gb3, db0, db1, db2, db3, bm3, bm2, bm1, b0)
    col = tl.arange(0, BH)
    real = col < HALF
    mine = dtaps + (part * C + n * D + col) * W
    tl.store(mine, of_own(ga0), mask=real)
    tl.store(mine + HALF * W, of_own(gb0), mask=real)
    tl.store(mine + 1, of_own(ga1), mask=real)
    tl.store(mine + HALF * W + 1, of_own(gb1), mask=real)
    if W > 2:
        tl.store(mine + 2, of_own(ga2), mask=real)
        tl.store(mine + HALF * W + 2, of_own(gb2), mask=real)
    if W > 3:
        tl.store(mine + 3, of_own(ga3), mask=real)
        tl.store(mine + HALF * W + 3, of_own(gb3), mask=real)
    if NORM:
        own_norm = dnorm + (part * H + h) * D + col
        tl.store(own_norm, of_own(na), mask=real)
        tl.store(own_norm + HALF, of_own(nb), mask=real)
    if MAPPED:
        k = tl.arange(0, BH)[:, None]
        own_map = dmap + ((part * H + h) * D + k) * M + j
        tl.store(own_map, ma, mask=(k < HALF) & (j < M))
        tl.store(own_map + HALF * M, mb, mask=(k < HALF) & (j < M))


@triton.jit(
    do_not_specialize=["parts", "count", "blocks", "length", "batch_units", "turn_stride"]
)  # fmt: skip
def heads_gradient_kernel(
    x, taps, state, age, q_norm, k_norm, cos, sin, q_map, k_map,
    dq, dk, dv, dq_turned, dk_turned, dv_again,
    dx, dtaps, dq_norm, dk_norm, dq_map, dk_map, notes,
    parts, count, blocks, length, batch_units, turn_stride, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, M: tl.constexpr,
    BM: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, STRIDE: tl.constexpr, UNIT: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    MAPPED: tl.constexpr,
):  # fmt: skip
    """Blocks ``part, part + parts, ..`` of ``count`` for one head; ``blocks`` lie in a row of x."""
    C: tl.constexpr = (HQ + 2 * HK) * D
    PLAIN: tl.constexpr = dq is not None
    TURNED: tl.constexpr = dq_turned is not None
    pid = tl.program_id(0)
    n = pid % (HQ + 2 * HK)
    part = pid // (HQ + 2 * HK)
    place = notes + pid.to(tl.int64) * (3 * BT * BH)
    query = n < HQ
    norm, w, plain, turned, dnorm, dmap, dv0, dv1 = x, x, x, x, x, x, x, x
    if NORM:
        norm, dnorm = tl.where(query, q_norm, k_norm), tl.where(query, dq_norm, dk_norm)
    if MAPPED:
        w, dmap = tl.where(query, q_map, k_map), tl.where(query, dq_map, dk_map)
    if PLAIN:
        plain = tl.where(query, dq, dk)
    if TURNED:
        turned = tl.where(query, dq_turned, dk_turned)
    if dv is not None:
        dv0 = dv
    if dv_again is not None:
        dv1 = dv_again
    if n >= HQ + HK:
        walk_back(
            x, taps, state, age, x, x, x, x, dv0, dv1, dx, dtaps, x, x, place,
            n, n - HQ - HK, part, parts, count, blocks, length, batch_units, turn_stride, eps,
            HK, C, D, BH, M, BM, W, BT, STRIDE, UNIT, HAS_STATE, HAS_AGE, False, False, False,
            dv is not None, dv_again is not None,
        )  # fmt: skip
    elif HQ == HK:
        walk_back(
            x, taps, state, age, norm, cos, sin, w, plain, turned, dx, dtaps, dnorm, dmap, place,
            n, n % HQ, part, parts, count, blocks, length, batch_units, turn_stride, eps,
            HQ, C, D, BH, M, BM, W, BT, STRIDE, UNIT, HAS_STATE, HAS_AGE, NORM, TURN, MAPPED,
            PLAIN, TURNED,
        )  # fmt: skip
    elif query:
        walk_back(
            x, taps, state, age, norm, cos, sin, x, plain, turned, dx, dtaps, dnorm, x, place,
            n, n, part, parts, count, blocks, length, batch_units, turn_stride, eps,
            HQ, C, D, BH, M, BM, W, BT, STRIDE, UNIT, HAS_STATE, HAS_AGE, NORM, TURN, False,
            PLAIN, TURNED,
        )  # fmt: skip
    else:
        walk_back(
            x, taps, state, age, norm, cos, sin, x, plain, turned, dx, dtaps, dnorm, x, place,
            n, n - HQ, part, parts, count, blocks, length, batch_units, turn_stride, eps,
            HK, C, D, BH, M, BM, W, BT, STRIDE, UNIT, HAS_STATE, HAS_AGE, NORM, TURN, False,
            PLAIN, TURNED,
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


def _constants(inputs: Inputs, tiles: dict[int, Any]) -> dict[str, Any]:
    """What kernels are compiled for."""
    x, dim = inputs.x, inputs.dim
    # a single row lies nowhere in particular
    stride = x.stride(1) if x.shape[1] > 1 else x.shape[2]
    return {
        "HQ": inputs.num_heads, "HK": inputs.num_key_value_heads, "D": dim,
        "BH": power_of_two(dim // 2), "M": inputs.features, "BM": power_of_two(inputs.features),
        "W": inputs.weight.shape[1], "BT": _tile(inputs, tiles).columns, "STRIDE": stride,
        "UNIT": gcd(8, x.stride(0)),
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
    constants = _constants(inputs, FORWARD)
    blocks = -(-length // constants["BT"])
    outputs = _shapes(inputs)
    taps = _taps(inputs.weight)
    launch(
        heads_tile_kernel, batch * blocks * (x.shape[2] // inputs.dim), x, taps, *inputs[2:10],
        *outputs[:5], length, x.stride(0) // constants["UNIT"], blocks, _turn_stride(inputs),
        inputs.eps, tile=_tile(inputs, FORWARD), **constants,
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
    constants = _constants(inputs, BACKWARD)
    tile = _tile(inputs, BACKWARD)
    blocks = -(-length // (tile.columns - 4))
    count = batch * blocks
    parts = min(count, max(1, PROGRAMS // (channels // dim)))
    like: Any = _shapes(inputs) if any(g is None for g in grads[:5]) else grads
    dq, dk = _pair(grads[0], grads[1], like[:2])
    dq_turned, dk_turned = _pair(grads[3], grads[4], like[3:5])
    wide: dict[str, Any] = {"dtype": torch.float32}
    dx = x.new_empty(x.shape)
    sums: list[Tensor | None] = [x.new_empty(parts, channels, weight.shape[1], **wide)]
    norms = ((heads, inputs.q_norm), (kv_heads, inputs.k_norm))
    sums += [None if w is None else x.new_empty(parts * n, dim, **wide) for n, w in norms]
    maps = (inputs.q_map, inputs.k_map)
    sums += [None if w is None else x.new_empty(parts, *w.shape, **wide) for w in maps]
    notes = x.new_empty(parts * (channels // dim), 3, tile.columns, constants["BH"])
    taps = kept[0] if kept else _taps(weight)
    launch(
        heads_gradient_kernel, parts * (channels // dim), x, taps, *inputs[2:10], dq, dk,
        dense(grads[2]), dq_turned, dk_turned, dense(grads[5]), dx, *sums, notes, parts, count,
        blocks, length, x.stride(0) // constants["UNIT"], _turn_stride(inputs), inputs.eps,
        tile=tile, **constants,
    )  # fmt: skip
    given = (weight, inputs.q_norm, inputs.k_norm, *maps)
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
