"""Weights between the tokens of a chunk, and their gradients.

W[t, i] = sum_s read[t, s] exp(log_decay[s] (t - i)) write[i, s], 0 where t may not see i. When
queries read all scales alike, W depends on the source and the lag alone (`LagWeights`). When they
choose, a [C, C, S] tensor would cost S times the scores, and W is factored (`GatedWeights`).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vort.ops.products import bmm
from vort.ops.retention.chunk.layout import Workspace

__all__ = ["Decays", "GatedWeights", "LagWeights", "at_offsets"]

# Tokens in a block of GatedWeights.
BLOCK = 8


@dataclass(frozen=True)
class Decays:
    """exp(log_decay * lag) for lags 0..C; H is 1 for decays that all heads share.

    rates: log_decay [H, S]. power: [C + 1, H, S]; drop: the same minus 1, kept apart because
    1 - 1e-7 has no float32. seen [C, C], by source: 1 at [i, t] where t may see i.
    """

    rates: Tensor
    power: Tensor
    drop: Tensor
    seen: Tensor

    @staticmethod
    def of(rates: Tensor, chunk: int, include_self: bool) -> "Decays":
        """The tables for log_decay [H, S]."""
        lags = torch.arange(chunk + 1, device=rates.device)
        power = decay_at(rates, lags)
        drop = torch.expm1(rates * lags[:, None, None]).masked_fill_(power == 0, -1)
        position = lags[:chunk]
        seen = position - position[:, None] >= (0 if include_self else 1)
        return Decays(rates, power, drop, seen.to(rates.dtype))


def least_exponent(dtype: torch.dtype) -> float:
    """Weights that have decayed below exp of this become 0.

    On a CPU, subnormal numbers multiply a hundred times slower, and a fast scale would fill whole
    matrices with them.
    """
    return 0.75 * math.log(torch.finfo(dtype).tiny)


def decay_at(rates: Tensor, lag: Tensor) -> Tensor:
    """exp(rates lag) [..., H, S] for lag [...]."""
    exponent = rates * lag[..., None, None]
    return exponent.exp().masked_fill_(exponent < least_exponent(rates.dtype), 0)


class LagWeights:
    """W by source, and its gradient, when queries read all scales alike.

    One product gives M[i, lag] from tables [H, S, C] of weights by lag. Its rows are 2 C long and 0
    beyond the chunk, so that W by source, W[i, t] = M[i, t - i], is the same memory with a stride
    one shorter, future and all.
    """

    def __init__(self, decays: Decays, workspace: Workspace) -> None:
        self.workspace = workspace
        self.chunk = decays.seen.shape[0]
        self.by_lag = decays.power[: self.chunk].permute(1, 2, 0) * decays.seen[0]
        self.padded = torch.nn.functional.pad(self.by_lag, (0, self.chunk))

    def by_source(self, read: Tensor, write: Tensor) -> Tensor:
        """W [n rows H, C, C], at [i, t], from write [n, rows, H, C, S]; 0 where t may not see i."""
        lags = self._lags("lags", write)
        bmm(write.flatten(0, 2), self._for_each(self.padded, write), out=lags)
        return self._skewed(lags)

    def backward(
        self, dW: Tensor, read: Tensor, write: Tensor, decay_needs_grad: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """dread (none), dwrite and, if needed, dlog_decay [H, S] from the gradient of W."""
        lags = self._lags("lag gradients", write).zero_()
        self._skewed(lags).copy_(dW)
        lags = lags[..., : self.chunk]
        dwrite = bmm(lags, self._for_each(self.by_lag, write).mT).view(write.shape)
        if not decay_needs_grad:
            return None, dwrite, None
        by_lag = bmm(write.flatten(0, 2).mT, lags)
        by_lag = by_lag.view(*write.shape[:3], *by_lag.shape[1:]).sum((0, 1))
        lag = torch.arange(self.chunk, device=dW.device)
        return None, dwrite, (by_lag * self.by_lag * lag).sum(-1)

    def _lags(self, name: str, write: Tensor) -> Tensor:
        return self.workspace.take(name, write.shape[:3].numel(), self.chunk, 2 * self.chunk)

    def _skewed(self, lags: Tensor) -> Tensor:
        """[.., i, lag] by [.., i, t]; pairs with t < i fall beyond the chunk, in the row before."""
        size = self.chunk
        return lags.as_strided((len(lags), size, size), (2 * size * size, 2 * size - 1, 1))

    def _for_each(self, table: Tensor, write: Tensor) -> Tensor:
        """The table of every chunk, row and head of write."""
        return table.expand(*write.shape[:3], *table.shape[1:]).flatten(0, 2)


class GatedWeights:
    """W by source, and its gradient, when queries choose what they read.

    Across a block boundary t0 (t >= t0 > i) the exponential splits into exp(l (t - t0))
    exp(l (t0 - i)), both at most 1, so everything outside diagonal blocks is one matrix product
    over blocks and s. In a diagonal block the second factor grows: where neither it (decays to
    about -9 per step in float32) nor its products overflow the same product serves, elsewhere that
    block is summed directly.

    inside: [H, C, C / BLOCK, S] from the first token of t's block to t, 0 at other blocks. before:
    the same shape, from token i to the first token of a later block, 0 elsewhere. diagonal:
    [H, 1, BLOCK, BLOCK, S] between two tokens of a block [t, i], 0 where t may not see i; None when
    every decay is gentle: `before` then goes on into the block itself, with exponents that cannot
    overflow. The lags of the first two are kept for the gradient.

    direct: whether there is a `diagonal` however gentle the decays.
    """

    def __init__(self, decays: Decays, workspace: Workspace, direct: bool = False) -> None:
        self.workspace, self.seen = workspace, decays.seen
        rates, chunk = decays.rates, decays.seen.shape[0]
        steepest = (BLOCK - 1) * (float(rates.min()) if rates.numel() else 0.0)
        gentle = steepest > least_exponent(rates.dtype) and not direct
        # How much the second factor grows within a block, where it does.
        self.growth = math.exp(-steepest) if gentle else 1.0
        position = torch.arange(chunk, device=rates.device)
        to_block = position[::BLOCK] - position[:, None]
        own = (to_block <= 0) & (to_block > -BLOCK)
        reach = to_block > (-BLOCK if gentle else 0)

        def table(lag: Tensor, keep: Tensor) -> Tensor:
            return (decay_at(rates, lag * keep) * keep[..., None, None]).movedim(-2, 0).contiguous()

        # Of the last call of `by_source`, for a backward that follows it.
        self._made: tuple[Tensor, Tensor] | None = None
        self.inside, self.before = table(-to_block, own), table(to_block, reach)
        self.inside_lag, self.before_lag = (
            (lag * keep)[..., None].to(rates.dtype)
            for lag, keep in ((-to_block, own), (to_block, reach))
        )
        self.diagonal = None
        if not gentle:
            between = position[:BLOCK, None] - position[:BLOCK]
            self.diagonal = table(between, self.seen[:BLOCK, :BLOCK].mT > 0).unsqueeze(1)

    def overflows(self, read: Tensor, write: Tensor) -> bool:
        """Whether products of the factors, which go through the future too, might be infinite.

        They may be a ten-thousandth of that: gradients to W multiply the second factor as well.
        """
        if self.diagonal is not None or not write.numel():
            return False
        most = 1e-4 * torch.finfo(self.seen.dtype).max
        # Handed over together: elsewhere than on a CPU each would be waited for.
        ends = (end.to(self.seen.dtype) for x in (write, read) for end in x.detach().aminmax())
        sizes: list[float] = torch.stack(list(ends)).abs().tolist()
        return self.growth * max(sizes[:2]) * max(sizes[2:]) > most

    def by_source(
        self, read: Tensor, write: Tensor, at: Tensor | None = None, seen: Tensor | None = None
    ) -> Tensor:
        """W [n rows H, C, R], at [i, t], from read [n, rows, H, R, S] and write [n, rows, H, C, S].

        Exactly 0 where t may not see i. Where not all of a chunk read (R < C): at [n, rows, R] says
        who does, and seen [n rows H, C, R] what they may see; there must be no `diagonal`.
        """
        left, right = self._made = self._factors(read, write, at)
        shape = (write.shape[:3].numel(), write.shape[3], read.shape[3])
        weights = self.workspace.take("weights", *shape)
        bmm(_rows(right), _rows(left).mT, out=weights)
        if self.diagonal is None:
            return weights.mul_(self.seen if seen is None else seen)
        near = _blocks(read).unsqueeze(-2) * self.diagonal * _blocks(write).unsqueeze(-3)
        on_diagonal(weights).mT.add_(near.sum(-1).flatten(0, 2))
        return weights

    def backward(
        self,
        dW: Tensor,
        read: Tensor,
        write: Tensor,
        decay_needs_grad: bool,
        at: Tensor | None = None,
        seen: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """dread, dwrite and, if needed, dlog_decay [H, S] from W's gradient.

        It follows `by_source` of the same arguments.
        """
        if self.diagonal is None:
            dW = dW * (self.seen if seen is None else seen)
        assert self._made is not None
        left, right = self._made
        dleft = bmm(dW.mT, _rows(right)).view(left.shape)
        dright = bmm(dW, _rows(left)).view(right.shape)
        dlog_decay = None
        if decay_needs_grad:
            read_lag = left.mul_(dleft)
            if at is not None:  # in its places, so that the sum has its order
                read_lag = at_offsets(read_lag, at, write.shape[3])
            dlog_decay = _total(read_lag.mul_(self.inside_lag))
            dlog_decay += _total(right.mul_(dright).mul_(self.before_lag))
        dread = dleft.mul_(self._inside(at)).sum(-2)
        dwrite = dright.mul_(self.before).sum(-2)
        if self.diagonal is not None:
            near = on_diagonal(dW).mT.unflatten(0, write.shape[:3])
            reads, writes = _blocks(read), _blocks(write)
            to_read = (near.unsqueeze(-2) @ (writes.unsqueeze(-3) * self.diagonal)).squeeze(-2)
            by_source = reads.unsqueeze(-3) * self.diagonal.transpose(-2, -3)
            to_write = (near.mT.unsqueeze(-2) @ by_source).squeeze(-2)
            dread += to_read.flatten(-3, -2)
            dwrite += to_write.flatten(-3, -2)
            if dlog_decay is not None:
                # Every term carries the factor lag = t - i, and positions in a block are small
                # numbers, so the sum over pairs may be taken as one over t less one over i.
                place = torch.arange(BLOCK, device=dW.device).unsqueeze(-1)
                dlog_decay += _total((reads * to_read - writes * to_write) * place)
        return dread, dwrite, dlog_decay

    def _inside(self, at: Tensor | None) -> Tensor:
        """`inside`, or of those that read [n, rows, H, R, C / BLOCK, S]."""
        return self.inside if at is None else self.inside[:, at].permute(1, 2, 0, 3, 4, 5)

    def _factors(self, read: Tensor, write: Tensor, at: Tensor | None) -> tuple[Tensor, Tensor]:
        """How t reads and i writes the boundary of each block, [n, rows, H, ., C / BLOCK, S]."""
        shape = (len(self.seen) // BLOCK, write.shape[-1])
        left = self.workspace.take("block reads", *read.shape[:-1], *shape)
        right = self.workspace.take("block writes", *write.shape[:-1], *shape)
        torch.mul(read.unsqueeze(-2), self._inside(at), out=left)
        torch.mul(write.unsqueeze(-2), self.before, out=right)
        return left, right


def at_offsets(x: Tensor, at: Tensor | None, chunk: int) -> Tensor:
    """x [n, rows, H, R, ...] at places [n, rows, R] of chunks: [n, rows, H, C, ...], else 0."""
    assert at is not None
    index = at.view(*at.shape[:2], 1, -1, *[1] * (x.ndim - 4)).expand(x.shape)
    # Slots that nobody has are added to the first place, and hold 0.
    return x.new_zeros(*x.shape[:3], chunk, *x.shape[4:]).scatter_add_(3, index, x)


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
