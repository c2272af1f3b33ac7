# mypy: ignore-errors

"""Gated linear attention at a few places: one program walks a sequence for one state of one head.

Places cut a sequence into segments, and these are walked in blocks of BT tokens, the last of which
ends at the place. Within a block all is turned, features by tokens: a gate's logit is a product,
what a token has left at the block's end comes of a product with a matrix of zeros and ones, and the
state takes up a block by one more. At a place the state is read, and kept for the backward.

Backward: the gradient of the state is carried from right to left. With dG_t the gradient of G_t,
that of the log gate is Σ_v dG_t e^{g_t} G_{t-1} = Σ_v dG_t G_t - k_t dk_t for each feature. From a
token to the one before, Σ_v dG G loses k_t dk_t alone; at a place it is summed anew from the state
that was kept, so that no error is carried past it. It is a small difference of large numbers, and
so both are made of the same rounded keys, and what is multiplied by these is rounded twice as fine;
what is left of it below its rounding is 0, lest all tokens of a long segment add that up.

Nothing is added atomically, and launches depend on shapes alone. A place that comes twice is read
twice; one that lies in no sequence reads zeros.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vort.ops.custom import Some, Tensors, custom_op
from vort.ops.gpu.launcher import Tile, dense, launch, power_of_two
from vort.ops.gpu.parts import (
    LOG2E,
    ON_GPU,
    load_flipped,
    load_rows,
    narrow,
    power,
    reciprocal,
    store_rows,
    uniform,
    widen,
)

from . import GatedInputs, gated_of_asked_exact

__all__ = ["gated_walk"]

# Tokens of a block: with 64 a program of the backward has too few registers.
TOKENS = 32
# Below, a logarithm of 1 + e is summed: 1 + e has lost digits of e.
SMALL = tl.constexpr(1 / 64)
# What the backward's sums are rounded by, for float32 and for bfloat16.
NOISE, COARSE = tl.constexpr(2.0**-22), tl.constexpr(2.0**-16)


@triton.jit
def fine_dot(x, y, PREC: tl.constexpr):
    """The product of float32 x with y of any type; as two where y is bfloat16: exact to 2^-16."""
    if y.dtype == tl.bfloat16:
        high = narrow(x, tl.bfloat16)
        low = narrow(x - widen(high), tl.bfloat16)
        found = tl.dot(low, y, tl.dot(high, y))
    else:
        found = tl.dot(x, y, input_precision=PREC)
    return found


@triton.jit
def log_2(x):
    """log2 of a number from 1 to 2 in one instruction, wrong by up to 2^-22."""
    if ON_GPU:
        x = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        x = tl.log2(x)
    return x


@triton.jit
def log_gates(w, bias, rt, n, rate, BT: tl.constexpr, PREC: tl.constexpr):
    """Of n tokens, ``[BD, BT]``: log2 of the gates, 0 beyond them; what a logit's change does.

    bias: in base 2 already; rate: what the logarithm of a sigmoid is multiplied by.
    """
    z = tl.dot(w, rt, input_precision=PREC) * LOG2E + bias[:, None]
    e = power(-tl.abs(z))
    series = e * (LOG2E - e * (LOG2E / 2 - e * (LOG2E / 3 - e * (LOG2E / 4))))
    g = tl.minimum(z, 0.0) - tl.where(e < SMALL, series, log_2(1.0 + e))
    slope = tl.where(z < 0, 1.0, e) * reciprocal(1.0 + e)
    real = (tl.arange(0, BT) < n)[None, :]
    return tl.where(real, g * rate, 0.0), tl.where(real, slope * rate, 0.0)


@triton.jit
def faded(kt, g, PREC: tl.constexpr, BT: tl.constexpr):
    """Keys as they are left at the block's end, what they are multiplied by, and what a state is.

    Exponents are sums of logs, none above 0.
    """
    at = tl.arange(0, BT)
    later = tl.where(at[:, None] > at[None, :], 1.0, 0.0).to(kt.dtype)
    left = power(fine_dot(g, later, PREC))
    return narrow(widen(kt) * left, kt.dtype), left, power(tl.sum(g, axis=1))


@triton.jit
def load_weights(
    weight, bias, state, dtype: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """What makes one state's logits of r, ``[BD, BR]`` and ``[BD]``, the latter in base 2."""
    d = tl.arange(0, BD)
    c = tl.arange(0, BR)
    mask = (d[:, None] < D) & (c[None, :] < R)
    w = tl.load(weight + (state * D + d)[:, None] * R + c[None, :], mask=mask, other=0.0)
    shift = tl.load(bias + state * D + d, mask=d < D, other=0.0)
    return w.to(dtype), shift.to(tl.float32) * LOG2E


@triton.jit
def whose(bounds, H: tl.constexpr, S: tl.constexpr):
    """Sequence, head and state of this program, the sequence's first place and end."""
    pid = tl.program_id(0)
    b = (pid // (S * H)).to(tl.int64)
    begin = uniform(tl.load(bounds + b))
    end = uniform(tl.load(bounds + b + 1))
    return b, pid // S % H, pid % S, begin, end


@triton.jit(do_not_specialize=["T", "rate"])
def read_kernel(
    k, v, r, weight, bias, q, spots, order, bounds, o, states, sums, T, rate,
    H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr, ONES: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """What places read of one state, ``o[row, h, s]``; the state at each of them, if kept."""
    b, h, s, begin, end = whose(bounds, H, S)
    w, shift = load_weights(weight, bias, h * S + s, k.dtype.element_ty, D, R, BD, BR)
    d = tl.arange(0, BD)
    e = tl.arange(0, BV)
    G = tl.zeros([BD, BV], dtype=tl.float32)
    total = tl.zeros([BD], dtype=tl.float32)
    start = begin * 0
    for n in range(begin, end):
        stop = uniform((tl.load(spots + n) - b * T).to(tl.int32)) + 1
        row = tl.load(order + n)
        at = (row * H + h) * S + s
        qt = tl.load(q + at * D + d, mask=d < D, other=0.0).to(tl.float32)
        for t0 in range(start, stop, BT):
            token = b * T + t0
            left = stop - t0
            rt = load_flipped(r, token, left, 0, 1, 0, R, BT, BR)
            kt = tl.trans(load_rows(k, token, left, h, H, 0, D, BT, BD))
            vt = load_rows(v, token, left, h, H, 0, V, BT, BV)
            g, _ = log_gates(w, shift, rt, left, rate, BT, PREC)
            kk, _, kept = faded(kt, g, PREC, BT)
            G = tl.dot(kk, vt, G * kept[:, None], input_precision=PREC)
            if ONES:
                total = total * kept + tl.sum(widen(kk), axis=1)
        start = stop
        found = tl.sum(qt[:, None] * G, axis=0)
        tl.store(o + at * (V + ONES) + e, found, mask=e < V)
        if ONES:
            tl.store(o + at * (V + ONES) + V, tl.sum(qt * total, axis=0))
        if states is not None:
            mask = (d[:, None] < D) & (e[None, :] < V)
            tl.store(states + (at * D + d)[:, None] * V + e[None, :], G, mask=mask)
            if ONES:
                tl.store(sums + at * D + d, total, mask=d < D)


@triton.jit(do_not_specialize=["T", "rate"])
def back_kernel(
    k, v, r, weight, bias, q, spots, order, bounds, states, sums, do,
    dq, dk, dv, dr, dweight, dbias, T, rate,
    H: tl.constexpr, S: tl.constexpr, D: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr, ONES: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """What goes back through one state; of tokens ``[tokens, H, S, .]``, zeros after all places.

    ``dweight`` and ``dbias`` are sums over one sequence.
    """
    b, h, s, begin, end = whose(bounds, H, S)
    dtype = k.dtype.element_ty
    state = h * S + s
    w, shift = load_weights(weight, bias, state, dtype, D, R, BD, BR)
    d = tl.arange(0, BD)
    e = tl.arange(0, BV)
    c = tl.arange(0, BR)
    j = tl.arange(0, BT)
    dG = tl.zeros([BD, BV], dtype=tl.float32)
    dtotal = tl.zeros([BD], dtype=tl.float32)
    dw = tl.zeros([BD, BR], dtype=tl.float32)
    dshift = tl.zeros([BD], dtype=tl.float32)
    stop = begin * 0
    if begin < end:
        stop = uniform((tl.load(spots + end - 1) - b * T).to(tl.int32)) + 1
    for t0 in range(stop, T, BT):
        nothing = tl.zeros([BT, BD], dtype=tl.float32)
        store_rows(dk, nothing, b * T + t0, T - t0, state, H * S, 0, D, BT, BD)
        nothing = tl.zeros([BT, BV], dtype=tl.float32)
        store_rows(dv, nothing, b * T + t0, T - t0, state, H * S, 0, V, BT, BV)
        nothing = tl.zeros([BT, BR], dtype=tl.float32)
        store_rows(dr, nothing, b * T + t0, T - t0, state, H * S, 0, R, BT, BR)
    for i in range(begin, end):
        n = end - 1 - (i - begin)
        start = begin * 0
        if n > begin:
            start = uniform((tl.load(spots + n - 1) - b * T).to(tl.int32)) + 1
        row = tl.load(order + n)
        at = (row * H + h) * S + s
        mask = (d[:, None] < D) & (e[None, :] < V)
        G = tl.load(states + (at * D + d)[:, None] * V + e[None, :], mask=mask, other=0.0)
        qt = tl.load(q + at * D + d, mask=d < D, other=0.0).to(tl.float32)
        dot = tl.load(do + (row * H + h) * (V + ONES) + e, mask=e < V, other=0.0)
        dqt = tl.sum(G * dot[None, :], axis=1)
        dG += qt[:, None] * dot[None, :]
        # what the state and its gradient have in common, of each feature
        both = tl.sum(dG * G, axis=1)
        noise = tl.sum(tl.abs(dG * G), axis=1)
        if ONES:
            total = tl.load(sums + at * D + d, mask=d < D, other=0.0)
            last = tl.load(do + (row * H + h) * (V + ONES) + V)
            dqt += total * last
            dtotal += qt * last
            both += dtotal * total
            noise += tl.abs(dtotal * total)
        noise *= NOISE if dtype == tl.float32 else COARSE
        tl.store(dq + at * D + d, dqt.to(dq.dtype.element_ty), mask=d < D)
        blocks = tl.cdiv(stop - start, BT)
        for block in range(blocks):
            t0 = start + (blocks - 1 - block) * BT
            token = b * T + t0
            left = stop - t0
            rt = load_flipped(r, token, left, 0, 1, 0, R, BT, BR)
            kt = tl.trans(load_rows(k, token, left, h, H, 0, D, BT, BD))
            vt = load_rows(v, token, left, h, H, 0, V, BT, BV)
            g, slope = log_gates(w, shift, rt, left, rate, BT, PREC)
            kk, fade, kept = faded(kt, g, PREC, BT)
            dvt = tl.dot(tl.trans(narrow(dG, dtype)), kk, input_precision=PREC)
            store_rows(dv, tl.trans(dvt), token, left, state, H * S, 0, V, BT, BV)
            dkk = fine_dot(dG, tl.trans(vt), PREC)
            if ONES:
                dkk += dtotal[:, None]
            store_rows(dk, tl.trans(dkk * fade), token, left, state, H * S, 0, D, BT, BD)
            own = dkk * widen(kk)
            both -= tl.sum(own, axis=1)
            both = tl.where(tl.abs(both) < noise, 0.0, both)
            # from the block's start on: what is left of tokens before it, then those in it
            before = tl.where(j[:, None] < j[None, :], 1.0, 0.0).to(dtype)
            dz = (both[:, None] + fine_dot(own, before, PREC)) * slope
            dshift += tl.sum(dz, axis=1)
            dz = narrow(dz, dtype)
            drt = tl.dot(tl.trans(dz), w, input_precision=PREC)
            store_rows(dr, drt, token, left, state, H * S, 0, R, BT, BR)
            dw = tl.dot(dz, tl.trans(rt), dw, input_precision=PREC)
            dG *= kept[:, None]
            dtotal *= kept
        stop = start
    at = (b * H * S + state) * D + d
    tl.store(dbias + at, dshift, mask=d < D)
    mask = (d[:, None] < D) & (c[None, :] < R)
    tl.store(dweight + at[:, None] * R + c[None, :], dw, mask=mask)


def gated_walk(inputs: GatedInputs) -> Tensor:
    """`gated_of_asked`; `walk_pays` says for which calls."""
    return _walk(inputs)[0]


def _dense(inputs: GatedInputs) -> GatedInputs:
    return GatedInputs._make((*map(dense, inputs[:6]), *inputs[6:]))


def _constants(inputs: GatedInputs) -> dict[str, object]:
    """What both kernels are told at compile time."""
    _, heads, states, features = inputs.q.shape
    values, rank = inputs.v.shape[3], inputs.r.shape[2]
    return {
        "H": heads,
        "S": states,
        "D": features,
        "V": values,
        "R": rank,
        "BD": power_of_two(features),
        "BV": power_of_two(values),
        "BR": power_of_two(rank),
        "BT": TOKENS,
        "ONES": int(inputs.ones),
        "PREC": "ieee" if inputs.k.dtype == torch.float32 else "tf32",
    }


def _tile(inputs: GatedInputs, registers: int) -> Tile:
    """Registers are limited where a state has up to 64 x 64 numbers, so that more programs fit."""
    features, values = inputs.k.shape[3], inputs.v.shape[3]
    if inputs.k.dtype == torch.float32:
        return Tile(0, 8, 1)
    return Tile(0, 8 if features > 64 else 4, 1, registers if max(features, values) <= 64 else None)


def _forward(inputs: GatedInputs) -> Tensors:
    """Outputs; then for the backward states at places, places in their order, whose they are."""
    inputs = _dense(inputs)
    q, k, v, r, weight, bias, places = inputs[:7]
    (rows, heads, states, features), (batch, length, _, values) = q.shape, v.shape
    spots, order = places.sort()
    edges = torch.arange(batch + 1, device=k.device) * length
    bounds = torch.searchsorted(spots, edges, out_int32=True)
    o = q.new_zeros(rows, heads, states, values + inputs.ones, dtype=torch.float32)
    kept = sums = None
    if inputs.tracked:
        shape = (len(places), heads, states, features)
        kept = o.new_empty(*shape, values)
        sums = o.new_empty(shape) if inputs.ones else None
    launch(
        read_kernel, batch * heads * states,
        k, v, r, weight, bias, q, spots, order, bounds, o, kept, sums, length, 1 / inputs.power,
        tile=_tile(inputs, 128), **_constants(inputs),
    )  # fmt: skip
    return o.sum(2), kept, sums, spots, order, bounds


def _backward(inputs: GatedInputs, held: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    """Gradients to q, k, v, r, weight and bias."""
    kept, sums, spots, order, bounds = held
    inputs = _dense(inputs)
    q, k, v, r, weight, bias = inputs[:6]
    batch, length, heads, _ = k.shape
    states, rank = q.shape[2], r.shape[2]
    dq = torch.zeros_like(q)
    dk, dv = (x.new_empty(*x.shape[:3], states, x.shape[3]) for x in (k, v))
    dr = q.new_empty(batch, length, heads * states, rank, dtype=torch.float32)
    dweight = dr.new_empty(batch, *weight.shape)
    dbias = dr.new_empty(batch, *bias.shape)
    launch(
        back_kernel, batch * heads * states,
        k, v, r, weight, bias, q, spots, order, bounds, kept, sums, dense(grads[0]),
        dq, dk, dv, dr, dweight, dbias, length, 1 / inputs.power,
        tile=_tile(inputs, 168), **_constants(inputs),
    )  # fmt: skip
    return (
        dq,
        dk.sum(3),
        dv.sum(3),
        dr.sum(2).to(r.dtype),
        dweight.sum(0).to(weight.dtype),
        dbias.sum(0).to(bias.dtype),
    )


def _plain(inputs: GatedInputs) -> Tensors:
    return (gated_of_asked_exact(inputs),)


_walk = custom_op(
    "vort::gated_walk",
    GatedInputs,
    _forward,
    _backward,
    None,
    gradients=("q", "k", "v", "r", "weight", "bias"),
    plain=_plain,
)
