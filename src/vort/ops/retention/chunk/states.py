"""States across chunks, forwards and backwards."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vort.ops.retention.chunk.layout import Chunk

__all__ = ["run_states", "run_states_backward"]

# States of fewer elements than this cost more in calls than in sums.
SMALL = 1 << 15


def run_states(
    states: Tensor,
    left: Tensor,
    right: Tensor,
    chunks: Sequence[Chunk],
    drop: Tensor,
    initial: Tensor,
    final: Tensor | None = None,
) -> None:
    """Fill states [n + 1, rows, H, S, D], before each chunk and after the last; states[0] is given.

    Chunk c adds left[c] @ right[c], [rows H, i, C] times [rows H, C, j] with i j = S D. A chunk
    that starts a sequence takes its state from `initial`, one that ends a sequence leaves it in
    `final`: nothing crosses over.
    """
    each, add_product = states.unbind(), _adder(states[1:], left, right)
    aging = _aging_of(chunks, drop)
    for index, chunk in enumerate(chunks):
        before, after = each[index], each[index + 1]
        if chunk.first is not None:
            before.copy_(initial[chunk.first])
        torch.addcmul(before, before, aging[chunk.length], out=after)
        add_product(index)
        if final is not None and chunk.last is not None:
            final[chunk.last] = after


def run_states_backward(
    grads: Tensor,
    left: Tensor,
    right: Tensor,
    chunks: Sequence[Chunk],
    drop: Tensor,
    initial: Tensor,
    final: Tensor,
) -> None:
    """Fill grads [n + 1, rows, H, S, D]: of the state before the first chunk, and after each.

    grads[n] is given; left[c] @ right[c] is what the chunk's own reading gives to the gradient of
    the state entering it. Gradients of final states come in through `final`, those of initial
    ones go out to `initial`.
    """
    each, add_product = grads.unbind(), _adder(grads[:-1], left, right)
    aging = _aging_of(chunks, drop)
    for index in reversed(range(len(chunks))):
        chunk, before, after = chunks[index], each[index], each[index + 1]
        if chunk.last is not None:
            after.copy_(final[chunk.last])
        torch.addcmul(after, after, aging[chunk.length], out=before)
        add_product(index)
        if chunk.first is not None:
            initial[chunk.first] = before


def _adder(states: Tensor, left: Tensor, right: Tensor) -> Callable[[int], Tensor]:
    """A function of c that adds left[c] @ right[c] to states[c]."""
    if states.shape[1:].numel() < SMALL:
        each, products = states.unbind(), (left @ right).view(states.shape).unbind()
        return lambda index: each[index].add_(products[index])
    matrices = states.view(len(states), -1, left.shape[-2], right.shape[-1]).unbind()
    lefts, rights = left.unbind(), right.unbind()
    return lambda index: matrices[index].baddbmm_(lefts[index], rights[index])


def _aging_of(chunks: Sequence[Chunk], drop: Tensor) -> dict[int, Tensor]:
    """What a state [rows, H, S, D] loses over a chunk, by the chunk's length."""
    return {length: drop[length].unsqueeze(-1) for length in {chunk.length for chunk in chunks}}
