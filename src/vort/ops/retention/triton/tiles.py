# mypy: ignore-errors

"""Pieces shared by the retention kernels: where a span lies, how a tile is read, how decays factor.

Tokens are packed: a batch ``[B, T, ...]`` is B sequences of T tokens laid end to end, so that one
indexing serves dense and variable-length inputs. A sequence is cut into *spans*; the S states are
kept at span starts alone, and inside a span the op is a masked matrix, worked on in blocks of
``BT`` tokens.
"""

import triton
import triton.language as tl

from vort.ops.gpu.parts import LOG2E, load_column, uniform

# Below this exponent exp2 is zero in float32; it also stands for "masked out" before exp2, so that
# no infinity is ever multiplied by zero.
DEAD = tl.constexpr(-1.0e4)
# A scale is forgotten after decaying by 2**-MEMORY, far below float32's last bit.
MEMORY = tl.constexpr(40.0)


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
def wanted_blocks(wanted, span, block, BLOCKS: tl.constexpr):
    """Of a span's blocks from ``block`` on: the first that is wanted, and the one after the last.

    An empty range where none is.
    """
    at = tl.arange(0, BLOCKS)
    kept = (tl.load(wanted + span * BLOCKS + at) != 0) & (at >= block)
    first = tl.min(tl.where(kept, at, BLOCKS), axis=0)
    last = tl.max(tl.where(kept, at + 1, 0), axis=0)
    return uniform(first), uniform(last)


@triton.jit
def load_scales(ptr, t0, n, h, H: tl.constexpr, s, S: tl.constexpr, BT: tl.constexpr):
    """Columns ``s`` (a vector, entries >= S read as zero) of a ``[tokens, H, S]`` tensor.

    n: see :func:`load_rows`.
    """
    if S == 1:
        # not as a tile, of which one number in a row would be loaded
        x = tl.where(s[None, :] == 0, load_column(ptr, t0, n, h, H, 0, 1, BT)[:, None], 0.0)
    else:
        rows = tl.arange(0, BT)
        base = ptr + (t0 * H + h) * S
        if n is not None:
            mask = (rows[:, None] < n) & (s[None, :] < S)
            x = tl.load(base + rows[:, None] * (H * S) + s[None, :], mask=mask, other=0.0)
        else:
            at = rows[:, None] * (H * S) + s[None, :]
            x = tl.load(base + at, mask=s[None, :] < S, other=0.0)
    return x.to(tl.float32)


@triton.jit
def load_rates(log_decay, h, rate_h, s, S: tl.constexpr):
    """Decays per token in base 2, ``[len(s)]``; finite even for ``log_decay = -inf``."""
    rate = tl.load(log_decay + h * rate_h + s, mask=s < S, other=0.0).to(tl.float32)
    return tl.maximum(rate * LOG2E, DEAD)


@triton.jit
def remembered(rates, tokens, S: tl.constexpr, SP: tl.constexpr):
    """Scales from the first to the last that is not forgotten after so many tokens.

    Where scales are sorted, slowest first, fast ones need no state beyond a span's first block.
    """
    scales = tl.arange(0, SP)
    kept = (scales < S) & (rates * tokens > -MEMORY)
    return uniform(tl.max(tl.where(kept, scales + 1, 0), axis=0))


@triton.jit
def column_of(x, s, SP: tl.constexpr):
    """Column ``s`` of a tile ``[BT, SP]`` in registers.

    A load that no product takes is not asked for ahead by the compiler: a step would wait for it.
    """
    return tl.sum(tl.where(tl.arange(0, SP)[None, :] == s, x, 0.0), axis=1)


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
def _slow(rates, BT: tl.constexpr):
    """Rates at which half a block of decay is a float32 whose inverse is one too."""
    REACH: tl.constexpr = 110.0 if BT >= 64 else 100.0
    return tl.maximum(rates, -REACH * 2 / BT)


@triton.jit
def row_factors(rates, lead, BT: tl.constexpr):
    """``[BT, scales]``: how a block of rows t sees each scale; see :func:`column_factors`."""
    steps = (lead - BT // 2 + tl.arange(0, BT)).to(tl.float32)
    return tl.exp2(_slow(rates, BT)[None, :] * steps[:, None])


@triton.jit
def column_factors(rates, lead, BT: tl.constexpr, CT: tl.constexpr):
    """``[CT, scales]``: what CT columns i, a block or a part of one, leave in each scale.

    ``exp(l (t-i)) = exp(l (t-m)) exp(l (m-i))`` with m the middle of a block: a product over scales
    instead of S exponentials for each (t, i). ``lead``, the tokens from the first column to the
    first row, goes to either side. In a block with itself exponents reach from -BT/2 to BT/2
    steps; a scale too fast for that in float32 is slowed down beyond lag 1, which it still meets
    exactly: the weight of lag 2 is then too large by at most 2**-8.9 of that of lag 0 in blocks of
    64, less than bfloat16 sees, and by 2**-27 in blocks of 16. Lag 0 is left to the caller.
    """
    slow = _slow(rates, BT)
    steps = (lead + BT // 2 - tl.arange(0, CT)).to(tl.float32)
    return tl.exp2((rates - slow)[None, :] + slow[None, :] * steps[:, None])


@triton.jit
def later(BT: tl.constexpr):
    """Mask ``[t, i]`` of a block with itself: t after i."""
    at = tl.arange(0, BT)
    return at[:, None] > at[None, :]


@triton.jit
def same(BT: tl.constexpr):
    """Mask ``[t, i]`` of a block with itself: t is i."""
    at = tl.arange(0, BT)
    return at[:, None] == at[None, :]


@triton.jit
def with_itself(w, own, seen, SELF: tl.constexpr, BT: tl.constexpr):
    """Weights of a block with itself, from those of its factors: nothing later, and lag 0 apart.

    own: ``[BT, scales]``, what write and read weights make of lag 0; seen: :func:`later`, or its
    transpose where w is.
    """
    w = tl.where(seen, w, 0.0)
    if SELF:
        w = tl.where(same(BT), tl.sum(own, axis=1)[:, None], w)
    return w
