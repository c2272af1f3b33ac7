"""More time scales than a kernel takes at once: groups of them, summed before the normaliser."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vort.ops.retention.normalizer import DEFAULT_EPS, normalize
from vort.ops.retention.state import RetentionState

__all__ = ["retention_in_groups"]

Retention = Callable[..., tuple[Tensor, RetentionState | None]]


def retention_in_groups(
    backend: Retention,
    most: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    write: Tensor,
    log_decay: Tensor,
    *,
    read: Tensor | None = None,
    normalizer: str = "decayed",
    initial_state: RetentionState | None = None,
    eps: float = DEFAULT_EPS,
    **options: Any,
) -> tuple[Tensor, RetentionState | None]:
    """What `retention` returns, from calls of `backend` with at most `most` time scales each.

    Retrieval is a sum over time scales until it is divided by the normaliser, and the normaliser is
    a retrieval of ones. So numerators and denominators of the groups add up; the paper's 10 banks
    of 15 terms (136 scales) take 5 groups of 28 and 5 of the ones.
    """
    groups = -(-write.shape[-1] // most)
    writes, decays = write.chunk(groups, -1), log_decay.chunk(groups, -1)
    reads = [None] * groups if read is None else read.chunk(groups, -1)

    def summed(values: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor | None]:
        starts = [None] * groups if start is None else start.chunk(groups, 2)
        total = torch.zeros((), device=v.device)
        ends = []
        for w, decay, r, G in zip(writes, decays, reads, starts, strict=True):
            before = None if G is None else RetentionState(G.contiguous(), None)
            part, after = _plain(backend, q, k, values, w, decay, r, before, options)
            total = total + part.to(torch.promote_types(part.dtype, torch.float32))
            ends.append(after)
        return total, None if ends[0] is None else torch.cat([x for x in ends if x is not None], 2)

    G, b = (None, None) if initial_state is None else initial_state
    numerator, G_after = summed(v, G)
    ones = v.new_ones(*v.shape[:-1], 1)
    if normalizer == "none":
        denominator, b_after = None, None
    elif normalizer == "decayed":
        sums, b_after = summed(ones, None if b is None else b.unsqueeze(-1))
        denominator = sums.squeeze(-1)
    else:
        kept = write.new_ones(*write.shape[:-1], 1)
        start = None if b is None else RetentionState(b.unsqueeze(-1).contiguous(), None)
        still = torch.zeros_like(log_decay[..., :1])
        sums, b_after = _plain(backend, q, k, ones, kept, still, None, start, options)
        denominator = sums.squeeze(-1)
    output = normalize(numerator, denominator, eps).to(v.dtype)
    if G_after is None:
        return output, None
    return output, RetentionState(G_after, None if b_after is None else b_after.squeeze(-1))


def _plain(
    backend: Retention,
    q: Tensor,
    k: Tensor,
    values: Tensor,
    write: Tensor,
    log_decay: Tensor,
    read: Tensor | None,
    state: RetentionState | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """One call without normaliser: what is retrieved, and G after it if asked for."""
    output, after = backend(
        q,
        k,
        values,
        write.contiguous(),
        log_decay.contiguous(),
        read=None if read is None else read.contiguous(),
        normalizer="none",
        initial_state=state,
        **options,
    )
    return output, None if after is None else after.G
