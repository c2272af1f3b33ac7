"""Packed sequences, one at a time: for the backends whose speed does not matter."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from vort.ops.retention.state import RetentionState

__all__ = ["each_sequence"]

Runner = Callable[..., tuple[Tensor, RetentionState]]


def each_sequence(
    run: Runner,
    tensors: Sequence[Tensor | None],
    state: RetentionState,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, RetentionState]:
    """Outputs and final states of `run(*tensors, state)` on the batch, or on each packed sequence.

    tensors [B, T, ...]; state holds one entry for each sequence. An empty sequence keeps its state.
    """
    if cu_seqlens is None:
        return run(*tensors, state)
    outputs, finals = [], []
    for index, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        pieces = [None if x is None else x[:, start:stop] for x in tensors]
        b = None if state.b is None else state.b[index : index + 1]
        output, final = run(*pieces, RetentionState(state.G[index : index + 1], b))
        outputs.append(output)
        finals.append(final)
    b = (
        torch.cat([final.b for final in finals if final.b is not None])
        if state.b is not None
        else None
    )
    return torch.cat(outputs, 1), RetentionState(torch.cat([final.G for final in finals]), b)
