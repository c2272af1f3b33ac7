# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, misc"
"""Sums over what programs leave, gradients to weights, each added up in a fixed order.

A layer's backward has half a dozen of them, each too small for a GPU: a launch takes longer than
what it launches. Within `folded_together` they wait for each other and are one.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from vort.ops.gpu.launcher import Tile, launch

__all__ = ["fold", "fold_pair", "folded_together"]

# Columns and rows that a program takes at once: it waits for memory once for so many.
COLUMNS, ROWS = 16, 512
TILE = Tile(COLUMNS, 8, 1)
# Likewise where rows are few, and most of those would not be there.
BROAD, FEW = 64, 128
# Sums of one launch.
MOST = 8


@triton.jit
def one_of(later, p1, o1, rows1, width1, begin1, p0, o0, rows0, width0, begin0):
    """The second sum's, where that is meant; pointers and sizes."""
    return (
        tl.where(later, p1, p0),
        tl.where(later, o1, o0),
        tl.where(later, rows1, rows0),
        tl.where(later, width1, width0),
        tl.where(later, begin1, begin0),
    )


@triton.jit
def fold_block(partial, out, rows, width, block, BN: tl.constexpr, BR: tl.constexpr):
    """BN column sums of ``partial [rows, width]``, BR rows at a time."""
    flat = block * BN + tl.arange(0, BN)
    col = flat[None, :]
    acc = tl.zeros([BR, BN], dtype=tl.float32)
    for first in range(0, rows, BR):
        row = (first + tl.arange(0, BR))[:, None]
        at = row.to(tl.int64) * width + col
        acc += tl.load(partial + at, mask=(row < rows) & (col < width), other=0.0)
    tl.store(out + flat, tl.sum(acc, axis=0).to(out.dtype.element_ty), mask=flat < width)


@triton.jit(do_not_specialize=[
    "r0", "r1", "r2", "r3", "r4", "r5", "r6", "r7",
    "n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7",
    "e0", "e1", "e2", "e3", "e4", "e5", "e6", "e7",
])  # fmt: skip
def fold_kernel(
    p0, o0, p1, o1, p2, o2, p3, o3, p4, o4, p5, o5, p6, o6, p7, o7,
    r0, r1, r2, r3, r4, r5, r6, r7, n0, n1, n2, n3, n4, n5, n6, n7,
    e0, e1, e2, e3, e4, e5, e6, e7, BN: tl.constexpr, BR: tl.constexpr, BROAD: tl.constexpr,
    FEW: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """BN column sums of one of several ``p [r, n UNIT]``, which goes to ``o [n UNIT]``.

    Of up to FEW rows it is BROAD sums. e: where the programs of each end.
    """
    pid = tl.program_id(0)
    partial, out, rows, width, begin = p0, o0, r0, n0, 0
    if p1 is not None:
        partial, out, rows, width, begin = one_of(
            pid >= e0, p1, o1, r1, n1, e0, partial, out, rows, width, begin
        )
    if p2 is not None:
        partial, out, rows, width, begin = one_of(
            pid >= e1, p2, o2, r2, n2, e1, partial, out, rows, width, begin
        )
    if p3 is not None:
        partial, out, rows, width, begin = one_of(
            pid >= e2, p3, o3, r3, n3, e2, partial, out, rows, width, begin
        )
    if p4 is not None:
        partial, out, rows, width, begin = one_of(
            pid >= e3, p4, o4, r4, n4, e3, partial, out, rows, width, begin
        )
    if p5 is not None:
        partial, out, rows, width, begin = one_of(
            pid >= e4, p5, o5, r5, n5, e4, partial, out, rows, width, begin
        )
    if p6 is not None:
        partial, out, rows, width, begin = one_of(
            pid >= e5, p6, o6, r6, n6, e5, partial, out, rows, width, begin
        )
    if p7 is not None:
        partial, out, rows, width, begin = one_of(
            pid >= e6, p7, o7, r7, n7, e6, partial, out, rows, width, begin
        )
    width *= UNIT
    if rows <= FEW:
        fold_block(partial, out, rows, width, pid - begin, BROAD, FEW)
    else:
        fold_block(partial, out, rows, width, pid - begin, BN, BR)


class _Waiting(threading.local):
    """Sums that a thread has not launched yet; None: none waits."""

    sums: list[tuple[Tensor, Tensor]] | None = None


_waiting = _Waiting()


def fold(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Float32 `partial`, dense, summed over its first axis, in a fixed order; rounded once."""
    out = partial.new_empty(partial.shape[1:], dtype=dtype)
    _fold([(partial, out)])
    return out


def fold_pair(partial: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Likewise of `[2, rows, ...]`, each half by itself."""
    first, second = (partial.new_empty(partial.shape[2:], dtype=dtype) for _ in range(2))
    _fold([(partial[0], first), (partial[1], second)])
    return first, second


@contextmanager
def folded_together() -> Iterator[None]:
    """Sums asked for within are there after it, and nobody looks at them before."""
    if _waiting.sums is not None:  # whoever is around this waits for more
        yield
        return
    sums: list[tuple[Tensor, Tensor]] = []
    _waiting.sums = sums
    try:
        yield
    finally:
        _waiting.sums = None
    _launch(sums)


def _fold(sums: list[tuple[Tensor, Tensor]]) -> None:
    if _waiting.sums is None:
        _launch(sums)
    else:
        _waiting.sums += sums


def _launch(sums: list[tuple[Tensor, Tensor]]) -> None:
    kinds = dict.fromkeys(out.dtype for _, out in sums)
    for dtype in kinds:
        same = [pair for pair in sums if pair[1].dtype == dtype]
        for first in range(0, len(same), MOST):
            _launch_one(same[first : first + MOST])


def _launch_one(sums: list[tuple[Tensor, Tensor]]) -> None:
    """Of one type, as many as a kernel takes."""
    missing = [None] * (2 * (MOST - len(sums)))
    rows = [partial.shape[0] for partial, _ in sums]
    widths = [out.numel() for _, out in sums]
    ends, count = [], 0
    for height, width in zip(rows, widths, strict=True):
        count += -(-width // (BROAD if height <= FEW else COLUMNS))
        ends.append(count)
    # neighbouring columns are one load where a row is known to begin at a multiple of them
    unit = gcd(4, *widths)
    units = [width // unit for width in widths]
    sizes = [n for column in (rows, units, ends) for n in (*column, *[0] * (MOST - len(sums)))]
    tensors = [x for pair in sums for x in pair]
    launch(
        fold_kernel, count, *tensors, *missing, *sizes, BN=COLUMNS, BR=ROWS, BROAD=BROAD, FEW=FEW,
        UNIT=unit, tile=TILE,
    )  # fmt: skip
