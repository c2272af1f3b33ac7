# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, misc"
"""What stands before and after matrix products, and the products with it: on a GPU.

A backward keeps what came in, not what the product saw: gates and norms are computed again, in the
very pass that makes their gradients.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vort.ops.custom import Some, Tensors, custom_op
from vort.ops.gpu.launcher import Tile, dense, launch, power_of_two
from vort.ops.gpu.parts import fold
from vort.ops.rms_norm.triton import PROGRAMS, blocks_of, load_weight

__all__ = ["cross_entropy_fused", "gated_linear_fused", "gated_norm_linear_fused", "products_fused"]

WHOLE = Tile(columns=0, warps=4, stages=1)
ROWS = Tile(columns=1024, warps=4, stages=1)
LOSS = Tile(columns=4096, warps=8, stages=1)
# Logits that are held at a time, in numbers: half a gigabyte in bfloat16.
LOGITS = 1 << 28


@triton.jit(do_not_specialize=["rows", "stride"])
def gate_kernel(
    both, out, rows, stride, F: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """BR rows of silu(a) b ``[rows, F]``, a and b the halves of a row of ``both``."""
    COLUMNS: tl.constexpr = (F + BF - 1) // BF
    pid = tl.program_id(0)
    row = ((pid // COLUMNS) * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    col = ((pid % COLUMNS) * BF + tl.arange(0, BF))[None, :]
    mask = (row < rows) & (col < F)
    a = tl.load(both + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(both + row * stride + F + col, mask=mask, other=0.0).to(tl.float32)
    value = a / (1.0 + tl.exp(-a)) * b
    tl.store(out + row * F + col, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "stride"])
def gate_gradient_kernel(
    grad, both, dboth, out, rows, stride, F: tl.constexpr, BF: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """Gradients to both halves, dense, and silu(a) b again."""
    COLUMNS: tl.constexpr = (F + BF - 1) // BF
    pid = tl.program_id(0)
    row = ((pid // COLUMNS) * BR + tl.arange(0, BR)).to(tl.int64)[:, None]
    col = ((pid % COLUMNS) * BF + tl.arange(0, BF))[None, :]
    mask = (row < rows) & (col < F)
    a = tl.load(both + row * stride + col, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(both + row * stride + F + col, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(grad + row * F + col, mask=mask, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-a))
    tl.store(out + row * F + col, (a * s * b).to(out.dtype.element_ty), mask=mask)
    da = g * b * s * (1.0 + a * (1.0 - s))
    at = dboth + row * (2 * F) + col
    tl.store(at, da.to(dboth.dtype.element_ty), mask=mask)
    tl.store(at + F, (g * a * s).to(dboth.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["stride", "ignored"])
def loss_kernel(
    logits, targets, losses, stride, ignored,
    V: tl.constexpr, BV: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Cross-entropy of a row, and its gradient in the logits' place."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    at = logits + row * stride
    col = tl.arange(0, BV)
    if target == ignored:
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for first in range(0, V, BV):
                zero = tl.zeros([BV], dtype=tl.float32).to(logits.dtype.element_ty)
                tl.store(at + first + col, zero, mask=first + col < V)
    else:
        most = tl.full([BV], float("-inf"), dtype=tl.float32)
        total = tl.zeros([BV], dtype=tl.float32)
        for first in range(0, V, BV):
            x = tl.load(at + first + col, mask=first + col < V, other=float("-inf"))
            x = x.to(tl.float32)
            new = tl.maximum(most, x)
            # a lane beyond V has seen nothing: its most stays -inf, and must not meet itself
            seen = new > float("-inf")
            total = tl.where(seen, total * tl.exp(most - new) + tl.exp(x - new), 0.0)
            most = new
        top = tl.max(most, axis=0)
        sums = tl.sum(tl.where(most > float("-inf"), total * tl.exp(most - top), 0.0), axis=0)
        log_total = top + tl.log(sums)
        tl.store(losses + row, log_total - tl.load(at + target).to(tl.float32))
        if GRADIENT:
            for first in range(0, V, BV):
                mask = first + col < V
                x = tl.load(at + first + col, mask=mask, other=float("-inf")).to(tl.float32)
                p = tl.exp(x - log_total) - tl.where(first + col == target, 1.0, 0.0)
                tl.store(at + first + col, p.to(logits.dtype.element_ty), mask=mask)


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


@triton.jit(do_not_specialize=["rows", "stride"])
def gated_norm_kernel(
    x, other, gate, weight, y, rows, stride, eps,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    HAS_OTHER: tl.constexpr, HAS_GATE: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """BR heads of norm(x + other) silu(gate)."""
    at, gate_at, mask = gated_tile(tl.program_id(0).to(tl.int64), rows, HEADS, D, BD, BR, stride)
    value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_OTHER:
        value += tl.load(other + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        value *= tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
        value *= load_weight(weight, D, BD)
    if HAS_GATE:
        g = tl.load(gate + gate_at, mask=mask, other=0.0).to(tl.float32)
        value *= g / (1.0 + tl.exp(-g))
    tl.store(y + at, value.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows", "stride"])
def gated_norm_gradient_kernel(
    grad, x, other, gate, weight, dx, dgate, y, partial, rows, stride, eps,
    HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    HAS_OTHER: tl.constexpr, HAS_GATE: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """dx (which is that of `other` too), dgate, y again, and a part of dweight ``[n, D]``."""
    programs = tl.num_programs(0)
    first = tl.program_id(0).to(tl.int64)
    if HAS_WEIGHT:
        scale = load_weight(weight, D, BD)
    acc = tl.zeros([BR, BD], dtype=tl.float32)
    for step in range(tl.cdiv(tl.cdiv(rows, BR) - first, programs)):
        at, gate_at, mask = gated_tile(first + step * programs, rows, HEADS, D, BD, BR, stride)
        value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_OTHER:
            value += tl.load(other + at, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_WEIGHT:
            rstd = tl.rsqrt(tl.sum(value * value, axis=1) / D + eps)[:, None]
            unit = value * rstd
            normed = unit * scale
        else:
            unit = value
            normed = value
        if HAS_GATE:
            a = tl.load(gate + gate_at, mask=mask, other=0.0).to(tl.float32)
            s = 1.0 / (1.0 + tl.exp(-a))
            da = g * normed * s * (1.0 + a * (1.0 - s))
            tl.store(dgate + at, da.to(dgate.dtype.element_ty), mask=mask)
            g *= a * s
            tl.store(y + at, (normed * a * s).to(y.dtype.element_ty), mask=mask)
        else:
            tl.store(y + at, normed.to(y.dtype.element_ty), mask=mask)
        if HAS_WEIGHT:
            acc += tl.where(mask, g * unit, 0.0)
            g *= scale
            g = rstd * (g - (tl.sum(g * unit, axis=1) / D)[:, None] * unit)
        tl.store(dx + at, g.to(dx.dtype.element_ty), mask=mask)
    if HAS_WEIGHT:
        flat = tl.arange(0, BD)
        tl.store(partial + first * D + flat, tl.sum(acc, axis=0), mask=flat < D)


class ProductInputs(NamedTuple):
    """The arguments of `products_fused`."""

    x: Tensor
    first: Tensor
    second: Tensor | None
    third: Tensor | None


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _products(inputs: ProductInputs) -> Tensors:
    x = _flat(inputs.x)
    return inputs.x.view_as(inputs.x), *(
        None if w is None else (x @ w.T).view(*inputs.x.shape[:-1], -1) for w in inputs[1:]
    )


def _products_back(
    inputs: ProductInputs, kept: Some, grads: Some, needs: Sequence[bool]
) -> Tensors:
    x = _flat(inputs.x)
    dx = None if grads[0] is None else _flat(grads[0])
    own = False
    found: list[Tensor | None] = []
    for weight, grad, needed in zip(inputs[1:], grads[1:], needs[1:], strict=True):
        if weight is None or grad is None:
            found.append(None if weight is None else torch.zeros_like(weight))
            continue
        grad = _flat(grad)
        found.append(grad.T @ x if needed else None)
        if needs[0]:
            # the sum over products is taken inside them, in place once it is ours
            if own and dx is not None:
                dx.addmm_(grad, weight)
            else:
                dx = grad @ weight if dx is None else torch.addmm(dx, grad, weight)
            own = True
    return None if dx is None else dx.view(inputs.x.shape), *found


class GatedInputs(NamedTuple):
    """The arguments of `gated_linear_fused`."""

    both: Tensor
    weight: Tensor


def _halves(both: Tensor) -> tuple[int, dict[str, Any]]:
    """How many programs a gate takes, and their sizes."""
    rows, width = both.shape[0], both.shape[1] // 2
    columns = min(ROWS.columns, power_of_two(width))
    height = max(1, 2048 // columns)
    sizes = {"F": width, "BF": columns, "BR": height, "tile": ROWS}
    return -(-rows // height) * -(-width // columns), sizes


def _gated(inputs: GatedInputs) -> tuple[Tensor]:
    both = _flat(inputs.both)
    hidden = both.new_empty(both.shape[0], both.shape[1] // 2)
    count, sizes = _halves(both)
    with torch.cuda.device_of(both):  # the GPU that holds the data, whichever is current
        launch(gate_kernel, count, both, hidden, both.shape[0], both.stride(0), **sizes)
        return ((hidden @ inputs.weight.T).view(*inputs.both.shape[:-1], -1),)


def _gated_back(inputs: GatedInputs, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    both, dy = _flat(inputs.both), _flat(grads[0])
    hidden, dboth = both.new_empty(both.shape[0], both.shape[1] // 2), torch.empty_like(both)
    count, sizes = _halves(both)
    with torch.cuda.device_of(both):
        dhidden = dy @ inputs.weight
        launch(
            gate_gradient_kernel, count, dhidden, both, dboth, hidden, both.shape[0],
            both.stride(0), **sizes,
        )  # fmt: skip
        return dboth.view(inputs.both.shape), dy.T @ hidden


class NormInputs(NamedTuple):
    """The arguments of `gated_norm_linear_fused`."""

    x: Tensor
    other: Tensor | None
    gate: Tensor | None
    norm: Tensor | None
    weight: Tensor
    eps: float


def _norm_arguments(inputs: NormInputs) -> tuple[NormInputs, int, dict[str, Any]]:
    """Dense inputs, heads in all, and what the kernels are compiled for."""
    x, other, gate, norm, weight, eps = inputs
    if gate is not None and (gate.stride(-1) != 1 or not _even_rows(gate)):
        gate = gate.contiguous()
    inputs = NormInputs(x.contiguous(), dense(other), gate, dense(norm), weight, eps)
    constants = {
        "HEADS": x.shape[-2], "HAS_OTHER": other is not None, "HAS_GATE": gate is not None,
        "HAS_WEIGHT": norm is not None,
    }  # fmt: skip
    return inputs, x.numel() // x.shape[-1], constants


def _even_rows(x: Tensor) -> bool:
    """Whether rows follow each other at one distance, so that they can be counted through."""
    return all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))


def _gated_norm(given: NormInputs) -> tuple[Tensor]:
    inputs, rows, constants = _norm_arguments(given)
    x, _, gate, _, weight, eps = inputs
    y = torch.empty_like(x)
    count, sizes = blocks_of(x, 4096)
    stride = 0 if gate is None else gate.stride(-2)
    with torch.cuda.device_of(x):
        launch(
            gated_norm_kernel, count, *inputs[:4], y, rows, stride, eps, tile=WHOLE, **sizes,
            **constants,
        )  # fmt: skip
        return ((_flat(y.flatten(-2)) @ weight.T).view(*x.shape[:-2], -1),)


def _gated_norm_back(given: NormInputs, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    inputs, rows, constants = _norm_arguments(given)
    x, other, gate, norm, weight, eps = inputs
    dy = _flat(grads[0])
    dx, y = torch.empty_like(x), torch.empty_like(x)
    dgate = None if gate is None else gate.new_empty(gate.shape)
    count, sizes = blocks_of(x, 2048)
    programs = min(count, PROGRAMS)
    partial = None
    if norm is not None:
        partial = x.new_empty(programs, x.shape[-1], dtype=torch.float32)
    stride = 0 if gate is None else gate.stride(-2)
    with torch.cuda.device_of(x):
        launch(
            gated_norm_gradient_kernel, programs, dy @ weight, *inputs[:4], dx, dgate, y, partial,
            rows, stride, eps, tile=WHOLE, **sizes, **constants,
        )  # fmt: skip
        dnorm = None if partial is None or norm is None else fold(partial, norm.dtype)
        dweight = dy.T @ _flat(y.flatten(-2))
    return dx, None if other is None else dx, dgate, dnorm, dweight


class LossInputs(NamedTuple):
    """The arguments of `cross_entropy_fused`."""

    x: Tensor
    weight: Tensor
    targets: Tensor
    ignored: int
    needs_grad: bool


def _losses(inputs: LossInputs) -> Tensors:
    """The sum of losses, and gradients to x and weight, made on the way."""
    x, weight, targets, ignored, needs_grad = inputs
    rows, vocabulary = x.shape[0], weight.shape[0]
    step = max(256, LOGITS // vocabulary // 256 * 256)
    losses = x.new_empty(rows, dtype=torch.float32)
    dx = torch.empty_like(x) if needs_grad else None
    dweight: Tensor | None = None
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        logits = x[part] @ weight.T
        with torch.cuda.device_of(x):
            launch(
                loss_kernel, logits.shape[0], logits, targets[part], losses[part],
                logits.stride(0), ignored, V=vocabulary,
                BV=min(LOSS.columns, power_of_two(vocabulary)), GRADIENT=needs_grad, tile=LOSS,
            )  # fmt: skip
        if dx is not None:
            torch.mm(logits, weight, out=dx[part])
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


_products_op = custom_op(
    "vort::products",
    ProductInputs,
    _products,
    _products_back,
    None,
    outputs=("x", "first", "second", "third"),
    shown=4,
    gradients=("x", "first", "second", "third"),
)
_gated_op = custom_op(
    "vort::gated_linear",
    GatedInputs,
    _gated,
    _gated_back,
    lambda i: (i.both.new_empty(*i.both.shape[:-1], i.weight.shape[0]),),
    gradients=("both", "weight"),
)
_gated_norm_op = custom_op(
    "vort::gated_norm_linear",
    NormInputs,
    _gated_norm,
    _gated_norm_back,
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


def products_fused(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """x, and x W^T for up to three W; the gradient to x is summed inside the products."""
    first, second, third = (*weights, None, None)[:3]
    assert first is not None
    return _products_op(ProductInputs(x, first, second, third))[: len(weights) + 1]


def gated_linear_fused(both: Tensor, weight: Tensor) -> Tensor:
    """(silu(a) b) W^T from [a, b], which alone is kept for the backward."""
    y: Tensor = _gated_op(GatedInputs(both, weight))[0]
    return y


def gated_norm_linear_fused(
    x: Tensor, other: Tensor | None, gate: Tensor | None, norm: Tensor | None, weight: Tensor,
    eps: float,
) -> Tensor:  # fmt: skip
    """(norm(x + other) silu(gate)) W^T, all that is between computed again in the backward."""
    y: Tensor = _gated_norm_op(NormInputs(x, other, gate, norm, weight, float(eps)))[0]
    return y


def cross_entropy_fused(x: Tensor, weight: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The sum of cross-entropies of x W^T `[N, V]`, of which a part exists at a time."""
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    loss: Tensor = _loss_op(LossInputs(x, weight, targets, ignored, needs_grad))[0]
    return loss
