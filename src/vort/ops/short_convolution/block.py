"""The taps of a short convolution on a CPU, a block of positions at a time: PyTorch's to the bit.

Composed of PyTorch's own ops it is two dozen passes over all of x, forward and back, most of them
by a tap whose numbers lie apart. Here taps are turned over once, and a block of positions stays
where the core can reach it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vort.ops.custom import Some, Tensors, custom_op, traced

__all__ = ["convolved", "fits", "taps_in_blocks"]

# Numbers of a block: a few of them fit into a core's own memory.
BLOCK = 1 << 16
# Where x has fewer, it fits by itself, and calls are what takes the time.
FEWEST = 1 << 15


class Inputs(NamedTuple):
    """See `taps_in_blocks`."""

    x: Tensor
    weight: Tensor


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether it is worth it, and known to be the same: much of x, dense, in float32."""
    if x.device.type != "cpu" or traced(x):  # first: a graph for all lengths may ask for none
        return False
    if x.numel() < FEWEST or x.shape[1] < weight.shape[1]:
        return False
    return x.dtype == weight.dtype == torch.float32 and x.is_contiguous()


def taps_in_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """Σ_j weight[:, j] x_{t-j}; x `[B, T, C]`, weight `[C, W]`, as `fits` has them."""
    return _taps(Inputs(x, weight))[0]  # type: ignore[no-any-return]


def convolved(x: Tensor, weight: Tensor, padded: Tensor, age: Tensor | None = None) -> Tensor:
    """The same by PyTorch's own ops: one shifted product for each tap.

    padded: x after the W - 1 positions before it. age: how many positions of its own sequence come
    before each, where rows are packed.
    """
    size, length = weight.shape[1], x.shape[1]
    y = x * weight[:, 0]
    for lag in range(1, size):
        earlier = padded[:, size - 1 - lag : size - 1 - lag + length]
        if age is not None:
            earlier = earlier.masked_fill((age < lag)[:, None], 0)
        y = y + earlier * weight[:, lag]
    return y


def _forward(given: Inputs) -> Tensors:
    x, taps = given.x, given.weight.T.contiguous()
    y, scratch = torch.empty_like(x), _scratch(x)
    for start, stop in _blocks(x):
        torch.mul(x[:, start:stop], taps[0], out=y[:, start:stop])
        for lag in range(1, len(taps)):
            first = max(start, lag)  # before it there is nothing to add
            if first < stop:
                _add_product(y[:, first:stop], x[:, first - lag : stop - lag], taps[lag], scratch)
    return (y,)


def _backward(given: Inputs, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    (dy,), x, weight = grads, given.x, given.weight
    if not dy.is_contiguous():  # sums over positions would come in another order than PyTorch's
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in given]
            return torch.autograd.grad(_plain(Inputs(*leaves)), leaves, (dy,))
    taps, length = weight.T.contiguous(), x.shape[1]
    met, dx, dweight = torch.empty_like(dy), None, None
    if needs[1]:
        dweight = torch.empty_like(weight)
        for lag in range(len(taps)):
            met[:, :lag] = 0
            torch.mul(dy[:, lag:], x[:, : length - lag], out=met[:, lag:])
            dweight[:, lag] = met.sum((0, 1))
    if needs[0]:
        dx, scratch = met, _scratch(x)  # what was met has been summed up
        for start, stop in _blocks(x):
            # What comes back from later positions, the farthest first, as PyTorch adds it.
            later = dx[:, start:stop].zero_()
            for lag in range(len(taps) - 1, 0, -1):
                last = min(stop, length - lag)  # beyond it there is nobody to send anything
                if last > start:
                    sent = dy[:, start + lag : last + lag]
                    _add_product(later[:, : last - start], sent, taps[lag], scratch)
            _add_product(later, dy[:, start:stop], taps[0], scratch)
    return dx, dweight


def _add_product(y: Tensor, x: Tensor, tap: Tensor, scratch: Tensor) -> None:
    """y + x tap in place, rounded twice: `addcmul_` would round once."""
    y.add_(torch.mul(x, tap, out=scratch[:, : x.shape[1]]))


def _scratch(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], min(_step(x), x.shape[1]), x.shape[2])


def _step(x: Tensor) -> int:
    return max(1, BLOCK * torch.get_num_threads() // (x.shape[0] * x.shape[2]))


def _blocks(x: Tensor) -> Iterator[tuple[int, int]]:
    length, step = x.shape[1], _step(x)
    return ((start, min(start + step, length)) for start in range(0, length, step))


def _plain(given: Inputs) -> tuple[Tensor]:
    past = given.x.new_zeros(given.x.shape[0], given.weight.shape[1] - 1, given.x.shape[2])
    return (convolved(*given, torch.cat([past, given.x], 1)),)


_taps = custom_op(
    "vort::taps_in_blocks",
    Inputs,
    _forward,
    _backward,
    None,
    gradients=("x", "weight"),
    plain=_plain,
)
