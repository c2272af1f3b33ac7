"""Weights between the tokens of a chunk when queries read all time scales alike.

W[t, i] = sum_s exp(log_decay[s] (t - i)) write[i, s] then depends on the source and the lag alone:
one product gives M[i, lag]. Its rows are 2 C long and 0 beyond the chunk, so that W by source,
W[i, t] = M[i, t - i], is the same memory with a stride one shorter, future and all.
"""

import torch
from torch import Tensor

from vort.ops.retention.chunk.decays import Decays
from vort.ops.retention.chunk.workspace import Workspace

__all__ = ["LagWeights"]


class LagWeights:
    """W by source, and its gradient; tables [H, S, C] of weights, by lag."""

    def __init__(self, decays: Decays, workspace: Workspace) -> None:
        self.workspace = workspace
        self.chunk = decays.seen.shape[0]
        self.by_lag = decays.power[: self.chunk].permute(1, 2, 0) * decays.seen[0]
        self.padded = torch.nn.functional.pad(self.by_lag, (0, self.chunk))

    def by_source(self, read: Tensor, write: Tensor) -> Tensor:
        """W [n rows H, C, C], at [i, t], from write [n, rows, H, C, S]; 0 where t may not see i."""
        lags = self._lags("lags", write)
        torch.bmm(write.flatten(0, 2), self._for_each(self.padded, write), out=lags)
        return self._skewed(lags)

    def backward(
        self, grad: Tensor, read: Tensor, write: Tensor, decay_needs_grad: bool
    ) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Gradients to read (none), write and, if needed, log_decay [H, S] from W's."""
        lags = self._lags("lag gradients", write).zero_()
        self._skewed(lags).copy_(grad)
        lags = lags[..., : self.chunk]
        to_write = torch.bmm(lags, self._for_each(self.by_lag, write).mT).view(write.shape)
        if not decay_needs_grad:
            return None, to_write, None
        by_lag = torch.bmm(write.flatten(0, 2).mT, lags)
        by_lag = by_lag.view(*write.shape[:3], *by_lag.shape[1:]).sum((0, 1))
        lag = torch.arange(self.chunk, device=grad.device)
        return None, to_write, (by_lag * self.by_lag * lag).sum(-1)

    def _lags(self, name: str, write: Tensor) -> Tensor:
        return self.workspace.take(name, write.shape[:3].numel(), self.chunk, 2 * self.chunk)

    def _skewed(self, lags: Tensor) -> Tensor:
        """[.., i, lag] by [.., i, t]; pairs with t < i fall beyond the chunk, in the row before."""
        size = self.chunk
        return lags.as_strided((len(lags), size, size), (2 * size * size, 2 * size - 1, 1))

    def _for_each(self, table: Tensor, write: Tensor) -> Tensor:
        """The table of every chunk, row and head of write."""
        return table.expand(*write.shape[:3], *table.shape[1:]).flatten(0, 2)
