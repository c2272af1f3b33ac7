# mypy: ignore-errors
# ruff: noqa: SIM108  (branches on compile-time constants stay branches)
"""What every token weighs in the states at its span's edge, written down before the walk.

The walk then has nothing to do to a tile but to load it, scale it and multiply: Triton scales in
the registers a product reads from. With exponentials in between it would go through shared memory.
"""

import triton
import triton.language as tl

from .tiles import load_modes, load_rates, span_bounds


@triton.jit
def _lags(part, n, BL: tl.constexpr, REVERSE: tl.constexpr):
    """Tokens to the span's last one (forward) or from the one before its first (backward)."""
    at = tl.arange(0, BL)
    if REVERSE:
        lag = at + part * BL + 1
    else:
        lag = tl.maximum(n - 1 - at, 0)
    return lag.to(tl.float32)


@triton.jit(do_not_specialize=["T", "SPANS", "rate_h"])
def weights_kernel(
    log_decay, weight, out, table, T, SPANS, rate_h,
    H: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, SPAN: tl.constexpr, BL: tl.constexpr,
    REVERSE: tl.constexpr, HAS_WEIGHT: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """``out[slot, h, s, at]``: what a token of a span weighs in a state at the span's edge."""
    PARTS: tl.constexpr = SPAN // BL
    pid = tl.program_id(0)
    part = pid % PARTS
    h = (pid // PARTS) % H
    slot = pid // (PARTS * H)
    start, end = span_bounds(slot, table, T, SPANS, SPAN, VARLEN)
    left = (end - start).to(tl.int32) - part * BL
    modes = tl.arange(0, SP)
    at = tl.arange(0, BL)
    rates = load_rates(log_decay, h, rate_h, modes, S)
    w = tl.exp2(rates[None, :] * _lags(part, left, BL, REVERSE)[:, None])
    if HAS_WEIGHT:
        w *= load_modes(weight, start + part * BL, left, h, H, modes, S, BL)
    w = tl.where(at[:, None] < left, w, 0.0)
    where = ((slot * H + h).to(tl.int64) * S + modes[None, :]) * SPAN + part * BL + at[:, None]
    tl.store(out + where, w.to(out.dtype.element_ty), mask=(modes < S)[None, :])
