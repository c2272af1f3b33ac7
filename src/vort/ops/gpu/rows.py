# mypy: ignore-errors
"""Tiles of a ``[tokens, H, D]`` tensor, read and written; a batch is tokens laid end to end."""

import triton
import triton.language as tl


@triton.jit
def load_rows(
    ptr, t0, n, h, H: tl.constexpr, col0, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """Tile ``[BT, BD]`` of a ``[tokens, H, D]`` tensor; zero beyond ``n`` tokens or D columns."""
    rows = tl.arange(0, BT)
    cols = col0 + tl.arange(0, BD)
    base = ptr + (t0 * H + h) * D
    mask = (rows[:, None] < n) & (cols[None, :] < D)
    return tl.load(base + rows[:, None] * (H * D) + cols[None, :], mask=mask, other=0.0)


@triton.jit
def load_flipped(
    ptr, t0, n, h, H: tl.constexpr, col0, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """The tile of :func:`load_rows` the other way around, ``[BD, BT]``."""
    rows = tl.arange(0, BT)
    cols = col0 + tl.arange(0, BD)
    base = ptr + (t0 * H + h) * D
    mask = (rows[None, :] < n) & (cols[:, None] < D)
    return tl.load(base + rows[None, :] * (H * D) + cols[:, None], mask=mask, other=0.0)


@triton.jit
def store_rows(
    ptr, x, t0, n, h, H: tl.constexpr, col0, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    """The reverse of :func:`load_rows`."""
    rows = tl.arange(0, BT)
    cols = col0 + tl.arange(0, BD)
    base = ptr + (t0 * H + h) * D
    mask = (rows[:, None] < n) & (cols[None, :] < D)
    tl.store(base + rows[:, None] * (H * D) + cols[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_column(ptr, t0, n, h, H: tl.constexpr, s, S: tl.constexpr, BT: tl.constexpr):
    """Column ``s`` of a ``[tokens, H, S]`` tensor as ``[BT]`` float32."""
    rows = tl.arange(0, BT)
    base = ptr + (t0 * H + h) * S + s
    return tl.load(base + rows * (H * S), mask=rows < n, other=0.0).to(tl.float32)
