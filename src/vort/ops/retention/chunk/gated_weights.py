"""Weights between the tokens of a chunk when queries choose what they read.

W[t, i] = sum_s read[t, s] exp(log_decay[s] (t - i)) write[i, s]. A [C, C, S] tensor would cost S
times the scores. Across a block boundary t0 (t >= t0 > i) the exponential splits into
exp(l (t - t0)) exp(l (t0 - i)), both at most 1, so everything outside diagonal blocks is one matrix
product over blocks and s. In a diagonal block the second factor grows: where it cannot overflow
(decays to about -9 per step in float32) the same product serves, elsewhere that block is summed
directly.
"""

import torch
from torch import Tensor

from vort.ops.retention.chunk.decays import Decays, decay_at, least_exponent
from vort.ops.retention.chunk.workspace import Workspace

__all__ = ["GatedWeights"]

# Tokens in a block.
BLOCK = 8


class GatedWeights:
    """W by source, and its gradient.

    inside: [H, C, C / BLOCK, S] from the first token of t's block to t, 0 at other blocks. before:
    the same shape, from token i to the first token of a later block, 0 elsewhere. diagonal:
    [H, 1, BLOCK, BLOCK, S] between two tokens of a block [t, i], 0 where t may not see i; None when
    every decay is gentle: `before` then goes on into the block itself, with exponents that cannot
    overflow. The lags of the first two are kept for the gradient.
    """

    def __init__(self, decays: Decays, workspace: Workspace) -> None:
        self.workspace, self.seen = workspace, decays.seen
        rates, chunk = decays.rates, decays.seen.shape[0]
        steepest = (BLOCK - 1) * (float(rates.min()) if rates.numel() else 0.0)
        gentle = steepest > least_exponent(rates.dtype)
        position = torch.arange(chunk, device=rates.device)
        to_block = position[::BLOCK] - position[:, None]
        own = (to_block <= 0) & (to_block > -BLOCK)
        reach = to_block > (-BLOCK if gentle else 0)

        def table(lag: Tensor, keep: Tensor) -> Tensor:
            return (decay_at(rates, lag * keep) * keep[..., None, None]).movedim(-2, 0).contiguous()

        self.inside, self.before = table(-to_block, own), table(to_block, reach)
        self.inside_lag, self.before_lag = (
            (lag * keep)[..., None].to(rates.dtype)
            for lag, keep in ((-to_block, own), (to_block, reach))
        )
        self.diagonal = None
        if not gentle:
            between = position[:BLOCK, None] - position[:BLOCK]
            self.diagonal = table(between, self.seen[:BLOCK, :BLOCK].mT > 0).unsqueeze(1)

    def by_source(self, read: Tensor, write: Tensor) -> Tensor:
        """W [n rows H, C, C], at [i, t], from read and write [n, rows, H, C, S].

        Exactly 0 where t may not see i.
        """
        left, right = self._factors(read, write)
        chunk = len(self.seen)
        weights = self.workspace.take("weights", write.shape[:3].numel(), chunk, chunk)
        torch.bmm(_rows(right), _rows(left).mT, out=weights)
        if self.diagonal is None:
            return weights.mul_(self.seen)
        near = _blocks(read).unsqueeze(-2) * self.diagonal * _blocks(write).unsqueeze(-3)
        on_diagonal(weights).mT.add_(near.sum(-1).flatten(0, 2))
        return weights

    def backward(
        self, grad: Tensor, read: Tensor, write: Tensor, decay_needs_grad: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Gradients to read, write [n, rows, H, C, S] and, if needed, log_decay [H, S] from W's."""
        if self.diagonal is None:
            grad = grad * self.seen
        left, right = self._factors(read, write)
        grad_left = torch.bmm(grad.mT, _rows(right)).view(left.shape)
        grad_right = torch.bmm(grad, _rows(left)).view(right.shape)
        grad_decay = None
        if decay_needs_grad:
            grad_decay = _total(left.mul_(grad_left).mul_(self.inside_lag))
            grad_decay += _total(right.mul_(grad_right).mul_(self.before_lag))
        grad_read = grad_left.mul_(self.inside).sum(-2)
        grad_write = grad_right.mul_(self.before).sum(-2)
        if self.diagonal is not None:
            near = on_diagonal(grad).mT.unflatten(0, write.shape[:3])
            reads, writes = _blocks(read), _blocks(write)
            to_read = (near.unsqueeze(-2) @ (writes.unsqueeze(-3) * self.diagonal)).squeeze(-2)
            by_source = reads.unsqueeze(-3) * self.diagonal.transpose(-2, -3)
            to_write = (near.mT.unsqueeze(-2) @ by_source).squeeze(-2)
            grad_read += to_read.flatten(-3, -2)
            grad_write += to_write.flatten(-3, -2)
            if grad_decay is not None:
                # Every term carries the factor lag = t - i, and positions in a block are small
                # numbers, so the sum over pairs may be taken as one over t less one over i.
                place = torch.arange(BLOCK, device=grad.device).unsqueeze(-1)
                grad_decay += _total((reads * to_read - writes * to_write) * place)
        return grad_read, grad_write, grad_decay

    def _factors(self, read: Tensor, write: Tensor) -> tuple[Tensor, Tensor]:
        """How t reads and i writes the boundary of each block, [n, rows, H, C, C / BLOCK, S]."""
        shape = (*write.shape[:-1], len(self.seen) // BLOCK, write.shape[-1])
        left = self.workspace.take("block reads", *shape)
        right = self.workspace.take("block writes", *shape)
        torch.mul(read.unsqueeze(-2), self.inside, out=left)
        torch.mul(write.unsqueeze(-2), self.before, out=right)
        return left, right


def on_diagonal(weights: Tensor) -> Tensor:
    """The diagonal blocks [..., C / BLOCK, BLOCK, BLOCK] of [..., C, C], as a view."""
    blocks = weights.shape[-1] // BLOCK
    grid = weights.view(*weights.shape[:-2], blocks, BLOCK, blocks, BLOCK)
    return grid.diagonal(0, -4, -2).movedim(-1, -3)


def _blocks(x: Tensor) -> Tensor:
    """[..., C, S] as [..., C / BLOCK, BLOCK, S]."""
    return x.view(*x.shape[:-2], -1, BLOCK, x.shape[-1])


def _rows(x: Tensor) -> Tensor:
    """[n, rows, H, C, C / BLOCK, S] as a batch of matrices [C, C S / BLOCK]."""
    return x.flatten(0, 2).flatten(-2)


def _total(x: Tensor) -> Tensor:
    """Sum of [n, rows, H, ..., S] over all but H and S."""
    return x.movedim(2, 0).flatten(1, -2).sum(1)
