# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""RMS norm on a GPU. Import this only where it is used: Triton may be absent.

Tiles of whole rows, normalised in float32; the backward computes 1 / rms again. x comes as groups
of GROUP dense rows, a group every STRIDE numbers: so a slice of a wider projection, split into
heads, is read where it lies. Everything else is dense.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vort.ops.custom import Tensors, custom_op
from vort.ops.gpu.folds import fold
from vort.ops.gpu.launcher import Tile, dense, launch, power_of_two

__all__ = ["blocks_of", "load_weight", "norm_rows", "norm_rows_back", "rms_norm_fused"]

WHOLE = Tile(columns=0, warps=4, stages=1)
# Numbers in a tile. The backward holds three tiles at once, the forward one.
FORWARD_TILE, BACKWARD_TILE = 4096, 2048
# Enough to fill a GPU, few enough that their partial sums are short work: six on each of a Hopper
# GPU's 132 multiprocessors, which run side by side, so that none is left for later. The same on
# every GPU, so that sums are taken in the same order.
PROGRAMS = 792


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
def norm_kernel(
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
def norm_gradient_kernel(
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


@triton.jit(do_not_specialize=["rows"])
def add_norm_kernel(
    x, delta, weight, total, y, rows, eps,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, HAS_DELTA: tl.constexpr,
):  # fmt: skip
    """BR rows of total = x + delta and y = total / rms(total) times weight."""
    row = (tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR))[:, None]
    col = tl.arange(0, BD)[None, :]
    mask = (row < rows) & (col < D)
    at = row * D + col
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + at, mask=mask, other=0.0).to(tl.float32)
        # what is kept is what is normalised
        narrow = value.to(total.dtype.element_ty)
        tl.store(total + at, narrow, mask=mask)
        value = narrow.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
    value *= load_weight(weight, D, BD)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def add_norm_gradient_kernel(
    grad, along_total, total, weight, dx, y, partial, rows, eps,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, HAS_ALONG: tl.constexpr,
):  # fmt: skip
    """dx of every n-th block of rows for n programs, and their part of dweight ``[n, D]``.

    y: where it is there, what the norm made of `total`, once more.
    """
    programs = tl.num_programs(0)
    first = tl.program_id(0).to(tl.int64)
    scale = load_weight(weight, D, BD)
    col = tl.arange(0, BD)[None, :]
    acc = tl.zeros([BR, BD], dtype=tl.float32)
    for step in range(tl.cdiv(tl.cdiv(rows, BR) - first, programs)):
        row = ((first + step * programs) * BR + tl.arange(0, BR))[:, None]
        mask = (row < rows) & (col < D)
        at = row * D + col
        value = tl.load(total + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        # asked for before the sums over rows, at which threads wait for each other
        more = g
        if HAS_ALONG:
            more = tl.load(along_total + at, mask=mask, other=0.0)
        rstd = tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
        value *= rstd
        if y is not None:
            tl.store(y + at, (value * scale).to(y.dtype.element_ty), mask=mask)
        acc += tl.where(mask, g * value, 0.0)
        g *= scale
        out = rstd * (g - (tl.sum(g * value, axis=1) / D)[:, None] * value)
        if HAS_ALONG:
            out += more.to(tl.float32)
        tl.store(dx + at, out.to(dx.dtype.element_ty), mask=mask)
    flat = tl.arange(0, BD)
    tl.store(partial + first * D + flat, tl.sum(acc, axis=0), mask=flat < D)


class Inputs(NamedTuple):
    """The arguments of `rms_norm_fused`."""

    x: Tensor
    weight: Tensor | None
    eps: float


def _in_groups(x: Tensor) -> tuple[Tensor, int, int]:
    """x, copied if it must be, as groups of dense rows: rows in a group, a group's stride."""
    dim = x.shape[-1]
    if x.is_contiguous() or x.ndim < 3:
        return x.contiguous(), 1, dim
    strides, shape = x.stride(), x.shape
    regular = all(strides[i] == strides[i + 1] * shape[i + 1] for i in range(x.ndim - 3))
    if regular and strides[-1] == 1 and strides[-2] == dim:
        return x, shape[-2], strides[-3]
    return x.contiguous(), 1, dim


def blocks_of(x: Tensor, tile: int) -> tuple[int, dict[str, int]]:
    """How many blocks of rows there are, and the sizes that make one."""
    wide = power_of_two(x.shape[-1])
    height = max(1, tile // wide)
    count = -(-(x.numel() // x.shape[-1]) // height)
    return count, {"D": x.shape[-1], "BD": wide, "BR": height}


def _forward(inputs: Inputs) -> tuple[Tensor]:
    x, group, stride = _in_groups(inputs.x)
    weight = dense(inputs.weight)
    y = x.new_empty(x.shape)
    count, sizes = blocks_of(x, FORWARD_TILE)
    launch(
        norm_kernel, count, x, weight, y, x.numel() // x.shape[-1], inputs.eps,
        GROUP=group, STRIDE=stride, HAS_WEIGHT=weight is not None, tile=WHOLE, **sizes,
    )  # fmt: skip
    return (y,)


def _backward(inputs: Inputs, kept: Tensors, grads: Tensors, needs: Sequence[bool]) -> Tensors:
    x, group, stride = _in_groups(inputs.x)
    weight, dy = dense(inputs.weight), dense(grads[0])
    dx = x.new_empty(x.shape)
    count, sizes = blocks_of(x, BACKWARD_TILE)
    programs, partial = min(count, PROGRAMS), None
    if weight is not None:
        partial = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    launch(
        norm_gradient_kernel, programs, dy, x, weight, dx, partial, x.numel() // x.shape[-1],
        inputs.eps, GROUP=group, STRIDE=stride, HAS_WEIGHT=weight is not None, tile=WHOLE, **sizes,
    )  # fmt: skip
    if weight is None or partial is None:
        return dx, None
    return dx, fold(partial, weight.dtype)


_rms_norm = custom_op(
    "vort::rms_norm_fused",
    Inputs,
    _forward,
    _backward,
    lambda inputs: (inputs.x.new_empty(inputs.x.shape),),
    gradients=("x", "weight"),
)


def rms_norm_fused(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return what `vort.ops.rms_norm.rms_norm` does, from GPU kernels, forward and backward.

    x `[..., D]` and weight `[D]` in bfloat16 or float32, each in its own; D in 1..1024. The sums
    of dweight are taken in a fixed order.
    """
    y: Tensor = _rms_norm(Inputs(x, weight, float(eps)))[0]
    return y


def norm_rows(
    x: Tensor,
    weight: Tensor,
    eps: float,
    delta: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """x + delta (x itself without one) in the type of x, and its RMS norm; x dense, D in 1..8192.

    dtype: of the norm; that of x by default.
    """
    total = x if delta is None else torch.empty_like(x)
    y = torch.empty_like(x, dtype=dtype)
    count, sizes = blocks_of(x, FORWARD_TILE)
    launch(
        add_norm_kernel, count, x, delta, weight, total, y, x.numel() // x.shape[-1], eps,
        HAS_DELTA=delta is not None, tile=WHOLE, **sizes,
    )  # fmt: skip
    return total, y


def norm_rows_back(
    dy: Tensor,
    along: Tensor | None,
    total: Tensor,
    weight: Tensor,
    eps: float,
    again: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients to `total` of `norm_rows`, what came along another way added, and to the weight.

    again: filled with the norm of `total` once more, for whoever multiplied it and kept nothing.
    """
    dx = torch.empty_like(total)
    count, sizes = blocks_of(total, BACKWARD_TILE)
    programs = min(count, PROGRAMS)
    partial = total.new_empty(programs, total.shape[-1], dtype=torch.float32)
    launch(
        add_norm_gradient_kernel, programs, dy, along, total, weight, dx, again, partial,
        total.numel() // total.shape[-1], eps, HAS_ALONG=along is not None, tile=WHOLE, **sizes,
    )  # fmt: skip
    return dx, fold(partial, weight.dtype)
