# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, misc"
"""From projections to heads, a block of positions at a time: convolution to features and back.

A program has one head of queries, keys or values, held as its two halves ``[BT, BH]``, which RoPE
turns into each other. Positions before are loads of the same rows, shifted: the first level of
cache holds them. Queries and keys may go through their learned maps (`hedgehog_features`) before
they are stored; l = z W are a map's logits of the head z.

The backward computes all that again. With u the convolution's sum and du its gradient

    dx_t = sum_j w_j du_{t+j},     dw_j = sum_t x_t du_{t+j}:

one kernel makes du, another one, of channels alone, the rest. In one kernel for both du would have
to pass from thread to thread, and registers would be short: that took longer.
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
from vort.ops.gpu.parts import ON_GPU, ask, fence_loads, fold, fold_pair, widen
from vort.ops.gpu.together import room_for

__all__ = ["Inputs", "heads_fused", "turned_again"]

# Positions in a block, for heads of up to 64 and for wider ones, in bfloat16 and in float32.
FORWARD = {2: (Tile(64, 4, 1), Tile(32, 4, 1)), 4: (Tile(32, 4, 1), Tile(32, 8, 1))}
BACKWARD = {2: (Tile(64, 4, 1), Tile(64, 8, 1)), 4: (Tile(32, 4, 1), Tile(32, 8, 1))}
# Positions and channels in a block of the convolution's own gradients.
TAPS, WIDE = Tile(32, 4, 1), 64
# Programs that share the blocks of a backward: each leaves sums of its own.
PROGRAMS, PROGRAMS_OF_TAPS = 3168, 3072
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
    square = tl.sum(a * a + b * b, axis=1)[:, None] * (1.0 / D)
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
def set_apart(x, mask):
    """x where the mask of its rows holds, by a detour that keeps a product's layout to itself.

    The compiler gives whatever meets a product's result its layout, which suits no load: what is
    loaded after it would pass through shared memory.
    """
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    apart = tl.reshape(x, [R, 2, N // 2])
    return tl.reshape(tl.where(mask[:, :, None], apart, 0.0), [R, N])


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
def reach(x, old, lag: tl.constexpr, HAS_AGE: tl.constexpr):
    """x where a position is at least ``lag`` after the first of its sequence, zero elsewhere."""
    if HAS_AGE:
        x = tl.where(old >= lag, x, 0.0)
    return x


@triton.jit
def convolve(
    x, taps, state, old, t, at, i, length,
    C: tl.constexpr, W: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr, STRIDE: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr,
):  # fmt: skip
    """The sums over taps of both halves of a head, at positions t."""
    a, b = input_at(x, state, t, at, i, length, C, W, HALF, BH, HAS_STATE)
    ua, ub = a * tap(taps, i, 0, C, HALF, BH), b * tap(taps + HALF, i, 0, C, HALF, BH)
    for lag in tl.static_range(1, W):
        a, b = input_at(x, state, t - lag, at - lag * STRIDE, i, length, C, W, HALF, BH, HAS_STATE)
        ua += reach(a, old, lag, HAS_AGE) * tap(taps, i, lag, C, HALF, BH)
        ub += reach(b, old, lag, HAS_AGE) * tap(taps + HALF, i, lag, C, HALF, BH)
    return ua, ub


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

    x's rows lie STRIDE apart: with it known, rows at all lags are one address and known offsets.
    Without v turned heads are all that is wanted.
    """
    HALF: tl.constexpr = D // 2
    C: tl.constexpr = (HQ + 2 * HK) * D
    HEADS: tl.constexpr = HQ + HK if v is None else HQ + 2 * HK
    NARROW: tl.constexpr = x.dtype.element_ty
    pid = tl.program_id(0)
    n = pid % HEADS
    block = pid // HEADS
    row = (block // blocks).to(tl.int64)
    t0 = block % blocks * BT
    r = tl.arange(0, BT)[:, None]
    i = tl.arange(0, BH)[None, :]
    t = t0 + r
    inside = t < length
    old = ages(age, t, length, HAS_AGE)
    xs = x + row * (batch_units * UNIT) + t0.to(tl.int64) * STRIDE + n * D
    past = xs
    if HAS_STATE:
        past = state + row * ((W - 1) * C) + n * D
    ua, ub = convolve(
        xs, taps + n * D, past, old, t, r * STRIDE + i, i, length, C, W, HALF, BH, STRIDE,
        HAS_STATE, HAS_AGE,
    )  # fmt: skip
    first = row * length + t0
    if n >= HQ + HK:
        if v is not None:
            out = v + (first * HK + (n - HQ - HK)) * D
            a, b = ua * sigmoid(ua), ub * sigmoid(ub)
            store_both(out, r * (HK * D) + i, a, b, inside, i, HALF, BH)
    else:
        query = n < HQ
        heads = HQ
        if HQ != HK:
            heads = tl.where(query, HQ, HK)
        h = tl.where(query, n, n - HQ)
        fa, fb = ua, ub
        if NORM:
            norm = tl.where(query, q_norm, k_norm)
            fa = tl.load(norm + i, mask=i < HALF, other=0.0).to(tl.float32)
            fb = tl.load(norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
        # turned and mapped from what is stored, so that both parts of a layer see the same head
        za, zb = head_of(ua, ub, fa, fb, inside, eps, D, NORM, NARROW)
        base = (first * heads + h) * D
        at = r * (heads * D) + i
        if TURN:
            turned = tl.where(query, q_turned, k_turned) + base
            c, s = cos + (row * turn_stride + t0) * HALF, sin + (row * turn_stride + t0) * HALF
            place = (old - t0) * HALF + i
            store_turned(turned, za, zb, c, s, at, place, inside, i, HALF, BH)
        if v is not None:
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
                store_both(out + base, at, za, zb, inside, i, HALF, BH)


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
def sums_back(
    x, taps, state, age, norm, cos, sin, w, plain, turned, du, dnorm, dmap,
    n, h, part, parts, count, blocks, length, batch_units, turn_stride, eps,
    H: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, M: tl.constexpr,
    BM: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, STRIDE: tl.constexpr, UNIT: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    MAPPED: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """du of every parts-th block of a head, and their share of the norm's and map's gradients.

    PLAIN: a gradient came back to the head or its features; TURNED: to the turned head, or without
    TURN to the head again.
    """
    HALF: tl.constexpr = D // 2
    NARROW: tl.constexpr = x.dtype.element_ty
    r = tl.arange(0, BT)[:, None]
    i = tl.arange(0, BH)[None, :]
    j = tl.arange(0, BM)[None, :]
    zero = tl.zeros([BT, BH], dtype=tl.float32)
    na, nb = zero, zero
    fa, fb = zero, zero
    if NORM:
        fa = tl.load(norm + i, mask=i < HALF, other=0.0).to(tl.float32)
        fb = tl.load(norm + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    if MAPPED:
        wa = map_half(w, h, 0, D, M, HALF, BH, BM)
        wb = map_half(w, h, HALF, D, M, HALF, BH, BM)
        ma = tl.zeros([BH, BM], dtype=tl.float32)
        mb = tl.zeros([BH, BM], dtype=tl.float32)
    for step in range(tl.cdiv(count - part, parts)):
        block = part + step * parts
        row = (block // blocks).to(tl.int64)
        t0 = block % blocks * BT
        first = row * length + t0
        t = t0 + r
        inside = t < length
        old = ages(age, t, length, HAS_AGE)
        xs = x + row * (batch_units * UNIT) + t0.to(tl.int64) * STRIDE + n * D
        past = xs
        if HAS_STATE:
            past = state + row * ((W - 1) * C) + n * D
        # what the next step loads is on its way while this one is computed
        after = block + parts
        row_after = (after // blocks).to(tl.int64)
        t_after = after % blocks * BT
        real = (after < count) & (t_after + r < length)
        begin = row_after * length + t_after
        ask(x + row_after * (batch_units * UNIT) + (t_after + r).to(tl.int64) * STRIDE + n * D,
            real)  # fmt: skip
        if PLAIN:
            wide: tl.constexpr = 2 * M if MAPPED else D
            ask(plain + ((begin + r) * H + h) * wide, real)
        if TURNED:
            ask(turned + ((begin + r) * H + h) * D, real)
        ua, ub = convolve(
            xs, taps + n * D, past, old, t, r * STRIDE + i, i, length, C, W, HALF, BH, STRIDE,
            HAS_STATE, HAS_AGE,
        )  # fmt: skip
        da, db = zero, zero
        if MAPPED and PLAIN:
            features = plain + (first * H + h) * (2 * M)
            dp = load_half(features, r * (H * 2 * M) + j, inside, j, M, BM)
            dm = load_half(features, r * (H * 2 * M) + M + j, inside, j, M, BM)
            za, zb = head_of(ua, ub, fa, fb, inside, eps, D, NORM, NARROW)
            fence_loads(step)
            p, m = softmaxes(logits_of(za, zb, wa, wb), M, BM)
            dl = p * (dp - tl.sum(p * dp, axis=1)[:, None])
            dl -= m * (dm - tl.sum(m * dm, axis=1)[:, None])
            da = set_apart(plain_product(dl, tl.trans(wa), zero, NARROW), inside)
            db = set_apart(plain_product(dl, tl.trans(wb), zero, NARROW), inside)
            ma = plain_product(tl.trans(za), dl, ma, NARROW)
            mb = plain_product(tl.trans(zb), dl, mb, NARROW)
        base = (first * H + h) * D
        place = (old - t0) * HALF + i
        c, s = cos, sin
        if TURN:
            c, s = cos + (row * turn_stride + t0) * HALF, sin + (row * turn_stride + t0) * HALF
        da, db = came_back(
            da, db, plain, turned, c, s, base, r * (H * D) + i, place, inside, i, HALF, BH,
            TURN, PLAIN and not MAPPED, TURNED,
        )  # fmt: skip
        da, db, na, nb = through_head(ua, ub, da, db, fa, fb, na, nb, inside, eps, D, NORM)
        store_both(du + first * C + n * D, r * C + i, da, db, inside, i, HALF, BH)
    col = tl.arange(0, BH)
    if NORM:
        own = dnorm + (part * H + h) * D + col
        tl.store(own, tl.sum(na, axis=0), mask=col < HALF)
        tl.store(own + HALF, tl.sum(nb, axis=0), mask=col < HALF)
    if MAPPED:
        k = tl.arange(0, BH)[:, None]
        own_map = dmap + ((part * H + h) * D + k) * M + j
        tl.store(own_map, ma, mask=(k < HALF) & (j < M))
        tl.store(own_map + HALF * M, mb, mask=(k < HALF) & (j < M))


@triton.jit(
    do_not_specialize=["parts", "count", "blocks", "length", "batch_units", "turn_stride"]
)  # fmt: skip
def sums_gradient_kernel(
    x, taps, state, age, q_norm, k_norm, cos, sin, q_map, k_map,
    dq, dk, dv, dq_turned, dk_turned, dv_again, du, dq_norm, dk_norm, dq_map, dk_map,
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
        sums_back(
            x, taps, state, age, x, x, x, x, dv0, dv1, du, x, x,
            n, n - HQ - HK, part, parts, count, blocks, length, batch_units, turn_stride, eps,
            HK, C, D, BH, M, BM, W, BT, STRIDE, UNIT, HAS_STATE, HAS_AGE, False, False, False,
            dv is not None, dv_again is not None,
        )  # fmt: skip
    elif HQ == HK:
        sums_back(
            x, taps, state, age, norm, cos, sin, w, plain, turned, du, dnorm, dmap,
            n, n % HQ, part, parts, count, blocks, length, batch_units, turn_stride, eps,
            HQ, C, D, BH, M, BM, W, BT, STRIDE, UNIT, HAS_STATE, HAS_AGE, NORM, TURN, MAPPED,
            PLAIN, TURNED,
        )  # fmt: skip
    elif query:
        sums_back(
            x, taps, state, age, norm, cos, sin, x, plain, turned, du, dnorm, x,
            n, n, part, parts, count, blocks, length, batch_units, turn_stride, eps,
            HQ, C, D, BH, M, BM, W, BT, STRIDE, UNIT, HAS_STATE, HAS_AGE, NORM, TURN, False,
            PLAIN, TURNED,
        )  # fmt: skip
    else:
        sums_back(
            x, taps, state, age, norm, cos, sin, x, plain, turned, du, dnorm, x,
            n, n - HQ, part, parts, count, blocks, length, batch_units, turn_stride, eps,
            HK, C, D, BH, M, BM, W, BT, STRIDE, UNIT, HAS_STATE, HAS_AGE, NORM, TURN, False,
            PLAIN, TURNED,
        )  # fmt: skip


@triton.jit
def load_later(
    du, age, t, at, c, length, lag: tl.constexpr, C: tl.constexpr, HAS_AGE: tl.constexpr
):
    """du ``lag`` positions later, where that still reaches back to position t; float32."""
    mask = (t + lag >= 0) & (t + lag < length) & (c < C)
    value = widen(tl.load(du + at + lag * C, mask=mask, other=0.0))
    if HAS_AGE:
        value = reach(value, ages(age, t + lag, length, True), lag, True)
    return value


@triton.jit(do_not_specialize=["parts", "count", "blocks", "length", "batch_units"])
def taps_gradient_kernel(
    x, taps, state, age, du, dx, dtaps, parts, count, blocks, length, batch_units,
    C: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, STRIDE: tl.constexpr,
    UNIT: tl.constexpr, OUT: tl.constexpr, HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr,
):  # fmt: skip
    """dx and a share of dw ``[C, W]`` from du, for BC channels of every parts-th block.

    Rows of the state are positions before the first: they have a share in dw, and no dx. Rows of
    dx lie OUT apart.
    """
    COLUMNS: tl.constexpr = (C + BC - 1) // BC
    LEAD: tl.constexpr = W - 1 if HAS_STATE else 0
    pid = tl.program_id(0)
    c = pid % COLUMNS * BC + tl.arange(0, BC)[None, :]
    part = pid // COLUMNS
    r = tl.arange(0, BT)[:, None]
    real = c < C
    w0 = tl.load(taps + c, mask=real, other=0.0)
    w1 = tl.load(taps + C + c, mask=real, other=0.0)
    w2, w3 = w1, w1
    if W > 2:
        w2 = tl.load(taps + 2 * C + c, mask=real, other=0.0)
    if W > 3:
        w3 = tl.load(taps + 3 * C + c, mask=real, other=0.0)
    zero = tl.zeros([BT, BC], dtype=tl.float32)
    g0, g1, g2, g3 = zero, zero, zero, zero
    for step in range(tl.cdiv(count - part, parts)):
        block = part + step * parts
        row = (block // blocks).to(tl.int64)
        t = block % blocks * BT - LEAD + r
        here = (t >= 0) & (t < length) & real
        own = widen(
            tl.load(
                x + row * (batch_units * UNIT) + t.to(tl.int64) * STRIDE + c, mask=here, other=0.0
            )
        )
        if HAS_STATE:
            before = (t < 0) & real
            own += widen(
                tl.load(state + (row * (W - 1) + t + (W - 1)) * C + c, mask=before, other=0.0)
            )
        at = (row * length + t) * C + c
        d0 = load_later(du, age, t, at, c, length, 0, C, HAS_AGE)
        d1 = load_later(du, age, t, at, c, length, 1, C, HAS_AGE)
        value = d0 * w0 + d1 * w1
        g0 += d0 * own
        g1 += d1 * own
        if W > 2:
            d2 = load_later(du, age, t, at, c, length, 2, C, HAS_AGE)
            value += d2 * w2
            g2 += d2 * own
        if W > 3:
            d3 = load_later(du, age, t, at, c, length, 3, C, HAS_AGE)
            value += d3 * w3
            g3 += d3 * own
        to = (row * length + t) * OUT + c
        tl.store(dx + to, value.to(dx.dtype.element_ty), mask=here)
    col = pid % COLUMNS * BC + tl.arange(0, BC)
    mine = dtaps + (part.to(tl.int64) * C + col) * W
    tl.store(mine, tl.sum(g0, axis=0), mask=col < C)
    tl.store(mine + 1, tl.sum(g1, axis=0), mask=col < C)
    if W > 2:
        tl.store(mine + 2, tl.sum(g2, axis=0), mask=col < C)
    if W > 3:
        tl.store(mine + 3, tl.sum(g3, axis=0), mask=col < C)


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
    return Inputs._make((x, *(dense(t) for t in inputs[1:10]), *inputs[10:]))


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
    blocks = -(-length // tile.columns)
    parts = min(batch * blocks, max(1, PROGRAMS // (channels // dim)))
    like: Any = _shapes(inputs) if any(g is None for g in grads[:5]) else grads
    dq, dk = _pair(grads[0], grads[1], like[:2])
    dq_turned, dk_turned = _pair(grads[3], grads[4], like[3:5])
    wide: dict[str, Any] = {"dtype": torch.float32}
    # those of queries and of keys side by side, to be folded together
    norms = maps = None
    sums: list[Tensor | None] = [None] * 4
    if inputs.q_norm is not None:
        # rows that the fewer heads of keys leave out add nothing
        make = x.new_empty if heads == kv_heads else x.new_zeros
        norms = make(2, parts * max(heads, kv_heads), dim, **wide)
        sums[:2] = norms
    if inputs.q_map is not None:
        maps = x.new_empty(2, parts, *inputs.q_map.shape, **wide)
        sums[2:] = maps
    du = x.new_empty(x.shape)
    taps = kept[0] if kept else _taps(weight)
    assert taps is not None
    launch(
        sums_gradient_kernel, parts * (channels // dim), x, taps, *inputs[2:10], dq, dk,
        dense(grads[2]), dq_turned, dk_turned, dense(grads[5]), du, *sums, parts,
        batch * blocks, blocks, length, x.stride(0) // constants["UNIT"], _turn_stride(inputs),
        inputs.eps, tile=tile, **constants,
    )  # fmt: skip
    dx, dtaps = _through_taps(inputs, constants, taps, du)
    return (
        dx,
        fold(dtaps, weight.dtype),
        *_fold_pair(norms, inputs.q_norm, inputs.k_norm),
        *_fold_pair(maps, inputs.q_map, inputs.k_map),
    )


def _fold_pair(partial: Tensor | None, q: Tensor | None, k: Tensor | None) -> Tensors:
    """Sums `[2, parts, ...]` of queries and keys as the gradients to both."""
    if partial is None or q is None or k is None:
        return None, None
    if q.dtype == k.dtype:
        return fold_pair(partial, q.dtype)
    return fold(partial[0], q.dtype), fold(partial[1], k.dtype)


def _through_taps(
    inputs: Inputs, constants: dict[str, Any], taps: Tensor, du: Tensor
) -> tuple[Tensor, Tensor]:
    """dx, and parts of dweight `[parts, C, W]`."""
    x, size = inputs.x, inputs.weight.shape[1]
    batch, length, channels = x.shape
    tile = TAPS
    columns = -(-channels // WIDE)
    blocks = -(-(length + (size - 1) * (inputs.state is not None)) // tile.columns)
    parts = min(batch * blocks, max(1, PROGRAMS_OF_TAPS // columns))
    dx = room_for(x)
    dtaps = x.new_empty(parts, channels, size, dtype=torch.float32)
    names = ("W", "STRIDE", "UNIT", "HAS_STATE", "HAS_AGE")
    launch(
        taps_gradient_kernel, parts * columns, x, taps, inputs.state, inputs.age, du, dx, dtaps,
        parts, batch * blocks, blocks, length, x.stride(0) // constants["UNIT"],
        C=channels, BT=tile.columns, BC=WIDE, OUT=dx.stride(1), tile=tile,
        **{n: constants[n] for n in names},
    )  # fmt: skip
    return dx, dtaps


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


def turned_again(inputs: Inputs) -> Tensors:
    """Turned queries and keys once more, without a backward: no map, no values."""
    inputs = _rows(inputs)
    x = inputs.x
    constants = _constants(inputs, FORWARD) | {"MAPPED": False}
    blocks = -(-x.shape[1] // constants["BT"])
    heads = inputs.num_heads + inputs.num_key_value_heads
    turned = _shapes(inputs)[3:5]
    launch(
        heads_tile_kernel, x.shape[0] * blocks * heads, x, _taps(inputs.weight), *inputs[2:8],
        None, None, None, None, None, *turned, x.shape[1], x.stride(0) // constants["UNIT"],
        blocks, _turn_stride(inputs), inputs.eps, tile=_tile(inputs, FORWARD), **constants,
    )  # fmt: skip
    return turned
