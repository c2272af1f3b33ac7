"""Local attention in linear memory, forward and backward, tile by tile.

Scores of all blocks take T * span numbers, linear in T but many. They are never held at once: a
few blocks at a time make a tile that fits in cache, and the backward pass computes each tile
again instead of storing it. With p = softmax(s) and H = -sum p log p a row of scores receives

    ds = p (dp - sum p dp - dH (log p + H)),     dp_j = do·v_j,     sum p dp = do·o.

The pair is registered as an operator of its own, so that `torch.compile` takes it whole and does
not unroll the loop over tiles for every new length.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .layout import BlockLayout

# Finite, because 0 * MASKED must be 0; far below any score, yet its products stay finite.
MASKED = -1e20
# Scores in one tile. On a CPU a tile of float32 should stay in the cache; a GPU wants few launches.
TILE_CPU, TILE_GPU = 2**19, 2**26


class _Tiles:
    """Padded inputs, read a few blocks at a time with batch, heads and blocks folded together."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        start: Tensor | None,
        valid: Tensor | None,
        window: int,
        scale: float,
    ) -> None:
        self.layout = layout = BlockLayout.plan(q.shape[1], k.shape[1], window)
        self.dtype, self.scale = _working_dtype(q, k, v), scale
        self.batch, self.heads, self.kv_heads = q.shape[0], q.shape[2], k.shape[2]
        self.q, self.k, self.v = layout.pad_queries(q), layout.pad_keys(k), layout.pad_keys(v)
        self.start = None if start is None else layout.pad_queries(start[None])[0]
        self.valid = None if valid is None else layout.pad_keys(valid)
        band = layout.band(q.device)
        bias = torch.zeros_like(band, dtype=self.dtype).masked_fill_(~band, MASKED)
        self.bias = bias.repeat(self.heads // self.kv_heads, 1)

    def groups(self) -> Iterator[tuple[int, int]]:
        """Yield (first block, number of blocks) so that the scores of each fit the budget."""
        layout = self.layout
        budget = TILE_CPU if self.q.device.type == "cpu" else TILE_GPU
        step = max(1, budget // (self.batch * self.heads * layout.size * layout.span))
        for first in range(0, layout.blocks, step):
            yield first, min(step, layout.blocks - first)

    def rows(self, x: Tensor, first: int, count: int) -> Tensor:
        """Return rows of a padded `[B, n, H, D]` as `[B Hkv count, R size, D]`."""
        return self._fold(self.layout.query_blocks(x, first, count, self.kv_heads))

    def stretches(self, x: Tensor, first: int, count: int) -> Tensor:
        """Return stretches of padded keys `[B, n, Hkv, D]` as `[B Hkv count, span, D]`."""
        return self._fold(self.layout.key_stretches(x, first, count).permute(0, 2, 1, 4, 3))

    def _fold(self, x: Tensor) -> Tensor:
        x = x.to(self.dtype)
        return x.reshape(x.shape[:3].numel(), -1, x.shape[-1])

    def put_rows(self, target: Tensor, x: Tensor, first: int, count: int) -> None:
        """Write `[B Hkv count, R size, D]` to its rows of a padded `[B, n, H, D]`."""
        self.layout.query_blocks(target, first, count, self.kv_heads).copy_(self._spread(x, count))

    def add_stretches(self, target: Tensor, x: Tensor, first: int, count: int) -> None:
        """Add `[B Hkv count, span, D]` to padded keys."""
        x = x.view(self.batch, self.kv_heads, count, *x.shape[1:])
        self.layout.add_stretches(target, x, first)

    def _spread(self, x: Tensor, count: int) -> Tensor:
        return x.view(self.batch, self.kv_heads, count, -1, self.layout.size, x.shape[-1])

    def weights(
        self, q: Tensor, k: Tensor, first: int, count: int, *, log: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attention weights p and, with `log`, log p."""
        scores = torch.baddbmm(self.bias, q, k.mT, alpha=self.scale)
        forbidden = self._forbidden(first, count)
        if forbidden is not None:
            self._spread(scores, count).masked_fill_(forbidden, MASKED)
        # Both from the scores: PyTorch's exp alone takes three times as long as either on a CPU.
        p = scores.softmax(-1)
        log_p = scores.log_softmax(-1) if log else None
        if forbidden is not None:  # only here can a row have no key at all
            self._spread(p, count).masked_fill_(forbidden, 0)
        return p, log_p

    def _forbidden(self, first: int, count: int) -> Tensor | None:
        """Return what the band alone does not rule out; None away from the start if it is all."""
        layout = self.layout
        if self.start is None and self.valid is None and first >= layout.before:
            return None
        keys = layout.key_numbers(first, count, self.q.device).view(1, 1, count, 1, 1, -1)
        forbidden = keys < 0
        if self.start is not None:
            start = self.start.narrow(0, first * layout.size, count * layout.size)
            forbidden = forbidden | (keys < start.view(1, 1, count, 1, -1, 1))
        if self.valid is not None:
            valid = layout.key_stretches(self.valid, first, count)
            forbidden = forbidden | ~valid[:, None, :, None, None]
        return forbidden


def _working_dtype(*tensors: Tensor) -> torch.dtype:
    wide = any(x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


@torch.library.custom_op("vort::local_attention", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    valid: Tensor | None,
    window: int,
    scale: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        tiles = _Tiles(q, k, v, start, valid, window, scale)
        rows = tiles.q.shape[:3]
        o = v.new_empty(*rows, v.shape[-1])
        entropy = q.new_empty(*rows, int(with_entropy), dtype=tiles.dtype)
        for first, count in tiles.groups():
            q_tile = tiles.rows(tiles.q, first, count)
            k_tile = tiles.stretches(tiles.k, first, count)
            p, log_p = tiles.weights(q_tile, k_tile, first, count, log=with_entropy)
            tile_o = torch.bmm(p, tiles.stretches(tiles.v, first, count))
            tiles.put_rows(o, tile_o, first, count)
            if log_p is not None:
                row_entropy = -torch.linalg.vecdot(p, log_p)[..., None]
                tiles.put_rows(entropy, row_entropy, first, count)
    entropy = entropy[:, : q.shape[1]].squeeze(-1) if with_entropy else entropy.flatten()
    return o[:, : q.shape[1]].contiguous(), entropy.contiguous()


@_attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    valid: Tensor | None,
    window: int,
    scale: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    shape = q.shape[:3] if with_entropy else (0,)
    return v.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(shape, dtype=_working_dtype(q, k, v))


@torch.library.custom_op("vort::local_attention_backward", mutates_args=())
def _attend_backward(
    grad_o: Tensor,
    grad_entropy: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    valid: Tensor | None,
    o: Tensor,
    entropy: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(q.device.type, enabled=False):
        tiles = _Tiles(q, k, v, start, valid, window, scale)
        pad = tiles.layout.pad_queries
        grad_q = torch.empty_like(tiles.q)
        grad_k = torch.zeros_like(tiles.k, dtype=tiles.dtype)
        grad_v = torch.zeros_like(tiles.v, dtype=tiles.dtype)
        # What is one number for each row in ds / p: sum p dp + dH H.
        shared = torch.linalg.vecdot(grad_o.to(tiles.dtype), o.to(tiles.dtype))[..., None]
        if grad_entropy is not None:
            grad_entropy = grad_entropy.to(tiles.dtype)[..., None]
            shared = shared + grad_entropy * entropy[..., None]
            grad_entropy = pad(grad_entropy)
        shared, grad_o = pad(shared), pad(grad_o)
        for first, count in tiles.groups():
            q_tile = tiles.rows(tiles.q, first, count)
            k_tile = tiles.stretches(tiles.k, first, count)
            v_tile = tiles.stretches(tiles.v, first, count)
            p, log_p = tiles.weights(q_tile, k_tile, first, count, log=grad_entropy is not None)
            grad_tile = tiles.rows(grad_o, first, count)
            tiles.add_stretches(grad_v, torch.bmm(p.mT, grad_tile), first, count)
            ds = torch.baddbmm(tiles.rows(shared, first, count), grad_tile, v_tile.mT, beta=-1)
            if log_p is not None and grad_entropy is not None:
                ds.addcmul_(log_p, tiles.rows(grad_entropy, first, count), value=-1)
            ds.mul_(p).mul_(scale)
            tiles.put_rows(grad_q, torch.bmm(ds, k_tile), first, count)
            tiles.add_stretches(grad_k, torch.bmm(ds.mT, q_tile), first, count)
    unpad = tiles.layout.unpad_keys
    return (
        grad_q[:, : q.shape[1]].contiguous(),
        unpad(grad_k).to(k.dtype, copy=True),
        unpad(grad_v).to(v.dtype, copy=True),
    )


@_attend_backward.register_fake
def _(
    grad_o: Tensor,
    grad_entropy: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    valid: Tensor | None,
    o: Tensor,
    entropy: Tensor,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, start, valid, ctx.window, ctx.scale, ctx.with_entropy = inputs
    ctx.save_for_backward(q, k, v, start, valid, *output)


def _differentiate(ctx: Any, grad_o: Tensor, grad_entropy: Tensor | None) -> tuple[Any, ...]:
    grad_entropy = grad_entropy if ctx.with_entropy else None
    grads = _attend_backward(grad_o, grad_entropy, *ctx.saved_tensors, ctx.window, ctx.scale)
    return (*grads, None, None, None, None, None)


_attend.register_autograd(_differentiate, setup_context=_save)


def attend_blockwise(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    *,
    scale: float,
    start: Tensor | None = None,
    valid: Tensor | None = None,
    return_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return output `[B, T, H, V]` and entropy `[B, T, H]` (or None) in linear memory.

    Shapes: q `[B, T, H, D]`, k `[B, P + T, Hkv, D]`, v `[B, P + T, Hkv, V]`: query t stands at key
    P + t. start `[T]` is the first key that belongs to the sequence of each query; valid
    `[B, P + T]` says which keys may be attended to.

    Example:
        >>> q, k = torch.randn(1, 5, 4, 8), torch.randn(1, 8, 2, 8)
        >>> attend_blockwise(q, k, k, window=4, scale=0.5)[0].shape
        torch.Size([1, 5, 4, 8])
    """
    o, entropy = _attend(q, k, v, start, valid, window, scale, return_entropy)
    return o, entropy if return_entropy else None
