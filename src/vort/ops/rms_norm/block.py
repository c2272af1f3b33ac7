"""RMS norm on a CPU, a block of rows at a time: PyTorch's own to the bit, gradients too.

PyTorch's norm is a dozen passes over all of x, forward and back, each of which fetches from memory
what the one before it has just left there. Here there are fewer, and a block of rows stays where
the core can reach it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vort.ops.custom import Some, Tensors, custom_op, traced

__all__ = ["fits", "rms_norm_in_blocks"]

# Numbers of a block, for each thread: half a megabyte, a few of which fit into a core's own
# memory.
BLOCK = 1 << 17
# Where x has fewer, it fits by itself.
FEWEST = 1 << 17


class Inputs(NamedTuple):
    """See `rms_norm_in_blocks`.

    x is there twice: in y = x f(x²) it is read twice, and what comes back to each is added to what
    else comes back to x one after the other, as it is by PyTorch.
    """

    x: Tensor
    again: Tensor
    weight: Tensor
    eps: float


def fits(x: Tensor, weight: Tensor | None) -> bool:
    """Whether it is worth it, and known to be the same: much of x, dense, in float32."""
    if x.device.type != "cpu" or x.numel() < FEWEST or traced(x) or weight is None:
        return False
    same = x.dtype == weight.dtype == torch.float32
    return same and x.is_contiguous() and not torch.is_autocast_enabled("cpu")


def rms_norm_in_blocks(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight; x `[..., D]`, weight `[D]`, as `fits` has them."""
    return _rms_norm(Inputs(x, x, weight, eps))[0]  # type: ignore[no-any-return]


def _forward(given: Inputs) -> Tensors:
    rows = given.x.flatten(0, -2)
    y, inverse = torch.empty_like(rows), rows.new_empty(len(rows), 1)
    for part in _blocks(rows):
        x, r, out = rows[part], inverse[part], y[part]
        torch.mean(torch.pow(x, 2, out=out), -1, keepdim=True, out=r)
        r.add_(given.eps).rsqrt_()
        torch.mul(x, r, out=out).mul_(given.weight)
    return y.view_as(given.x), inverse


def _backward(given: Inputs, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    (dy,), (inverse,) = grads, kept
    if not dy.is_contiguous():  # sums over rows would come in another order than PyTorch's
        with torch.enable_grad():
            x, again, weight = leaves = [t.detach().requires_grad_() for t in given[:3]]
            y = _plain(Inputs(x, again, weight, given.eps))
            return torch.autograd.grad(y, leaves, (dy,))
    rows, dys = given.x.flatten(0, -2), dy.flatten(0, -2)
    dx, through, scaled = (torch.empty_like(rows) for _ in range(3))
    for part in _blocks(rows):
        x, r, g = rows[part], inverse[part], dys[part]
        first, second, product = dx[part], through[part], scaled[part]
        torch.mul(g, given.weight, out=first)
        total = torch.mul(first, x, out=second).sum(-1, keepdim=True)
        first.mul_(r)
        # PyTorch divides by D and doubles number by number: of a row, the same for all of them.
        torch.mul(x, total.mul_(-0.5).mul_(r.pow(3)).div_(x.shape[-1]).mul_(2), out=second)
        torch.mul(g, torch.mul(x, r, out=product), out=product)
    dweight = scaled.view_as(dy).sum(tuple(range(dy.ndim - 1))) if needs[2] else None
    return dx.view_as(dy), through.view_as(dy), dweight


def _blocks(rows: Tensor) -> Iterator[slice]:
    step = max(1, BLOCK * torch.get_num_threads() // rows.shape[-1])
    return (slice(first, first + step) for first in range(0, len(rows), step))


def _plain(given: Inputs) -> tuple[Tensor]:
    x, weight = given.x, given.weight
    inverse = given.again.pow(2).mean(-1, keepdim=True).add(given.eps).rsqrt()
    return (x * inverse * weight,)


_rms_norm = custom_op(
    "vort::rms_norm_in_blocks",
    Inputs,
    _forward,
    _backward,
    None,
    gradients=("x", "again", "weight"),
    plain=_plain,
)
