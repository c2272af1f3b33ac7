# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, misc"
"""What stands before and after matrix products, and the products with it: on a GPU.

A backward keeps what came in, not what the product saw: gates and norms are computed again, in the
very pass that makes their gradients. Weights that were joined stay so.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vort.ops.custom import Some, Tensors, custom_op
from vort.ops.gpu.folds import fold
from vort.ops.gpu.launcher import Tile, dense, even_rows, launch, power_of_two
from vort.ops.gpu.parts import LN2, LOG2E, narrow, power, sigmoid, widen
from vort.ops.gpu.together import Together, room_for
from vort.ops.linear import MOST
from vort.ops.rms_norm.triton import (
    PROGRAMS,
    blocks_of,
    load_weight,
    norm_rows,
    norm_rows_back,
)

__all__ = [
    "NormInputs",
    "ProductInputs",
    "cross_entropy_fused",
    "gated_mlp_fused",
    "gated_norm_back",
    "gated_norm_linear_fused",
    "gated_norm_op",
    "products_fused",
    "products_op",
]

WHOLE = Tile(columns=0, warps=4, stages=1)
ROWS = Tile(columns=1024, warps=4, stages=1)
LOSS = Tile(columns=8192, warps=16, stages=1)
# Numbers that a program joins, and the widest rows.
JOINED = 8192
# Logits that are held at a time, in numbers: half a gigabyte in bfloat16.
LOGITS = 1 << 28


@triton.jit
def gated_place(rows, F: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr):
    """Rows and columns of this program's block, and what of it exists."""
    COLUMNS: tl.constexpr = (F + BF - 1) // BF
    pid = tl.program_id(0)
    row = ((pid // COLUMNS) * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    col = ((pid % COLUMNS) * BF + tl.arange(0, BF))[None, :]
    return row, col, (row < rows) & (col < F)


@triton.jit(do_not_specialize=["rows"])
def gate_kernel(both, out, rows, F: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr):
    """BR rows of silu(a) b ``[rows, F]``, a and b the halves of a row of ``both``."""
    row, col, mask = gated_place(rows, F, BF, BR)
    at = both + row * (2 * F) + col
    a = widen(tl.load(at, mask=mask, other=0.0))
    b = widen(tl.load(at + F, mask=mask, other=0.0))
    value = a * sigmoid(a) * b
    tl.store(out + row * F + col, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def gate_gradient_kernel(
    grad, both, dboth, out, rows, F: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """Gradients to both halves, and silu(a) b again."""
    row, col, mask = gated_place(rows, F, BF, BR)
    at = row * (2 * F) + col
    a = widen(tl.load(both + at, mask=mask, other=0.0))
    b = widen(tl.load(both + at + F, mask=mask, other=0.0))
    g = widen(tl.load(grad + row * F + col, mask=mask, other=0.0))
    s = sigmoid(a)
    tl.store(out + row * F + col, (a * s * b).to(out.dtype.element_ty), mask=mask)
    da = g * b * s * (1.0 + a * (1.0 - s))
    tl.store(dboth + at, da.to(dboth.dtype.element_ty), mask=mask)
    tl.store(dboth + at + F, (g * a * s).to(dboth.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["ignored"])
def loss_kernel(
    logits, targets, losses, ignored,
    V: tl.constexpr, BV: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Cross-entropy of a row, and its gradient in the logits' place; logits are dense.

    Eight columns, which a thread has side by side, share a maximum: fewer exponentials.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    # a multiple that is known, where V is: eight columns are one load then
    at = logits + row * V
    col = tl.arange(0, BV // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    if target == ignored:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for first in range(0, V, BV):
                zero = tl.zeros([BV // 8, 8], dtype=tl.float32).to(logits.dtype.element_ty)
                tl.store(at + first + col, zero, mask=first + col < V)
    else:
        # read here: sums stand between it and what takes its place
        own = tl.load(at + target).to(tl.float32)
        # not -inf, which columns beyond V are: less itself it would be no number
        most = tl.full([BV // 8], -1.0e30, dtype=tl.float32)
        total = tl.zeros([BV // 8], dtype=tl.float32)
        for first in range(0, V, BV):
            x = widen(tl.load(at + first + col, mask=first + col < V, other=float("-inf")))
            new = tl.maximum(most, tl.max(x, axis=1) * LOG2E)
            total = total * power(most - new) + tl.sum(power(x * LOG2E - new[:, None]), axis=1)
            most = new
        top = tl.max(most, axis=0)
        log_total = top + tl.log2(tl.sum(total * power(most - top), axis=0))
        tl.store(losses + row, log_total * LN2 - own)
        if GRADIENT:
            for first in range(0, V, BV):
                mask = first + col < V
                x = widen(tl.load(at + first + col, mask=mask, other=float("-inf")))
                p = power(x * LOG2E - log_total)
                tl.store(at + first + col, p.to(logits.dtype.element_ty), mask=mask)
            # after whichever thread has stored the target's among the others
            tl.debug_barrier()
            # nothing checks targets on a GPU: a wrong one must not write elsewhere
            if (target >= 0) & (target < V):
                p = power(own * LOG2E - log_total) - 1.0
                tl.store(at + target, p.to(logits.dtype.element_ty))


@triton.jit
def gated_tile(
    block, rows, HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, stride
):  # fmt: skip
    """Where BR heads lie in dense tensors and in the gate, and what of them exists."""
    row = block * BR + tl.arange(0, BR)
    col = tl.arange(0, BD)[None, :]
    mask = (row[:, None] < rows) & (col < D)
    gate_at = (row // HEADS) * stride + (row % HEADS) * D
    return row[:, None] * D + col, gate_at[:, None] + col, mask


@triton.jit(do_not_specialize=["rows", "units"])
def gated_norm_kernel(
    x, other, gate, weight, y, rows, units, eps,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, UNIT: tl.constexpr,
    HAS_OTHER: tl.constexpr, HAS_GATE: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """BR heads of norm(x + other) silu(gate); rows of the gate lie `units` times UNIT apart."""
    block = tl.program_id(0).to(tl.int64)
    at, gate_at, mask = gated_tile(block, rows, HEADS, D, BD, BR, units * UNIT)
    value = widen(tl.load(x + at, mask=mask, other=0.0))
    if HAS_OTHER:
        value += widen(tl.load(other + at, mask=mask, other=0.0))
    g = value
    if HAS_GATE:
        g = widen(tl.load(gate + gate_at, mask=mask, other=0.0))
    if HAS_WEIGHT:
        value *= tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
        value *= load_weight(weight, D, BD)
    if HAS_GATE:
        value *= g * sigmoid(g)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "units", "back_units", "length", "padded"])
def gated_norm_gradient_kernel(
    grad, x, other, gate, weight, dx, dgate, y, partial, dots, rows, units, back_units, length,
    padded, eps,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    UNIT: tl.constexpr, HAS_OTHER: tl.constexpr, HAS_GATE: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """dx (which is that of `other` too), dgate, y again, and a part of dweight ``[n, D]``.

    Rows of the gate lie `units` times UNIT apart, those of dgate `back_units` times.
    dots: where it is there, dx·other ``[B, HEADS, padded]`` of sequences of `length` tokens.
    """
    programs = tl.num_programs(0)
    first = tl.program_id(0).to(tl.int64)
    if HAS_WEIGHT:
        scale = load_weight(weight, D, BD)
    acc = tl.zeros([BR, BD], dtype=tl.float32)
    for step in range(tl.cdiv(tl.cdiv(rows, BR) - first, programs)):
        block = first + step * programs
        at, gate_at, mask = gated_tile(block, rows, HEADS, D, BD, BR, units * UNIT)
        _, back_at, _ = gated_tile(block, rows, HEADS, D, BD, BR, back_units * UNIT)
        value = widen(tl.load(x + at, mask=mask, other=0.0))
        if HAS_OTHER:
            near = widen(tl.load(other + at, mask=mask, other=0.0))
            value += near
        g = widen(tl.load(grad + at, mask=mask, other=0.0))
        a = g
        if HAS_GATE:
            a = widen(tl.load(gate + gate_at, mask=mask, other=0.0))
        if HAS_WEIGHT:
            rstd = tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
            unit = value * rstd
            normed = unit * scale
        else:
            unit = value
            normed = value
        if HAS_GATE:
            s = sigmoid(a)
            da = g * normed * s * (1.0 + a * (1.0 - s))
            tl.store(dgate + back_at, da.to(dgate.dtype.element_ty), mask=mask)
            a *= s
            g *= a
            normed *= a
        tl.store(y + at, normed.to(y.dtype.element_ty), mask=mask)
        if HAS_WEIGHT:
            acc += tl.where(mask, g * unit, 0.0)
            g *= scale
            g = rstd * (g - (tl.sum(g * unit, axis=1) / D)[:, None] * unit)
        if dots is None:
            tl.store(dx + at, g.to(dx.dtype.element_ty), mask=mask)
        else:
            g = narrow(g, dx.dtype.element_ty)
            tl.store(dx + at, g, mask=mask)
            # 32 bits: a division of more is long
            row = (block * BR).to(tl.int32) + tl.arange(0, BR)
            token = row // HEADS
            to = (token // length * HEADS + row % HEADS).to(tl.int64) * padded + token % length
            tl.store(dots + to, tl.sum(near * widen(g), axis=1), mask=row < rows)
    if HAS_WEIGHT:
        flat = tl.arange(0, BD)
        tl.store(partial + first * D + flat, tl.sum(acc, axis=0), mask=flat < D)


@triton.jit
def next_of(pid, p1, u1, begin1, first1, end1, p0, u0, begin0, first0, end0):
    """The next weight's, where there is one and the program is not of those before it."""
    if p1 is not None:
        later = pid >= begin1
        p0 = tl.where(later, p1, p0)
        u0 = tl.where(later, u1, u0)
        begin0 = tl.where(later, begin1, begin0)
        first0 = tl.where(later, first1, first0)
        end0 = tl.where(later, end1, end0)
    return p0, u0, begin0, first0, end0


@triton.jit(do_not_specialize=[
    "u0", "u1", "u2", "u3", "u4", "u5", "u6", "u7",
    "e0", "e1", "e2", "e3", "e4", "e5", "e6", "e7",
    "r0", "r1", "r2", "r3", "r4", "r5", "r6", "r7",
])  # fmt: skip
def join_kernel(
    p0, p1, p2, p3, p4, p5, p6, p7, out, u0, u1, u2, u3, u4, u5, u6, u7,
    e0, e1, e2, e3, e4, e5, e6, e7, r0, r1, r2, r3, r4, r5, r6, r7,
    D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """BR rows of one of several weights ``[r, D]``, to their place in ``out``.

    u: how many UNITs its rows lie apart; e: where the programs of each end; r: where its rows do
    in ``out``.
    """
    pid = tl.program_id(0)
    p, u, begin, first, end = next_of(pid, p1, u1, e0, r0, r1, p0, u0, 0, 0, r0)
    p, u, begin, first, end = next_of(pid, p2, u2, e1, r1, r2, p, u, begin, first, end)
    p, u, begin, first, end = next_of(pid, p3, u3, e2, r2, r3, p, u, begin, first, end)
    p, u, begin, first, end = next_of(pid, p4, u4, e3, r3, r4, p, u, begin, first, end)
    p, u, begin, first, end = next_of(pid, p5, u5, e4, r4, r5, p, u, begin, first, end)
    p, u, begin, first, end = next_of(pid, p6, u6, e5, r5, r6, p, u, begin, first, end)
    p, u, begin, first, end = next_of(pid, p7, u7, e6, r6, r7, p, u, begin, first, end)
    row = ((pid - begin) * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    col = tl.arange(0, BD)[None, :]
    mask = (first + row < end) & (col < D)
    x = tl.load(p + row * (u * UNIT) + col, mask=mask, other=0.0)
    tl.store(out + (first + row) * D + col, x, mask=mask)


class ProductInputs(NamedTuple):
    """The arguments of `products_fused`; weights may be of another type than `dtype`."""

    x: Tensor
    delta: Tensor | None
    norm: Tensor | None
    w0: Tensor | None
    w1: Tensor | None
    w2: Tensor | None
    w3: Tensor | None
    w4: Tensor | None
    w5: Tensor | None
    w6: Tensor | None
    w7: Tensor | None
    eps: float
    sizes: tuple[int, ...]
    together: Together | None
    dtype: torch.dtype

    def groups(self) -> list[list[Tensor]]:
        """The weights, as many to a group as `sizes` says."""
        weights: Any = iter(self[3 : 3 + MOST])
        return [[next(weights) for _ in range(size)] for size in self.sizes]


def _flat(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _joined(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """One below the other, in the type that they are multiplied in."""
    alike = all(w.dtype == dtype and w.stride(1) == 1 for w in weights)
    few = 1 < len(weights) <= MOST and weights[0].shape[1] <= JOINED
    if alike and few and dtype in (torch.bfloat16, torch.float32):
        return _join(weights)
    return (weights[0] if len(weights) == 1 else torch.cat(list(weights))).to(dtype)


def _join(weights: Sequence[Tensor]) -> Tensor:
    """Weights of one type, which may be columns of wider ones, by one kernel."""
    wide, missing = weights[0].shape[1], MOST - len(weights)
    height = max(1, JOINED // power_of_two(wide))
    rows = list(accumulate(w.shape[0] for w in weights))
    ends = list(accumulate(-(-w.shape[0] // height) for w in weights))
    out = weights[0].new_empty(rows[-1], wide)
    unit = gcd(8, *(w.stride(0) for w in weights))
    strides = [w.stride(0) // unit for w in weights]
    numbers = [n for column in (strides, ends, rows) for n in (*column, *[0] * missing)]
    launch(
        join_kernel, ends[-1], *weights, *[None] * missing, out, *numbers,
        D=wide, BD=power_of_two(wide), BR=height, UNIT=unit, tile=WHOLE,
    )  # fmt: skip
    return out


def _to_weights(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient to a weight that x was multiplied by; in float32 it is never rounded."""
    return grad.T @ x if weight.dtype == x.dtype else _wide_product(grad.T, x).to(weight.dtype)


def _parted(joined: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """The gradient to each of them."""
    return list(torch.split_with_sizes(joined, [w.shape[0] for w in weights]))


def _products(inputs: ProductInputs) -> Tensors:
    """The outputs and, where all weights are joined, those."""
    x, delta, norm = inputs[:3]
    total = normed = _dense_rows(x)
    if norm is not None:
        rows = None if delta is None else _dense_rows(delta)
        total, normed = norm_rows(total, norm, inputs.eps, rows, inputs.dtype)
    groups, dtype, joined = inputs.groups(), inputs.dtype, None
    if inputs.together is None:
        found = [(normed @ _joined(w, dtype).T).view(*x.shape[:-1], -1) for w in groups]
    else:
        joined = _joined([w for group in groups for w in group], dtype)
        product = normed @ joined.T
        widths = [sum(w.shape[0] for w in group) for group in groups]
        found = list(inputs.together.parts(product.view(*x.shape[:-1], -1), widths))
    same = x.view_as(x) if delta is None else total.view(x.shape)
    return same, normed.view(x.shape), *found, *[None] * (MOST - len(found)), joined


def _products_back(
    inputs: ProductInputs, kept: Some, grads: Some, needs: Sequence[bool]
) -> Tensors:
    total, norm = _dense_rows(kept[0]), inputs.norm
    along, dnormed = (None if g is None else _flat(g) for g in grads[:2])
    own = False
    if norm is None and along is not None:
        # both are gradients to the same numbers
        along, dnormed = None, along if dnormed is None else along + dnormed
    groups, known = inputs.groups(), None
    came = list(zip(groups, (None if g is None else _flat(g) for g in grads[2:]), strict=False))
    if inputs.together is not None:
        whole = inputs.together.whole(grads[2 : 2 + len(groups)])
        if whole is not None:
            came, known = [([w for group in groups for w in group], whole)], kept[1]
    for weights, grad in came:
        if grad is None:
            continue
        joined = _joined(weights, inputs.dtype) if known is None else known
        # the sum over products is taken inside them, in place once it is ours
        if own and dnormed is not None:
            dnormed.addmm_(grad, joined)
        else:
            dnormed = grad @ joined if dnormed is None else torch.addmm(dnormed, grad, joined)
        own = True
    # before the weights: their gradients need what the norm made, which comes with its backward
    dx, dnorm, normed = dnormed, None, total
    if norm is not None:
        dnormed = torch.zeros_like(total) if dnormed is None else dnormed.contiguous()
        again = torch.empty_like(total, dtype=inputs.dtype) if own else None
        dx, dnorm = norm_rows_back(dnormed, dense(along), total, norm, inputs.eps, again)
        normed = total if again is None else again
    found: list[Tensor | None] = []
    for weights, grad in came:
        if grad is None:
            found += [None] * len(weights)
        else:
            found += _parted(_to_weights(grad, normed, weights[0]), weights)
    found += [None] * (MOST - len(found))
    dx = None if dx is None else dx.view(kept[0].shape)
    return dx, dx, dnorm, *found


class MlpInputs(NamedTuple):
    """The arguments of `gated_mlp_fused`; weights may be of another type than `dtype`."""

    x: Tensor
    delta: Tensor | None
    norm: Tensor | None
    gate: Tensor
    up: Tensor
    down: Tensor
    eps: float
    dtype: torch.dtype


def _halves(both: Tensor) -> tuple[int, dict[str, Any]]:
    """How many programs a gate takes, and their sizes."""
    rows, width = both.shape[0], both.shape[1] // 2
    columns = min(ROWS.columns, power_of_two(width))
    height = max(1, 2048 // columns)
    sizes = {"F": width, "BF": columns, "BR": height, "tile": ROWS}
    return -(-rows // height) * -(-width // columns), sizes


def _mlp(inputs: MlpInputs) -> Tensors:
    """x + delta, the result, what the gate has read, and the weights that made it."""
    x, delta, norm, gate, up, down, eps, dtype = inputs
    total = normed = _dense_rows(x)
    if norm is not None:
        rows = None if delta is None else _dense_rows(delta)
        total, normed = norm_rows(total, norm, eps, rows, dtype)
    joined = _joined([gate, up], dtype)
    both = normed @ joined.T
    hidden = both.new_empty(both.shape[0], both.shape[1] // 2)
    count, sizes = _halves(both)
    launch(gate_kernel, count, both, hidden, both.shape[0], **sizes)
    y = (hidden @ down.to(dtype).T).view(*x.shape[:-1], -1)
    return total.view(x.shape) if delta is not None else x.view_as(x), y, both, joined


def _mlp_back(inputs: MlpInputs, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    norm, gate, up, down, eps, dtype = inputs[2:]
    total, both, joined = _flat(kept[0]), *kept[1:]
    along, dy = (None if g is None else _dense_rows(g) for g in grads)
    if dy is None:
        dy = torch.zeros_like(total, dtype=dtype)
    hidden, dboth = both.new_empty(both.shape[0], both.shape[1] // 2), torch.empty_like(both)
    count, sizes = _halves(both)
    launch(
        gate_gradient_kernel, count, dy @ down.to(dtype), both, dboth, hidden, both.shape[0],
        **sizes,
    )  # fmt: skip
    ddown = _to_weights(dy, hidden, down)
    dx, dnorm, normed = dboth @ joined, None, total
    if norm is not None:
        normed = torch.empty_like(total, dtype=dtype)
        dx, dnorm = norm_rows_back(dx, along, total, norm, eps, normed)
    elif along is not None:
        dx += along
    dgate, dup = _parted(_to_weights(dboth, normed, gate), [gate, up])
    dx = dx.view(kept[0].shape)
    return dx, dx, dnorm, dgate, dup, ddown


def _dense_rows(x: Tensor) -> Tensor:
    return _flat(x).contiguous()


class NormInputs(NamedTuple):
    """The arguments of `gated_norm_linear_fused`; the weight may be of another type than x."""

    x: Tensor
    other: Tensor | None
    gate: Tensor | None
    norm: Tensor | None
    weight: Tensor
    eps: float


def _norm_arguments(inputs: NormInputs) -> tuple[NormInputs, int, dict[str, Any]]:
    """Dense inputs, heads in all, and what the kernels are compiled for."""
    x, other, gate, norm, weight, eps = inputs
    if gate is not None and (gate.stride(-1) != 1 or not even_rows(gate)):
        gate = gate.contiguous()
    inputs = NormInputs(x.contiguous(), dense(other), gate, dense(norm), weight, eps)
    constants = {
        "HEADS": x.shape[-2], "HAS_OTHER": other is not None, "HAS_GATE": gate is not None,
        "HAS_WEIGHT": norm is not None,
    }  # fmt: skip
    return inputs, x.numel() // x.shape[-1], constants


def _gated_norm(given: NormInputs) -> tuple[Tensor]:
    inputs, rows, constants = _norm_arguments(given)
    x, _, gate, _, weight, eps = inputs
    y = torch.empty_like(x)
    count, sizes = blocks_of(x, 4096)
    stride = 0 if gate is None else gate.stride(-2)
    unit = gcd(8, stride)
    launch(
        gated_norm_kernel, count, *inputs[:4], y, rows, stride // unit, eps, UNIT=unit,
        tile=WHOLE, **sizes, **constants,
    )  # fmt: skip
    return ((y.view(-1, weight.shape[1]) @ weight.to(y.dtype).T).view(*x.shape[:-2], -1),)


def gated_norm_back(
    given: NormInputs, kept: Some, grads: Some, needs: Sequence[bool], dots: Tensor | None = None
) -> Tensors:
    """The backward of `gated_norm_op`.

    dots: room `[B, H, T or more]` for each head's product of `other` and the gradient to it, for
    which the backward of the attention that made `other` would have to read it.
    """
    inputs, rows, constants = _norm_arguments(given)
    x, other, gate, norm, weight, eps = inputs
    dy = _flat(grads[0])
    dx, y = torch.empty_like(x), torch.empty_like(x)
    dgate = None if gate is None else room_for(gate)
    back = 0 if dgate is None else dgate.stride(-2)
    count, sizes = blocks_of(x, 2048)
    programs = min(count, 2 * PROGRAMS)
    partial = None
    if norm is not None:
        partial = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    stride = 0 if gate is None else gate.stride(-2)
    unit = gcd(8, stride, back)
    grad = dy @ weight.to(dy.dtype)
    launch(
        gated_norm_gradient_kernel, programs, grad, *inputs[:4], dx, dgate, y, partial, dots,
        rows, stride // unit, back // unit, x.shape[1], 0 if dots is None else dots.shape[-1], eps,
        UNIT=unit, tile=WHOLE, **sizes, **constants,
    )  # fmt: skip
    dnorm = None if partial is None or norm is None else fold(partial, norm.dtype)
    dweight = _to_weights(dy, y.view(-1, weight.shape[1]), weight)
    return dx, None if other is None else dx, dgate, dnorm, dweight


class LossInputs(NamedTuple):
    """The arguments of `cross_entropy_fused`; the weight may be of another type than x."""

    x: Tensor
    weight: Tensor
    targets: Tensor
    ignored: int
    needs_grad: bool


def _losses(inputs: LossInputs) -> Tensors:
    """The sum of losses, and gradients to x and weight, made on the way."""
    x, weight, targets, ignored, needs_grad = inputs
    rows, vocabulary, narrow = x.shape[0], weight.shape[0], weight.to(x.dtype)
    step = max(256, LOGITS // vocabulary // 256 * 256)
    losses = x.new_empty(rows, dtype=torch.float32)
    dx = torch.empty_like(x) if needs_grad else None
    dweight: Tensor | None = None
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        logits = (x[part] @ narrow.T).contiguous()
        launch(
            loss_kernel, logits.shape[0], logits, targets[part], losses[part], ignored,
            V=vocabulary, BV=min(LOSS.columns, power_of_two(vocabulary)), GRADIENT=needs_grad,
            tile=LOSS,
        )  # fmt: skip
        if dx is not None:
            torch.mm(logits, narrow, out=dx[part])
            share = _wide_product(logits.T, x[part])
            dweight = share if dweight is None else dweight.add_(share)
    if dweight is not None:
        dweight = dweight.to(weight.dtype)
    return losses.sum(), dx, dweight


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32, so that sums over parts lose nothing."""
    if a.dtype == torch.float32 or not a.is_cuda:
        return a.float() @ b.float()
    return torch.mm(a, b, out_dtype=torch.float32)


def _losses_back(inputs: LossInputs, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    dx, dweight = kept
    return (dx * grads[0]).to(dx.dtype), (dweight * grads[0]).to(dweight.dtype)


def _loss_shapes(inputs: LossInputs) -> Tensors:
    x, weight = inputs.x, inputs.weight
    total = x.new_empty((), dtype=torch.float32)
    if not inputs.needs_grad:
        return total, None, None
    return total, torch.empty_like(x), torch.empty_like(weight)


_WEIGHTS = tuple(f"w{i}" for i in range(MOST))
products_op = custom_op(
    "vort::products",
    ProductInputs,
    _products,
    _products_back,
    None,
    outputs=("total", "normed", *(f"y{i}" for i in range(MOST))),
    shown=2 + MOST,
    saved=("total",),
    gradients=("x", "delta", "norm", *_WEIGHTS),
    forget=("x", "delta"),
)
_mlp_op = custom_op(
    "vort::gated_mlp",
    MlpInputs,
    _mlp,
    _mlp_back,
    None,
    outputs=("total", "y"),
    shown=2,
    saved=("total",),
    gradients=("x", "delta", "norm", "gate", "up", "down"),
    forget=("x", "delta"),
)
gated_norm_op = custom_op(
    "vort::gated_norm_linear",
    NormInputs,
    _gated_norm,
    gated_norm_back,
    None,
    gradients=("x", "other", "gate", "norm", "weight"),
)
_loss_op = custom_op(
    "vort::linear_cross_entropy",
    LossInputs,
    _losses,
    _losses_back,
    _loss_shapes,
    outputs=("loss", "dx", "dweight"),
    saved=("dx", "dweight"),
    gradients=("x", "weight"),
)


def products_fused(
    x: Tensor, groups: Sequence[Sequence[Tensor]], delta: Tensor | None, norm: Tensor | None,
    eps: float, dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """x + delta, its norm n, and n W^T for each group of weights, their rows joined.

    dtype: that products are taken in, that of x by default, and always without a norm. Weights may
    be of another one, all of the same.

    Only the sum is kept for the backward, and the weights of several groups as they were joined;
    the gradient to the sum is summed inside the products. A delta needs a norm. Not to be traced:
    both summands have one gradient, and without a norm two outputs are views of x.
    """
    weights = [w for group in groups for w in group]
    given: Any = [*weights, *[None] * (MOST - len(weights))]
    sizes = tuple(len(group) for group in groups)
    # several groups, and columns that matrix units can begin at
    join = len(groups) > 1 and all(sum(w.shape[0] for w in g) % 8 == 0 for g in groups)
    together = Together() if join else None
    dtype = x.dtype if dtype is None else dtype
    inputs = ProductInputs._make((x, delta, norm, *given, float(eps), sizes, together, dtype))
    return products_op(inputs)[: 2 + len(sizes)]


def gated_mlp_fused(
    x: Tensor, gate: Tensor, up: Tensor, down: Tensor, delta: Tensor | None, norm: Tensor | None,
    eps: float, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x + delta and, of its norm n, (silu(n G^T) n U^T) D^T; a delta needs a norm.

    dtype: as for `products_fused`.

    Kept are the sum, what the gate reads and the joined weights; the norm and the gate are computed
    again. Not to be traced: both summands have one gradient.
    """
    dtype = x.dtype if dtype is None else dtype
    total, y = _mlp_op(MlpInputs(x, delta, norm, gate, up, down, float(eps), dtype))
    return total, y


def gated_norm_linear_fused(
    x: Tensor, other: Tensor | None, gate: Tensor | None, norm: Tensor | None, weight: Tensor,
    eps: float,
) -> Tensor:  # fmt: skip
    """(norm(x + other) silu(gate)) W^T, all that is between computed again in the backward."""
    y: Tensor = gated_norm_op(NormInputs(x, other, gate, norm, weight, float(eps)))[0]
    return y


def cross_entropy_fused(x: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The sum of cross-entropies of x W^T `[N, V]`, of which a part exists at a time."""
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    loss: Tensor = _loss_op(LossInputs(x, weight, targets, ignored, needs_grad))[0]
    return loss
