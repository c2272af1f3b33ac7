"""A few positions of many: what follows the last look at other positions, for those asked for.

A task that asks at 32 positions of 1,000 has no use for what a last layer makes of the others. What
is computed for each position by itself may be computed for those alone, and the others' gradients
are 0. Sums over positions, in the gradients of weights, are taken with these zeros in their places:
their order is that of all positions, and so is the result, to the bit. Where products are another
library's (`vort.ops.products`) that is given up, and zeros are left out.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vort.ops.custom import Some, Tensors, custom_op
from vort.ops.products import one_by_one
from vort.ops.rms_norm import rms_norm

__all__ = [
    "Asked",
    "check_places",
    "check_range",
    "heads_of_asked",
    "linear_of_asked",
    "norm_of_asked",
    "pick",
]

# Zeros that are kept for the next sum, of so many numbers or fewer: making them anew takes longer
# than what is done with them.
KEPT = 1 << 22
# Rows are filled up to a multiple of this: the last numbers of a tensor that fill no register are
# computed by other functions than the rest, whose exponentials may end in another bit.
ROWS = 32


class Asked(NamedTuple):
    """Which positions.

    places: `[N]`, flat places b T + t, each at most once.
    batch, length: B and T.
    """

    places: Tensor
    batch: int
    length: int

    @property
    def rows(self) -> int:
        """Rows of a tensor of these positions: N, filled up."""
        return -(-len(self.places) // ROWS) * ROWS

    @property
    def late(self) -> bool:
        """Whether they are picked after the memory: on a GPU, whose kernels are quick for all.

        Elsewhere every part of a layer leaves out what it can of the others.
        """
        return self.places.is_cuda

    def put(self, x: Tensor, whole: Tensor | None = None) -> Tensor:
        """`[B T, ...]`: x `[rows, ...]` in its places, 0 elsewhere, as they are in `whole`."""
        if whole is None:
            whole = x.new_zeros(self.batch * self.length, *x.shape[1:])
        rows = x[: len(self.places)]
        # Of places on a GPU nobody has seen whether each is there once: what comes twice is added.
        if whole.is_cuda:
            return whole.index_add_(0, self.places, rows)
        return whole.index_copy_(0, self.places, rows)

    @contextmanager
    def lent(self, x: Tensor, name: str) -> Iterator[Tensor]:
        """`put(x)`, until the next of this name is asked for; x itself where zeros are left out."""
        if one_by_one(x):
            yield x
            return
        size = self.batch * self.length * x.shape[1:].numel()
        if size > KEPT:
            yield self.put(x)
            return
        key = f"{name} {x.dtype} {x.device}"
        zeros: Tensor | None = _zeros.__dict__.get(key)
        if zeros is None or len(zeros) < size:
            zeros = _zeros.__dict__[key] = x.new_zeros(size)
        whole = zeros[:size].view(self.batch * self.length, *x.shape[1:])
        try:
            yield self.put(x, whole)
        finally:
            whole.index_fill_(0, self.places, 0)


def check_places(asked: Tensor) -> None:
    """Refuse what are no places."""
    if asked.ndim != 1 or asked.dtype != torch.int64:
        raise ValueError(
            f"asked must be [N] places, int64, got {list(asked.shape)} of {asked.dtype}"
        )


def check_range(asked: Tensor, count: int) -> None:
    """Refuse places that are none of `count` positions; this looks at numbers."""
    if len(asked) and not 0 <= asked.min() <= asked.max() < count:
        raise ValueError(f"asked must lie in [0, {count}), got {asked.min()} to {asked.max()}")


# By name, for each thread its own.
_zeros = threading.local()


class _Pick(NamedTuple):
    x: Tensor
    places: Tensor
    batch: int
    length: int


class _Linear(NamedTuple):
    x: Tensor
    weight: Tensor
    places: Tensor
    batch: int
    length: int


class _Heads(NamedTuple):
    x: Tensor
    weight: Tensor
    places: Tensor
    batch: int
    length: int


class _Norm(NamedTuple):
    """x twice, as `vort.ops.rms_norm.block` has it, and for the same reason."""

    x: Tensor
    again: Tensor
    weight: Tensor
    places: Tensor
    batch: int
    length: int
    eps: float


def pick(x: Tensor, asked: Asked) -> Tensor:
    """The rows of x `[B, T, ...]` that are asked for, then zeros: `[rows, ...]`.

    >>> asked = Asked(torch.tensor([1, 5]), batch=2, length=3)
    >>> pick(torch.arange(6.0).view(2, 3), asked)[:3]
    tensor([1., 5., 0.])
    """
    return _pick(_Pick(x, *asked))[0]  # type: ignore[no-any-return]


def linear_of_asked(x: Tensor, weight: Tensor, asked: Asked) -> Tensor:
    """X W^T for x `[rows, in]` of `pick` and weight `[out, in]`."""
    return _linear(_Linear(x, weight, *asked))[0]  # type: ignore[no-any-return]


def heads_of_asked(x: Tensor, weight: Tensor, asked: Asked) -> Tensor:
    """X W of each head by itself, for x `[rows, H, in]` of `pick` and weight `[H, in, out]`."""
    return _heads(_Heads(x, weight, *asked))[0]  # type: ignore[no-any-return]


def norm_of_asked(x: Tensor, weight: Tensor, eps: float, asked: Asked) -> Tensor:
    """`rms_norm` of x `[rows, ..., D]` of `pick`."""
    return _norm(_Norm(x, x, weight, *asked, eps))[0]  # type: ignore[no-any-return]


def _pick_forward(given: _Pick) -> Tensors:
    asked = Asked(*given[1:])
    found = given.x.new_zeros(asked.rows, *given.x.shape[2:])
    torch.index_select(given.x.flatten(0, 1), 0, asked.places, out=found[: len(asked.places)])
    return (found,)


def _pick_backward(given: _Pick, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    return (Asked(*given[1:]).put(grads[0]).view_as(given.x),)


def _pick_plain(given: _Pick) -> Tensors:
    asked = Asked(*given[1:])
    found = given.x.flatten(0, 1)[asked.places]
    more = asked.rows - len(found)
    return (torch.cat([found, found.new_zeros(more, *found.shape[1:])]),)


def _linear_forward(given: _Linear) -> Tensors:
    return (F.linear(given.x, given.weight),)


def _linear_backward(given: _Linear, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    (dy,), asked = grads, Asked(*given[2:])
    dx = dy @ given.weight if needs[0] else None
    dweight = None
    if needs[1]:
        with asked.lent(dy, "gradients") as dys, asked.lent(given.x, "inputs") as xs:
            dweight = dys.T @ xs
    return dx, dweight


def _heads_forward(given: _Heads) -> Tensors:
    return (torch.einsum("...hd,hdm->...hm", given.x, given.weight),)


def _heads_backward(given: _Heads, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    (dy,), asked = grads, Asked(*given[2:])
    dx = torch.einsum("...hm,hdm->...hd", dy, given.weight) if needs[0] else None
    dweight = None
    if needs[1]:
        with asked.lent(dy, "gradients") as dys, asked.lent(given.x, "inputs") as xs:
            dweight = torch.bmm(xs.permute(1, 2, 0), dys.permute(1, 0, 2))
    return dx, dweight


def _norm_forward(given: _Norm) -> Tensors:
    return (rms_norm(given.x, given.weight, given.eps),)


def _norm_backward(given: _Norm, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    (dy,), x, asked = grads, given.x, Asked(*given[3:6])
    # As PyTorch orders it, number by number.
    r = x.pow(2).mean(-1, keepdim=True).add_(given.eps).rsqrt_()
    dx = dy * given.weight
    total = (dx * x).sum(-1, keepdim=True)
    through = x * total.mul_(-0.5).mul_(r.pow(3)).div_(x.shape[-1]).mul_(2)
    dweight = None
    if needs[2]:
        with asked.lent(dy * (x * r), "gradients") as whole:
            if len(whole) != len(x):
                whole = whole.view(asked.batch, asked.length, *x.shape[1:])
            dweight = whole.sum(tuple(range(whole.ndim - 1)))
    return dx.mul_(r), through, dweight


def _norm_plain(given: _Norm) -> Tensors:
    inverse = given.again.pow(2).mean(-1, keepdim=True).add(given.eps).rsqrt()
    return (given.x * inverse * given.weight,)


_pick = custom_op(
    "vort::pick", _Pick, _pick_forward, _pick_backward, None, gradients=("x",), plain=_pick_plain
)
_linear = custom_op(
    "vort::linear_of_asked",
    _Linear,
    _linear_forward,
    _linear_backward,
    None,
    gradients=("x", "weight"),
    plain=_linear_forward,
)
_heads = custom_op(
    "vort::heads_of_asked",
    _Heads,
    _heads_forward,
    _heads_backward,
    None,
    gradients=("x", "weight"),
    plain=_heads_forward,
)
_norm = custom_op(
    "vort::norm_of_asked",
    _Norm,
    _norm_forward,
    _norm_backward,
    None,
    gradients=("x", "again", "weight"),
    plain=_norm_plain,
)
