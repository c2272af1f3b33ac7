# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Rotation of coordinate pairs: `vort::rotate`, whose gradient is the turn back.

Two kernels: angles of all positions, in float64, then the turn itself in one pass over x.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vort.ops.custom import Some, Tensors, custom_op
from vort.ops.gpu.launcher import Tile, launch, power_of_two

__all__ = ["angles", "frequencies_of", "rotate"]

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
def frequencies_of(dim: int, base: float, device: torch.device) -> Tensor:
    """base^(-2i/D) for i < D/2, in float64."""
    with torch.inference_mode(False):
        frequencies: Tensor = base ** -(
            torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim
        )
        return frequencies


class Inputs(NamedTuple):
    """The arguments of `rotate`."""

    x: Tensor
    positions: Tensor
    base: float
    back: bool


def _turn(x: Tensor, positions: Tensor, base: float, back: bool) -> tuple[Tensor]:
    x, positions = x.contiguous(), positions.contiguous()
    y = torch.empty_like(x)
    heads, half, count = x.shape[-2], x.shape[-1] // 2, positions.numel()
    rows = x.numel() // max(2 * half, 1)
    cos, sin = angles(positions, 2 * half, base)
    launch(
        rotate_kernel, -(-rows // ROWS), x, cos, sin, y, rows, count,
        H=heads, HALF=half, BC=power_of_two(half, 1), BR=ROWS, BACK=back, tile=WHOLE,
    )  # fmt: skip
    return (y,)


def angles(positions: Tensor, dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin `[count, D / 2]` float32 of the angles that `apply_rope` turns pairs by."""
    half, count = dim // 2, positions.numel()
    cos, sin = (
        torch.empty(count, half, dtype=torch.float32, device=positions.device) for _ in range(2)
    )
    launch(
        angle_kernel, -(-count // ROWS), positions.contiguous(),
        frequencies_of(dim, base, positions.device), cos, sin, count,
        HALF=half, BC=power_of_two(half, 1), BR=ROWS, tile=WHOLE,
    )  # fmt: skip
    return cos, sin


def _turn_back(inputs: Inputs, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    return _turn(grads[0], inputs.positions, inputs.base, not inputs.back)


_rotate = custom_op(
    "vort::rotate",
    Inputs,
    lambda inputs: _turn(*inputs),
    _turn_back,
    lambda inputs: (inputs.x.new_empty(inputs.x.shape),),
    gradients=("x",),
    forget=("x",),
)


def rotate(x: Tensor, positions: Tensor, base: float, back: bool = False) -> Tensor:
    """x `[B, T, H, D]` turned as in `apply_rope`; positions `[T]`, `[1, T]` or `[B, T]`.

    `back` turns the other way. The gradient goes to x alone.
    """
    y: Tensor = _rotate(Inputs(x, positions, float(base), back))[0]
    return y
