# mypy: ignore-errors
"""FAVOR+ features of a block of rows, and the gradient to the rows.

With y = c x, where c holds the scale d^(-1/4) and the cut of the length, the exponents are
e_i = w_i·y - |y|²/2. Their gradient de reaches x as

    dx = c (sum_i de_i w_i - a x),     a = d^(-1/4) sum_i de_i             where nothing was cut,
                                       a = sum_i de_i (w_i·x) / |x|²       where the length was,

the second because a cut length leaves the direction alone to be changed. Both a come out of the
products w_i·x, so the D coordinates may be taken in chunks of BC.
"""

import triton
import triton.language as tl

from vort.ops.gpu.parts import load_rows, store_rows

from .product import product


@triton.jit
def exponents(
    x, w, row, left, scale, max_norm, D: tl.constexpr, M: tl.constexpr, BT: tl.constexpr,
    BC: tl.constexpr, BM: tl.constexpr, CUT: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """What goes into the exponential ``[BT, BM]``, -inf beyond M; then w·x, |x|², c, is it cut."""
    along = tl.zeros([BT, BM], dtype=tl.float32)
    square = tl.zeros([BT], dtype=tl.float32)
    for col in range(0, D, BC):
        xt = load_rows(x, row, left, 0, 1, col, D, BT, BC)
        wt = load_rows(w, 0, M, 0, 1, col, D, BM, BC).to(tl.float32)
        along = product(xt, tl.trans(wt), along, x.dtype.element_ty)
        wide = xt.to(tl.float32)
        square += tl.sum(wide * wide, axis=1)
    norm = scale * tl.sqrt(square)
    factor = tl.zeros([BT], dtype=tl.float32) + scale
    cut = norm >= max_norm
    if CUT:
        factor = scale * (max_norm / tl.maximum(norm, max_norm))
        norm = tl.minimum(norm, max_norm)
    e = factor[:, None] * along - (norm * norm * 0.5)[:, None]
    e = tl.where((tl.arange(0, BM) < M)[None, :], e, float("-inf"))
    if SHIFT:
        e -= tl.max(e, axis=1)[:, None]
    return e, along, square, factor, cut


@triton.jit(do_not_specialize=["rows"])
def favor_kernel(
    x, w, out, rows, scale, max_norm, ceiling, weight,
    D: tl.constexpr, M: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
    CUT: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Features of BT rows; ``weight`` is 1/sqrt(M)."""
    row = tl.program_id(0).to(tl.int64) * BT
    left = rows - row
    e, _, _, _, _ = exponents(
        x, w, row, left, scale, max_norm, D, M, BT, BC, BM, CUT, SHIFT
    )  # fmt: skip
    store_rows(out, tl.exp(tl.minimum(e, ceiling)) * weight, row, left, 0, 1, 0, M, BT, BM)


@triton.jit(do_not_specialize=["rows", "columns"])
def favor_gradient_kernel(
    x, w, dout, dx, rows, columns, scale, max_norm, ceiling, weight,
    D: tl.constexpr, M: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BM: tl.constexpr,
    CUT: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """``dx`` of BT rows."""
    row = tl.program_id(0).to(tl.int64) * BT
    left = rows - row
    dfeatures = load_rows(dout, row, left, 0, 1, 0, M, BT, BM).to(tl.float32)
    e, along, square, factor, cut = exponents(
        x, w, row, left, scale, max_norm, D, M, BT, BC, BM, CUT, SHIFT
    )
    # an exponent above the ceiling does not move its feature
    de = tl.where(e <= ceiling, dfeatures * tl.exp(tl.minimum(e, ceiling)) * weight, 0.0)
    if SHIFT:
        # the largest exponent, which is now zero, was taken from all; equal ones share alike
        top = (e == 0.0).to(tl.float32)
        de -= top * (tl.sum(de, axis=1) / tl.sum(top, axis=1))[:, None]
    back = scale * tl.sum(de, axis=1)
    if CUT:
        back = tl.where(cut, tl.sum(de * along, axis=1) / tl.where(cut, square, 1.0), back)
    end = D
    if BM >= 128:
        # a loop of unknown length reads x and w again: kept from above, tiles so wide would spill
        end = columns
    for col in range(0, end, BC):
        xt = load_rows(x, row, left, 0, 1, col, D, BT, BC).to(tl.float32)
        wt = load_rows(w, 0, M, 0, 1, col, D, BM, BC).to(tl.float32)
        dxt = product(de, wt, tl.zeros([BT, BC], dtype=tl.float32), x.dtype.element_ty)
        dxt = factor[:, None] * (dxt - back[:, None] * xt)
        store_rows(dx, dxt, row, left, 0, 1, col, D, BT, BC)
