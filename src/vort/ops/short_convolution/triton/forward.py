# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, misc"
"""From projections to heads, a block of positions at a time: convolution to features.

A program has one head of queries, keys or values, held as its two halves ``[BT, BH]``, which RoPE
turns into each other. Positions before are loads of the same rows, shifted: the first level of
cache holds them. Queries and keys may go through their learned maps (`hedgehog_features`) before
they are stored; l = z W are a map's logits of the head z. With a single tap, W = 1, there is no
convolution, nor its silu: heads are the projections themselves.
"""

import triton
import triton.language as tl

from vort.ops.gpu.parts import LOG2E, power, reciprocal, sigmoid, widen


@triton.jit
def silu(u, W: tl.constexpr):
    """What follows the convolution, if there is one."""
    if W > 1:
        u = u * sigmoid(u)
    return u


@triton.jit
def load_half(ptr, at, mask, i, HALF: tl.constexpr, BH: tl.constexpr):
    """Half a head of many rows, float32."""
    if BH > HALF:
        mask = mask & (i < HALF)
    return widen(tl.load(ptr + at, mask=mask, other=0.0))


@triton.jit
def store_half(ptr, at, value, mask, i, HALF: tl.constexpr, BH: tl.constexpr):
    """Half a head of many rows, in the type of where it goes."""
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
def load_both(ptr, at, mask, i, HALF: tl.constexpr, BH: tl.constexpr):
    """Both halves of a head."""
    return load_half(ptr, at, mask, i, HALF, BH), load_half(ptr, at + HALF, mask, i, HALF, BH)


@triton.jit
def store_both(ptr, at, a, b, mask, i, HALF: tl.constexpr, BH: tl.constexpr):
    """Both halves of a head."""
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
    """The sums over taps of both halves of a head, at positions t; its inputs where W is 1."""
    ua, ub = input_at(x, state, t, at, i, length, C, W, HALF, BH, HAS_STATE)
    if W > 1:
        ua, ub = ua * tap(taps, i, 0, C, HALF, BH), ub * tap(taps + HALF, i, 0, C, HALF, BH)
    for lag in tl.static_range(1, W):
        a, b = input_at(x, state, t - lag, at - lag * STRIDE, i, length, C, W, HALF, BH, HAS_STATE)
        ua += reach(a, old, lag, HAS_AGE) * tap(taps, i, lag, C, HALF, BH)
        ub += reach(b, old, lag, HAS_AGE) * tap(taps + HALF, i, lag, C, HALF, BH)
    return ua, ub


@triton.jit
def head_of(
    ua, ub, fa, fb, inside, eps, D: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """A head as it is stored, from the convolution's sum."""
    a, b = silu(ua, W), silu(ub, W)
    if NORM:
        scale = scale_of(a, b, inside, eps, D)
        a, b = a * (scale * fa), b * (scale * fb)
    return a.to(NARROW), b.to(NARROW)


@triton.jit
def store_turned(
    turned, za, zb, cos, sin, at, place, inside, i, HALF: tl.constexpr, BH: tl.constexpr
):  # fmt: skip
    """A head turned by the angles of its rows."""
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
    own = x
    if W > 1:
        own = taps + n * D
    ua, ub = convolve(
        xs, own, past, old, t, r * STRIDE + i, i, length, C, W, HALF, BH, STRIDE, HAS_STATE,
        HAS_AGE,
    )  # fmt: skip
    first = row * length + t0
    if n >= HQ + HK:
        if v is not None:
            out = v + (first * HK + (n - HQ - HK)) * D
            store_both(out, r * (HK * D) + i, silu(ua, W), silu(ub, W), inside, i, HALF, BH)
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
        za, zb = head_of(ua, ub, fa, fb, inside, eps, D, W, NORM, NARROW)
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
