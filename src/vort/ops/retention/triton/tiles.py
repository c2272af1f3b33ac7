# mypy: ignore-errors
# ruff: noqa: SIM108  (branches on compile-time constants stay branches)
"""Pieces shared by the retention kernels: where a span lies, how a tile is read, how decays factor.

Tokens are packed: a batch ``[B, T, ...]`` is B sequences of T tokens laid end to end, so that one
indexing serves dense and variable-length inputs. A sequence is cut into *spans*; the S states are
kept at span starts alone, and inside a span the op is a masked matrix, worked on in blocks of
``BT`` tokens.
"""

import triton
import triton.language as tl

# Below this exponent exp2 is zero in float32; it also stands for "masked out" before exp2, so that
# no infinity is ever multiplied by zero.
DEAD = tl.constexpr(-1.0e4)
LOG2E = tl.constexpr(1.4426950408889634)
# A factor of a diagonal block reaches at most 2**REACH: its square overflows only where masked.
REACH = tl.constexpr(115.0)


@triton.jit
def span_bounds(span, table, T, SPANS, SPAN: tl.constexpr, VARLEN: tl.constexpr):
    """First token of a span and the token after its last one (equal for an unused slot)."""
    if VARLEN:
        start = tl.load(table + 2 * span).to(tl.int64)
        end = tl.load(table + 2 * span + 1).to(tl.int64)
    else:
        first = (span // SPANS).to(tl.int64) * T
        start = first + (span % SPANS) * SPAN
        end = tl.minimum(start + SPAN, first + T)
    return start, end


@triton.jit
def load_modes(ptr, t0, n, h, H: tl.constexpr, s, S: tl.constexpr, BT: tl.constexpr):
    """Columns ``s`` (a vector, entries >= S read as zero) of a ``[tokens, H, S]`` tensor."""
    rows = tl.arange(0, BT)
    base = ptr + (t0 * H + h) * S
    mask = (rows[:, None] < n) & (s[None, :] < S)
    x = tl.load(base + rows[:, None] * (H * S) + s[None, :], mask=mask, other=0.0)
    return x.to(tl.float32)


@triton.jit
def load_rates(log_decay, h, rate_h, s, S: tl.constexpr):
    """Decays per token in base 2, ``[len(s)]``; finite even for ``log_decay = -inf``."""
    rate = tl.load(log_decay + h * rate_h + s, mask=s < S, other=0.0).to(tl.float32)
    return tl.maximum(rate * LOG2E, DEAD)


@triton.jit
def load_state(
    ptr, slot, row0, col0, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr
):
    """Tile ``[BK, BV]`` of state number ``slot`` in a ``[slots, K, V]`` buffer."""
    rows = row0 + tl.arange(0, BK)
    cols = col0 + tl.arange(0, BV)
    mask = (rows[:, None] < K) & (cols[None, :] < V)
    return tl.load(ptr + slot * (K * V) + rows[:, None] * V + cols[None, :], mask=mask, other=0.0)


@triton.jit
def load_normalizer(ptr, slot, s, SB: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Tile ``[len(s), BK]`` of a ``[slots, SB, K]`` buffer."""
    cols = tl.arange(0, BK)
    mask = (s[:, None] < SB) & (cols[None, :] < K)
    return tl.load(ptr + slot * (SB * K) + s[:, None] * K + cols[None, :], mask=mask, other=0.0)


@triton.jit
def diagonal_factors(rates, BT: tl.constexpr, GB: tl.constexpr, SD: tl.constexpr):
    """Row and column factors ``[BT, (BT/GB) SD]`` of the decays inside one diagonal block.

    ``exp(l (t-i)) = exp(l (t-m)) exp(l (m-i))`` with m the middle of the GB tokens around i: a
    product over (group, mode) pairs instead of S exponentials per (t, i). Going through the middle
    the exponents stay within GB/2 steps of zero from above, so only decays faster than
    ``REACH / (GB/2)`` need a clamp, which moves a weight of at most 2**-REACH*2/GB.
    Also returned: the signed distances ``t-m`` and ``m-i``.
    """
    n = tl.arange(0, (BT // GB) * SD)
    group = n // SD
    middle = group * GB + GB // 2
    slow = tl.maximum(rates, -REACH * 2 / GB)
    at = tl.arange(0, BT)
    behind = (at[:, None] - middle[None, :]).to(tl.float32)
    row = tl.exp2(tl.where(at[:, None] >= (group * GB)[None, :], slow[None, :] * behind, DEAD))
    col = tl.exp2(tl.where((at // GB)[:, None] == group[None, :], -slow[None, :] * behind, DEAD))
    return row, col, behind


@triton.jit
def causal(BT: tl.constexpr, SELF: tl.constexpr):
    """Mask ``[t, i]`` of a diagonal block."""
    at = tl.arange(0, BT)
    if SELF:
        mask = at[:, None] >= at[None, :]
    else:
        mask = at[:, None] > at[None, :]
    return mask
