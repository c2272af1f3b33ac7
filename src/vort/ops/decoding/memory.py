# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call, operator, misc"
"""A token in its memory: order, write and read weights, the states, then norm and gate.

A program has one head of one sequence. All its scales are in registers at once: every number of
the state is read once and written once, and nothing waits for the scale before.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from vort.ops.decoding.heads import HeadsOutputs
from vort.ops.gpu.launcher import Tile, dense, launch, power_of_two
from vort.ops.gpu.parts import let_next_start, wait_for_inputs
from vort.ops.order_weights.triton import by_scale, exponents, gain_of, prefactors, sigmoid
from vort.ops.retention.triton.decode import aged, decay_in_parts
from vort.ops.retention.triton.spans import NORMALIZER_CODES
from vort.ops.retention.triton.tiles import load_rates

__all__ = ["StepInputs", "memory_step"]

# Numbers of a head's states that a program holds at once.
AT_ONCE = 32768


@triton.jit
def load_read(logits, bias, col, S: tl.constexpr):
    """Read logits of some scales with their biases; -inf beyond S."""
    value = tl.load(logits + col, mask=col < S, other=0.0).to(tl.float32)
    value += tl.load(bias + col, mask=col < S, other=0.0).to(tl.float32)
    return tl.where(col < S, value, float("-inf"))


@triton.jit
def places(s, ks, vs, S: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    """Where some scales of a head lie in its states, and what of them exists."""
    offs = (s[:, None, None] * K + ks[None, :, None]) * V + vs[None, None, :]
    mask = (s < S)[:, None, None] & (ks < K)[None, :, None] & (vs < V)[None, None, :]
    return offs, mask


@triton.jit
def load_states(G, base, s, ks, vs, S: tl.constexpr, K: tl.constexpr, V: tl.constexpr):
    offs, mask = places(s, ks, vs, S, K, V)
    return tl.load(G + base * (S * K * V) + offs, mask=mask, other=0.0)


@triton.jit
def mixed(number, seed):
    """Sixteen bits that look drawn at random, from a place and a seed."""
    x = number.to(tl.uint32) * 0x9E3779B1 + seed
    x = (x ^ (x >> 15)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x >> 16


@triton.jit
def narrowed(x, at, seed, narrow: tl.constexpr):
    """x in the type of the state; bfloat16 is rounded up or down at random, by what is lost.

    Rounded to the nearest, a slow scale would never forget: a step takes less than half of its
    last bit.
    """
    if narrow == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True) + mixed(at, seed)
        # the bits of a NaN might be carried away
        x = tl.where(x == x, (bits & 0xFFFF0000).to(tl.float32, bitcast=True), x)
    return x.to(narrow)


@triton.jit(do_not_specialize=["logit_stride", "gate_stride", "mix_stride"])
def memory_kernel(
    G, b, q, k, v, logits, order_bias, write_bias, read_bias, gain_bias, entropy, mix, polynomials,
    log_decay, local, gate, norm, place, seen, out,
    logit_stride, gate_stride, mix_stride, order_min, eps, norm_eps,
    H: tl.constexpr, R: tl.constexpr, S: tl.constexpr, CS: tl.constexpr, BS: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    BH: tl.constexpr, GAINS: tl.constexpr, NORMALIZER: tl.constexpr, SELF: tl.constexpr,
    HAS_WRITE: tl.constexpr, HAS_READ: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    HAS_LOCAL: tl.constexpr, HAS_GATE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One head ``[V]`` of norm(retrieved + local) silu(gate); G, b and the count move on."""
    READ: tl.constexpr = 2 * H if HAS_WRITE else H
    GAIN: tl.constexpr = READ + H * S if HAS_READ else READ
    narrow: tl.constexpr = v.dtype.element_ty
    let_next_start()
    pid = tl.program_id(0)
    row, h = (pid // H).to(tl.int64), pid % H
    base = pid.to(tl.int64)
    ks, vs = tl.arange(0, BK), tl.arange(0, BV)
    # the first states are under way while everything else is waited for
    held = load_states(G, base, tl.arange(0, CS), ks, vs, S, K, V)
    wait_for_inputs()
    qt = tl.load(q + base * K + ks, mask=ks < K, other=0.0).to(tl.float32)
    kt = tl.load(k + base * K + ks, mask=ks < K, other=0.0).to(tl.float32)
    vt = tl.load(v + (base // R) * V + vs, mask=vs < V, other=0.0).to(tl.float32)
    # the order, and what it writes; tiles of one, since the interpreter has no scalar masks
    at = logits + row * logit_stride
    lo = tl.load(at + h).to(tl.float32) + tl.load(order_bias + h).to(tl.float32)
    if HAS_ENTROPY:
        j = tl.arange(0, BH)
        e = tl.load(entropy + row * H + j, mask=j < H, other=0.0).to(narrow).to(tl.float32)
        m = tl.load(mix + h * mix_stride + j, mask=j < H, other=0.0).to(tl.float32)
        lo += tl.sum(e * m, axis=0).to(narrow).to(tl.float32)
    a = order_min + (1.0 - order_min) * sigmoid(lo) + tl.zeros([1], dtype=tl.float32)
    first, inner, last, _, _, _ = prefactors(a)
    strength = 1.0
    if HAS_WRITE:
        strength = sigmoid(
            tl.load(at + H + h).to(tl.float32) + tl.load(write_bias + h).to(tl.float32)
        )
    if HAS_READ:
        all_reads = load_read(at + READ + h * S, read_bias + h * S, tl.arange(0, BS), S)
        most = tl.max(all_reads, axis=0)
        share = S / tl.sum(tl.exp(all_reads - most), axis=0)
    count = base * 0
    if HAS_LOCAL:
        count = tl.load(place + row)
    seed = count.to(tl.uint32) * 0x27D4EB2F
    den = 0.0
    if NORMALIZER == 2:
        bt = tl.load(b + base * K + ks, mask=ks < K, other=0.0)
        after = bt + kt
        den = tl.sum(qt * (after if SELF else bt), axis=0)
        tl.debug_barrier()
        tl.store(b + base * K + ks, after, mask=ks < K)
    acc = tl.zeros([BK, BV], dtype=tl.float32)
    for s0 in tl.static_range(0, S, CS):
        s = s0 + tl.arange(0, CS)
        exponent, _ = exponents(polynomials, a, s[None, :], S, N)
        weights = by_scale(first, inner, last, s[None, :], S) * tl.exp(exponent) * strength
        w = tl.sum(tl.where(s[None, :] < S, weights, 0.0), axis=0)
        if GAINS > 0:
            own = h * GAINS + (s if GAINS > 1 else s * 0)
            log = tl.load(at + GAIN + own, mask=s < S, other=0.0).to(tl.float32)
            log += tl.load(gain_bias + own, mask=s < S, other=0.0).to(tl.float32)
            w *= gain_of(log)
        r = tl.where(s < S, 1.0, 0.0)
        if HAS_READ:
            reads = load_read(at + READ + h * S, read_bias + h * S, s, S)
            r = tl.exp(reads - most) * share
        kept, lost = decay_in_parts(load_rates(log_decay, h, 0, s, S))
        if s0 > 0:
            held = load_states(G, base, s, ks, vs, S, K, V)
        old = aged(held.to(tl.float32), kept[:, None, None], lost[:, None, None])
        written = w[:, None] * kt[None, :]
        new = old + written[:, :, None] * vt[None, None, :]
        acc += tl.sum(r[:, None, None] * (new if SELF else old), axis=0)
        if NORMALIZER == 1:
            sums = b + (base * S + s[:, None]) * K + ks[None, :]
            inside = (s < S)[:, None] & (ks < K)[None, :]
            bt = tl.load(sums, mask=inside, other=0.0)
            bt = aged(bt, kept[:, None], lost[:, None])
            after = bt + written
            den += tl.sum(tl.sum((after if SELF else bt) * r[:, None], axis=0) * qt, axis=0)
        # several threads may hold the same number: all have read before one writes
        tl.debug_barrier()
        offs, mask = places(s, ks, vs, S, K, V)
        new = narrowed(new, pid * (S * K * V) + offs, seed, G.dtype.element_ty)
        tl.store(G + base * (S * K * V) + offs, new, mask=mask)
        if NORMALIZER == 1:
            tl.store(sums, after, mask=inside)
    y = tl.sum(qt[:, None] * acc, axis=0)
    if NORMALIZER > 0:
        y = y / (tl.abs(den) + eps)
    y = y.to(narrow).to(tl.float32)
    if HAS_LOCAL:
        y += tl.load(local + base * V + vs, mask=vs < V, other=0.0).to(tl.float32)
        if h == 0:
            tl.store(seen + row, count + 1)
    if HAS_NORM:
        y *= tl.rsqrt(tl.sum(y * y, axis=0) / V + norm_eps)
        y *= tl.load(norm + vs, mask=vs < V, other=0.0).to(tl.float32)
    if HAS_GATE:
        z = tl.load(gate + row * gate_stride + h * V + vs, mask=vs < V, other=0.0).to(tl.float32)
        y *= z / (1.0 + tl.exp(-z))
    tl.store(out + base * V + vs, y.to(narrow), mask=vs < V)


class StepInputs(NamedTuple):
    """What `memory_step` takes besides the heads.

    Attributes:
        G: `[B, H, S, K, V]` states, float32 or bfloat16.
        b: `[B, H, S, K]` or `[B, H, 1, K]` float32, what the normaliser needs; None without one.
        logits: `[B, H (1 + gate + S read + gains)]`, of orders, write gate, read weights and gains
            in turn; rows may lie apart.
        order_bias: `[H]`.
        write_bias: `[H]`; None without a write gate.
        read_bias: `[H S]`; None without read weights.
        gain_bias: `[H]` or `[H S]`; None: what is written has no gain.
        mix: `[H, H]`, the orders' weight of the entropies, rows may lie apart; None: not seen.
        polynomials: `[S, degree + 1]` of the basis, float32.
        log_decay: `[S]` float32.
        order_min: the lowest order.
        normalizer: "decayed", "undecayed" or "none".
        include_self: whether the token reads what it writes itself.
        eps: of the normaliser.
        gate: `[B, H V]`, the output gate before its silu, rows may lie apart; None without one.
        norm: `[V]`, the weight of the heads' RMS norm; None without one.
        norm_eps: of that norm.
        seen: `[B]` int64, positions so far; None without local attention.
    """

    G: Tensor
    b: Tensor | None
    logits: Tensor
    order_bias: Tensor
    write_bias: Tensor | None
    read_bias: Tensor | None
    gain_bias: Tensor | None
    mix: Tensor | None
    polynomials: Tensor
    log_decay: Tensor
    order_min: float
    normalizer: str
    include_self: bool
    eps: float
    gate: Tensor | None
    norm: Tensor | None
    norm_eps: float
    seen: Tensor | None


def memory_step(heads: HeadsOutputs, inputs: StepInputs) -> Tensor:
    """`[B, H V]`, what the output projection multiplies; states and count move on in place.

    What is retrieved plus what local attention found, normalised and gated. A bfloat16 state is
    rounded at random (the same numbers every time), so it needs the count of local attention.
    """
    G, b = inputs.G, inputs.b
    batch, num_heads, scales, key_dim, value_dim = G.shape
    keys, values = power_of_two(key_dim), power_of_two(value_dim)
    at_once = min(power_of_two(scales, 1), max(1, AT_ONCE // (keys * values)))
    out = heads.v.new_empty(batch, num_heads * value_dim)
    warps = min(16, max(2, at_once * keys * values // 2048))
    logits, gate, mix, gain = inputs.logits, inputs.gate, inputs.mix, inputs.gain_bias
    launch(
        memory_kernel, batch * num_heads, G, b, heads.q, heads.k, heads.v, logits,
        inputs.order_bias, inputs.write_bias, inputs.read_bias, gain, heads.entropy, mix,
        dense(inputs.polynomials.T), inputs.log_decay, heads.local, gate, inputs.norm, heads.place,
        inputs.seen, out, logits.stride(0), 0 if gate is None else gate.stride(0),
        0 if mix is None else mix.stride(0), inputs.order_min, inputs.eps, inputs.norm_eps,
        H=num_heads, R=num_heads // heads.v.shape[1], S=scales, CS=at_once,
        BS=power_of_two(scales, 1), N=inputs.polynomials.shape[1], K=key_dim, V=value_dim,
        BK=keys, BV=values, BH=power_of_two(num_heads),
        GAINS=0 if gain is None else gain.shape[0] // num_heads,
        NORMALIZER=NORMALIZER_CODES[inputs.normalizer], SELF=inputs.include_self,
        HAS_WRITE=inputs.write_bias is not None, HAS_READ=inputs.read_bias is not None,
        HAS_ENTROPY=mix is not None and heads.entropy is not None,
        HAS_LOCAL=heads.local is not None, HAS_GATE=gate is not None,
        HAS_NORM=inputs.norm is not None, tile=Tile(0, warps, 1, early=True),
    )  # fmt: skip
    return out
