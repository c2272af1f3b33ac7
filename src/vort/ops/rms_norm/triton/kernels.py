# mypy: ignore-errors
"""Tiles of whole rows, normalised in float32; the backward computes 1 / rms again.

x comes as groups of GROUP dense rows, a group every STRIDE numbers: so a slice of a wider
projection, split into heads, is read where it lies. Everything else is dense.
"""

import triton
import triton.language as tl


@triton.jit
def tile_at(
    block, rows, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    GROUP: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Where block number `block` (int64) lies in x and in dense tensors, and what of it exists."""
    row = block * BR + tl.arange(0, BR)
    col = tl.arange(0, BD)[None, :]
    mask = (row[:, None] < rows) & (col < D)
    grouped = (row // GROUP) * STRIDE + (row % GROUP) * D
    return grouped[:, None] + col, row[:, None] * D + col, mask


@triton.jit
def load_weight(weight, D: tl.constexpr, BD: tl.constexpr):
    """The weight as ``[1, BD]`` float32."""
    col = tl.arange(0, BD)
    return tl.load(weight + col, mask=col < D, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    x, weight, y, rows, eps,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    GROUP: tl.constexpr, STRIDE: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """BR rows of y = x / rms(x) times weight."""
    at, dense, mask = tile_at(tl.program_id(0).to(tl.int64), rows, D, BD, BR, GROUP, STRIDE)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
    if HAS_WEIGHT:
        value *= load_weight(weight, D, BD)
    tl.store(y + dense, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    grad, x, weight, dx, partial, rows, eps,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    GROUP: tl.constexpr, STRIDE: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """dx of every n-th block of rows for n programs, and their part of dweight ``[n, D]``."""
    programs = tl.num_programs(0)
    first = tl.program_id(0).to(tl.int64)
    if HAS_WEIGHT:
        scale = load_weight(weight, D, BD)
        # rows are added up at the end alone: that exchanges numbers between threads
        total = tl.zeros([BR, BD], dtype=tl.float32)
    for step in range(tl.cdiv(tl.cdiv(rows, BR) - first, programs)):
        at, dense, mask = tile_at(first + step * programs, rows, D, BD, BR, GROUP, STRIDE)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + dense, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
        value *= rstd
        if HAS_WEIGHT:
            # rows that do not exist have an infinite rstd where eps is 0
            total += tl.where(mask, g * value, 0.0)
            g *= scale
        along = (tl.sum(g * value, axis=1) / D)[:, None]
        tl.store(dx + dense, (rstd * (g - along * value)).to(dx.dtype.element_ty), mask=mask)
    if HAS_WEIGHT:
        col = tl.arange(0, BD)
        tl.store(partial + first * D + col, tl.sum(total, axis=0), mask=col < D)
