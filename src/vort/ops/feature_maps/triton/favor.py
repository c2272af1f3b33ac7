# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""FAVOR+ features of a block of rows, and the gradient to the rows.

With y = c x, where c holds the scale d^(-1/4) and the cut of the length, the exponents are
e_i = w_i·y - |y|²/2. Their gradient de reaches x as

    dx = c (sum_i de_i w_i - a x),     a = d^(-1/4) sum_i de_i             where nothing was cut,
                                       a = sum_i de_i (w_i·x) / |x|²       where the length was,

the second because a cut length leaves the direction alone to be changed. Both a come out of the
products w_i·x, so the D coordinates may be taken in chunks of BC.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vort.ops.custom import Tensors, custom_op
from vort.ops.gpu.launcher import dense, launch
from vort.ops.gpu.parts import load_rows, store_rows

from .shared import Tiling, blocks, choose_tiling, product

__all__ = ["favor_fused"]


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


class Inputs(NamedTuple):
    """The arguments of `favor_fused`."""

    x: Tensor
    projection: Tensor
    max_norm: float | None
    shift: bool
    ceiling: float


def _arguments(inputs: Inputs) -> tuple[Tiling, int, tuple[float, ...], dict[str, Any]]:
    """Block sizes, rows, numbers and compile-time constants that both kernels take."""
    features, head_dim = inputs.projection.shape
    tiling = choose_tiling(head_dim, features, inputs.x.dtype)
    cut = 0.0 if inputs.max_norm is None else float(inputs.max_norm)
    numbers = (head_dim**-0.25, cut, inputs.ceiling, features**-0.5)
    constants = {
        "D": head_dim, "M": features, "BC": tiling.chunk, "BM": tiling.features,
        "CUT": inputs.max_norm is not None, "SHIFT": inputs.shift,
    }  # fmt: skip
    return tiling, prod(inputs.x.shape[:-1]), numbers, constants


def _forward(inputs: Inputs) -> tuple[Tensor]:
    tiling, rows, numbers, constants = _arguments(inputs)
    tile = tiling.forward
    (out,) = _shapes(inputs)
    launch(
        favor_kernel, blocks(rows, tile.columns), dense(inputs.x), dense(inputs.projection),
        out, rows, *numbers, BT=tile.columns, tile=tile, **constants,
    )  # fmt: skip
    return (out,)


def _backward(inputs: Inputs, kept: Tensors, grads: Tensors, needs: Sequence[bool]) -> Tensors:
    tiling, rows, numbers, constants = _arguments(inputs)
    tile, x = tiling.backward, dense(inputs.x)
    dx = torch.empty_like(x)
    launch(
        favor_gradient_kernel, blocks(rows, tile.columns), x, dense(inputs.projection),
        dense(grads[0]), dx, rows, x.shape[-1], *numbers, BT=tile.columns, tile=tile,
        **constants,
    )  # fmt: skip
    return (dx,)


def _shapes(inputs: Inputs) -> tuple[Tensor]:
    return (inputs.x.new_empty(*inputs.x.shape[:-1], inputs.projection.shape[0]),)


_favor = custom_op("vort::favor_fused", Inputs, _forward, _backward, _shapes, gradients=("x",))


def favor_fused(
    x: Tensor, projection: Tensor, *, max_norm: float | None, shift: bool, ceiling: float
) -> Tensor:
    """Return what `favor_features` returns, from fused GPU kernels, forward and backward.

    x is bfloat16 or float32, `[..., d]`, projection `[m, d]`; d and m at most 256. Exponents stop
    at `ceiling`. The gradient goes to x alone.
    """
    features: Tensor = _favor(Inputs(x, projection, max_norm, shift, ceiling))[0]
    return features
