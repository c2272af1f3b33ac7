"""More scales than a kernel takes at once: groups of them, summed before the normaliser."""

from collections.abc import Callable

import torch
from torch import Tensor

from vort.ops.retention.exact import normalize
from vort.ops.retention.inputs import Inputs
from vort.ops.retention.state import RetentionState

__all__ = ["retention_in_groups"]

Retention = Callable[[Inputs], tuple[Tensor, RetentionState | None]]


def retention_in_groups(
    backend: Retention, most: int, inputs: Inputs
) -> tuple[Tensor, RetentionState | None]:
    """What `retention` returns, from calls of `backend` with at most `most` scales each.

    Retrieval is a sum over scales until it is divided by the normaliser, and the normaliser is a
    retrieval of ones. So numerators and denominators of the groups add up; the paper's 10 banks of
    15 exponentials (136 scales) take 5 groups of 28 and 5 of the ones.
    """
    _, _, v, write, log_decay, read, G, b, *_ = inputs
    groups = -(-write.shape[-1] // most)

    def one(**changes: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """A call without normaliser: what is retrieved, and G after it if asked for."""
        dense = {name: None if x is None else x.contiguous() for name, x in changes.items()}
        output, after = backend(inputs._replace(normalizer="none", b=None, **dense))  # type: ignore[arg-type]
        return output, None if after is None else after.G

    def summed(values: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor | None]:
        total = torch.zeros((), device=v.device)
        ends = []
        for w, decay, r, before in zip(
            write.chunk(groups, -1),
            log_decay.chunk(groups, -1),
            [None] * groups if read is None else read.chunk(groups, -1),
            [None] * groups if start is None else start.chunk(groups, 2),
            strict=True,
        ):
            part, after = one(v=values, write=w, log_decay=decay, read=r, G=before)
            total = total + part.to(torch.promote_types(part.dtype, torch.float32))
            ends.append(after)
        return total, None if ends[0] is None else torch.cat([x for x in ends if x is not None], 2)

    numerator, G_last = summed(v, G)
    denominator = b_last = None
    ones, start = v.new_ones(*v.shape[:-1], 1), None if b is None else b.unsqueeze(-1)
    if inputs.normalizer == "decayed":
        denominator, b_last = summed(ones, start)
    elif inputs.normalizer == "undecayed":
        kept, still = write.new_ones(*write.shape[:-1], 1), torch.zeros_like(log_decay[..., :1])
        denominator, b_last = one(v=ones, write=kept, log_decay=still, read=None, G=start)
    if denominator is not None:
        denominator = denominator.squeeze(-1)
    output = normalize(numerator, denominator, inputs.eps).to(v.dtype)
    if G_last is None:
        return output, None
    return output, RetentionState(G_last, None if b_last is None else b_last.squeeze(-1))
