"""Gradients to the parts of one matrix product, written side by side by those who make them.

A layer's projections are one product with their weights joined, and its parts go different ways.
Where gradients to all parts come back as columns of one tensor, the product's backward is one
product too. So whoever makes such a gradient asks `room_for` its place; whoever does not is served
as well, part by part.
"""

from collections.abc import Sequence
from weakref import ref

import torch
from torch import Tensor

__all__ = ["Together", "room_for"]

# By where a part lies: whose it is, and which. An entry may outlive its part, whose place another
# tensor then takes: that one is given room nobody else has, which does no harm.
_known: dict[int, tuple["ref[Together]", int]] = {}


class Together:
    """The parts of one product, and room for their gradients, each of which is given away once.

    >>> product = torch.zeros(2, 3, 5)
    >>> together = Together()
    >>> a, b = together.parts(product, [2, 3])
    >>> da, db = room_for(a).fill_(1.0), room_for(b).fill_(2.0)
    >>> together.whole([da, db])[0]
    tensor([1., 1., 2., 2., 2.])
    >>> together.whole([da, db]) is None
    True
    """

    def __init__(self) -> None:
        self._places: list[tuple[int, int, int]] = []
        self._width = 0
        self._room: Tensor | None = None
        self._taken: set[int] = set()

    def parts(self, product: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        """`product` `[..., sum of widths]` as its parts, which are known by their places."""
        found: tuple[Tensor, ...] = torch.split_with_sizes(product, list(widths), -1)
        self._width, first = product.shape[-1], 0
        for i, part in enumerate(found):
            place = part.data_ptr()
            _known[place] = (ref(self), i)
            self._places.append((place, first, part.shape[-1]))
            first += part.shape[-1]
        return found

    def __del__(self) -> None:
        for i, (place, _, _) in enumerate(self._places):
            known = _known.get(place)
            if known is not None and known[1] == i and known[0]() in (None, self):
                _known.pop(place, None)

    def room(self, i: int, like: Tensor) -> Tensor | None:
        """Where the gradient to part i goes, in the shape of `like`; None: it was given away."""
        _, first, width = self._places[i]
        if i in self._taken or like.shape[-1] != width:
            return None
        rows = like.numel() // width
        if self._room is None:
            self._room = like.new_empty(rows, self._width)
        if self._room.shape[0] != rows or self._room.dtype != like.dtype:
            return None
        self._taken.add(i)
        return self._room[:, first : first + width].view(like.shape)

    def whole(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """All gradients as one `[rows, sum of widths]`, if each is in its place; asked once."""
        room, self._room = self._room, None
        self._taken.clear()
        if room is None:
            return None
        for (_, first, width), grad in zip(self._places, grads, strict=True):
            if grad is None or grad.data_ptr() != room[:, first:].data_ptr():
                return None
            if grad.shape[-1] != width or grad.stride()[-2:] != room.stride():
                return None
        return room


def room_for(x: Tensor) -> Tensor:
    """Uninitialised, in the shape of x, for the gradient to it: rows may lie apart."""
    known = _known.get(x.data_ptr())
    if known is not None:
        together = known[0]()
        found = None if together is None else together.room(known[1], x)
        if found is not None:
            return found
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
