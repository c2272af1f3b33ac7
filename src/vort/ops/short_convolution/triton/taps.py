# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, misc"
"""From the gradient to the convolution's sum back to its inputs and taps, a walk through time.

With u the convolution's sum and du its gradient

    dx_t = sum_j w_j du_{t+j},     dw_j = sum_t x_t du_{t+j}:

a program walks through several segments of a sequence side by side, so that a position's neighbours
are at hand in registers, and nothing is loaded twice but where segments meet. Values have neither
norm nor map: their du is made on the way, from x and its neighbours as well.
"""

import triton
import triton.language as tl

from vort.ops.gpu.parts import sigmoid, widen

from .forward import reach


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
    dv, again, x0, x1, x2, x3, old, w0, w1, w2, w3, W: tl.constexpr, HAS_AGE: tl.constexpr,
    AGAIN: tl.constexpr,
):  # fmt: skip
    """du at a position from the gradient to values, which are silu of the convolution's sum.

    x0 is x at that position, x1 to x3 before it.
    """
    u = widen(x0) * w0 + reach(widen(x1), old, 1, HAS_AGE) * w1
    if W > 2:
        u += reach(widen(x2), old, 2, HAS_AGE) * w2
    if W > 3:
        u += reach(widen(x3), old, 3, HAS_AGE) * w3
    d = widen(dv)
    if AGAIN:
        d += widen(again)
    s = sigmoid(u)
    return d * (s + u * s * (1.0 - s))


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
def four_of(
    x, state, du, again, age, row, first, at, came, c, k, real, length,
    C: tl.constexpr, ROW: tl.constexpr, W: tl.constexpr, STRIDE: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr, VALUES: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """Four positions of segments from the k-th on: x, what came back, what came again, ages.

    x of queries and keys is wanted where dx is, three positions behind.
    """
    j = k if VALUES else k - 3
    x0 = input_of(x, state, row, first, at, c, j, real, length, C, W, STRIDE, HAS_STATE)
    x1 = input_of(x, state, row, first, at, c, j + 1, real, length, C, W, STRIDE, HAS_STATE)
    x2 = input_of(x, state, row, first, at, c, j + 2, real, length, C, W, STRIDE, HAS_STATE)
    x3 = input_of(x, state, row, first, at, c, j + 3, real, length, C, W, STRIDE, HAS_STATE)
    d0 = gradient_of(du, came, first, k, real, length, ROW)
    d1 = gradient_of(du, came, first, k + 1, real, length, ROW)
    d2 = gradient_of(du, came, first, k + 2, real, length, ROW)
    d3 = gradient_of(du, came, first, k + 3, real, length, ROW)
    e0, e1, e2, e3 = d0, d1, d2, d3
    if AGAIN:
        e0 = gradient_of(again, came, first, k, real, length, ROW)
        e1 = gradient_of(again, came, first, k + 1, real, length, ROW)
        e2 = gradient_of(again, came, first, k + 2, real, length, ROW)
        e3 = gradient_of(again, came, first, k + 3, real, length, ROW)
    o0 = age_of(age, first, k, length, HAS_AGE)
    o1 = age_of(age, first, k + 1, length, HAS_AGE)
    o2 = age_of(age, first, k + 2, length, HAS_AGE)
    o3 = age_of(age, first, k + 3, length, HAS_AGE)
    return x0, x1, x2, x3, d0, d1, d2, d3, e0, e1, e2, e3, o0, o1, o2, o3


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
    # segments beyond the last begin where no position is, nor four before
    first = tl.where(segment < count, segment % per_row * SPAN - LEAD, length + 4)
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
    # three positions ahead of the first; and of values, x three before it
    xz, x0, x1, x2, _, d0, d1, d2, _, e0, e1, e2, _, o0, o1, o2 = four_of(
        x, state, du, again, age, row, first, at, came, c, -1, real, length, C, ROW, W, STRIDE,
        HAS_STATE, HAS_AGE, VALUES, AGAIN,
    )  # fmt: skip
    if VALUES:
        xx = input_of(x, state, row, first, at, c, -3, real, length, C, W, STRIDE, HAS_STATE)
        xy = input_of(x, state, row, first, at, c, -2, real, length, C, W, STRIDE, HAS_STATE)
        d0 = sum_back(d0, e0, x0, xz, xy, xx, o0, w0, w1, w2, w3, W, HAS_AGE, AGAIN)
        d1 = sum_back(d1, e1, x1, x0, xz, xy, o1, w0, w1, w2, w3, W, HAS_AGE, AGAIN)
        d2 = sum_back(d2, e2, x2, x1, x0, xz, o2, w0, w1, w2, w3, W, HAS_AGE, AGAIN)
    else:
        d0, d1, d2 = widen(d0), widen(d1), widen(d2)
    zero = tl.zeros([BT, BC], dtype=tl.float32)
    g0, g1, g2, g3 = zero, zero, zero, zero
    for k in range(0, SPAN, 4):
        # four at once, before any is stored: a store would keep later loads waiting
        x3, x4, x5, x6, d3, d4, d5, d6, e3, e4, e5, e6, o3, o4, o5, o6 = four_of(
            x, state, du, again, age, row, first, at, came, c, k + 3, real, length, C, ROW, W,
            STRIDE, HAS_STATE, HAS_AGE, VALUES, AGAIN,
        )  # fmt: skip
        own0, own1, own2, own3 = x3, x4, x5, x6
        if VALUES:
            own0, own1, own2, own3 = x0, x1, x2, x3
            d3 = sum_back(d3, e3, x3, x2, x1, x0, o3, w0, w1, w2, w3, W, HAS_AGE, AGAIN)
            d4 = sum_back(d4, e4, x4, x3, x2, x1, o4, w0, w1, w2, w3, W, HAS_AGE, AGAIN)
            d5 = sum_back(d5, e5, x5, x4, x3, x2, o5, w0, w1, w2, w3, W, HAS_AGE, AGAIN)
            d6 = sum_back(d6, e6, x6, x5, x4, x3, o6, w0, w1, w2, w3, W, HAS_AGE, AGAIN)
        else:
            d3, d4, d5, d6 = widen(d3), widen(d4), widen(d5), widen(d6)
        t = first + k
        g0, g1, g2, g3 = through_taps(
            out + k * OUT, own0, d0, d1, d2, d3, o1, o2, o3, w0, w1, w2, w3, g0, g1, g2, g3,
            (t >= 0) & (t < length) & real, W, HAS_AGE,
        )  # fmt: skip
        g0, g1, g2, g3 = through_taps(
            out + (k + 1) * OUT, own1, d1, d2, d3, d4, o2, o3, o4, w0, w1, w2, w3, g0, g1, g2, g3,
            (t >= -1) & (t < length - 1) & real, W, HAS_AGE,
        )  # fmt: skip
        g0, g1, g2, g3 = through_taps(
            out + (k + 2) * OUT, own2, d2, d3, d4, d5, o3, o4, o5, w0, w1, w2, w3, g0, g1, g2, g3,
            (t >= -2) & (t < length - 2) & real, W, HAS_AGE,
        )  # fmt: skip
        g0, g1, g2, g3 = through_taps(
            out + (k + 3) * OUT, own3, d3, d4, d5, d6, o4, o5, o6, w0, w1, w2, w3, g0, g1, g2, g3,
            (t >= -3) & (t < length - 3) & real, W, HAS_AGE,
        )  # fmt: skip
        d0, d1, d2, o1, o2 = d4, d5, d6, o5, o6
        if VALUES:
            x0, x1, x2 = x4, x5, x6
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
