"""W[t, i] = sum_s read[t, s] exp(log_decay[s] (t - i)) write[i, s] inside a chunk, and its gradient.

A [C, C, S] tensor would cost S times the scores. Across a block boundary t0 (t >= t0 > i) the
exponential splits into exp(l (t - t0)) exp(l (t0 - i)), both at most 1, so everything left of a
diagonal block is one small matrix product over s; only the diagonal blocks are summed directly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vort.ops.retention.chunk_layout import BLOCK

__all__ = ["Decays", "pair_weights", "pair_weights_backward"]


@dataclass(frozen=True)
class Decays:
    """exp(log_decay * lag) wherever a chunk needs it; no exponent is ever positive.

    power: [C + 1, H, S] for lags 0..C; drop: the same minus 1, kept apart because 1 - 1e-7 has no
    float32. inside: [H, 1, BLOCK, S] from a block's first token to t. before: [H, C / BLOCK, C, S]
    from token i to the first token of a later block, 0 elsewhere. diagonal: [H, 1, BLOCK, BLOCK, S]
    between two tokens of a block, 0 where t may not see i. The lags of the first two are kept for
    the gradient; seen [C, C] is 1 where t may see i.
    """

    power: Tensor
    drop: Tensor
    inside: Tensor
    before: Tensor
    diagonal: Tensor
    inside_lag: Tensor
    before_lag: Tensor
    seen: Tensor

    @staticmethod
    def of(log_decay: Tensor, chunk: int, include_self: bool) -> "Decays":
        """The tables for log_decay [H, S]."""
        exponent = log_decay * torch.arange(chunk + 1, device=log_decay.device)[:, None, None]
        power = exponent.exp()
        position = torch.arange(chunk, device=log_decay.device)
        block = position[:BLOCK]
        to_block = position[::BLOCK, None] - position
        between = block[:, None] - block
        sees = 0 if include_self else 1

        def at(lag: Tensor, keep: Tensor) -> Tensor:
            table = power[lag.clamp_min(0)] * keep[..., None, None]
            return table.movedim(-2, 0).contiguous()

        return Decays(
            power,
            torch.expm1(exponent),
            at(block, block >= 0).unsqueeze(1),
            at(to_block, to_block > 0),
            at(between, between >= sees).unsqueeze(1),
            block[:, None].to(log_decay.dtype),
            to_block.clamp_min(0)[..., None].to(log_decay.dtype),
            (position[:, None] - position >= sees).to(log_decay.dtype),
        )


def _blocks(x: Tensor) -> Tensor:
    """[..., C, S] as [..., C / BLOCK, BLOCK, S]."""
    return x.unflatten(-2, (-1, BLOCK))


def pair_weights(read: Tensor, write: Tensor, decays: Decays) -> Tensor:
    """W [..., C, C] from read and write [..., H, C, S]; exactly 0 where t may not see i."""
    left = _blocks(read) * decays.inside
    right = write.unsqueeze(-3) * decays.before
    weights = (left @ right.mT).flatten(-3, -2)
    near = _blocks(read).unsqueeze(-2) * decays.diagonal * _blocks(write).unsqueeze(-3)
    on_diagonal(weights).add_(near.sum(-1))
    return weights


def on_diagonal(weights: Tensor) -> Tensor:
    """The diagonal blocks [..., C / BLOCK, BLOCK, BLOCK] of [..., C, C], as a view."""
    grid = weights.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
    return grid.diagonal(0, -4, -2).movedim(-1, -3)


def pair_weights_backward(
    grad: Tensor, read: Tensor, write: Tensor, decays: Decays
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients to read, write [..., H, C, S] and log_decay [H, S] from that of W."""
    left = _blocks(read) * decays.inside
    right = write.unsqueeze(-3) * decays.before
    rows = _blocks(grad)
    grad_left = rows @ right
    grad_right = rows.mT @ left
    grad_read = grad_left * decays.inside
    grad_write = (grad_right * decays.before).sum(-3)
    grad_decay = _total(left * grad_left * decays.inside_lag)
    grad_decay += _total(right * grad_right * decays.before_lag)

    near = on_diagonal(grad)
    near_read = (near.unsqueeze(-2) @ (_blocks(write).unsqueeze(-3) * decays.diagonal)).squeeze(-2)
    seen_by = _blocks(read).unsqueeze(-3) * decays.diagonal.transpose(-2, -3)
    near_write = (near.mT.unsqueeze(-2) @ seen_by).squeeze(-2)
    # Every term carries the factor lag = t - i, and positions in a block are small numbers, so
    # the sum over pairs may be taken as one over t less one over i.
    moved = _blocks(read) * near_read - _blocks(write) * near_write
    grad_decay += _total(moved * decays.inside_lag)
    return (
        (grad_read + near_read).flatten(-3, -2),
        grad_write + near_write.flatten(-3, -2),
        grad_decay,
    )


def _total(x: Tensor) -> Tensor:
    """Sum of [n, rows, H, ..., S] over all but H and S."""
    return x.movedim(2, 0).flatten(1, -2).sum(1)
