"""How a sequence is cut into blocks of queries, each with the stretch of keys it can see.

Positions are cut into blocks of `size`. A block looks at itself and at the `before` blocks that
its window reaches into, a stretch of `span` keys. Queries and keys are padded to whole blocks,
keys also with `before` blocks in front, so that every block has a full stretch.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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
