"""Local attention for decoding: a ring buffer that holds the keys and values of one window.

Position p lives in slot p mod window. Softmax does not care about the order of its keys, so a step
reads the ring as it lies.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .attention import attend, local_attention, silence
from .block import MASKED
from .checks import check_heads, check_padding_mask, check_window
from .rope import apply_rope


class LocalAttentionCache(NamedTuple):
    """The last `window` keys (turned by RoPE where it is used) and values of every sequence.

    Attributes:
        k: `[B, window, Hkv, D]`.
        v: `[B, window, Hkv, V]`.
        valid: `[B, window]` bool; False for slots not yet written and for padding.
        seen: positions seen so far, a 0-d int64 tensor (a tensor, so that a compiled step need
            not be compiled again for every position).
    """

    k: Tensor
    v: Tensor
    valid: Tensor
    seen: Tensor

    @property
    def window(self) -> int:
        """Return the number of positions that the ring holds."""
        return self.k.shape[1]

    @classmethod
    def empty(
        cls,
        batch: int,
        window: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> "LocalAttentionCache":
        """Return a cache that has seen nothing.

        Example:
            >>> LocalAttentionCache.empty(2, 16, 4, 64).k.shape
            torch.Size([2, 16, 4, 64])
        """
        check_window(window)
        value_dim = head_dim if value_dim is None else value_dim
        return cls(
            torch.zeros(batch, window, kv_heads, head_dim, dtype=dtype, device=device),
            torch.zeros(batch, window, kv_heads, value_dim, dtype=dtype, device=device),
            torch.zeros(batch, window, dtype=torch.bool, device=device),
            torch.zeros((), dtype=torch.int64, device=device),
        )

    def in_order(self) -> "LocalAttentionCache":
        """Return the same content with the oldest position in slot 0."""
        slots = (self.seen + torch.arange(self.window, device=self.k.device)) % self.window
        k, v, valid = (x.index_select(1, slots) for x in self[:3])
        return LocalAttentionCache(k, v, valid, self.seen)


def local_attention_step(
    cache: LocalAttentionCache,
    q_t: Tensor,
    k_t: Tensor,
    v_t: Tensor,
    *,
    scale: float | None = None,
    rope_base: float | None = None,
    padding_mask: Tensor | None = None,
    return_entropy: bool = False,
) -> tuple[Tensor, Tensor | None, LocalAttentionCache]:
    """Return output, entropy (or None) and the cache after one more position.

    Shapes: q_t `[B, H, D]`, k_t `[B, Hkv, D]`, v_t `[B, Hkv, V]`, padding_mask `[B]` bool; output
    `[B, H, V]`, entropy `[B, H]`. The window is that of the cache. The given cache is left as it
    is, so a search may branch from it.

    Example:
        >>> cache = LocalAttentionCache.empty(1, window=4, kv_heads=2, head_dim=8)
        >>> for _ in range(10):
        ...     x = torch.randn(1, 2, 8)
        ...     o, entropy, cache = local_attention_step(cache, x, x, x, return_entropy=True)
        >>> o.shape, entropy.shape, int(cache.seen)
        (torch.Size([1, 2, 8]), torch.Size([1, 2]), 10)
    """
    check_heads(q_t, k_t, v_t, layout="[B, H, D]")
    check_padding_mask(padding_mask, q_t.shape[:1])
    _check_cache(cache, k_t, v_t)
    B, _, D = q_t.shape
    if rope_base is not None:
        q_t = apply_rope(q_t, cache.seen, rope_base)
        k_t = apply_rope(k_t, cache.seen, rope_base)
    real = cache.valid.new_ones(B) if padding_mask is None else padding_mask
    q_t, k_t, v_t = (silence(x, real) for x in (q_t, k_t, v_t))
    here = torch.arange(cache.window, device=k_t.device) == cache.seen % cache.window
    k = torch.where(here[:, None, None], k_t[:, None], cache.k)
    v = torch.where(here[:, None, None], v_t[:, None], cache.v)
    valid = torch.where(here, real[:, None], cache.valid)
    o, entropy = _attend_row(q_t, k, v, valid & real[:, None], D**-0.5 if scale is None else scale)
    after = LocalAttentionCache(k, v, valid, cache.seen + 1)
    return o.to(v_t.dtype), entropy if return_entropy else None, after


def _attend_row(
    q: Tensor, k: Tensor, v: Tensor, valid: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend from `[B, H, D]` to every valid slot of `[B, window, Hkv, D]`."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    with torch.autocast(q.device.type, enabled=False):
        q = q.to(dtype).view(q.shape[0], k.shape[2], -1, q.shape[-1])
        scores = torch.einsum("bgrd,bjgd->bgrj", q, k.to(dtype)) * scale
        forbidden = ~valid[:, None, None]
        scores = scores.masked_fill(forbidden, MASKED)
        p, log_p = scores.softmax(-1).masked_fill(forbidden, 0), scores.log_softmax(-1)
        o = torch.einsum("bgrj,bjgd->bgrd", p, v.to(dtype)).flatten(1, 2)
        entropy = -torch.linalg.vecdot(p, log_p).flatten(1, 2)
    return o, entropy


def local_attention_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    cache: LocalAttentionCache | None = None,
    scale: float | None = None,
    rope_base: float | None = None,
    padding_mask: Tensor | None = None,
    return_entropy: bool = False,
) -> tuple[Tensor, Tensor | None, LocalAttentionCache]:
    """Return output, entropy (or None) and the cache after all positions of `q`, `k`, `v`.

    Shapes as in `local_attention`. With `cache` the sequence goes on where that one ended, so a
    long prompt may come in pieces of any length.

    Example:
        >>> q, k, v = torch.randn(3, 1, 20, 2, 8)
        >>> whole, _ = local_attention(q, k, v, window=4)
        >>> a, _, cache = local_attention_prefill(q[:, :7], k[:, :7], v[:, :7], window=4)
        >>> b, _, cache = local_attention_prefill(
        ...     q[:, 7:], k[:, 7:], v[:, 7:], window=4, cache=cache
        ... )
        >>> torch.allclose(torch.cat([a, b], dim=1), whole, atol=1e-6), int(cache.seen)
        (True, 20)
    """
    check_window(window)
    check_heads(q, k, v)
    B, T, _, D = q.shape
    check_padding_mask(padding_mask, q.shape[:2])
    past = _past(cache, k, v, window)
    if rope_base is not None:
        position = past.seen + torch.arange(T, device=q.device)
        q, k = apply_rope(q, position, rope_base), apply_rope(k, position, rope_base)
    real = past.valid.new_ones(B, T) if padding_mask is None else padding_mask
    q, k, v = (silence(x, real) for x in (q, k, v))
    keys, values = (torch.cat([a, b.to(a.dtype)], dim=1) for a, b in ((past.k, k), (past.v, v)))
    valid = torch.cat([past.valid, real], dim=1)
    after = _ring(keys[:, T:], values[:, T:], valid[:, T:], past.seen + T)
    scale = D**-0.5 if scale is None else float(scale)
    if cache is None or T == 0:  # nothing before the first position: no mask is needed for it
        o, entropy = local_attention(
            q, k, v, window, scale=scale, padding_mask=padding_mask, return_entropy=return_entropy
        )
        return o, entropy, after
    o, entropy = attend(
        q,
        keys[:, 1:],
        values[:, 1:],
        window,
        scale=scale,
        valid=valid[:, 1:],
        return_entropy=return_entropy,
    )
    entropy = None if entropy is None else entropy.masked_fill(~real[..., None], 0)
    return silence(o, real).to(v.dtype), entropy, after


def _past(
    cache: LocalAttentionCache | None, k: Tensor, v: Tensor, window: int
) -> LocalAttentionCache:
    """Return the given cache in order, or an empty one that fits `k` and `v`."""
    if cache is None:
        sizes = (k.shape[0], window, k.shape[2], k.shape[3], v.shape[3])
        return LocalAttentionCache.empty(*sizes, dtype=k.dtype, device=k.device)
    _check_cache(cache, k, v)
    if cache.window != window:
        raise ValueError(f"window must be that of the cache, {cache.window}, got {window}")
    return cache.in_order()


def _ring(k: Tensor, v: Tensor, valid: Tensor, seen: Tensor) -> LocalAttentionCache:
    """Return the cache after `seen` positions, given the last `window` of them in order."""
    window = k.shape[1]
    order = (torch.arange(window, device=k.device) - seen) % window
    k, v, valid = (x.index_select(1, order) for x in (k, v, valid))
    return LocalAttentionCache(k, v, valid, seen)


def _check_cache(cache: LocalAttentionCache, k: Tensor, v: Tensor) -> None:
    for name, held, x in (("k", cache.k, k), ("v", cache.v, v)):
        wanted = (x.shape[0], *x.shape[-2:])
        if (held.shape[0], *held.shape[2:]) != wanted:
            raise ValueError(
                f"cache.{name} must be [{wanted[0]}, window, {wanted[1]}, {wanted[2]}] to go with "
                f"{name}, got shape {tuple(held.shape)}"
            )
