# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, misc"
"""Products of a few rows, as a step of decoding has them, on a GPU. No gradients.

Such a product takes as long as its weights take to arrive. A program has a few rows of one weight
and all rows of x, and what stands beside the product is done on the way: the RMS norm of x, the
gate of an MLP, a residual. Weights stay where they are; several share one launch.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vort.ops.gpu.launcher import Tile, launch, power_of_two
from vort.ops.gpu.parts import let_next_start, wait_for_inputs
from vort.ops.linear import MOST, Norm

__all__ = ["few_gated", "few_products"]


@triton.jit
def choose(
    pid, w, size, stride, first, column,
    other, SIZE: tl.constexpr, STRIDE: tl.constexpr, FIRST: tl.constexpr, COLUMN: tl.constexpr,
):  # fmt: skip
    """Another weight from program FIRST on: where it is, its rows, their stride, its columns."""
    here = pid >= FIRST
    return (
        tl.where(here, other, w), tl.where(here, SIZE, size), tl.where(here, STRIDE, stride),
        tl.where(here, FIRST, first), tl.where(here, COLUMN, column),
    )  # fmt: skip


@triton.jit
def load_row(x, norm, at, mask, HAS_NORM: tl.constexpr):
    """Numbers of x, and the same times the norm's weight, both float32."""
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    scaled = value
    if HAS_NORM:
        scaled = value * tl.load(norm + at, mask=mask, other=0.0).to(tl.float32)
    return value, scaled


@triton.jit
def finished(
    total, other, residual, at, mask,
    GATED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, narrow: tl.constexpr,
):  # fmt: skip
    """What is stored of a product, rounded wherever separate launches would store it."""
    y = total.to(narrow).to(tl.float32)
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * other.to(narrow).to(tl.float32)
    if HAS_RESIDUAL:
        y += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    return y.to(narrow)


@triton.jit
def one_row(
    x, norm, w, up, stride, row, size, eps,
    K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """Sums ``[BN]`` of a product with one row of x, and of a second one."""
    ks = tl.arange(0, BK)
    acc = tl.zeros([BN, BK], dtype=tl.float32)
    more = acc
    squares = tl.zeros([BK], dtype=tl.float32)
    # unrolled: all loads are under way before the first product
    for first in tl.static_range(0, K, BK):
        col = first + ks
        mask = (row < size)[:, None] & (col < K)[None, :]
        at = row[:, None] * stride + col[None, :]
        wt = tl.load(w + at, mask=mask, other=0.0)
        if GATED:
            ut = tl.load(up + at, mask=mask, other=0.0)
        if first == 0:
            wait_for_inputs()
        value, scaled = load_row(x, norm, col, col < K, HAS_NORM)
        squares += value * value
        acc += wt.to(tl.float32) * scaled[None, :]
        if GATED:
            more += ut.to(tl.float32) * scaled[None, :]
    total, second = tl.sum(acc, axis=1), tl.sum(acc, axis=1)
    if GATED:
        second = tl.sum(more, axis=1)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        total *= scale
        second *= scale
    return total, second


@triton.jit
def few_rows(
    x, norm, w, up, stride, row, size, rows, eps,
    K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    HAS_NORM: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Sums ``[BR, BN]`` of a product with all rows of x, and of a second one."""
    EXACT: tl.constexpr = "ieee" if x.dtype.element_ty == tl.float32 else "tf32"
    r = tl.arange(0, BR)
    acc = tl.zeros([BR, BN], dtype=tl.float32)
    more = tl.zeros([BR, BN], dtype=tl.float32)
    squares = tl.zeros([BR, BK], dtype=tl.float32)
    wait_for_inputs()
    for first in range(0, K, BK):
        col = first + tl.arange(0, BK)
        mask = (row < size)[None, :] & (col < K)[:, None]
        at = row[None, :] * stride + col[:, None]
        wt = tl.load(w + at, mask=mask, other=0.0)
        inside = (r < rows)[:, None] & (col < K)[None, :]
        xt = tl.load(x + r[:, None] * K + col[None, :], mask=inside, other=0.0)
        if HAS_NORM:
            wide = xt.to(tl.float32)
            squares += wide * wide
            scale = tl.load(norm + col, mask=col < K, other=0.0).to(tl.float32)
            xt = (wide * scale[None, :]).to(x.dtype.element_ty)
        acc = tl.dot(xt, wt, acc, input_precision=EXACT)
        if GATED:
            ut = tl.load(up + at, mask=mask, other=0.0)
            more = tl.dot(xt, ut, more, input_precision=EXACT)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
        acc *= scale
        more *= scale
    return acc, more


@triton.jit(do_not_specialize=["rows"])
def few_kernel(
    x, norm, residual, out, w0, w1, w2, w3, w4, w5, w6, w7, rows, eps,
    K: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, N4: tl.constexpr,
    N5: tl.constexpr, N6: tl.constexpr, N7: tl.constexpr,
    T0: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr, T4: tl.constexpr,
    T5: tl.constexpr, T6: tl.constexpr, T7: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """BN columns of out ``[rows, all sizes]``: x, or its RMS norm, times one of the weights.

    Weight i is ``[Ni, K]`` with rows Ti apart. GATED: silu(x w0^T) times x w1^T instead.
    """
    C1: tl.constexpr = N0
    C2: tl.constexpr = C1 if GATED else C1 + N1
    C3: tl.constexpr = C2 + N2
    C4: tl.constexpr = C3 + N3
    C5: tl.constexpr = C4 + N4
    C6: tl.constexpr = C5 + N5
    C7: tl.constexpr = C6 + N6
    WIDTH: tl.constexpr = C7 + N7
    P1: tl.constexpr = (N0 + BN - 1) // BN
    P2: tl.constexpr = P1 + (N1 + BN - 1) // BN
    P3: tl.constexpr = P2 + (N2 + BN - 1) // BN
    P4: tl.constexpr = P3 + (N3 + BN - 1) // BN
    P5: tl.constexpr = P4 + (N4 + BN - 1) // BN
    P6: tl.constexpr = P5 + (N5 + BN - 1) // BN
    P7: tl.constexpr = P6 + (N6 + BN - 1) // BN
    narrow: tl.constexpr = out.dtype.element_ty
    let_next_start()
    pid = tl.program_id(0)
    w, size, stride, first, column = w0, N0, T0, 0, 0
    up = w0
    if GATED:
        up = w1
    else:
        if N1 > 0:
            w, size, stride, first, column = choose(
                pid, w, size, stride, first, column, w1, N1, T1, P1, C1
            )
        if N2 > 0:
            w, size, stride, first, column = choose(
                pid, w, size, stride, first, column, w2, N2, T2, P2, C2
            )
        if N3 > 0:
            w, size, stride, first, column = choose(
                pid, w, size, stride, first, column, w3, N3, T3, P3, C3
            )
        if N4 > 0:
            w, size, stride, first, column = choose(
                pid, w, size, stride, first, column, w4, N4, T4, P4, C4
            )
        if N5 > 0:
            w, size, stride, first, column = choose(
                pid, w, size, stride, first, column, w5, N5, T5, P5, C5
            )
        if N6 > 0:
            w, size, stride, first, column = choose(
                pid, w, size, stride, first, column, w6, N6, T6, P6, C6
            )
        if N7 > 0:
            w, size, stride, first, column = choose(
                pid, w, size, stride, first, column, w7, N7, T7, P7, C7
            )
    row = (pid - first) * BN + tl.arange(0, BN)
    if BR == 1:
        total, second = one_row(x, norm, w, up, stride, row, size, eps, K, BK, BN, HAS_NORM, GATED)
        at = column + row
        mask = row < size
        y = finished(total, second, residual, at, mask, GATED, HAS_RESIDUAL, narrow)
        tl.store(out + at, y, mask=mask)
    else:
        total, second = few_rows(
            x, norm, w, up, stride, row, size, rows, eps, K, BK, BN, BR, HAS_NORM, GATED
        )
        r = tl.arange(0, BR)
        at = r[:, None] * WIDTH + column + row[None, :]
        mask = (r < rows)[:, None] & (row < size)[None, :]
        y = finished(total, second, residual, at, mask, GATED, HAS_RESIDUAL, narrow)
        tl.store(out + at, y, mask=mask)


def _tile(rows: int, inner: int, gated: bool, dtype: torch.dtype) -> Any:
    """Rows and columns of a block of weights, rows of x in a tile, and the launch."""
    wide = dtype == torch.float32
    if rows == 1:
        # a block as long as a row of weights: its loads are all under way at once
        block = min(power_of_two(inner), 512 if wide else 1024)
        return 8, block, 1, Tile(0, 8 if gated else 4, 1, early=True)
    high = power_of_two(rows)
    # a tile of x has 64 numbers a thread, and their squares as many
    block = min(power_of_two(inner), 64 if wide else 256, 4096 // high)
    return 16, block, high, Tile(0, 2, 2 if wide else 4, early=True)


def _run(
    x: Tensor, weights: Sequence[Tensor], norm: Norm | None, residual: Tensor | None, gated: bool
) -> Tensor:  # fmt: skip
    """One launch; x `[..., K]`, dense."""
    scale, eps = (None, 0.0) if norm is None else norm
    inner = x.shape[-1]
    rows = x.numel() // inner
    sizes = [w.shape[0] for w in weights]
    width = sizes[0] if gated else sum(sizes)
    out = x.new_empty(*x.shape[:-1], width)
    tall, block, high, tile = _tile(rows, inner, gated, x.dtype)
    absent = [None] * (MOST - len(weights))
    strides = [w.stride(0) for w in weights]
    counts = [-(-n // tall) for n in sizes[: 1 if gated else None]]
    constants = {f"N{i}": n for i, n in enumerate([*sizes, *[0] * len(absent)])}
    constants |= {f"T{i}": n for i, n in enumerate([*strides, *[0] * len(absent)])}
    launch(
        few_kernel, sum(counts), x, scale, residual, out, *weights, *absent, rows, float(eps),
        K=inner, BK=block, BN=tall, BR=high, **constants, HAS_NORM=norm is not None,
        HAS_RESIDUAL=residual is not None, GATED=gated, tile=tile,
    )  # fmt: skip
    return out


def few_products(
    x: Tensor,
    *weights: Tensor,
    norm: Norm | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x W^T for up to eight weights W, side by side: `[..., sum of sizes]`.

    x `[..., K]` dense, weights `[N, K]` with dense rows, all of one type, bfloat16 or float32.
    norm: of x, then the products are taken of that. residual has the shape of the result and is
    added to it.
    """
    return _run(x, weights, norm, residual, gated=False)


def few_gated(x: Tensor, gate: Tensor, up: Tensor, *, norm: Norm | None = None) -> Tensor:
    """silu(x gate^T) times x up^T `[..., F]`, both weights `[F, K]`; else as `few_products`."""
    return _run(x, (gate, up), norm, None, gated=True)
