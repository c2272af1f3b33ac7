"""Weights between the tokens of a chunk, and their gradient.

W[t, i] = sum_s read[t, s] exp(log_decay[s] (t - i)) write[i, s]. A [C, C, S] tensor would cost S
times the scores. Across a block boundary t0 (t >= t0 > i) the exponential splits into
exp(l (t - t0)) exp(l (t0 - i)), both at most 1, so everything left of a diagonal block is one small
matrix product over s. In a diagonal block the second factor grows: where it cannot overflow (decays
to about -9 per step in float32) the same product serves, elsewhere that block is summed directly.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vort.ops.retention.chunk.layout import BLOCK

__all__ = ["Decays", "pair_weights", "pair_weights_backward"]


@dataclass(frozen=True)
class Decays:
    """exp(log_decay * lag) wherever a chunk needs it; H is 1 for decays that all heads share.

    power: [C + 1, H, S] for lags 0..C; drop: the same minus 1, kept apart because 1 - 1e-7 has no
    float32. inside: [H, 1, BLOCK, S] from a block's first token to t. before: [H, C / BLOCK, C, S]
    from token i to the first token of a later block, 0 elsewhere. diagonal: [H, 1, BLOCK, BLOCK, S]
    between two tokens of a block [t, i], 0 where t may not see i; it is empty when every decay is
    gentle: `before` then goes on into the block itself, with exponents that cannot overflow. The
    lags of the first two are kept for the gradient; seen [C, C] is 1 where t may see i.
    """

    power: Tensor
    drop: Tensor
    inside: Tensor
    before: Tensor
    diagonal: Tensor
    inside_lag: Tensor
    before_lag: Tensor
    seen: Tensor

    @property
    def gentle(self) -> bool:
        """Whether a block may be factorised from its first token on, growing factors and all."""
        return self.diagonal.numel() == 0

    @staticmethod
    def of(log_decay: Tensor, chunk: int, include_self: bool) -> "Decays":
        """The tables for log_decay [H, S]."""
        position = torch.arange(chunk + 1, device=log_decay.device)
        # Weights that have decayed out of sight become 0: on a CPU, subnormal numbers multiply a
        # hundred times slower, and a fast scale would fill whole matrices with them.
        least = 0.75 * math.log(torch.finfo(log_decay.dtype).tiny)
        gentle = log_decay.numel() == 0 or bool(log_decay.min() * (BLOCK - 1) > least)
        block, position = position[:BLOCK], position[:chunk]
        to_block = position[::BLOCK, None] - position
        between = block[:, None] - block
        sees = between >= (0 if include_self else 1)

        def at(lag: Tensor) -> Tensor:
            exponent = log_decay * lag[..., None, None]
            return exponent.exp().masked_fill_(exponent < least, 0)

        def table(lag: Tensor, keep: Tensor) -> Tensor:
            return (at(lag * keep) * keep[..., None, None]).movedim(-2, 0).contiguous()

        lags = torch.arange(chunk + 1, device=log_decay.device)
        power = at(lags)
        drop = torch.expm1(log_decay * lags[:, None, None]).masked_fill_(power == 0, -1)
        reach = to_block > (-BLOCK if gentle else 0)
        diagonal = table(between, sees).unsqueeze(1)
        return Decays(
            power,
            drop,
            table(block, block >= 0).unsqueeze(1),
            table(to_block, reach),
            diagonal[:0] if gentle else diagonal,
            block[:, None].to(log_decay.dtype),
            (to_block * reach)[..., None].to(log_decay.dtype),
            (position[:, None] - position >= (0 if include_self else 1)).to(log_decay.dtype),
        )


def _blocks(x: Tensor) -> Tensor:
    """[..., C, S] as [..., C / BLOCK, BLOCK, S]."""
    return x.view(*x.shape[:-2], -1, BLOCK, x.shape[-1])


def pair_weights(read: Tensor, write: Tensor, decays: Decays) -> Tensor:
    """W [..., C, C] from read and write [..., H, C, S]; exactly 0 where t may not see i."""
    left = _blocks(read) * decays.inside
    right = write.unsqueeze(-3) * decays.before
    weights = (left @ right.mT).flatten(-3, -2)
    if decays.gentle:
        return weights.mul_(decays.seen)
    near = _blocks(read).unsqueeze(-2) * decays.diagonal * _blocks(write).unsqueeze(-3)
    on_diagonal(weights).add_(near.sum(-1))
    return weights


def on_diagonal(weights: Tensor) -> Tensor:
    """The diagonal blocks [..., C / BLOCK, BLOCK, BLOCK] of [..., C, C], as a view."""
    blocks = weights.shape[-1] // BLOCK
    grid = weights.view(*weights.shape[:-2], blocks, BLOCK, blocks, BLOCK)
    return grid.diagonal(0, -4, -2).movedim(-1, -3)


def pair_weights_backward(
    grad: Tensor, read: Tensor, write: Tensor, decays: Decays, decay_needs_grad: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to read, write [..., H, C, S] and log_decay [H, S] (0 if not needed) from W's."""
    if decays.gentle:
        grad = grad * decays.seen
    rows = _blocks(grad)
    left, right = _blocks(read) * decays.inside, write.unsqueeze(-3) * decays.before
    grad_left, grad_right = rows @ right, rows.mT @ left
    grad_read = (grad_left * decays.inside).flatten(-3, -2)
    grad_write = (grad_right * decays.before).sum(-3)
    grad_decay = read.new_zeros(read.shape[2], read.shape[-1])
    if decay_needs_grad:
        grad_decay += _total(left * grad_left * decays.inside_lag)
        grad_decay += _total(right * grad_right * decays.before_lag)
    if not decays.gentle:
        _add_near_backward(
            on_diagonal(grad), read, write, decays, grad_read, grad_write, grad_decay
        )
    return grad_read, grad_write, grad_decay


def _add_near_backward(
    near: Tensor,
    read: Tensor,
    write: Tensor,
    decays: Decays,
    grad_read: Tensor,
    grad_write: Tensor,
    grad_decay: Tensor,
) -> None:
    """Add what the directly summed diagonal blocks `near` contribute."""
    reads, writes, diagonal = _blocks(read), _blocks(write), decays.diagonal
    to_read = (near.unsqueeze(-2) @ (writes.unsqueeze(-3) * diagonal)).squeeze(-2)
    by_source = reads.unsqueeze(-3) * diagonal.transpose(-2, -3)
    to_write = (near.mT.unsqueeze(-2) @ by_source).squeeze(-2)
    grad_read += to_read.flatten(-3, -2)
    grad_write += to_write.flatten(-3, -2)
    # Every term carries the factor lag = t - i, and positions in a block are small numbers,
    # so the sum over pairs may be taken as one over t less one over i.
    grad_decay += _total((reads * to_read - writes * to_write) * decays.inside_lag)


def _total(x: Tensor) -> Tensor:
    """Sum of [n, rows, H, ..., S] over all but H and S."""
    return x.movedim(2, 0).flatten(1, -2).sum(1)
