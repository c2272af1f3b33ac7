# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, misc"
"""From projections to heads: convolution, silu, RMS norm and RoPE in one walk along time.

A program takes G heads of queries, of keys or of values, and walks over STEPS positions: the last
inputs stay in registers, so that everything is read once and written once. A head is held as its
two halves, ``[G, HALF]`` each, which RoPE turns into each other. x is a row of all heads, queries
first, then keys, then values, a row every ``stride`` numbers.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vort.ops.custom import Some
from vort.ops.gpu.launcher import Tile, launch, power_of_two
from vort.ops.local_attention.triton.rope import angles

from .inputs import Inputs, dense_rows, empty_heads, turn_stride

__all__ = ["heads_step", "turn_table"]

WALK = Tile(columns=0, warps=4, stages=1)
# Positions that a program walks over, and heads it has: measured on an H200.
STEPS, GROUP = 64, 8


@triton.jit
def part_of(pid, HQ: tl.constexpr, HK: tl.constexpr, G: tl.constexpr):
    """Which heads a program has: 0 queries, 1 keys, 2 values; the first; how many; all before."""
    NQ: tl.constexpr = (HQ + G - 1) // G
    NK: tl.constexpr = (HK + G - 1) // G
    part = (pid >= NQ).to(tl.int32) + (pid >= NQ + NK).to(tl.int32)
    first = (pid - tl.where(part > 0, NQ, 0) - tl.where(part > 1, NK, 0)) * G
    heads = tl.where(part > 0, HK, HQ)
    before = tl.where(part > 0, HQ, 0) + tl.where(part > 1, HK, 0)
    return part, first, heads, before


@triton.jit
def load_half(ptr, at, mask):
    return tl.load(ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_input(
    x, state, t, channel, mask, row, stride, length,
    C: tl.constexpr, W: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Half a head of x at position t; before the first position, of the state."""
    value = load_half(x, t * stride + channel, mask & (t >= 0) & (t < length))
    if HAS_STATE:
        before = (row * (W - 1) + W - 1 + t) * C + channel
        value += load_half(state, before, mask & (t < 0) & (t >= 1 - W))
    return value


@triton.jit
def tap(weight, channel, lag, mask, W: tl.constexpr):
    if lag < W:
        return tl.load(weight + channel * W + lag, mask=mask, other=0.0).to(tl.float32)
    return tl.zeros(channel.shape, dtype=tl.float32)


@triton.jit
def store_state(last, x1, x2, x3, channel, mask, C: tl.constexpr, W: tl.constexpr):
    """Half a head of the last W - 1 inputs, the latest at ``last``."""
    tl.store(last + channel, x1.to(last.dtype.element_ty), mask=mask)
    if W > 2:
        tl.store(last - C + channel, x2.to(last.dtype.element_ty), mask=mask)
    if W > 3:
        tl.store(last - 2 * C + channel, x3.to(last.dtype.element_ty), mask=mask)


@triton.jit
def silu(u):
    return u / (1.0 + tl.exp(-u))


@triton.jit
def weigh(x0, x1, x2, x3, w0, w1, w2, w3, m1, m2, m3):
    """The sum over taps; m: whether the position so many steps ago is of the same sequence."""
    return x0 * w0 + x1 * (w1 * m1) + x2 * (w2 * m2) + x3 * (w3 * m3)


@triton.jit
def masks_at(age, t, length, HAS_AGE: tl.constexpr):
    """Age of position t, and m1, m2, m3 of `weigh`."""
    old = t
    m1 = tl.full([1, 1], 1.0, dtype=tl.float32)
    m2, m3 = m1, m1
    if HAS_AGE:
        old = tl.load(age + t, mask=(t >= 0) & (t < length), other=0)
        m1 = (old >= 1).to(tl.float32)
        m2 = (old >= 2).to(tl.float32)
        m3 = (old >= 3).to(tl.float32)
    return old, m1, m2, m3


@triton.jit(do_not_specialize=["length", "stride", "batch_stride", "spans", "turn_stride"])
def heads_kernel(
    x, weight, state, age, q_norm, k_norm, cos, sin, q, k, v, q_turned, k_turned,
    length, stride, batch_stride, spans, turn_stride, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr,
    G: tl.constexpr, W: tl.constexpr, STEPS: tl.constexpr,
    HAS_STATE: tl.constexpr, HAS_AGE: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr,
    UPDATE: tl.constexpr,
):  # fmt: skip
    """Queries, keys and values ``[B, T, heads, D]``, the former two turned as well.

    UPDATE: move the state on by the one position there is, in place.
    """
    C: tl.constexpr = (HQ + 2 * HK) * D
    BLOCKS: tl.constexpr = (HQ + G - 1) // G + 2 * ((HK + G - 1) // G)
    pid = tl.program_id(0)
    part, first, heads, before = part_of(pid % BLOCKS, HQ, HK, G)
    span = pid // BLOCKS
    row = (span // spans).to(tl.int64)
    # a tile of one, since the interpreter has no scalar masks
    t0 = ((span % spans) * STEPS).to(tl.int64) + tl.zeros([1, 1], dtype=tl.int64)
    h = first + tl.arange(0, G)[:, None]
    i = tl.arange(0, BH)[None, :]
    mask = (h < heads) & (i < HALF)
    ca = (before + h) * D + i
    cb = ca + HALF
    wa0, wb0 = tap(weight, ca, 0, mask, W), tap(weight, cb, 0, mask, W)
    wa1, wb1 = tap(weight, ca, 1, mask, W), tap(weight, cb, 1, mask, W)
    wa2, wb2 = tap(weight, ca, 2, mask, W), tap(weight, cb, 2, mask, W)
    wa3, wb3 = tap(weight, ca, 3, mask, W), tap(weight, cb, 3, mask, W)
    xs = x + row * batch_stride
    xa1 = load_input(xs, state, t0 - 1, ca, mask, row, stride, length, C, W, HAS_STATE)
    xb1 = load_input(xs, state, t0 - 1, cb, mask, row, stride, length, C, W, HAS_STATE)
    xa2 = load_input(xs, state, t0 - 2, ca, mask, row, stride, length, C, W, HAS_STATE)
    xb2 = load_input(xs, state, t0 - 2, cb, mask, row, stride, length, C, W, HAS_STATE)
    xa3 = load_input(xs, state, t0 - 3, ca, mask, row, stride, length, C, W, HAS_STATE)
    xb3 = load_input(xs, state, t0 - 3, cb, mask, row, stride, length, C, W, HAS_STATE)
    out = tl.where(part == 0, q, tl.where(part == 1, k, v))
    if NORM:
        scale = tl.where(part == 0, q_norm, k_norm)
        na = load_half(scale, i, i < HALF)
        nb = load_half(scale, i + HALF, i < HALF)
    xa = load_half(xs, t0 * stride + ca, mask & (t0 < length))
    xb = load_half(xs, t0 * stride + cb, mask & (t0 < length))
    for step in range(STEPS):
        t = t0 + step
        here = mask & (t < length)
        # the next row is under way while this one is worked on
        ahead = mask & (t + 1 < tl.minimum(length, t0 + STEPS))
        next_a = load_half(xs, (t + 1) * stride + ca, ahead)
        next_b = load_half(xs, (t + 1) * stride + cb, ahead)
        old, m1, m2, m3 = masks_at(age, t, length, HAS_AGE)
        ya = silu(weigh(xa, xa1, xa2, xa3, wa0, wa1, wa2, wa3, m1, m2, m3))
        yb = silu(weigh(xb, xb1, xb2, xb3, wb0, wb1, wb2, wb3, m1, m2, m3))
        at = ((row * length + t) * heads + h) * D + i
        if part < 2:
            if NORM:
                r = tl.rsqrt((tl.sum(ya * ya, axis=1) + tl.sum(yb * yb, axis=1)) / D + eps)[:, None]
                ya *= r * na
                yb *= r * nb
            if TURN:
                turned = tl.where(part == 0, q_turned, k_turned)
                place = (row * turn_stride + old) * HALF + i
                known = (i < HALF) & (t < length)
                c = tl.load(cos + place, mask=known, other=0.0)
                s = tl.load(sin + place, mask=known, other=0.0)
                # turned from what is stored, so that both parts of a layer see the same head
                za = ya.to(q.dtype.element_ty).to(tl.float32)
                zb = yb.to(q.dtype.element_ty).to(tl.float32)
                tl.store(turned + at, (za * c - zb * s).to(q.dtype.element_ty), mask=here)
                tl.store(turned + at + HALF, (zb * c + za * s).to(q.dtype.element_ty), mask=here)
        tl.store(out + at, ya.to(q.dtype.element_ty), mask=here)
        tl.store(out + at + HALF, yb.to(q.dtype.element_ty), mask=here)
        xa3, xa2, xa1, xa = xa2, xa1, xa, next_a
        xb3, xb2, xb1, xb = xb2, xb1, xb, next_b
    if UPDATE:
        last = state + (row * (W - 1) + W - 2) * C
        store_state(last, xa1, xa2, xa3, ca, mask, C, W)
        store_state(last, xb1, xb2, xb3, cb, mask, C, W)


def _constants(inputs: Inputs) -> tuple[int, dict[str, Any]]:
    """How many programs a span takes, and what their kernels are compiled for."""
    heads, kv_heads, half = inputs.num_heads, inputs.num_key_value_heads, inputs.dim // 2
    group = min(GROUP, power_of_two(max(heads, kv_heads), 1))
    blocks = -(-heads // group) + 2 * -(-kv_heads // group)
    return blocks, {
        "HQ": heads, "HK": kv_heads, "D": inputs.dim, "HALF": half, "BH": power_of_two(half, 1),
        "G": group, "W": inputs.taps, "HAS_STATE": inputs.state is not None,
        "HAS_AGE": inputs.age is not None, "NORM": inputs.q_norm is not None,
        "TURN": inputs.cos is not None,
    }  # fmt: skip


def heads_step(inputs: Inputs) -> Some:
    """Queries, keys and values of one position, and the former two turned, or None twice.

    Shapes as in `heads_fused`, T = 1, and no maps. The state is moved on in place. No gradients.
    """
    inputs = dense_rows(inputs)
    x = inputs.x
    batch, length = x.shape[:2]
    blocks, constants = _constants(inputs)
    steps = min(STEPS, power_of_two(length, 1))
    spans = -(-length // steps)
    outputs = empty_heads(inputs)[:5]
    launch(
        heads_kernel, batch * spans * blocks, *inputs[:8], *outputs, length, x.stride(1),
        x.stride(0), spans, turn_stride(inputs), inputs.eps, STEPS=steps, UPDATE=True, tile=WALK,
        **constants,
    )  # fmt: skip
    return outputs


def turn_table(positions: int | Tensor, dim: int, base: float, device: torch.device) -> Any:
    """cos and sin `[count, D / 2]` for RoPE at the given positions, or at 0 .. positions - 1."""
    if isinstance(positions, int):
        cos, sin = _first_angles(power_of_two(positions), dim, float(base), device)
        return cos[:positions], sin[:positions]
    return angles(positions, dim, float(base))


@cache
def _first_angles(length: int, dim: int, base: float, device: torch.device) -> Any:
    """Shared by all layers of a model, and never let go: recorded launches read it where it lies.

    Lengths are powers of two, so that all tables together are no more than twice the longest.
    """
    with torch.inference_mode(False):
        return angles(torch.arange(length, device=device), dim, base)
