# mypy: ignore-errors
"""Rotation of coordinate pairs: `vort::rotate`, whose gradient is the turn back.

Two kernels: angles of all positions, in float64, then the turn itself in one pass over x.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from vort.ops.custom import traced
from vort.ops.gpu.launcher import Tile, launch, power_of_two

__all__ = ["rotate"]

ROWS = 64
WHOLE = Tile(columns=0, warps=4, stages=1)


@triton.jit(do_not_specialize=["count"])
def angle_kernel(
    positions, frequencies, cos, sin, count,
    HALF: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """cos and sin ``[count, HALF]`` of position times frequency, BR positions."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    col = tl.arange(0, BC)
    mask = (row[:, None] < count) & (col[None, :] < HALF)
    position = tl.load(positions + row, mask=row < count, other=0).to(tl.float64)
    frequency = tl.load(frequencies + col, mask=col < HALF, other=0.0)
    angle = position[:, None] * frequency[None, :]
    at = row[:, None] * HALF + col[None, :]
    tl.store(cos + at, tl.cos(angle).to(tl.float32), mask=mask)
    tl.store(sin + at, tl.sin(angle).to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["rows", "count"])
def rotate_kernel(
    x, cos, sin, y, rows, count,
    H: tl.constexpr, HALF: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """BR rows (token, head) of ``[tokens, H, 2 HALF]``; tables ``[count, HALF]`` repeat."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    col = tl.arange(0, BC)
    mask = (row[:, None] < rows) & (col[None, :] < HALF)
    at = ((row // H) % count)[:, None] * HALF + col[None, :]
    c = tl.load(cos + at, mask=mask, other=0.0)
    s = tl.load(sin + at, mask=mask, other=0.0)
    if BACK:
        s = -s
    first = row[:, None] * (2 * HALF) + col[None, :]
    a = tl.load(x + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + first + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + first, (a * c - b * s).to(y.dtype.element_ty), mask=mask)
    tl.store(y + first + HALF, (b * c + a * s).to(y.dtype.element_ty), mask=mask)


@lru_cache(maxsize=32)
def _frequencies(dim, base, device):
    """base^(-2i/D) for i < D/2, in float64."""
    with torch.inference_mode(False):
        return base ** -(torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)


def _rotate(x, positions, base, back):
    x, positions = x.contiguous(), positions.contiguous()
    y = torch.empty_like(x)
    heads, half, count = x.shape[-2], x.shape[-1] // 2, positions.numel()
    rows = x.numel() // max(2 * half, 1)
    cos, sin = (x.new_empty(count, half, dtype=torch.float32) for _ in range(2))
    sizes = {"HALF": half, "BC": power_of_two(half, 1), "BR": ROWS}
    with torch.cuda.device_of(x):
        launch(
            angle_kernel, -(-count // ROWS), positions, _frequencies(2 * half, base, x.device),
            cos, sin, count, tile=WHOLE, **sizes,
        )  # fmt: skip
        launch(
            rotate_kernel, -(-rows // ROWS), x, cos, sin, y, rows, count,
            H=heads, BACK=back, tile=WHOLE, **sizes,
        )  # fmt: skip
    return y


@torch.library.custom_op("vort::rotate", mutates_args=())
def rotate_op(x: Tensor, positions: Tensor, base: float, back: bool = False) -> Tensor:
    """What `rotate` returns, as an operator."""
    return _rotate(x, positions, base, back)


@rotate_op.register_fake
def _(x, positions, base, back=False):
    return x.new_empty(x.shape)


def _save(ctx, inputs, output):
    _, positions, ctx.base, ctx.back = inputs
    ctx.save_for_backward(positions)


def _turn_back(ctx, grad):
    return rotate_op(grad, *ctx.saved_tensors, ctx.base, not ctx.back), None, None, None


rotate_op.register_autograd(_turn_back, setup_context=_save)


class _Rotate(torch.autograd.Function):
    """The same as the operator, without a dispatcher in between."""

    @staticmethod
    def forward(ctx, *inputs):
        _save(ctx, inputs, None)
        return _rotate(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _rotate(grad, *ctx.saved_tensors, ctx.base, not ctx.back), None, None, None


def rotate(x: Tensor, positions: Tensor, base: float, back: bool = False) -> Tensor:
    """x `[B, T, H, D]` turned as in `apply_rope`; positions `[T]`, `[1, T]` or `[B, T]`.

    `back` turns the other way. The gradient goes to x alone.
    """
    inputs = (x, positions, float(base), back)
    return rotate_op(*inputs) if traced(x) else _Rotate.apply(*inputs)
