# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, misc"
"""A token's heads: convolution, RMS norm, RoPE, local attention over a ring, learned features.

A program has one sequence, one head of keys and values and the R query heads that read it. Queries
and keys are held as their two halves, which RoPE turns into each other.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vort.ops.feature_maps.triton.hedgehog import softmax
from vort.ops.gpu.launcher import Tile, launch, power_of_two
from vort.ops.gpu.parts import let_next_start, wait_for_inputs
from vort.ops.local_attention.triton.rope import frequencies_of

__all__ = ["HeadsInputs", "HeadsOutputs", "heads_step"]

# Slots of the ring that a program reads at a time.
SLOTS = 128
TILE = Tile(columns=0, warps=8, stages=1, early=True)


@triton.jit
def load_past(state, row, channel, lag, mask, C: tl.constexpr, W: tl.constexpr):
    """The convolution's input so many positions ago; zeros before those it weighs."""
    value = tl.zeros(channel.shape, dtype=tl.float32)
    if lag < W:
        at = (row * (W - 1) + W - 1 - lag) * C + channel
        value = tl.load(state + at, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def weighed(x, taps, channel, lag, mask, W: tl.constexpr):
    value = tl.zeros(channel.shape, dtype=tl.float32)
    if lag < W:
        value = x * tl.load(taps + channel * W + lag, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def convolved(x, state, taps, row, stride, channel, mask, C: tl.constexpr, W: tl.constexpr):
    """silu of the convolution at some channels, or x itself where W is 1; the state moves on."""
    x0 = tl.load(x + row * stride + channel, mask=mask, other=0.0).to(tl.float32)
    y = x0
    if W > 1:
        x1 = load_past(state, row, channel, 1, mask, C, W)
        x2 = load_past(state, row, channel, 2, mask, C, W)
        x3 = load_past(state, row, channel, 3, mask, C, W)
        y = weighed(x0, taps, channel, 0, mask, W) + weighed(x1, taps, channel, 1, mask, W)
        y += weighed(x2, taps, channel, 2, mask, W) + weighed(x3, taps, channel, 3, mask, W)
        y = y / (1.0 + tl.exp(-y))
        # several threads may hold the same channel: all have read before one writes
        tl.debug_barrier()
        narrow = state.dtype.element_ty
        last = state + (row * (W - 1) + W - 2) * C + channel
        tl.store(last, x0.to(narrow), mask=mask)
        if W > 2:
            tl.store(last - C, x1.to(narrow), mask=mask)
        if W > 3:
            tl.store(last - 2 * C, x2.to(narrow), mask=mask)
    return y


@triton.jit
def cos_and_sin(turns):
    """Of so many turns, float64.

    What is beyond the nearest quarter has all its digits in float32, and a short series.
    """
    quarters = tl.floor(turns * 4.0 + 0.5)
    x = ((turns * 4.0 - quarters) * 1.5707963267948966).to(tl.float32)
    q = (quarters - tl.floor(quarters * 0.25) * 4.0).to(tl.int32)
    xx = x * x
    s = 8.3333333e-3 + xx * (-1.9841270e-4 + xx * 2.7557319e-6)
    s = x * (1.0 + xx * (-0.16666667 + xx * s))
    c = -1.3888889e-3 + xx * (2.4801587e-5 - xx * 2.7557319e-7)
    c = 1.0 + xx * (-0.5 + xx * (0.041666667 + xx * c))
    cos, sin = tl.where(q % 2 == 0, c, s), tl.where(q % 2 == 0, s, c)
    return tl.where((q == 1) | (q == 2), -cos, cos), tl.where(q >= 2, -sin, sin)


@triton.jit
def pick(x, j, which):
    """Row number ``which`` of a tile."""
    return tl.sum(tl.where(j == which, x, 0.0), axis=0)


@triton.jit
def store_features(
    out, maps, a, b, at, h, i, D: tl.constexpr, HALF: tl.constexpr, M: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """[softmax(W x), softmax(-W x)] of a head ``[2 M]`` at row ``at`` of out."""
    m = tl.arange(0, BM)
    mask = (i < HALF)[:, None] & (m < M)[None, :]
    first = maps + h * (D * M) + i[:, None] * M + m[None, :]
    wa = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    wb = tl.load(first + HALF * M, mask=mask, other=0.0).to(tl.float32)
    logits = tl.sum(a[:, None] * wa + b[:, None] * wb, axis=0)[None, :]
    col = m[None, :]
    to = out + at * (2 * M) + col
    tl.store(to, softmax(logits, M, BM).to(out.dtype.element_ty), mask=col < M)
    tl.store(to + M, softmax(-logits, M, BM).to(out.dtype.element_ty), mask=col < M)


@triton.jit
def load_ring(
    ring, row, g, first, window, HK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    BD: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """WIDTH numbers of BW slots.

    No count of positions is waited for: slots that hold none are left out where they are used.
    """
    w = first + tl.arange(0, BW)
    d = tl.arange(0, BD)
    at = ring + (((row * window + w) * HK + g) * D)[:, None] + d[None, :]
    return tl.load(at, mask=(w < window)[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit(do_not_specialize=["stride", "window"])
def heads_kernel(
    x, state, taps, q_norm, k_norm, frequencies, ring_k, ring_v, seen, q_map, k_map,
    q, k, v, o, entropy, place, stride, window, scale, eps,
    HK: tl.constexpr, R: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BH: tl.constexpr,
    BD: tl.constexpr, BP: tl.constexpr, W: tl.constexpr, M: tl.constexpr, BM: tl.constexpr,
    BW: tl.constexpr, NORM: tl.constexpr, TURN: tl.constexpr, LOCAL: tl.constexpr,
    MANY: tl.constexpr,
):  # fmt: skip
    """Features, values and local attention of R query heads.

    The count of positions goes on to ``place``: other programs of the row read it still.
    """
    HQ: tl.constexpr = HK * R
    C: tl.constexpr = (HQ + 2 * HK) * D
    narrow: tl.constexpr = v.dtype.element_ty
    let_next_start()
    pid = tl.program_id(0).to(tl.int64)
    row, g = pid // HK, pid % HK
    i, d = tl.arange(0, BH), tl.arange(0, BD)
    if LOCAL:
        # under way while the heads are made
        ka = load_ring(ring_k, row, g, 0, window, HK, D, HALF, BH, BW)
        kb = load_ring(ring_k + HALF, row, g, 0, window, HK, D, HALF, BH, BW)
        vt = load_ring(ring_v, row, g, 0, window, HK, D, D, BD, BW)
        old = tl.load(seen + row)
        slot = old % window
    # states are of the step before: only the projections are waited for
    wait_for_inputs()
    # a tile of the R queries and the key
    j = tl.arange(0, BP)[:, None]
    channel = tl.where(j < R, g * R + j, HQ + g) * D + i[None, :]
    mask = (j <= R) & (i < HALF)[None, :]
    a = convolved(x, state, taps, row, stride, channel, mask, C, W)
    b = convolved(x, state, taps, row, stride, channel + HALF, mask, C, W)
    if NORM:
        r = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / D + eps)[:, None]
        weight = tl.where(j < R, q_norm, k_norm) + i[None, :]
        a *= r * tl.load(weight, mask=mask, other=0.0).to(tl.float32)
        b *= r * tl.load(weight + HALF, mask=mask, other=0.0).to(tl.float32)
    # from here on as they would be stored
    a, b = a.to(narrow).to(tl.float32), b.to(narrow).to(tl.float32)
    cos = tl.full([BH], 1.0, dtype=tl.float32)
    sin = tl.zeros([BH], dtype=tl.float32)
    if TURN:
        turns = old.to(tl.float64) * tl.load(frequencies + i, mask=i < HALF, other=0.0)
        cos, sin = cos_and_sin(turns * 0.15915494309189535)
    one_a, one_b = pick(a, j, R), pick(b, j, R)
    new_a = (one_a * cos - one_b * sin).to(narrow)
    new_b = (one_b * cos + one_a * sin).to(narrow)
    new_v = convolved(x, state, taps, row, stride, (HQ + HK + g) * D + d, d < D, C, W).to(narrow)
    tl.store(v + pid * D + d, new_v, mask=d < D)
    for r in tl.static_range(R):
        h = pid * R + r
        qa, qb = pick(a, j, r), pick(b, j, r)
        store_features(k, k_map, one_a, one_b, h, g * R + r, i, D, HALF, M, BM)
        store_features(q, q_map, qa, qb, h, g * R + r, i, D, HALF, M, BM)
        if LOCAL:
            ta = (qa * cos - qb * sin).to(narrow).to(tl.float32) * scale
            tb = (qb * cos + qa * sin).to(narrow).to(tl.float32) * scale
            if MANY and r > 0:
                ka = load_ring(ring_k, row, g, 0, window, HK, D, HALF, BH, BW)
                kb = load_ring(ring_k + HALF, row, g, 0, window, HK, D, HALF, BH, BW)
                vt = load_ring(ring_v, row, g, 0, window, HK, D, D, BD, BW)
            most, total, along = -1e30, 0.0, 0.0
            acc = tl.zeros([BD], dtype=tl.float32)
            for first in range(0, window if MANY else BW, BW):
                w = first + tl.arange(0, BW)
                # the ring is full from `window` positions on; the slot of this one comes by itself
                here = (w == slot)[:, None]
                there = (w < window) & ((w < old) | (w == slot))
                first_half = tl.where(here, new_a[None, :], ka).to(tl.float32) * ta[None, :]
                other_half = tl.where(here, new_b[None, :], kb).to(tl.float32) * tb[None, :]
                s = tl.where(there, tl.sum(first_half + other_half, axis=1), -1e30)
                new = tl.maximum(most, tl.max(s, axis=0))
                fade = tl.exp(most - new)
                p = tl.where(there, tl.exp(s - new), 0.0)
                values = tl.where(here, new_v[None, :], vt).to(tl.float32)
                acc = acc * fade + tl.sum(p[:, None] * values, axis=0)
                along = along * fade + tl.sum(p * s, axis=0)
                total = total * fade + tl.sum(p, axis=0)
                most = new
                if MANY:
                    ka = load_ring(ring_k, row, g, first + BW, window, HK, D, HALF, BH, BW)
                    kb = load_ring(ring_k + HALF, row, g, first + BW, window, HK, D, HALF, BH, BW)
                    vt = load_ring(ring_v, row, g, first + BW, window, HK, D, D, BD, BW)
            tl.store(o + h * D + d, (acc / total).to(narrow), mask=d < D)
            # -sum p log p with p = exp(s - most) / total
            tl.store(entropy + h, most + tl.log(total) - along / total)
    if LOCAL:
        at = ((row * window + slot) * HK + g) * D
        tl.store(ring_k + at + i, new_a, mask=i < HALF)
        tl.store(ring_k + at + HALF + i, new_b, mask=i < HALF)
        tl.store(ring_v + at + d, new_v, mask=d < D)
        if g == 0:
            tl.store(place + row, old)


class HeadsInputs(NamedTuple):
    """What `heads_step` takes.

    Attributes:
        x: `[B, C]`, queries, keys and values of all heads, C = (H + 2 Hkv) D; rows may lie apart.
        q_map: `[H, D, M]`, the weight of the queries' learned map.
        k_map: the same of the keys'.
        num_key_value_heads: Hkv.
        state: `[B, W - 1, C]`, the convolution's last inputs; None without one.
        taps: `[C, W]`, its weight; W at most 4.
        q_norm: `[D]`, weight of the queries' RMS norm; None without one.
        k_norm: the same of the keys'.
        ring_k: `[B, window, Hkv, D]`; None without local attention.
        ring_v: the same of the values.
        seen: `[B]` int64, positions so far.
        rope_base: None: nothing is turned.
        eps: of both norms.
    """

    x: Tensor
    q_map: Tensor
    k_map: Tensor
    num_key_value_heads: int
    state: Tensor | None = None
    taps: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    ring_k: Tensor | None = None
    ring_v: Tensor | None = None
    seen: Tensor | None = None
    rope_base: float | None = None
    eps: float = 1e-6


class HeadsOutputs(NamedTuple):
    """What `heads_step` gives.

    Attributes:
        q: `[B, H, 2 M]`, features.
        k: `[B, H, 2 M]`, features of every query head's own map.
        v: `[B, Hkv, D]`.
        local: `[B, H, D]`, what local attention found; None without it.
        entropy: `[B, H]` float32 of its weights; None without it.
        place: `[B]` int64, where in its row the token is; None without local attention.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    local: Tensor | None
    entropy: Tensor | None
    place: Tensor | None


def heads_step(inputs: HeadsInputs) -> HeadsOutputs:
    """One token's heads; the convolution's state and the ring move on in place.

    The count of positions does not: `memory_step`, which comes after, moves it. All tensors of the
    type of x, bfloat16 or float32, but for the counts; all dense but x.
    """
    x, ring, taps = inputs.x, inputs.ring_k, inputs.taps
    heads, dim, features = inputs.q_map.shape
    batch, kv_heads, half = x.shape[0], inputs.num_key_value_heads, dim // 2
    q, k = (x.new_empty(batch, heads, 2 * features) for _ in range(2))
    v = x.new_empty(batch, kv_heads, dim)
    local = entropy = place = None
    window = 0 if ring is None else ring.shape[1]
    if ring is not None:
        local = x.new_empty(batch, heads, dim)
        entropy = x.new_empty(batch, heads, dtype=torch.float32)
        place = x.new_empty(batch, dtype=torch.int64)
    turns = ring is not None and inputs.rope_base is not None
    table = frequencies_of(dim, float(inputs.rope_base), x.device) if turns else None  # type: ignore[arg-type]
    launch(
        heads_kernel, batch * kv_heads, x, inputs.state, taps, inputs.q_norm, inputs.k_norm,
        table, ring, inputs.ring_v, inputs.seen, inputs.q_map, inputs.k_map,
        q, k, v, local, entropy, place, x.stride(0), window, dim**-0.5, inputs.eps,
        HK=kv_heads, R=heads // kv_heads, D=dim, HALF=half, BH=power_of_two(half),
        BD=power_of_two(dim), BP=power_of_two(heads // kv_heads + 1, 2),
        W=1 if taps is None else taps.shape[1], M=features, BM=power_of_two(features),
        BW=min(power_of_two(window), SLOTS), NORM=inputs.q_norm is not None, TURN=turns,
        LOCAL=ring is not None, MANY=window > SLOTS, tile=TILE,
    )  # fmt: skip
    return HeadsOutputs(q, k, v, local, entropy, place)
