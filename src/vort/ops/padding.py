"""Padding taken out of the way: real tokens first in every row, whatever the mask looks like.

A decaying memory must not only ignore a padded position, it must not grow older there. With the
real tokens of each row moved to its front, what comes before a token is exactly its past.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from vort.ops.custom import traced
from vort.ops.gpu.launcher import transformed

__all__ = [
    "Padding",
    "check_lengths",
    "check_no_past",
    "keep_last",
    "may_look",
    "not_looking",
    "pad_packed",
    "present",
]

_looks = ContextVar("_looks", default=True)


@contextmanager
def not_looking() -> Iterator[None]:
    """Within, masks are taken as they are, whatever is in them: a recorded step is for all."""
    before = _looks.set(False)
    try:
        yield
    finally:
        _looks.reset(before)


def may_look(mask: Tensor) -> bool:
    """Whether a number of it may be asked for: not where something traces or records."""
    if traced(mask) or not _looks.get():
        return False
    return not (mask.is_cuda and torch.cuda.is_current_stream_capturing())


class Padding(NamedTuple):
    """Where the real tokens of a padded batch are, and how to bring them to the front.

    Attributes:
        real: `[B, T]` bool, after the move: True for the first `lengths[b]` positions of a row.
        lengths: `[B]` int64, number of real tokens.
        order: `[B, T]`, position before the move of what stands here after it.
        inverse: `[B, T]`, the other way round.
    """

    real: Tensor
    lengths: Tensor
    order: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor | None, batch: int, length: int) -> "Padding | None":
        """The padding of the last `length` positions of a mask `[B, >= length]`; None without any.

        >>> padding = Padding.of(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]), 2, 4)
        >>> padding.lengths.tolist(), padding.real[0].tolist()
        ([2, 3], [True, True, False, False])
        """
        if attention_mask is None:
            return None
        mask = present(attention_mask, batch, length).bool()
        if may_look(mask) and bool(mask.all()):
            return None
        order = torch.argsort((~mask).to(torch.uint8), dim=1, stable=True)
        lengths = mask.sum(1)
        real = torch.arange(length, device=mask.device) < lengths[:, None]
        return cls(real, lengths, order, torch.argsort(order, dim=1))

    def align(self, x: Tensor) -> Tensor:
        """`[B, T, ...]` with the real tokens at the front and zeros behind them."""
        moved = x.gather(1, _index(self.order, x))
        return moved.masked_fill(~_spread(self.real, x), 0)

    def restore(self, x: Tensor) -> Tensor:
        """The inverse of `align`: every token where it came from."""
        return x.gather(1, _index(self.inverse, x))

    def pack(self, x: Tensor) -> Tensor:
        """The real tokens alone: aligned `[B, T, ...]` to `[1, sum of lengths, ...]`."""
        return x[self.real].unsqueeze(0)

    def unpack(self, packed: Tensor) -> Tensor:
        """The inverse of `pack`, with zeros at padding."""
        x = packed.new_zeros(*self.real.shape, *packed.shape[2:])
        return x.index_put((self.real,), packed[0])

    @property
    def cu_seqlens(self) -> Tensor:
        """Bounds of the packed rows, `[B + 1]`."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))


def present(given: Tensor, batch: int, length: int, name: str = "attention_mask") -> Tensor:
    """The mask of the last `length` positions, `[B, length]`; refused where it does not cover them.

    A mask of past and present positions comes with a cache: the past has been dealt with.
    """
    if given.dim() != 2 or given.shape[0] != batch:
        raise ValueError(
            f"{name} must be [{batch}, {length} or more], got shape {tuple(given.shape)}"
        )
    if given.shape[1] < length:
        raise ValueError(f"{name} must cover {length} positions, got {given.shape[1]}")
    mask = given[:, given.shape[1] - length :]
    if name != "attention_mask":
        return mask
    if mask.is_floating_point() and may_look(mask):
        wrong = mask[(mask != 0) & (mask != 1)]
        if wrong.numel():
            added = " one that is added to scores, with" if bool((wrong < 0).any()) else ""
            raise ValueError(
                f"attention_mask must be 1 at tokens and 0 at padding, got{added} "
                f"{wrong.min().item():.3g} in it"
            )
    return mask


def check_no_past(attention_mask: Tensor, length: int) -> None:
    """Refuse a mask of more positions than there are, where no state stands for others."""
    if attention_mask.dim() == 2 and attention_mask.shape[1] > length:
        raise ValueError(
            f"attention_mask must be of {length} positions where past_key_values is None, "
            f"got {attention_mask.shape[1]}"
        )


def check_lengths(lengths: Tensor, batch: int, length: int) -> None:
    """Refuse counts of real positions that are not `[batch]`; on a CPU those beyond `length` too.

    >>> check_lengths(torch.tensor([3, 6]), 2, 5)
    Traceback (most recent call last):
    ValueError: lengths must lie in [0, T] = [0, 5], got 6 at index 1
    """
    if lengths.shape != (batch,):
        raise ValueError(f"lengths must be [B] = [{batch}], got {list(lengths.shape)}")
    if lengths.device.type != "cpu" or not may_look(lengths) or transformed():
        return
    for index, count in enumerate(lengths.tolist()):
        if not 0 <= count <= length:
            raise ValueError(
                f"lengths must lie in [0, T] = [0, {length}], got {count} at index {index}"
            )


def pad_packed(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Packed sequences `[1, total, ...]` as rows `[N, longest, ...]`, and their mask.

    >>> rows, mask = pad_packed(torch.arange(1, 6).view(1, 5), torch.tensor([0, 2, 5]))
    >>> rows.tolist(), mask.sum(1).tolist()
    ([[1, 2, 0], [3, 4, 5]], [2, 3])
    """
    lengths = cu_seqlens.diff()
    longest = int(lengths.max())
    mask = torch.arange(longest, device=x.device) < lengths[:, None]
    rows = x.new_zeros(*mask.shape, *x.shape[2:])
    return rows.index_put((mask,), x[0]), mask


def keep_last(past: Tensor, new: Tensor, lengths: Tensor | None) -> Tensor:
    """The last entries of every row, as many as `past` has: `[N, W, ...]` of past and new together.

    Row n of `new` `[N, T, ...]` has `lengths[n]` real entries at its front; all T without lengths.
    """
    if lengths is None and new.shape[1] >= past.shape[1]:
        # A copy: what is kept for long should not keep a whole prompt alive.
        return new[:, new.shape[1] - past.shape[1] :].to(past.dtype, copy=True)
    both = torch.cat([past, new.to(past.dtype)], 1)
    if lengths is None:
        return both[:, new.shape[1] :]
    index = torch.arange(past.shape[1], device=past.device) + lengths[:, None]
    return both.gather(1, _index(index, both))


def _index(order: Tensor, x: Tensor) -> Tensor:
    """`[B, T]` positions as an index for `gather` along axis 1 of `x`."""
    return _spread(order, x).expand(-1, -1, *x.shape[2:])


def _spread(positions: Tensor, x: Tensor) -> Tensor:
    return positions.reshape(*positions.shape, *[1] * (x.dim() - 2))
