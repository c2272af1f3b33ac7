# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, misc"
"""From queries and keys back to the gradient of the convolution's sum; the rest is in `taps.py`.

All that the forward computed is computed again but the features, which were kept. In one kernel
with the walk through the taps that gradient would have to pass from thread to thread, and registers
would be short: that took longer. Without a convolution (W = 1) it is the gradient to x.
"""

import triton
import triton.language as tl

from vort.ops.gpu.parts import ask, fence_loads, sigmoid

from .forward import (
    ages,
    convolve,
    load_both,
    load_half,
    map_half,
    scale_of,
    store_both,
)


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
def again_to_head(ua, ub, inside, eps, D: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr):
    """Both halves before the norm's weight, the silu's slopes, and what the norm multiplied by."""
    a, b, slope_a, slope_b, scale = ua, ub, ua, ub, ua
    if W > 1:
        sa, sb = sigmoid(ua), sigmoid(ub)
        a, b = ua * sa, ub * sb
        slope_a, slope_b = sa + a * (1.0 - sa), sb + b * (1.0 - sb)
    if NORM:
        scale = scale_of(a, b, inside, eps, D)
        a, b = a * scale, b * scale
    return a, b, slope_a, slope_b, scale


@triton.jit
def through_head(
    a, b, slope_a, slope_b, scale, da, db, fa, fb, na, nb, D: tl.constexpr, W: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """The gradient to the convolution's sum from that to the head; and to the norm, added."""
    if NORM:
        na += da * a
        nb += db * b
        da, db = da * fa, db * fb
        along = tl.sum(da * a + db * b, axis=1)[:, None] * (1.0 / D)
        da, db = scale * (da - along * a), scale * (db - along * b)
    if W > 1:
        da, db = da * slope_a, db * slope_b
    return da, db, na, nb


@triton.jit
def came_back(
    da, db, plain, turned, cos, sin, base, at, place, inside, i,
    HALF: tl.constexpr, BH: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """The gradient to a head, added: what came back to it, and to the turned head."""
    if PLAIN:
        a, b = load_both(plain + base, at, inside, i, HALF, BH)
        da += a
        db += b
    if TURNED:
        a, b = load_both(turned + base, at, inside, i, HALF, BH)
        c = load_half(cos, place, inside, i, HALF, BH)
        s = load_half(sin, place, inside, i, HALF, BH)
        da += a * c
        da += b * s
        db += b * c
        db -= a * s
    return da, db


@triton.jit
def sums_back(
    x, taps, state, age, norm, cos, sin, w, features, plain, turned, du, dnorm, dmap,
    n, h, part, parts, count, blocks, length, batch_units, turn_stride, eps,
    H: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, M: tl.constexpr,
    BM: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, STRIDE: tl.constexpr, UNIT: tl.constexpr,
    OUT: tl.constexpr, HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr, NORM: tl.constexpr,
    TURN: tl.constexpr, MAPPED: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """du of every parts-th block of a head, and their share of the norm's and map's gradients.

    PLAIN: a gradient came back to the head or its features; TURNED: to the turned head. Rows of du
    lie OUT apart.
    """
    HALF: tl.constexpr = D // 2
    NARROW: tl.constexpr = x.dtype.element_ty
    r = tl.arange(0, BT)[:, None]
    i = tl.arange(0, BH)[None, :]
    j = tl.arange(0, BM)[None, :]
    zero = tl.zeros([BT, BH], dtype=tl.float32)
    own = x
    if W > 1:
        own = taps + n * D
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
            if MAPPED:
                ask(features + ((begin + r) * H + h) * wide, real)
        if TURNED:
            ask(turned + ((begin + r) * H + h) * D, real)
        ua, ub = convolve(
            xs, own, past, old, t, r * STRIDE + i, i, length, C, W, HALF, BH, STRIDE, HAS_STATE,
            HAS_AGE,
        )  # fmt: skip
        za, zb, slope_a, slope_b, scale = again_to_head(ua, ub, inside, eps, D, W, NORM)
        da, db = zero, zero
        if MAPPED and PLAIN:
            at = (first * H + h) * (2 * M)
            to = r * (H * 2 * M) + j
            dp = load_half(plain + at, to, inside, j, M, BM)
            dm = load_half(plain + at, to + M, inside, j, M, BM)
            p = load_half(features + at, to, inside, j, M, BM)
            m = load_half(features + at, to + M, inside, j, M, BM)
            dl = p * (dp - tl.sum(p * dp, axis=1)[:, None])
            dl -= m * (dm - tl.sum(m * dm, axis=1)[:, None])
            fence_loads(step)
            da = set_apart(plain_product(dl, tl.trans(wa), zero, NARROW), inside)
            db = set_apart(plain_product(dl, tl.trans(wb), zero, NARROW), inside)
            ha, hb = za, zb
            if NORM:
                ha, hb = za * fa, zb * fb
            ma = plain_product(tl.trans(ha.to(NARROW)), dl, ma, NARROW)
            mb = plain_product(tl.trans(hb.to(NARROW)), dl, mb, NARROW)
        base = (first * H + h) * D
        place = (old - t0) * HALF + i
        c, s = cos, sin
        if TURN:
            c, s = cos + (row * turn_stride + t0) * HALF, sin + (row * turn_stride + t0) * HALF
        da, db = came_back(
            da, db, plain, turned, c, s, base, r * (H * D) + i, place, inside, i, HALF, BH,
            PLAIN and not MAPPED, TURNED,
        )  # fmt: skip
        da, db, na, nb = through_head(
            za, zb, slope_a, slope_b, scale, da, db, fa, fb, na, nb, D, W, NORM
        )  # fmt: skip
        store_both(du + first * OUT + n * D, r * OUT + i, da, db, inside, i, HALF, BH)
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
    x, taps, state, age, q_norm, k_norm, cos, sin, q_map, k_map, q, k,
    dq, dk, dq_turned, dk_turned, du, dq_norm, dk_norm, dq_map, dk_map,
    parts, count, blocks, length, batch_units, turn_stride, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, M: tl.constexpr,
    BM: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, STRIDE: tl.constexpr, UNIT: tl.constexpr,
    OUT: tl.constexpr, HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr, NORM: tl.constexpr,
    TURN: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """du of queries and keys: blocks ``part, part + parts, ..`` of ``count`` for one head.

    ``blocks`` lie in a row of x.
    """
    C: tl.constexpr = (HQ + 2 * HK) * D
    PLAIN: tl.constexpr = dq is not None
    TURNED: tl.constexpr = dq_turned is not None
    pid = tl.program_id(0)
    n = pid % (HQ + HK)
    part = pid // (HQ + HK)
    query = n < HQ
    norm, w, features, plain, turned, dnorm, dmap = x, x, x, x, x, x, x
    if NORM:
        norm, dnorm = tl.where(query, q_norm, k_norm), tl.where(query, dq_norm, dk_norm)
    if MAPPED:
        w, dmap = tl.where(query, q_map, k_map), tl.where(query, dq_map, dk_map)
        features = tl.where(query, q, k)
    if PLAIN:
        plain = tl.where(query, dq, dk)
    if TURNED:
        turned = tl.where(query, dq_turned, dk_turned)
    if HQ == HK:
        sums_back(
            x, taps, state, age, norm, cos, sin, w, features, plain, turned, du, dnorm, dmap,
            n, n % HQ, part, parts, count, blocks, length, batch_units, turn_stride, eps,
            HQ, C, D, BH, M, BM, W, BT, STRIDE, UNIT, OUT, HAS_STATE, HAS_AGE, NORM, TURN, MAPPED,
            PLAIN, TURNED,
        )  # fmt: skip
    elif query:
        sums_back(
            x, taps, state, age, norm, cos, sin, x, x, plain, turned, du, dnorm, x,
            n, n, part, parts, count, blocks, length, batch_units, turn_stride, eps,
            HQ, C, D, BH, M, BM, W, BT, STRIDE, UNIT, OUT, HAS_STATE, HAS_AGE, NORM, TURN, False,
            PLAIN, TURNED,
        )  # fmt: skip
    else:
        sums_back(
            x, taps, state, age, norm, cos, sin, x, x, plain, turned, du, dnorm, x,
            n, n - HQ, part, parts, count, blocks, length, batch_units, turn_stride, eps,
            HK, C, D, BH, M, BM, W, BT, STRIDE, UNIT, OUT, HAS_STATE, HAS_AGE, NORM, TURN, False,
            PLAIN, TURNED,
        )  # fmt: skip
