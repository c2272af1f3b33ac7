# mypy: ignore-errors
"""One token of generation: every head and scale of a state, read and written once, in place.

The state is all the traffic there is, so each program streams one head's matrices through
registers. Launches depend on shapes alone: a CUDA graph can record them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vort.ops.gpu.launcher import Tile, dense, launch, power_of_two
from vort.ops.retention.inputs import DEFAULT_EPS, Inputs
from vort.ops.retention.state import RetentionState, starting_state

from .spans import NORMALIZER_CODES
from .tiles import load_rates

__all__ = ["retention_decode", "retention_step_triton"]


@triton.jit
def decay_in_parts(rate):
    """What a step keeps of a state as it is, 1 or 0, and the share of it that it then takes off.

    A float32 near 1 would leave 2^rate of a slow state few digits, and 1 less one near 1 would
    leave that of a fast one none: of that nothing is kept, and the share is -2^rate.
    """
    x = rate * 0.6931471805599453
    series = x * (1.0 + x * (0.5 + x * (0.16666667 + x * 0.041666668)))
    left = tl.exp2(rate)
    slow = rate >= -1.0
    share = -tl.where(slow, tl.where(x > -0.05, series, left - 1.0), left)
    return tl.where(slow, 1.0, 0.0), share


@triton.jit
def aged(state, kept, share):
    """A state after the step that `decay_in_parts` speaks of, rounded once."""
    return tl.fma(state, -share, state * kept)


@triton.jit(do_not_specialize=["rate_h"])
def step_kernel(
    G, b, q, k, v, write, read, log_decay, o, rate_h, eps,
    H: tl.constexpr, S: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, NORM: tl.constexpr, HAS_READ: tl.constexpr,
    SELF: tl.constexpr,
):  # fmt: skip
    """BV value columns of one (sequence, head): decay, write, read; b stays as it is."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    vb = pid % NV
    row = pid // NV
    h = row % H
    ks = tl.arange(0, BK)
    vs = vb * BV + tl.arange(0, BV)
    base = row.to(tl.int64)
    qt = tl.load(q + base * K + ks, mask=ks < K, other=0.0).to(tl.float32)
    kt = tl.load(k + base * K + ks, mask=ks < K, other=0.0).to(tl.float32)
    vt = tl.load(v + base * V + vs, mask=vs < V, other=0.0).to(tl.float32)
    mask = (ks[:, None] < K) & (vs[None, :] < V)
    offs = ks[:, None] * V + vs[None, :]
    acc = tl.zeros([BK, BV], dtype=tl.float32)
    den = 0.0
    if NORM == 2:
        b0 = tl.load(b + base * K + ks, mask=ks < K, other=0.0)
        if SELF:
            b0 += kt
        den = tl.sum(qt * b0, axis=0)
    for s in range(S):
        kept, share = decay_in_parts(load_rates(log_decay, h, rate_h, s, S))
        w = tl.load(write + base * S + s).to(tl.float32)
        r = 1.0
        if HAS_READ:
            r = tl.load(read + base * S + s).to(tl.float32)
        at = G + (base * S + s) * (K * V) + offs
        old = aged(tl.load(at, mask=mask, other=0.0), kept, share)
        new = old + (w * kt)[:, None] * vt[None, :]
        tl.store(at, new, mask=mask)
        if SELF:
            acc += r * new
        else:
            acc += r * old
        if NORM == 1:
            bs = tl.load(b + (base * S + s) * K + ks, mask=ks < K, other=0.0)
            bs = aged(bs, kept, share)
            if SELF:
                bs += w * kt
            den += r * tl.sum(qt * bs, axis=0)
    ot = tl.sum(qt[:, None] * acc, axis=0)
    if NORM > 0:
        ot = ot / (tl.abs(den) + eps)
    tl.store(o + base * V + vs, ot.to(o.dtype.element_ty), mask=vs < V)


@triton.jit(do_not_specialize=["rate_h"])
def step_sums_kernel(
    b, k, write, log_decay, rate_h,
    H: tl.constexpr, S: tl.constexpr, SB: tl.constexpr, SP: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """b of one (sequence, head), after every value block has read the old one."""
    row = tl.program_id(0)
    base = row.to(tl.int64)
    s = tl.arange(0, SP)
    ks = tl.arange(0, BK)
    mask = (s[:, None] < SB) & (ks[None, :] < K)
    kt = tl.load(k + base * K + ks, mask=ks < K, other=0.0).to(tl.float32)
    at = b + base * (SB * K) + s[:, None] * K + ks[None, :]
    old = tl.load(at, mask=mask, other=0.0)
    if NORM == 1:
        kept, share = decay_in_parts(load_rates(log_decay, row % H, rate_h, s, S))
        w = tl.load(write + base * S + s, mask=s < S, other=0.0).to(tl.float32)
        new = aged(old, kept[:, None], share[:, None]) + w[:, None] * kt[None, :]
    else:
        new = old + kt[None, :]
    tl.store(at, new, mask=mask)


@torch.library.custom_op("vort::retention_step", mutates_args=("G", "b"))
def _step(
    G: Tensor,
    b: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    read: Tensor | None,
    normalizer: str,
    include_self: bool,
    eps: float,
) -> Tensor:
    """Output `[N, H, V]` of one token; G and b move on by it."""
    sequences, heads, num_scales, key_dim, value_dim = G.shape
    q, k, v, write, log_decay, read = (dense(x) for x in (q, k, v, write, log_decay, read))
    o = torch.empty_like(v)
    columns = min(power_of_two(value_dim), 64)
    keys = power_of_two(key_dim)
    rate_h = num_scales if log_decay.dim() == 2 else 0
    code = NORMALIZER_CODES[normalizer]
    sizes = {"H": heads, "S": num_scales, "K": key_dim, "BK": keys, "NORM": code}
    rows = sequences * heads
    launch(
        step_kernel, rows * -(-value_dim // columns),
        G, b, q, k, v, write, read, log_decay, o, rate_h, eps,
        V=value_dim, BV=columns, HAS_READ=read is not None, SELF=include_self,
        tile=Tile(columns, 4 if keys <= 64 else 8, 3), **sizes,
    )  # fmt: skip
    if b is not None:
        launch(
            step_sums_kernel, rows, b, k, write, log_decay, rate_h,
            SB=b.shape[2], SP=power_of_two(b.shape[2], 1), tile=Tile(0, 2, 3), **sizes,
        )  # fmt: skip
    return o


@_step.register_fake
def _(G, b, q, k, v, *others):
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def retention_decode(inputs: Inputs) -> tuple[Tensor, RetentionState | None]:
    """What `retention` returns for one token, T = 1, that no gradient goes through."""
    # moved on in place, so not those of the caller
    own = {"memory_format": torch.contiguous_format}
    state = RetentionState(*(None if x is None else x.clone(**own) for x in starting_state(inputs)))
    read = None if inputs.read is None else inputs.read[:, 0]
    tokens = (x[:, 0] for x in inputs[:4])
    options = (inputs.normalizer, inputs.include_self, inputs.eps)
    o = _step(*state, *tokens, inputs.log_decay, read, *options)
    return o.unsqueeze(1), state if inputs.output_final_state else None


def retention_step_triton(
    state: RetentionState,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    *,
    read: Tensor | None = None,
    normalizer: str = "decayed",
    include_self: bool = True,
    eps: float = DEFAULT_EPS,
) -> Tensor:
    """Output `[N, H, V]` of one more token; `state` is moved on by it, in place. No gradients.

    q, k [N, H, K]; v [N, H, V]; write, read [N, H, S]; log_decay [S] or [H, S]. The state's tensors
    must be contiguous float32. May be recorded in a CUDA graph.
    """
    for name, x in (("G", state.G), ("b", state.b)):
        if x is not None and (x.dtype != torch.float32 or not x.is_contiguous()):
            raise ValueError(
                f"state.{name} must be contiguous float32, got {x.dtype} with strides {x.stride()}"
            )
    if normalizer != "none" and state.b is None:
        raise ValueError(f"state.b must be given for normalizer={normalizer!r}, got None")
    b = None if normalizer == "none" else state.b
    with torch.no_grad():
        return _step(state.G, b, q, k, v, write, log_decay, read, normalizer, include_self, eps)
