"""Local attention in linear memory, forward and backward, tile by tile.

Scores of all blocks take T * span numbers, linear in T but many. They are never held at once: a
few blocks at a time make a tile that fits in cache, and the backward pass computes each tile
again instead of storing it. With p = softmax(s) and H = -sum p log p a row of scores receives

    ds = p (dp - sum p dp - dH (log p + H)),     dp_j = do·v_j,     sum p dp = do·o.

Positions are cut into blocks of `size`. A block looks at itself and at the `before` blocks that
its window reaches into, a stretch of `span` keys. Queries and keys are padded to whole blocks,
keys also with `before` blocks in front, so that every block has a full stretch.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vort.ops.custom import Some, Tensors, custom_op, without_autocast
from vort.ops.products import baddbmm, bmm, one_by_one
from vort.ops.side_by_side import cut, run_side_by_side, threads_here

# Finite, because 0 * MASKED must be 0; far below any score, yet its products stay finite.
MASKED = -1e20
# Scores in one tile. On a CPU a tile of float32 should stay in the cache; a GPU wants few launches.
TILE_CPU, TILE_GPU = 2**19, 2**26
# Scores of a call that is worth the way to other threads, where products are one thread's (see
# `vort.ops.products`): 1,024 tokens of 4 heads in a window of 64, measured on two idle cores.
LARGE = 2**18


class BlockLayout(NamedTuple):
    """The numbers of one call. Keys may be `prefix` longer than queries, at the front."""

    length: int
    prefix: int
    window: int
    size: int
    before: int
    blocks: int

    @classmethod
    def plan(cls, length: int, keys: int, window: int) -> "BlockLayout":
        """Return the layout for `length` queries at the end of `keys` keys."""
        window = min(window, keys)
        # Small blocks waste fewer scores outside the window; large ones make better matrices.
        best = 32 if window <= 32 else 64 if window <= 512 else 128
        size = min(best, length)
        before = -(-(window - 1) // size)
        return cls(length, keys - length, window, size, before, -(-length // size))

    @property
    def span(self) -> int:
        """Return the number of keys in a stretch."""
        return (self.before + 1) * self.size

    @property
    def tail(self) -> int:
        """Return how many positions are missing from the last block."""
        return self.blocks * self.size - self.length

    @property
    def front(self) -> int:
        """Return how many keys are missing before the first one."""
        return self.before * self.size - self.prefix

    def pad_queries(self, x: Tensor) -> Tensor:
        """Return `[B, T, ...]` with zeros up to `blocks * size` positions."""
        return F.pad(x, [0, 0] * (x.ndim - 2) + [0, self.tail])

    def pad_keys(self, x: Tensor) -> Tensor:
        """Return `[B, prefix + T, ...]` with zeros up to `(before + blocks) * size` positions."""
        return F.pad(x, [0, 0] * (x.ndim - 2) + [self.front, self.tail])

    def unpad_keys(self, x: Tensor) -> Tensor:
        """Return the keys without what `pad_keys` added."""
        return x.narrow(1, self.front, self.prefix + self.length)

    def query_blocks(self, padded: Tensor, first: int, count: int, kv_heads: int) -> Tensor:
        """Return a view of `count` blocks, `[B, n, H, D]` as `[B, Hkv, count, H/Hkv, size, D]`."""
        part = padded.narrow(1, first * self.size, count * self.size)
        batch, _, heads, dim = padded.shape
        part = part.view(batch, count, self.size, kv_heads, heads // kv_heads, dim)
        return part.permute(0, 3, 1, 4, 2, 5)

    def key_stretches(self, padded: Tensor, first: int, count: int) -> Tensor:
        """Return a view of what `count` blocks see, `[B, n, ...]` as `[B, count, ..., span]`."""
        part = padded.narrow(1, first * self.size, (count + self.before) * self.size)
        return part.unfold(1, self.span, self.size)

    def add_stretches(self, target: Tensor, x: Tensor, first: int) -> None:
        """Add `[B, Hkv, count, span, D]` to padded keys `[B, n, Hkv, D]`; stretches overlap."""
        count = x.shape[2]
        for shift in range(self.before + 1):
            block = x.narrow(3, shift * self.size, self.size).permute(0, 2, 3, 1, 4)
            part = target.narrow(1, (first + shift) * self.size, count * self.size)
            part.view(block.shape).add_(block)

    def band(self, device: torch.device) -> Tensor:
        """Return `[size, span]`: whether a key of the stretch is in the window of a query."""
        query = torch.arange(self.size, device=device)[:, None]
        key = torch.arange(self.span, device=device) - self.before * self.size
        return (key <= query) & (key > query - self.window)

    def key_numbers(self, first: int, count: int, device: torch.device) -> Tensor:
        """Return `[count, span]`: which of the `prefix + T` keys stands where; < 0 is padding."""
        block = torch.arange(first, first + count, device=device)[:, None] * self.size
        return block + torch.arange(self.span, device=device) - self.front


class _Tiles:
    """Padded inputs, read a few blocks at a time with batch, heads and blocks folded together."""

    def __init__(self, inputs: "Inputs") -> None:
        q, k, v, start, valid, window, scale, _ = inputs
        self.layout = layout = BlockLayout.plan(q.shape[1], k.shape[1], window)
        self.dtype, self.scale = working_dtype(q, k, v), scale
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
        scores = baddbmm(self.bias, q, k.mT, alpha=self.scale)
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


def working_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 where any input is, else float32."""
    wide = any(x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


class Inputs(NamedTuple):
    """The arguments of the operators."""

    q: Tensor
    k: Tensor
    v: Tensor
    start: Tensor | None
    valid: Tensor | None
    window: int
    scale: float
    with_entropy: bool


def _for_heads(inputs: Inputs, run: Callable[[Inputs, slice], Tensors]) -> Tensors:
    """What `run` finds for all heads, in parts at once where that pays.

    It is told which heads of queries it has; all that it finds has heads in third place.
    """
    q, k, v, *_ = inputs
    heads, parts = k.shape[2], 1
    if one_by_one(q) and q.shape[:3].numel() * min(inputs.window, k.shape[1]) >= LARGE:
        parts = min(threads_here(), heads)
    if parts == 1:
        return run(inputs, slice(None))
    shared = q.shape[2] // heads
    found: list[Tensors] = [()] * parts

    def work(part: int, keys: slice) -> None:
        queries = slice(keys.start * shared, keys.stop * shared)
        mine = inputs._replace(q=q[:, :, queries], k=k[:, :, keys], v=v[:, :, keys])
        found[part] = run(mine, queries)

    run_side_by_side([partial(work, i, keys) for i, keys in enumerate(cut(heads, parts))])
    return tuple(
        None if each[0] is None else torch.cat(each, 2) for each in zip(*found, strict=True)
    )


def _forward(inputs: Inputs) -> Tensors:
    return _for_heads(inputs, lambda part, _: _attended(part))


def _attended(inputs: Inputs) -> Tensors:
    """Output and, if asked for, entropy."""
    q, _, v, *_, with_entropy = inputs
    with without_autocast(q):
        tiles = _Tiles(inputs)
        rows = tiles.q.shape[:3]
        o = v.new_empty(*rows, v.shape[-1])
        entropy = q.new_empty(*rows, int(with_entropy), dtype=tiles.dtype)
        for first, count in tiles.groups():
            q_tile = tiles.rows(tiles.q, first, count)
            k_tile = tiles.stretches(tiles.k, first, count)
            p, log_p = tiles.weights(q_tile, k_tile, first, count, log=with_entropy)
            tile_o = bmm(p, tiles.stretches(tiles.v, first, count))
            tiles.put_rows(o, tile_o, first, count)
            if log_p is not None:
                row_entropy = -torch.linalg.vecdot(p, log_p)[..., None]
                tiles.put_rows(entropy, row_entropy, first, count)
    o, entropy = (x[:, : q.shape[1]].contiguous() for x in (o, entropy))
    return o, entropy.squeeze(-1) if with_entropy else None


def _backward(inputs: Inputs, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    def run(part: Inputs, heads: slice) -> Tensors:
        rows: Some = tuple(None if x is None else x[:, :, heads] for x in (*kept, *grads))
        return _gradients(part, *rows)

    return _for_heads(inputs, run)


def _gradients(
    inputs: Inputs, o: Tensor, entropy: Any, do: Tensor | None, dentropy: Tensor | None
) -> Tensors:
    q, k, v, *_ = inputs
    do = torch.zeros_like(o) if do is None else do
    with without_autocast(q):
        tiles = _Tiles(inputs)
        pad = tiles.layout.pad_queries
        dq = torch.empty_like(tiles.q)
        dk = torch.zeros_like(tiles.k, dtype=tiles.dtype)
        dv = torch.zeros_like(tiles.v, dtype=tiles.dtype)
        # What is one number for each row in ds / p: sum p dp + dH H.
        shared = torch.linalg.vecdot(do.to(tiles.dtype), o.to(tiles.dtype))[..., None]
        if dentropy is not None:
            dentropy = dentropy.to(tiles.dtype)[..., None]
            shared = shared + dentropy * entropy[..., None]
            dentropy = pad(dentropy)
        shared, do = pad(shared), pad(do)
        for first, count in tiles.groups():
            q_tile = tiles.rows(tiles.q, first, count)
            k_tile = tiles.stretches(tiles.k, first, count)
            v_tile = tiles.stretches(tiles.v, first, count)
            p, log_p = tiles.weights(q_tile, k_tile, first, count, log=dentropy is not None)
            do_tile = tiles.rows(do, first, count)
            tiles.add_stretches(dv, bmm(p.mT, do_tile), first, count)
            ds = baddbmm(tiles.rows(shared, first, count), do_tile, v_tile.mT, beta=-1)
            if log_p is not None and dentropy is not None:
                ds.addcmul_(log_p, tiles.rows(dentropy, first, count), value=-1)
            ds.mul_(p).mul_(inputs.scale)
            tiles.put_rows(dq, bmm(ds, k_tile), first, count)
            tiles.add_stretches(dk, bmm(ds.mT, q_tile), first, count)
    unpad = tiles.layout.unpad_keys
    return (
        dq[:, : q.shape[1]].contiguous(),
        unpad(dk).to(k.dtype, copy=True),
        unpad(dv).to(v.dtype, copy=True),
    )


def _shapes(inputs: Inputs) -> Tensors:
    q, k, v, *_, with_entropy = inputs
    rows = q.shape[:3]
    entropy = q.new_empty(rows, dtype=working_dtype(q, k, v)) if with_entropy else None
    return v.new_empty(*rows, v.shape[-1]), entropy


def _plain(inputs: Inputs) -> Tensors:
    """The same with every weight there at once, in O(T²) memory."""
    q, k, v, start, valid, window, scale, with_entropy = inputs
    dtype, groups = working_dtype(q, k, v), k.shape[2]
    key = torch.arange(k.shape[1], device=q.device)
    lag = key[k.shape[1] - q.shape[1] :, None] - key
    allowed = (lag >= 0) & (lag < window)
    allowed = allowed if start is None else allowed & (key >= start[:, None])
    allowed = allowed[None] if valid is None else allowed & valid[:, None]
    forbidden = ~allowed[:, None, None]
    with without_autocast(q):
        rows = q.to(dtype).unflatten(2, (groups, -1))
        scores = torch.einsum("btgrd,bjgd->bgrtj", rows, k.to(dtype)) * scale
        scores = scores.masked_fill(forbidden, MASKED)
        p = scores.softmax(-1).masked_fill(forbidden, 0)
        o = torch.einsum("bgrtj,bjgv->btgrv", p, v.to(dtype)).flatten(2, 3).to(v.dtype)
        if not with_entropy:
            return o, None
        log_p = scores.log_softmax(-1).masked_fill(forbidden, 0)
        return o, -(p * log_p).sum(-1).permute(0, 3, 1, 2).flatten(2, 3)


_attend = custom_op(
    "vort::local_attention",
    Inputs,
    _forward,
    _backward,
    _shapes,
    outputs=("o", "entropy"),
    shown=2,
    saved=("o", "entropy"),
    gradients=("q", "k", "v"),
    plain=_plain,
)


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
    o, entropy = _attend(Inputs(q, k, v, start, valid, window, scale, return_entropy))
    return o, entropy
