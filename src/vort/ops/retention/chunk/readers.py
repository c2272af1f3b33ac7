"""Positions that read, where not all of them do: a few slots for each chunk instead of all of it.

What a chunk's tokens write goes on as ever. Of queries, reads and outputs there are as many rows as
the chunk with the most readers has; sums over readers leave out zeros, and are the same to the bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vort.ops.retention.chunk.layout import DenseLayout

__all__ = ["AskedInputs", "Readers"]

# Slots of a chunk are a multiple of this; and of more where a product has a single column, which is
# another function's: in its first rows sums have another order.
SLOTS, SLOTS_OF_ONE = 4, 16


class AskedInputs(NamedTuple):
    """A call of `retention_of_asked`: q and read `[rows, H, .]` as `pick` leaves them, else Inputs.

    places, batch, length: see `Asked`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    write: Tensor
    log_decay: Tensor
    read: Tensor | None
    places: Tensor
    batch: int
    length: int
    normalizer: str
    include_self: bool
    eps: float
    tracked: bool


class Readers:
    """The slots of a call: [n, rows, H, R, D] stands for [B, T, H, D] on the reading side.

    index: flat places b T + t of those that read, each once.
    b_rows: of the normaliser.
    offset [n, rows, R]: where in its chunk a slot's reader is; 0 where there is none.
    """

    def __init__(self, index: Tensor, layout: DenseLayout, b_rows: int) -> None:
        count, batch, chunk = len(layout.chunks), layout.rows, layout.chunk
        row, position = index // layout.length, index % layout.length
        group = position // chunk * batch + row
        # Readers of a chunk are numbered in its order, which is that of sums.
        order = (group * chunk + position % chunk).argsort()
        members = torch.bincount(group, minlength=count * batch)
        first = members.cumsum(0) - members
        number = torch.empty_like(group)
        number[order] = torch.arange(len(group), device=group.device) - first[group[order]]
        most = max(1, int(members.max()))
        unit = SLOTS_OF_ONE if b_rows == 1 else SLOTS
        self.slots = min(chunk, -(-most // unit) * unit)
        self.shape = (count, batch, self.slots)
        self.place = group * self.slots + number
        self.offset = index.new_zeros(count * batch * self.slots)
        self.offset[self.place] = position % chunk
        self.offset = self.offset.view(self.shape)

    def spread(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [N or more, H, D] in their slots, [n, rows, H, R, D]; 0 where nobody reads."""
        out = x.new_zeros(self.offset.numel(), *x.shape[1:], dtype=dtype)
        out.index_copy_(0, self.place, x[: len(self.place)].to(dtype))
        return out.view(*self.shape, *x.shape[1:]).transpose(2, 3).contiguous()

    def gather(self, x: Tensor, like: Tensor) -> Tensor:
        """The reverse of `spread`: as many rows as `like`, of its type."""
        rows = x.transpose(2, 3).flatten(0, 2).index_select(0, self.place)
        out = like.new_zeros(len(like), *rows.shape[1:])
        out[: len(rows)] = rows
        return out
