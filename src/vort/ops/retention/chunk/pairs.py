"""Retention at a few positions, pair by pair: no states, each reader meets the tokens before it.

States cost S K V products for each token, and more on the way back; a reader costs K + V + S or so
for each token before it. Where 32 of 1,000 positions read, states are the dearer way by far.

Weights Σ_s read_rs e^{l_s (t - i)} write_is come from blocks of tokens: before the reader's own
block the exponent is (t - e) + (e - i), e the block's end, both at least 0, and the sum over scales
is a product of matrices; within the block it is written out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vort.ops.custom import Some, Tensors
from vort.ops.products import bmm
from vort.ops.retention.chunk.layout import DenseLayout
from vort.ops.retention.chunk.readers import AskedInputs, Readers
from vort.ops.retention.inputs import b_rows, compute_dtype

__all__ = ["pairs_backward", "pairs_forward", "pairs_pay"]

# Tokens in a block.
BLOCK = 64
# Pairs whose scores and weights may be held at once.
MOST = 1 << 23


def pairs_pay(given: AskedInputs) -> bool:
    """Whether pairs cost less than states, as measured on one core (Neoverse N1, NumPy's products).

    Up to a hundred readers of a sequence are always the cheaper way: chunks have pairs too.
    """
    (batch, length, heads, keys), values = given.k.shape, given.v.shape[3]
    # every row has as many slots as the one with the most readers
    readers = int(torch.bincount(given.places // length).max()) if len(given.places) else 0
    scales = given.write.shape[-1]
    few = (readers - 100) * (keys + values + 2 * scales) < scales * keys * values
    return few and batch * heads * readers * length <= MOST


class _Weights:
    """What readers give to tokens: W [B H, R, T], and the way back.

    t [B, R]: where readers are. write [B H, n, C, S] and read [B H, R, S] as they are laid out
    here; tokens that fill up the last block write nothing.
    """

    def __init__(
        self, t: Tensor, write: Tensor, read: Tensor, log_decay: Tensor, include_self: bool
    ) -> None:
        self.write, self.read = write, read
        heads = len(log_decay)
        (self.batch, self.readers), (_, count, block, _) = t.shape, write.shape
        own, offset = t // block, t % block
        rows = torch.arange(len(write), device=t.device)[:, None]
        # the block that a reader stands in, among all of them
        self.own = (rows * count + own.repeat_interleave(heads, 0)).flatten()
        # decays by head, for every row of the batch
        rates = log_decay.repeat(self.batch, 1)[:, None, None]
        ages = torch.arange(block, 0, -1, device=t.device)
        self.ages = ages.to(rates)[:, None]
        self.leave = (self.ages * rates).exp()
        since = t[:, None] - torch.arange(1, count + 1, device=t.device)[:, None] * block
        self.since = since.repeat_interleave(heads, 0)[..., None].to(rates)
        self.arrive = (self.since.clamp(min=0) * rates).exp() * (self.since >= 0)
        lags = offset[..., None] - torch.arange(block, device=t.device)
        self.lags = lags.repeat_interleave(heads, 0)[..., None].to(rates)
        seen = self.lags >= (0 if include_self else 1)
        self.near = (self.lags.clamp(min=0) * rates).exp() * seen
        self.written = write * self.leave
        self.asking = read[:, None] * self.arrive
        self.met = self.near * self._of_own(write)

    def forward(self) -> Tensor:
        """[B H, R, n C]."""
        blocks = bmm(self.asking.flatten(0, 1), self.written.flatten(0, 1).mT)
        W = blocks.view(*self.asking.shape[:3], -1).transpose(1, 2).contiguous()
        near = bmm(self.met.flatten(0, 1), self.read.flatten(0, 1)[..., None])
        W.flatten(0, 1)[self._places()] = near.squeeze(-1)
        return W.flatten(2)

    def backward(self, dW: Tensor, rates: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients to write, read and log_decay [H, S], the last only if `rates`."""
        block = self.write.shape[2]
        dW = dW.unflatten(2, (-1, block))
        near = dW.flatten(0, 1)[self._places()]
        far = dW.transpose(1, 2).flatten(0, 1)
        dasking = bmm(far, self.written.flatten(0, 1)).view(self.asking.shape)
        dwritten = bmm(far.mT, self.asking.flatten(0, 1)).view(self.written.shape)
        dread = (dasking * self.arrive).sum(1)
        met = bmm(near[:, None], self.met.flatten(0, 1)).view(dread.shape)
        dwrite = dwritten * self.leave
        told = near[..., None] * self.near.flatten(0, 1) * self.read.flatten(0, 1)[:, None]
        dwrite.flatten(0, 1).index_add_(0, self.own, told)
        if not rates:
            return dwrite, dread + met, None
        drates = (dasking * self.asking * self.since).sum((1, 2))
        drates += (dwritten * self.written * self.ages).sum((1, 2))
        drates += (told.view(self.met.shape) * self._of_own(self.write) * self.lags).sum((1, 2))
        return dwrite, dread + met, drates.unflatten(0, (self.batch, -1)).sum(0)

    def _of_own(self, blocks: Tensor) -> Tensor:
        """[B H, R, C, S]: of each reader the block it stands in."""
        found = blocks.flatten(0, 1).index_select(0, self.own)
        return found.view(len(blocks), self.readers, *blocks.shape[2:])

    def _places(self) -> tuple[Tensor, Tensor]:
        """Rows of [B H R, n, C], and in each the block of its reader."""
        rows = torch.arange(len(self.own), device=self.own.device)
        return rows, self.own % self.write.shape[1]


class _Laid(NamedTuple):
    """A call's tensors by row and head: [B H, R or T, .]."""

    readers: Readers
    q: Tensor
    k: Tensor
    v: Tensor
    weights: _Weights
    # where a reader looks at all, for a normaliser that does not decay
    seen: Tensor | None


def _lay(given: AskedInputs) -> _Laid:
    (batch, length, heads, _), scales = given.k.shape, given.write.shape[-1]
    dtype, device = compute_dtype(*given[:3]), given.k.device
    readers = Readers(
        given.places, DenseLayout(batch, length, length, device), b_rows(given.normalizer, scales)
    )
    t = readers.offset[0]
    count = -(-length // BLOCK)
    write = _by_head(given.write, dtype)
    write = torch.nn.functional.pad(write, (0, 0, 0, count * BLOCK - length))
    read = t.new_ones((batch * heads, t.shape[1], scales), dtype=dtype)
    if given.read is not None:
        read = readers.spread(given.read, dtype).flatten(0, 2)
    weights = _Weights(
        t, write.unflatten(1, (count, BLOCK)), read, given.log_decay.to(dtype), given.include_self
    )
    seen = None
    if given.normalizer == "undecayed":
        seen = torch.arange(length, device=device) <= t[..., None] - int(not given.include_self)
        seen = seen.repeat_interleave(heads, 0)
    q = readers.spread(given.q, dtype).flatten(0, 2)
    return _Laid(readers, q, _by_head(given.k, dtype), _by_head(given.v, dtype), weights, seen)


def _by_head(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, T, H, D] as [B H, T, D]."""
    return x.to(dtype).transpose(1, 2).flatten(0, 1)


def _by_token(x: Tensor, like: Tensor) -> Tensor:
    """The reverse, of the type of `like`."""
    found: Tensor = x.unflatten(0, (like.shape[0], -1))
    return found.transpose(1, 2).to(like.dtype)


def pairs_forward(given: AskedInputs) -> Tensors:
    """The output, then what the backward is given: scores, weights, output, signed inverse sums."""
    laid, length = _lay(given), given.length
    scores = bmm(laid.q, laid.k.mT)
    W = laid.weights.forward()[..., :length]
    pairs = scores * W
    o = bmm(pairs, laid.v)
    inverse = o.new_ones(1)
    if given.normalizer != "none":
        counted = pairs if laid.seen is None else scores * laid.seen
        total = counted.sum(-1, keepdim=True)
        inverse = torch.copysign(1 / (total.abs() + given.eps), total)
        o *= inverse.abs()
    shape = (1, given.batch, -1, *o.shape[1:])
    return laid.readers.gather(o.view(shape), given.q), scores, W, o, inverse


def pairs_backward(given: AskedInputs, kept: Some, grads: Some, needs: Sequence[bool]) -> Tensors:
    """Gradients to q, k, v, write, log_decay and read."""
    laid, (scores, W, o, inverse) = _lay(given), kept
    do = laid.readers.spread(grads[0], o.dtype).flatten(0, 2)
    dvalue = do * inverse.abs()
    dpairs = bmm(dvalue, laid.v.mT)
    dscores = dpairs * W
    if given.normalizer != "none":
        dtotal = -(do * o).sum(-1, keepdim=True) * inverse
        if laid.seen is None:
            dpairs += dtotal
            dscores = dpairs * W
        else:
            dscores += dtotal * laid.seen
    dv = bmm((scores * W).mT, dvalue)
    more = laid.weights.write.shape[1] * BLOCK - given.length
    dW = torch.nn.functional.pad(dpairs * scores, (0, more))
    dwrite, dread, drates = laid.weights.backward(dW, needs[4])
    dwrite = dwrite.flatten(1, 2)[:, : given.length]
    shape = (1, given.batch, given.k.shape[2])
    dq = laid.readers.gather(bmm(dscores, laid.k).unflatten(0, shape), given.q)
    return (
        dq,
        _by_token(bmm(dscores.mT, laid.q), given.k),
        _by_token(dv, given.v),
        _by_token(dwrite, given.write),
        None if drates is None else drates.to(given.log_decay.dtype),
        None if given.read is None
        else laid.readers.gather(dread.unflatten(0, shape), given.read),
    )  # fmt: skip
