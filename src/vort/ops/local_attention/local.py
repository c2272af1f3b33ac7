"""Local attention with a state for each row, so that rows of one batch may differ in length."""

from typing import NamedTuple

import torch
from torch import Tensor

from vort.ops.local_attention import (
    LocalAttentionCache,
    apply_rope,
    local_attention,
    local_attention_prefill,
    local_attention_step,
)
from vort.ops.padding import keep_last

__all__ = ["LocalState", "attend_locally"]


class LocalState(NamedTuple):
    """The last `window` keys (turned by RoPE) and values, oldest first, right-aligned.

    Attributes:
        k: `[B, window, Hkv, D]`.
        v: `[B, window, Hkv, V]`.
        seen: `[B]` int64, real positions each row has seen so far.
    """

    k: Tensor
    v: Tensor
    seen: Tensor

    @classmethod
    def empty(cls, k: Tensor, v: Tensor, window: int) -> "LocalState":
        """The state before the first of `k` and `v` `[B, T, Hkv, ·]`."""
        shape = (k.shape[0], window, k.shape[2])
        return cls(
            k.new_zeros(*shape, k.shape[3]),
            v.new_zeros(*shape, v.shape[3]),
            torch.zeros(k.shape[0], dtype=torch.int64, device=k.device),
        )

    def as_ring(self) -> LocalAttentionCache:
        """The same for the op: a ring whose next slot, 0, holds the oldest position."""
        window = self.k.shape[1]
        slots = torch.arange(window, device=self.k.device)
        valid = slots >= window - self.seen[:, None]
        return LocalAttentionCache(self.k, self.v, valid, torch.zeros_like(self.seen[0]))


def attend_locally(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    rope_base: float | None = None,
    state: LocalState | None = None,
    real: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_entropy: bool = False,
    output_state: bool = False,
) -> tuple[Tensor, Tensor | None, LocalState | None]:
    """Output `[B, T, H, V]`, entropy `[B, T, H]` and state of attention within a window.

    q `[B, T, H, D]`, k and v `[B, T, Hkv, ·]`; real `[B, T]` and lengths `[B]` say which positions
    at the front of each row are tokens. cu_seqlens packs sequences where no state is involved.

    >>> q, k, v = torch.randn(3, 2, 9, 1, 4)
    >>> whole, _, _ = attend_locally(q, k, v, 3)
    >>> _, _, state = attend_locally(q[:, :5], k[:, :5], v[:, :5], 3, output_state=True)
    >>> rest, _, _ = attend_locally(q[:, 5:], k[:, 5:], v[:, 5:], 3, state=state)
    >>> torch.allclose(rest, whole[:, 5:], atol=1e-6)
    True
    """
    if state is None and not output_state:
        o, entropy = local_attention(
            q,
            k,
            v,
            window,
            rope_base=rope_base,
            padding_mask=real,
            cu_seqlens=cu_seqlens,
            return_entropy=return_entropy,
        )
        return o, entropy, None
    past = LocalState.empty(k, v, window) if state is None else state
    if rope_base is not None:
        position = past.seen[:, None] + torch.arange(q.shape[1], device=q.device)
        q, k = apply_rope(q, position, rope_base), apply_rope(k, position, rope_base)
    if state is None:
        o, entropy = local_attention(
            q, k, v, window, padding_mask=real, return_entropy=return_entropy
        )
    else:
        o, entropy = _continue(q, k, v, window, past, real, return_entropy)
    added = q.shape[1] if lengths is None else lengths
    kept_k, kept_v = keep_last(past.k, k, lengths), keep_last(past.v, v, lengths)
    return o, entropy, LocalState(kept_k, kept_v, past.seen + added)


def _continue(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    past: LocalState,
    real: Tensor | None,
    return_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of new positions to those of the window and to each other."""
    ring = past.as_ring()
    if q.shape[1] == 1:
        mask = None if real is None else real[:, 0]
        o, entropy, _ = local_attention_step(
            ring, q[:, 0], k[:, 0], v[:, 0], padding_mask=mask, return_entropy=return_entropy
        )
        return o.unsqueeze(1), None if entropy is None else entropy.unsqueeze(1)
    o, entropy, _ = local_attention_prefill(
        q, k, v, window, cache=ring, padding_mask=real, return_entropy=return_entropy
    )
    return o, entropy
