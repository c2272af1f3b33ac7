"""Which positions ask for what: the i*(t) of eq. retrieval-loss, ready for a batch."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Retrievals"]


class Retrievals(NamedTuple):
    """The N queries of each sequence and the tokens that hold their answers.

    Attributes:
        queries: `[B, N]`, positions t that ask.
        sources: `[B, N]`, the position i*(t) < t that each should find.
        asked: `[B, N]`, False where a row has fewer than N queries and the entry means nothing.

    >>> found = Retrievals.of(torch.tensor([[-1, -1, 0, 1], [-1, 0, -1, -1]]))
    >>> found.queries.tolist(), found.sources.tolist(), found.asked.tolist()
    ([[2, 3], [1, 1]], [[0, 1], [0, 0]], [[True, True], [True, False]])
    """

    queries: Tensor
    sources: Tensor
    asked: Tensor

    @classmethod
    def of(cls, sources: Tensor) -> "Retrievals":
        """The retrievals of `sources` `[B, T]`: i*(t) at positions that ask, -1 elsewhere.

        This is what `batch["sources"]` of a task holds. A source must lie before its query: the
        sum of eq. retrieval-loss goes over i < t.
        """
        if sources.dim() != 2 or sources.is_floating_point():
            raise ValueError(
                f"sources must be whole numbers [B, T], got {sources.dtype} {tuple(sources.shape)}"
            )
        position = torch.arange(sources.shape[1], device=sources.device).expand_as(sources)
        late = sources >= position
        if bool(late.any()):
            row, place = (int(x) for x in late.nonzero()[0])
            raise ValueError(
                f"sources must lie before their queries, got {int(sources[row, place])} at "
                f"position {place} of row {row}"
            )
        asking = sources >= 0
        count = asking.sum(1)
        # Rows with fewer queries repeat the last of them, so that every entry is a legal pair.
        rank = torch.arange(int(count.max()) if count.numel() else 0, device=sources.device)
        asked = rank < count[:, None]
        first = torch.where(asking, position, sources.shape[1]).sort(1)[0]
        queries = first.gather(1, torch.minimum(rank, (count[:, None] - 1).clamp_min(0)))
        # A row without any query: position 0, never counted.
        queries = torch.where(count[:, None] > 0, queries, 0)
        found = sources.long().gather(1, queries).clamp_min(0)
        return cls(queries, found, asked)

    @property
    def total(self) -> int:
        """Queries in all rows."""
        return int(self.asked.sum())

    @property
    def lags(self) -> Tensor:
        """`[B, N]`, t - i*(t)."""
        return self.queries - self.sources

    def is_source(self, length: int) -> Tensor:
        """`[B, length]`, True at tokens that some query asks for."""
        hits = torch.zeros(len(self.sources), length, device=self.sources.device)
        hits.scatter_add_(1, self.sources, self.asked.to(hits.dtype))
        return hits > 0
