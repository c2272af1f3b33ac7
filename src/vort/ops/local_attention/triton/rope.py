# mypy: ignore-errors
"""Rotation of coordinate pairs in one pass: `vort::rotate`, whose gradient is the turn back."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from vort.ops.gpu.launcher import Shape, launch, power_of_two, traced

__all__ = ["rotate"]

ROWS = 64


@triton.jit(do_not_specialize=["rows", "positions"])
def rotate_kernel(
    x, cos, sin, y, rows, positions,
    H: tl.constexpr, HALF: tl.constexpr, BC: tl.constexpr, BR: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """BR rows (token, head) of ``[tokens, H, 2 HALF]``; tables ``[positions, HALF]`` repeat."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    col = tl.arange(0, BC)
    mask = (row[:, None] < rows) & (col[None, :] < HALF)
    at = ((row // H) % positions)[:, None] * HALF + col[None, :]
    c = tl.load(cos + at, mask=mask, other=0.0)
    s = tl.load(sin + at, mask=mask, other=0.0)
    if BACK:
        s = -s
    first = row[:, None] * (2 * HALF) + col[None, :]
    a = tl.load(x + first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + first + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + first, (a * c - b * s).to(y.dtype.element_ty), mask=mask)
    tl.store(y + first + HALF, (b * c + a * s).to(y.dtype.element_ty), mask=mask)


def _rotate(x, cos, sin, back):
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    y = torch.empty_like(x)
    heads, half = x.shape[-2], x.shape[-1] // 2
    rows = x.numel() // max(2 * half, 1)
    with torch.cuda.device_of(x):
        launch(
            rotate_kernel, -(-rows // ROWS), x, cos, sin, y, rows, cos.shape[0],
            H=heads, HALF=half, BC=power_of_two(half, 1), BR=ROWS, BACK=back,
            shape=Shape(0, 4, 1),
        )  # fmt: skip
    return y


@torch.library.custom_op("vort::rotate", mutates_args=())
def rotate_op(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    """What `rotate` returns, as an operator."""
    return _rotate(x, cos, sin, back)


@rotate_op.register_fake
def _(x, cos, sin, back=False):
    return x.new_empty(x.shape)


def _save(ctx, inputs, output):
    _, cos, sin, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _turn_back(ctx, grad):
    return rotate_op(grad, *ctx.saved_tensors, not ctx.back), None, None, None


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
        return _rotate(grad, *ctx.saved_tensors, not ctx.back), None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, back: bool = False) -> Tensor:
    """x `[B, T, H, D]` with pairs (i, i + D/2) turned; cos, sin `[T or B T, D/2]` float32.

    `back` turns the other way. The gradient goes to x alone.
    """
    return rotate_op(x, cos, sin, back) if traced(x) else _Rotate.apply(x, cos, sin, back)
