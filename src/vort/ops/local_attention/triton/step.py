# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""One token of local attention over a ring that it joins, in place. No gradients.

A program has one sequence and one head of keys. Launches depend on shapes alone: a CUDA graph can
record them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vort.ops.gpu.launcher import Tile, launch, power_of_two

__all__ = ["attend_step"]

ROWS = 64


@triton.jit(do_not_specialize=["window"])
def step_kernel(
    q, k, v, ring_k, ring_v, seen, o, entropy, window, scale,
    HK: tl.constexpr, R: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, BW: tl.constexpr,
):  # fmt: skip
    """R query heads of one key head; the new position takes the slot of the oldest."""
    pid = tl.program_id(0).to(tl.int64)
    row, g = pid // HK, pid % HK
    old = tl.load(seen + row)
    slot = old % window
    ds, vs = tl.arange(0, BD), tl.arange(0, BV)
    new_k = tl.load(k + pid * D + ds, mask=ds < D, other=0.0)
    new_v = tl.load(v + pid * V + vs, mask=vs < V, other=0.0)
    at_k = ring_k + (row * window * HK + g) * D
    at_v = ring_v + (row * window * HK + g) * V
    for r in tl.static_range(R):
        h = pid * R + r
        qt = tl.load(q + h * D + ds, mask=ds < D, other=0.0).to(tl.float32) * scale
        most, total, along = -1e30, 0.0, 0.0
        acc = tl.zeros([BV], dtype=tl.float32)
        for first in range(0, window, BW):
            w = first + tl.arange(0, BW)
            # the ring is full from `window` positions on; the slot of this one comes by itself
            there = (w < window) & ((w < old) | (w == slot))
            held = (there & (w != slot))[:, None]
            kt = tl.load(
                at_k + w[:, None] * (HK * D) + ds[None, :], mask=held & (ds < D)[None, :], other=0.0
            )
            kt = tl.where((w == slot)[:, None], new_k[None, :], kt).to(tl.float32)
            s = tl.sum(kt * qt[None, :], axis=1)
            s = tl.where(there, s, -1e30)
            new = tl.maximum(most, tl.max(s, axis=0))
            fade = tl.exp(most - new)
            p = tl.where(there, tl.exp(s - new), 0.0)
            vt = tl.load(
                at_v + w[:, None] * (HK * V) + vs[None, :], mask=held & (vs < V)[None, :], other=0.0
            )
            vt = tl.where((w == slot)[:, None], new_v[None, :], vt).to(tl.float32)
            acc = acc * fade + tl.sum(p[:, None] * vt, axis=0)
            along = along * fade + tl.sum(p * s, axis=0)
            total = total * fade + tl.sum(p, axis=0)
            most = new
        tl.store(o + h * V + vs, (acc / total).to(o.dtype.element_ty), mask=vs < V)
        # -sum p log p with p = exp(s - most) / total
        tl.store(entropy + h, most + tl.log(total) - along / total)
    tl.store(at_k + slot * (HK * D) + ds, new_k.to(ring_k.dtype.element_ty), mask=ds < D)
    tl.store(at_v + slot * (HK * V) + vs, new_v.to(ring_v.dtype.element_ty), mask=vs < V)


def attend_step(
    q: Tensor, k: Tensor, v: Tensor, ring_k: Tensor, ring_v: Tensor, seen: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output `[B, 1, H, V]` and entropy `[B, 1, H]`; the ring and `seen` move on, in place.

    q `[B, 1, H, D]`, k and v `[B, 1, Hkv, ·]`, ring_k and ring_v `[B, window, Hkv, ·]` contiguous,
    seen `[B]` int64.
    """
    batch, _, heads, dim = q.shape
    kv_heads, width = k.shape[2], v.shape[3]
    q, k, v = (x.contiguous() for x in (q, k, v))
    o = v.new_empty(batch, 1, heads, width)
    entropy = q.new_empty(batch, 1, heads, dtype=torch.float32)
    launch(
        step_kernel, batch * kv_heads, q, k, v, ring_k, ring_v, seen, o, entropy,
        ring_k.shape[1], scale, HK=kv_heads, R=heads // kv_heads, D=dim, V=width,
        BD=power_of_two(dim), BV=power_of_two(width), BW=ROWS, tile=Tile(0, 4, 1),
    )  # fmt: skip
    seen.add_(1)
    return o, entropy
