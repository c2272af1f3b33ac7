# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, misc"
"""From heads back to projections: the gradient to the convolution's sum, then through its taps.

All that the forward computed is computed again. With u the convolution's sum and du its gradient

    dx_t = sum_j w_j du_{t+j},     dw_j = sum_t x_t du_{t+j}:

one kernel makes du of queries and keys, another one, of channels alone, the rest. In one kernel for
both du would have to pass from thread to thread, and registers would be short: that took longer.
Values have neither norm nor map: their du is made where it is used. Without a convolution (W = 1)
du is dx.
"""

import triton
import triton.language as tl

from vort.ops.gpu.parts import ask, fence_loads, sigmoid, widen

from .forward import (
    ages,
    convolve,
    load_both,
    load_half,
    map_half,
    reach,
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
            TURN, PLAIN and not MAPPED, TURNED,
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


@triton.jit
def input_of(
    x, state, row, first, at, c, k, real, length, C: tl.constexpr, W: tl.constexpr,
    STRIDE: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """x at the k-th position of segments; before a row's first position, its state."""
    t = first + k
    found = tl.load(x + at + k * STRIDE + c, mask=(t >= 0) & (t < length) & real, other=0.0)
    if HAS_STATE:
        kept = state + (row * (W - 1) + t + (W - 1)) * C + c
        found = tl.where(
            t < 0, tl.load(kept, mask=(t < 0) & (t > -W) & real, other=0.0), found
        )  # fmt: skip
    return found


@triton.jit
def gradient_of(d, at, first, k, real, length, ROW: tl.constexpr):
    """A gradient at the k-th position of segments; rows of it lie ROW apart."""
    t = first + k
    return tl.load(d + at + k * ROW, mask=(t >= 0) & (t < length) & real, other=0.0)


@triton.jit
def age_of(age, first, k, length, HAS_AGE: tl.constexpr):
    """How far back the k-th position of segments reaches."""
    old = first
    if HAS_AGE:
        t = first + k
        old = tl.load(age + t, mask=(t >= 0) & (t < length), other=0).to(tl.int32)
    return old


@triton.jit
def sum_back(
    d, again, x0, x1, x2, x3, old, w0, w1, w2, w3, W: tl.constexpr, HAS_AGE: tl.constexpr,
    VALUES: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """du at a position: as it came; or from the gradient to values, which are silu of the sum.

    x0 is x at that position, x1 to x3 before it.
    """
    d = widen(d)
    if VALUES:
        u = widen(x0) * w0 + reach(widen(x1), old, 1, HAS_AGE) * w1
        if W > 2:
            u += reach(widen(x2), old, 2, HAS_AGE) * w2
        if W > 3:
            u += reach(widen(x3), old, 3, HAS_AGE) * w3
        if AGAIN:
            d += widen(again)
        s = sigmoid(u)
        a = u * s
        d *= s + a * (1.0 - s)
    return d


@triton.jit
def through_taps(
    dx, own, d0, d1, d2, d3, old1, old2, old3, w0, w1, w2, w3, g0, g1, g2, g3, mask,
    W: tl.constexpr, HAS_AGE: tl.constexpr,
):  # fmt: skip
    """dx at a position, stored, from du there and later; and the position's share of dw, added."""
    own = widen(own)
    d1 = reach(d1, old1, 1, HAS_AGE)
    value = d0 * w0 + d1 * w1
    g0 += d0 * own
    g1 += d1 * own
    if W > 2:
        d2 = reach(d2, old2, 2, HAS_AGE)
        value += d2 * w2
        g2 += d2 * own
    if W > 3:
        d3 = reach(d3, old3, 3, HAS_AGE)
        value += d3 * w3
        g3 += d3 * own
    tl.store(dx, value.to(dx.dtype.element_ty), mask=mask)
    return g0, g1, g2, g3


@triton.jit
def taps_back(
    x, taps, state, age, du, again, dx, dtaps, c, part, count, per_row, length, batch_units,
    C: tl.constexpr, FIRST: tl.constexpr, ROW: tl.constexpr, W: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, SPAN: tl.constexpr, STRIDE: tl.constexpr, UNIT: tl.constexpr,
    OUT: tl.constexpr, HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr, VALUES: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """dx and a share of dw, of BC channels in BT segments of SPAN positions.

    du's rows have ROW channels, of which the first is FIRST of x's. VALUES: what came is the
    gradient to values, and du is computed on the way.
    """
    LEAD: tl.constexpr = W - 1 if HAS_STATE else 0
    real = c < FIRST + ROW
    segment = part * BT + tl.arange(0, BT)[:, None]
    row = (segment // per_row).to(tl.int64)
    # segments beyond the last begin where no position is, nor three before
    first = tl.where(segment < count, segment % per_row * SPAN - LEAD, length + 3)
    at = row * (batch_units * UNIT) + first.to(tl.int64) * STRIDE
    here = row * length + first
    came = here * ROW + (c - FIRST)
    out = dx + here * OUT + c
    w0 = tl.load(taps + c, mask=real, other=0.0)
    w1 = tl.load(taps + C + c, mask=real, other=0.0)
    w2, w3 = w1, w1
    if W > 2:
        w2 = tl.load(taps + 2 * C + c, mask=real, other=0.0)
    if W > 3:
        w3 = tl.load(taps + 3 * C + c, mask=real, other=0.0)
    o0 = age_of(age, first, 0, length, HAS_AGE)
    o1 = age_of(age, first, 1, length, HAS_AGE)
    o2 = age_of(age, first, 2, length, HAS_AGE)
    d0 = gradient_of(du, came, first, 0, real, length, ROW)
    d1 = gradient_of(du, came, first, 1, real, length, ROW)
    d2 = gradient_of(du, came, first, 2, real, length, ROW)
    e0, e1, e2, e3, e4, e5, e6 = d0, d0, d0, d0, d0, d0, d0
    if AGAIN:
        e0 = gradient_of(again, came, first, 0, real, length, ROW)
        e1 = gradient_of(again, came, first, 1, real, length, ROW)
        e2 = gradient_of(again, came, first, 2, real, length, ROW)
    x0, x1, x2, before1, before2, before3 = d0, d0, d0, d0, d0, d0
    if VALUES:
        before3 = input_of(x, state, row, first, at, c, -3, real, length, C, W, STRIDE, HAS_STATE)
        before2 = input_of(x, state, row, first, at, c, -2, real, length, C, W, STRIDE, HAS_STATE)
        before1 = input_of(x, state, row, first, at, c, -1, real, length, C, W, STRIDE, HAS_STATE)
        x0 = input_of(x, state, row, first, at, c, 0, real, length, C, W, STRIDE, HAS_STATE)
        x1 = input_of(x, state, row, first, at, c, 1, real, length, C, W, STRIDE, HAS_STATE)
        x2 = input_of(x, state, row, first, at, c, 2, real, length, C, W, STRIDE, HAS_STATE)
    d0 = sum_back(d0, e0, x0, before1, before2, before3, o0, w0, w1, w2, w3, W, HAS_AGE, VALUES,
                  AGAIN)  # fmt: skip
    d1 = sum_back(d1, e1, x1, x0, before1, before2, o1, w0, w1, w2, w3, W, HAS_AGE, VALUES, AGAIN)
    d2 = sum_back(d2, e2, x2, x1, x0, before1, o2, w0, w1, w2, w3, W, HAS_AGE, VALUES, AGAIN)
    zero = tl.zeros([BT, BC], dtype=tl.float32)
    g0, g1, g2, g3 = zero, zero, zero, zero
    # x of queries and keys is wanted where dx is; of values, where du is
    AHEAD: tl.constexpr = 3 if VALUES else 0
    for k in range(0, SPAN, 4):
        # four positions are loaded at once, before any is stored
        x3 = input_of(
            x, state, row, first, at, c, k + AHEAD, real, length, C, W, STRIDE, HAS_STATE
        )
        x4 = input_of(
            x, state, row, first, at, c, k + AHEAD + 1, real, length, C, W, STRIDE, HAS_STATE
        )
        x5 = input_of(
            x, state, row, first, at, c, k + AHEAD + 2, real, length, C, W, STRIDE, HAS_STATE
        )
        x6 = input_of(
            x, state, row, first, at, c, k + AHEAD + 3, real, length, C, W, STRIDE, HAS_STATE
        )
        d3 = gradient_of(du, came, first, k + 3, real, length, ROW)
        d4 = gradient_of(du, came, first, k + 4, real, length, ROW)
        d5 = gradient_of(du, came, first, k + 5, real, length, ROW)
        d6 = gradient_of(du, came, first, k + 6, real, length, ROW)
        if AGAIN:
            e3 = gradient_of(again, came, first, k + 3, real, length, ROW)
            e4 = gradient_of(again, came, first, k + 4, real, length, ROW)
            e5 = gradient_of(again, came, first, k + 5, real, length, ROW)
            e6 = gradient_of(again, came, first, k + 6, real, length, ROW)
        o3 = age_of(age, first, k + 3, length, HAS_AGE)
        o4 = age_of(age, first, k + 4, length, HAS_AGE)
        o5 = age_of(age, first, k + 5, length, HAS_AGE)
        o6 = age_of(age, first, k + 6, length, HAS_AGE)
        t = first + k
        own0, own1, own2, own3 = x3, x4, x5, x6
        if VALUES:
            own0, own1, own2, own3 = x0, x1, x2, x3
        d3 = sum_back(d3, e3, x3, x2, x1, x0, o3, w0, w1, w2, w3, W, HAS_AGE, VALUES, AGAIN)
        g0, g1, g2, g3 = through_taps(
            out + k * OUT, own0, d0, d1, d2, d3, o1, o2, o3, w0, w1, w2, w3, g0, g1, g2, g3,
            (t >= 0) & (t < length) & real, W, HAS_AGE,
        )  # fmt: skip
        d4 = sum_back(d4, e4, x4, x3, x2, x1, o4, w0, w1, w2, w3, W, HAS_AGE, VALUES, AGAIN)
        g0, g1, g2, g3 = through_taps(
            out + (k + 1) * OUT, own1, d1, d2, d3, d4, o2, o3, o4, w0, w1, w2, w3, g0, g1, g2, g3,
            (t >= -1) & (t < length - 1) & real, W, HAS_AGE,
        )  # fmt: skip
        d5 = sum_back(d5, e5, x5, x4, x3, x2, o5, w0, w1, w2, w3, W, HAS_AGE, VALUES, AGAIN)
        g0, g1, g2, g3 = through_taps(
            out + (k + 2) * OUT, own2, d2, d3, d4, d5, o3, o4, o5, w0, w1, w2, w3, g0, g1, g2, g3,
            (t >= -2) & (t < length - 2) & real, W, HAS_AGE,
        )  # fmt: skip
        d6 = sum_back(d6, e6, x6, x5, x4, x3, o6, w0, w1, w2, w3, W, HAS_AGE, VALUES, AGAIN)
        g0, g1, g2, g3 = through_taps(
            out + (k + 3) * OUT, own3, d3, d4, d5, d6, o4, o5, o6, w0, w1, w2, w3, g0, g1, g2, g3,
            (t >= -3) & (t < length - 3) & real, W, HAS_AGE,
        )  # fmt: skip
        if VALUES:
            x0, x1, x2 = x4, x5, x6
        d0, d1, d2 = d4, d5, d6
        o1, o2 = o5, o6
    col = tl.reshape(c, [BC])
    mine = dtaps + (part.to(tl.int64) * C + col) * W
    tl.store(mine, tl.sum(g0, axis=0), mask=col < FIRST + ROW)
    tl.store(mine + 1, tl.sum(g1, axis=0), mask=col < FIRST + ROW)
    if W > 2:
        tl.store(mine + 2, tl.sum(g2, axis=0), mask=col < FIRST + ROW)
    if W > 3:
        tl.store(mine + 3, tl.sum(g3, axis=0), mask=col < FIRST + ROW)


@triton.jit(do_not_specialize=["count", "per_row", "length", "batch_units"])
def taps_gradient_kernel(
    x, taps, state, age, du, dv, dv_again, dx, dtaps, count, per_row, length, batch_units,
    C: tl.constexpr, CV: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    SPAN: tl.constexpr, STRIDE: tl.constexpr, UNIT: tl.constexpr, OUT: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr,
):  # fmt: skip
    """BT segments of BC channels: of queries and keys, whose du is given, or of values' CV.

    Segments are walked through side by side, so that a position's neighbours in time are at hand in
    registers. Rows of the state are positions before the first: they have a share in dw, and no dx.
    Rows of dx lie OUT apart; ``per_row`` of the ``count`` segments are in one row of x.
    """
    OTHERS: tl.constexpr = (C - CV + BC - 1) // BC
    COLUMNS: tl.constexpr = OTHERS + (CV + BC - 1) // BC
    AGAIN: tl.constexpr = dv_again is not None
    pid = tl.program_id(0)
    column = pid % COLUMNS
    part = pid // COLUMNS
    again = dv
    if AGAIN:
        again = dv_again
    c = tl.arange(0, BC)[None, :]
    if column >= OTHERS:
        taps_back(
            x, taps, state, age, dv, again, dx, dtaps, C - CV + (column - OTHERS) * BC + c, part,
            count, per_row, length, batch_units, C, C - CV, CV, W, BT, BC, SPAN, STRIDE, UNIT, OUT,
            HAS_STATE, HAS_AGE, True, AGAIN,
        )  # fmt: skip
    else:
        taps_back(
            x, taps, state, age, du, again, dx, dtaps, column * BC + c, part,
            count, per_row, length, batch_units, C, 0, C - CV, W, BT, BC, SPAN, STRIDE, UNIT, OUT,
            HAS_STATE, HAS_AGE, False, False,
        )  # fmt: skip
