# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Order weights on a GPU. Import this only where it is used: Triton may be absent.

The closed forms of `PowerLawBasis` and their derivatives, a tile of orders times scales. Every
weight is a prefactor, which depends on the order alone, times exp(exponent). The sine in the
prefactors is a series of our own: the hardware's has an absolute error, which would be a large
relative one near order 1, where the sine vanishes and sinc divides it by as little.

`routing_weights_fused` starts from a router's logits. A token's row of them holds, head by head,
the order's, then the write gate's, the read weights', and those of a gain, G for each head: one for
each scale, or one for all.
"""

from collections.abc import Sequence
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vort.ops.custom import Some, Tensors, custom_op
from vort.ops.gpu.folds import fold
from vort.ops.gpu.launcher import Tile, dense, even_rows, launch, power_of_two
from vort.ops.gpu.together import room_for

__all__ = ["RoutingInputs", "order_weights_fused", "routing_op", "routing_weights_fused"]

WHOLE = Tile(columns=0, warps=4, stages=1)
NUMBERS = 2048  # that a program computes
# The largest product of a program's rows and the width of what else orders are made of: beyond it
# what programs leave to be added up is larger than what they read.
MIXED = 8192
# Beyond it the logarithm of a gain is cut off; see `vort.memories.retention_memory.WriteGain`.
LARGEST_LOG = tl.constexpr(15.0)


@triton.jit
def sinc_series(x):
    """sin(πm)/(πm) at m² = x <= 1/4 to float32's last bits, and its derivative by x."""
    y = 0.00014842879303107 * x - 0.002346081035455824
    y = y * x + 0.0261478478176548
    y = y * x - 0.19075182412208422
    y = y * x + 0.8117424252833536
    y = y * x - 1.6449340668482264
    slope = 6 * 0.00014842879303107 * x - 5 * 0.002346081035455824
    slope = slope * x + 4 * 0.0261478478176548
    slope = slope * x - 3 * 0.19075182412208422
    slope = slope * x + 2 * 0.8117424252833536
    slope = slope * x - 1.6449340668482264
    return y * x + 1.0, slope


@triton.jit
def prefactors(a):
    """Those of the first, an inner and the last scale at order a, then their derivatives by a."""
    u = 1.0 - a
    near = u <= 0.5
    # sin(πu) = sin(πa), taken of the smaller: exactly 0 at order 1
    m = tl.where(near, u, a)
    series, slope = sinc_series(m * m)
    inner = m * series
    cosine = series + 2.0 * m * m * slope
    d_inner = tl.where(near, -cosine, cosine)
    far = tl.where(near, 1.0, u)  # sinc divides by u only where u is large
    first = tl.where(near, series, inner / far)
    d_first = tl.where(near, -2.0 * u * slope, (d_inner + first) / far)
    last = inner / a
    return first, inner, last, d_first, d_inner, (d_inner - last) / a


@triton.jit
def by_scale(first, inner, last, col, S: tl.constexpr):
    """``[BR, BS]`` of what the first, the inner and the last scale have; one scale is the first."""
    rest = tl.where(col == S - 1, last[:, None], inner[:, None])
    return tl.where(col == 0, first[:, None], rest)


@triton.jit
def exponents(polynomials, a, col, S: tl.constexpr, N: tl.constexpr):
    """The exponents ``[BR, BS]`` of all scales, and their derivatives by a.

    polynomials are ``[N, S]``: those of neighbouring scales are one load.
    """
    x = a[:, None]
    value = tl.zeros([a.shape[0], col.shape[1]], dtype=tl.float32)
    slope = value
    for i in tl.static_range(N):
        slope = slope * x + value
        value = value * x + tl.load(polynomials + (N - 1 - i) * S + col, mask=col < S, other=0.0)
    # the first scale's exponent is (1 - a) p(a), so that it is 1 at order 1
    slope = tl.where(col == 0, (1.0 - x) * slope - value, slope)
    return tl.where(col == 0, (1.0 - x) * value, value), slope


@triton.jit(do_not_specialize=["rows"])
def order_kernel(
    polynomials, order, gate, weights, rows,
    S: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """weights ``[rows, S]`` of BR orders; polynomials are ``[N, S]``."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    col = tl.arange(0, BS)[None, :]
    a = tl.load(order + row, mask=row < rows, other=1.0)
    first, inner, last, _, _, _ = prefactors(a)
    exponent, _ = exponents(polynomials, a, col, S, N)
    value = by_scale(first, inner, last, col, S) * tl.exp(exponent)
    if HAS_GATE:
        value *= tl.load(gate + row, mask=row < rows, other=0.0)[:, None]
    tl.store(weights + row[:, None] * S + col, value, mask=(row[:, None] < rows) & (col < S))


@triton.jit(do_not_specialize=["rows"])
def order_gradient_kernel(
    polynomials, grad, order, gate, d_order, d_gate, rows,
    S: tl.constexpr, N: tl.constexpr, BS: tl.constexpr, BR: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Gradients ``[rows]`` to BR orders and gates."""
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    col = tl.arange(0, BS)[None, :]
    mask = (row[:, None] < rows) & (col < S)
    a = tl.load(order + row, mask=row < rows, other=1.0)
    g = tl.load(grad + row[:, None] * S + col, mask=mask, other=0.0)
    first, inner, last, d_first, d_inner, d_last = prefactors(a)
    exponent, slope = exponents(polynomials, a, col, S, N)
    before = by_scale(first, inner, last, col, S)
    g *= tl.exp(exponent)
    da = tl.sum(g * (by_scale(d_first, d_inner, d_last, col, S) + before * slope), axis=1)
    if HAS_GATE:
        tl.store(d_gate + row, tl.sum(g * before, axis=1), mask=row < rows)
        da *= tl.load(gate + row, mask=row < rows, other=0.0)
    tl.store(d_order + row, da, mask=row < rows)


@triton.jit
def logits_at(
    row, stride, H: tl.constexpr, S: tl.constexpr, G: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_READ: tl.constexpr,
):  # fmt: skip
    """A head's number, and where its order, gate, first read and gain logit lie in the rows."""
    h = row % H
    at = (row // H) * stride
    READ: tl.constexpr = 2 * H if HAS_GATE else H
    GAIN: tl.constexpr = READ + H * S if HAS_READ else READ
    return h, at + h, at + H + h, at + READ + h * S, at + GAIN + h * G


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def load_logit(logits, bias, at, there, row, rows):
    """A logit of BR heads with its bias, float32."""
    value = tl.load(logits + at, mask=row < rows, other=0.0).to(tl.float32)
    return value + tl.load(bias + there, mask=row < rows, other=0.0).to(tl.float32)


@triton.jit
def load_read(logits, bias, at, there, row, col, rows, S: tl.constexpr):
    """S softmax(read logits) ``[BR, BS]``."""
    mask = (row[:, None] < rows) & (col < S)
    value = tl.load(logits + at[:, None] + col, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(bias + there[:, None] + col, mask=mask, other=0.0).to(tl.float32)
    value = tl.where(col < S, value, float("-inf"))
    p = tl.exp(value - tl.max(value, axis=1)[:, None])
    return p / tl.sum(p, axis=1)[:, None] * S


@triton.jit
def load_gain(logits, bias, at, h, row, col, rows, G: tl.constexpr):
    """The logarithm ``[BR, BS or 1]`` of what scales are multiplied by, not yet cut off."""
    one = col if G > 1 else tl.zeros([1, 1], dtype=tl.int32)
    mask = (row[:, None] < rows) & (one < G)
    value = tl.load(logits + at[:, None] + one, mask=mask, other=0.0).to(tl.float32)
    return value + tl.load(bias + h[:, None] * G + one, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def gain_of(log):
    return tl.exp(tl.minimum(tl.maximum(log, -LARGEST_LOG), LARGEST_LOG))


@triton.jit
def add_more(logit, more, weight, token, h, weight_stride, there, F: tl.constexpr):
    """The orders' logits with what else they are made of, one number after the other.

    As a sum over a tile its rows would lie in other threads than the logits do.
    """
    for f in tl.static_range(F):
        x = tl.load(more + token * F + f, mask=there, other=0.0).to(tl.float32)
        w = tl.load(weight + h * weight_stride + f, mask=there, other=0.0).to(tl.float32)
        logit += x * w
    return logit


@triton.jit(do_not_specialize=["rows", "stride", "weight_stride"])
def routing_kernel(
    logits, order_bias, write_bias, read_bias, gain_bias, more, more_weight, polynomials, order,
    write, read, rows, stride, weight_stride, order_min,
    H: tl.constexpr, S: tl.constexpr, G: tl.constexpr, N: tl.constexpr, F: tl.constexpr,
    BS: tl.constexpr, BR: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_READ: tl.constexpr, UNIT: tl.constexpr, HAS_MORE: tl.constexpr,
):  # fmt: skip
    """Orders ``[rows]``, write and read weights ``[rows, S]`` of BR heads.

    Rows of logits lie `stride` times UNIT apart.
    """
    row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    col = tl.arange(0, BS)[None, :]
    mask = (row[:, None] < rows) & (col < S)
    h, order_at, gate_at, read_at, gain_at = logits_at(
        row, stride * UNIT, H, S, G, HAS_GATE, HAS_READ
    )
    lo = load_logit(logits, order_bias, order_at, h, row, rows)
    if HAS_MORE:
        lo = add_more(lo, more, more_weight, row // H, h, weight_stride, row < rows, F)
    a = order_min + (1.0 - order_min) * sigmoid(lo)
    tl.store(order + row, a, mask=row < rows)
    first, inner, last, _, _, _ = prefactors(a)
    exponent, _ = exponents(polynomials, a, col, S, N)
    value = by_scale(first, inner, last, col, S) * tl.exp(exponent)
    if HAS_GATE:
        value *= sigmoid(load_logit(logits, write_bias, gate_at, h, row, rows))[:, None]
    if G > 0:
        value *= gain_of(load_gain(logits, gain_bias, gain_at, h, row, col, rows, G))
    tl.store(write + row[:, None] * S + col, value, mask=mask)
    if HAS_READ:
        weights = load_read(logits, read_bias, read_at, h * S, row, col, rows, S)
        tl.store(read + row[:, None] * S + col, weights, mask=mask)


@triton.jit
def more_back(
    came, more, weight, dmore, to, token, tokens, weight_stride,
    H: tl.constexpr, F: tl.constexpr, BH: tl.constexpr, BF: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Gradients to what else BT tokens' orders are made of, and their part of its weight's.

    came: to the orders' logits ``[BT, BH]``, as they are rounded.
    """
    t = token + tl.arange(0, BT)
    h = tl.arange(0, BH)
    f = tl.arange(0, BF)
    there = (t < tokens)[:, None] & (f < F)[None, :]
    at = t[:, None] * F + f[None, :]
    x = tl.load(more + at, mask=there, other=0.0).to(came.dtype)
    mask = (h < H)[:, None] & (f < F)[None, :]
    w = tl.load(weight + h[:, None] * weight_stride + f[None, :], mask=mask, other=0.0)
    w = w.to(came.dtype)
    if BT >= 16 and BH >= 16 and BF >= 16:
        dx = tl.dot(came, w, input_precision="ieee")
        dw = tl.dot(tl.trans(came), x, input_precision="ieee")
    else:
        wide = came.to(tl.float32)
        dx = tl.sum(wide[:, :, None] * w.to(tl.float32)[None, :, :], axis=1)
        dw = tl.sum(wide[:, :, None] * x.to(tl.float32)[:, None, :], axis=0)
    tl.store(dmore + at, dx.to(dmore.dtype.element_ty), mask=there)
    tl.store(to + h[:, None] * F + f[None, :], dw, mask=mask)


@triton.jit(do_not_specialize=["tokens", "stride", "out_stride", "weight_stride"])
def routing_gradient_kernel(
    logits, write_bias, read_bias, gain_bias, polynomials, order, dorder, dwrite, dread, dlogits,
    partial, more, more_weight, dmore, tokens, stride, out_stride, weight_stride, order_min,
    H: tl.constexpr, S: tl.constexpr, G: tl.constexpr, N: tl.constexpr, F: tl.constexpr,
    BS: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, BF: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_READ: tl.constexpr, UNIT: tl.constexpr, HAS_DORDER: tl.constexpr,
):  # fmt: skip
    """Gradients to the logits of BR / BH tokens, and their sum.

    dmore: where it is there, what the F numbers `more` of a token receive; their weight's part
    follows the sums. Rows of logits lie `stride` times UNIT apart, those of dlogits `out_stride`
    times.
    """
    READ: tl.constexpr = H * (1 + HAS_GATE)
    GAIN: tl.constexpr = READ + (H * S if HAS_READ else 0)
    MORE: tl.constexpr = GAIN + H * G
    WIDTH: tl.constexpr = MORE + (0 if dmore is None else H * F)
    flat = tl.arange(0, BR)
    token = tl.program_id(0).to(tl.int64) * (BR // BH) + flat // BH
    there = (token < tokens) & (flat % BH < H)
    rows = tokens * H
    row = tl.where(there, token * H + flat % BH, rows)
    col = tl.arange(0, BS)[None, :]
    mask = there[:, None] & (col < S)
    h, _, gate_at, read_at, gain_at = logits_at(row, stride * UNIT, H, S, G, HAS_GATE, HAS_READ)
    _, d_order, d_gate, d_read, d_gain = logits_at(
        row, out_stride * UNIT, H, S, G, HAS_GATE, HAS_READ
    )
    a = tl.load(order + row, mask=there, other=1.0)
    s = (a - order_min) / (1.0 - order_min)
    g = tl.load(dwrite + row[:, None] * S + col, mask=mask, other=0.0)
    first, inner, last, d_first, d_inner, d_last = prefactors(a)
    exponent, slope = exponents(polynomials, a, col, S, N)
    before = by_scale(first, inner, last, col, S)
    g *= tl.exp(exponent)
    if G > 0:
        log = load_gain(logits, gain_bias, gain_at, h, row, col, rows, G)
        g *= gain_of(log)
    da = tl.sum(g * (by_scale(d_first, d_inner, d_last, col, S) + before * slope), axis=1)
    # sums over tokens are taken of what has not been rounded yet
    to = partial + tl.program_id(0).to(tl.int64) * WIDTH
    head = tl.arange(0, BH)
    gate = tl.full([BR], 1.0, dtype=tl.float32)
    if HAS_GATE:
        gate = sigmoid(load_logit(logits, write_bias, gate_at, h, row, rows))
        dgate = tl.where(there, tl.sum(g * before, axis=1) * gate * (1.0 - gate), 0.0)
        tl.store(dlogits + d_gate, dgate.to(dlogits.dtype.element_ty), mask=there)
        sums = tl.sum(tl.reshape(dgate, (BR // BH, BH)), axis=0)
        tl.store(to + H + head, sums, mask=head < H)
        da *= gate
    if G > 0:
        # what is cut off does not move
        dl = tl.where(tl.abs(log) <= LARGEST_LOG, g * before * gate[:, None], 0.0)
        dl = tl.where(mask, dl, 0.0)
        if G > 1:
            tl.store(dlogits + d_gain[:, None] + col, dl.to(dlogits.dtype.element_ty), mask=mask)
            sums = tl.sum(tl.reshape(dl, (BR // BH, BH, BS)), axis=0)
            at = to + GAIN + head[:, None] * S + col
            tl.store(at, sums, mask=(head[:, None] < H) & (col < S))
        else:
            whole = tl.sum(dl, axis=1)
            tl.store(dlogits + d_gain, whole.to(dlogits.dtype.element_ty), mask=there)
            sums = tl.sum(tl.reshape(whole, (BR // BH, BH)), axis=0)
            tl.store(to + GAIN + head, sums, mask=head < H)
    if HAS_DORDER:
        da += tl.load(dorder + row, mask=there, other=0.0)
    da = tl.where(there, da * ((1.0 - order_min) * s * (1.0 - s)), 0.0)
    tl.store(dlogits + d_order, da.to(dlogits.dtype.element_ty), mask=there)
    tl.store(to + head, tl.sum(tl.reshape(da, (BR // BH, BH)), axis=0), mask=head < H)
    if dmore is not None:
        came = tl.reshape(da.to(dlogits.dtype.element_ty), (BR // BH, BH))
        more_back(
            came, more, more_weight, dmore, to + MORE,
            tl.program_id(0).to(tl.int64) * (BR // BH), tokens, weight_stride,
            H, F, BH, BF, BR // BH,
        )  # fmt: skip
    if HAS_READ:
        weights = load_read(logits, read_bias, read_at, h * S, row, col, rows, S)
        dr = tl.load(dread + row[:, None] * S + col, mask=mask, other=0.0)
        dl = weights * (dr - tl.sum(weights * dr, axis=1)[:, None] / S)
        dl = tl.where(mask, dl, 0.0)
        tl.store(dlogits + d_read[:, None] + col, dl.to(dlogits.dtype.element_ty), mask=mask)
        sums = tl.sum(tl.reshape(dl, (BR // BH, BH, BS)), axis=0)
        at = to + READ + head[:, None] * S + col
        tl.store(at, sums, mask=(head[:, None] < H) & (col < S))


class Inputs(NamedTuple):
    """The arguments of `order_weights_fused`."""

    polynomials: Tensor
    order: Tensor
    gate: Tensor | None


def _blocks(inputs: Inputs) -> tuple[int, dict[str, int]]:
    """How many blocks of orders there are, and the sizes that make one."""
    scales, coefficients = inputs.polynomials.shape
    wide = power_of_two(scales, 1)
    # a tile of few scales is no taller than one of four: orders are loaded one to a thread
    height = NUMBERS // max(wide, 4)
    sizes = {"S": scales, "N": coefficients, "BS": wide, "BR": height}
    return -(-inputs.order.numel() // height), sizes


def _forward(inputs: Inputs) -> tuple[Tensor]:
    polynomials, order, gate = dense(inputs[0].T), dense(inputs[1]), dense(inputs[2])
    (weights,) = _shapes(inputs)
    count, sizes = _blocks(inputs)
    launch(
        order_kernel, count, polynomials, order, gate, weights, order.numel(),
        HAS_GATE=gate is not None, tile=WHOLE, **sizes,
    )  # fmt: skip
    return (weights,)


def _backward(inputs: Inputs, kept: Tensors, grads: Tensors, needs: Sequence[bool]) -> Tensors:
    polynomials, order, gate = dense(inputs[0].T), dense(inputs[1]), dense(inputs[2])
    d_order = order.new_empty(order.shape)
    d_gate = None if gate is None else gate.new_empty(gate.shape)
    count, sizes = _blocks(inputs)
    launch(
        order_gradient_kernel, count, polynomials, dense(grads[0]), order, gate, d_order, d_gate,
        order.numel(), HAS_GATE=gate is not None, tile=WHOLE, **sizes,
    )  # fmt: skip
    return d_order, d_gate


def _shapes(inputs: Inputs) -> tuple[Tensor]:
    return (inputs.order.new_empty(*inputs.order.shape, inputs.polynomials.shape[0]),)


_order_weights = custom_op(
    "vort::order_weights_fused", Inputs, _forward, _backward, _shapes, gradients=("order", "gate")
)


def order_weights_fused(polynomials: Tensor, order: Tensor, gate: Tensor | None) -> Tensor:
    """Return `[..., S]` as `order_weights` does, from GPU kernels, forward and backward.

    polynomials `[S, degree + 1]` of the basis, order and gate `[...]`, all float32. The gradient
    goes to order and gate.
    """
    weights: Tensor = _order_weights(Inputs(polynomials, order, gate))[0]
    return weights


class RoutingInputs(NamedTuple):
    """The arguments of `routing_weights_fused`."""

    logits: Tensor
    order_bias: Tensor
    write_bias: Tensor | None
    read_bias: Tensor | None
    gain_bias: Tensor | None
    more: Tensor | None
    more_weight: Tensor | None
    polynomials: Tensor
    order_min: float

    @property
    def num_heads(self) -> int:
        """H."""
        return self.order_bias.shape[0]

    @property
    def gains(self) -> int:
        """G: gains of each head."""
        return 0 if self.gain_bias is None else self.gain_bias.shape[0] // self.num_heads


def _routing_sizes(inputs: RoutingInputs) -> tuple[int, int, dict[str, Any]]:
    """Heads in all, blocks of them, and what the kernels are compiled for."""
    scales, coefficients = inputs.polynomials.shape
    rows = inputs.logits.numel() // inputs.logits.shape[-1] * inputs.num_heads
    wide = power_of_two(scales, 1)
    height = NUMBERS // max(wide, 4)
    constants = {
        "H": inputs.num_heads, "S": scales, "G": inputs.gains, "N": coefficients,
        "F": 0 if inputs.more is None else inputs.more.shape[-1], "BS": wide, "BR": height,
        "HAS_GATE": inputs.write_bias is not None, "HAS_READ": inputs.read_bias is not None,
        "tile": WHOLE,
    }  # fmt: skip
    return rows, -(-rows // height), constants


def _routing_arguments(inputs: RoutingInputs) -> tuple[list[Tensor | None], int, int]:
    """The tensors as kernels read them, how far rows of logits lie apart, and those of weights."""
    logits, weight = inputs.logits, inputs.more_weight
    if logits.stride(-1) != 1 or not even_rows(logits):
        logits = logits.contiguous()
    if weight is not None and weight.stride(1) != 1:
        weight = weight.contiguous()
    given = [logits, *map(dense, inputs[1:6]), weight, dense(inputs.polynomials.T)]
    return given, logits.stride(-2), 0 if weight is None else weight.stride(0)


def _routing_forward(inputs: RoutingInputs) -> Tensors:
    """Orders, write and read weights."""
    given, stride, weight_stride = _routing_arguments(inputs)
    rows, count, constants = _routing_sizes(inputs)
    shape = (*inputs.logits.shape[:-1], inputs.num_heads)
    order = inputs.logits.new_empty(shape, dtype=torch.float32)
    write = order.new_empty(*shape, constants["S"])
    read = None if inputs.read_bias is None else torch.empty_like(write)
    unit = gcd(8, stride)
    launch(
        routing_kernel, count, *given, order, write, read, rows, stride // unit, weight_stride,
        inputs.order_min, UNIT=unit, HAS_MORE=inputs.more is not None, **constants,
    )  # fmt: skip
    return order, write, read


def _routing_backward(
    inputs: RoutingInputs, kept: Some, grads: Some, needs: Sequence[bool]
) -> Tensors:
    given, stride, weight_stride = _routing_arguments(inputs)
    numbers, _, constants = _routing_sizes(inputs)
    logits, more, more_weight = inputs.logits, inputs.more, inputs.more_weight
    dorder, dwrite, dread = grads
    if dwrite is None:
        dwrite = logits.new_zeros(numbers, constants["S"], dtype=torch.float32)
    if dread is None and inputs.read_bias is not None:
        dread = torch.zeros_like(dwrite)
    heads, tokens = power_of_two(inputs.num_heads, 1), numbers // inputs.num_heads
    height = max(constants["BR"], heads)
    count = -(-tokens // (height // heads))
    dlogits = room_for(logits)
    sizes = [x.shape[0] for x in inputs[1:5] if x is not None]
    features, dmore, dweight = constants["F"], None, None
    wide = power_of_two(features, 1)
    if more is not None and height * wide <= MIXED:
        dmore = torch.empty_like(more, memory_format=torch.contiguous_format)
        sizes.append(inputs.num_heads * features)
    mixing = (None, None, None) if dmore is None else (*given[5:7], dmore)
    partial = logits.new_empty(count, sum(sizes), dtype=torch.float32)
    back = dlogits.stride(-2)
    unit = gcd(8, stride, back)
    launch(
        routing_gradient_kernel, count, given[0], *given[2:5], given[7], kept[0], dense(dorder),
        dense(dwrite), dense(dread), dlogits, partial, *mixing, tokens, stride // unit,
        back // unit, weight_stride, inputs.order_min, BH=heads, BF=wide, UNIT=unit,
        HAS_DORDER=dorder is not None, **constants | {"BR": height},
    )  # fmt: skip
    parts = iter(torch.split_with_sizes(fold(partial, inputs.order_bias.dtype), sizes))
    dbiases = [None if x is None else next(parts) for x in inputs[1:5]]
    if more is None or more_weight is None:
        return dlogits, *dbiases, None, None
    if dmore is not None:
        dweight = next(parts).view(more_weight.shape).to(more_weight.dtype)
    else:
        came = dlogits[..., : inputs.num_heads].view(tokens, -1)
        rows = more.reshape(tokens, -1).to(came.dtype)
        dweight = (came.T @ rows).to(more_weight.dtype)
        dmore = (came @ more_weight.to(came.dtype)).view(more.shape).to(more.dtype)
    return dlogits, *dbiases, dmore, dweight


routing_op = custom_op(
    "vort::routing_weights",
    RoutingInputs,
    _routing_forward,
    _routing_backward,
    None,
    outputs=("order", "write", "read"),
    shown=3,
    saved=("order",),
    gradients=(
        *("logits", "order_bias", "write_bias", "read_bias", "gain_bias", "more", "more_weight"),
    ),
)


def routing_weights_fused(inputs: RoutingInputs) -> tuple[Tensor, Tensor, Tensor | None]:
    """Orders `[..., H]`, write weights and read weights `[..., H, S]` (or None), all float32.

    logits `[..., H (1 + gate + S read + G)]` in bfloat16 or float32, a bias for each part that is
    there: `[H]`, `[H]`, `[H S]`, `[H G]`, the last of gains, one a head or one a scale; more
    `[..., F]` with more_weight `[H, F]` adds to the orders' logits; polynomials `[S, degree + 1]`
    of the basis, float32. Not to be traced.
    """
    order, write, read = routing_op(inputs)
    return order, write, read
