# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, misc"
"""From heads back to projections: the gradient to the convolution's sum, then through its taps.

All that the forward computed is computed again. With u the convolution's sum and du its gradient

    dx_t = sum_j w_j du_{t+j},     dw_j = sum_t x_t du_{t+j}:

one kernel makes du, another one, of channels alone, the rest. In one kernel for both du would have
to pass from thread to thread, and registers would be short: that took longer. Without a convolution
(W = 1) du is dx.
"""

import triton
import triton.language as tl

from vort.ops.gpu.parts import ask, fence_loads, widen

from .forward import (
    ages,
    convolve,
    head_of,
    load_both,
    load_half,
    logits_of,
    map_half,
    reach,
    scale_of,
    sigmoid,
    softmaxes,
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
def through_head(
    ua, ub, da, db, fa, fb, na, nb, inside, eps, D: tl.constexpr, W: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """The gradient to the convolution's sum from that to the head; and to the norm, added."""
    a, b = ua, ub
    if W > 1:
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
    OUT: tl.constexpr, HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr, NORM: tl.constexpr,
    TURN: tl.constexpr, MAPPED: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """du of every parts-th block of a head, and their share of the norm's and map's gradients.

    PLAIN: a gradient came back to the head or its features; TURNED: to the turned head, or without
    TURN to the head again. Rows of du lie OUT apart.
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
        if TURNED:
            ask(turned + ((begin + r) * H + h) * D, real)
        ua, ub = convolve(
            xs, own, past, old, t, r * STRIDE + i, i, length, C, W, HALF, BH, STRIDE, HAS_STATE,
            HAS_AGE,
        )  # fmt: skip
        da, db = zero, zero
        if MAPPED and PLAIN:
            features = plain + (first * H + h) * (2 * M)
            dp = load_half(features, r * (H * 2 * M) + j, inside, j, M, BM)
            dm = load_half(features, r * (H * 2 * M) + M + j, inside, j, M, BM)
            za, zb = head_of(ua, ub, fa, fb, inside, eps, D, W, NORM, NARROW)
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
        da, db, na, nb = through_head(ua, ub, da, db, fa, fb, na, nb, inside, eps, D, W, NORM)
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
    x, taps, state, age, q_norm, k_norm, cos, sin, q_map, k_map,
    dq, dk, dv, dq_turned, dk_turned, dv_again, du, dq_norm, dk_norm, dq_map, dk_map,
    parts, count, blocks, length, batch_units, turn_stride, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, M: tl.constexpr,
    BM: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, STRIDE: tl.constexpr, UNIT: tl.constexpr,
    OUT: tl.constexpr, HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr, NORM: tl.constexpr,
    TURN: tl.constexpr, MAPPED: tl.constexpr,
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
            HK, C, D, BH, M, BM, W, BT, STRIDE, UNIT, OUT, HAS_STATE, HAS_AGE, False, False, False,
            dv is not None, dv_again is not None,
        )  # fmt: skip
    elif HQ == HK:
        sums_back(
            x, taps, state, age, norm, cos, sin, w, plain, turned, du, dnorm, dmap,
            n, n % HQ, part, parts, count, blocks, length, batch_units, turn_stride, eps,
            HQ, C, D, BH, M, BM, W, BT, STRIDE, UNIT, OUT, HAS_STATE, HAS_AGE, NORM, TURN, MAPPED,
            PLAIN, TURNED,
        )  # fmt: skip
    elif query:
        sums_back(
            x, taps, state, age, norm, cos, sin, x, plain, turned, du, dnorm, x,
            n, n, part, parts, count, blocks, length, batch_units, turn_stride, eps,
            HQ, C, D, BH, M, BM, W, BT, STRIDE, UNIT, OUT, HAS_STATE, HAS_AGE, NORM, TURN, False,
            PLAIN, TURNED,
        )  # fmt: skip
    else:
        sums_back(
            x, taps, state, age, norm, cos, sin, x, plain, turned, du, dnorm, x,
            n, n - HQ, part, parts, count, blocks, length, batch_units, turn_stride, eps,
            HK, C, D, BH, M, BM, W, BT, STRIDE, UNIT, OUT, HAS_STATE, HAS_AGE, NORM, TURN, False,
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
