"""What the memory is between two calls: the states G and b."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from vort.names import check_choice
from vort.ops.retention.inputs import (
    NORMALIZERS,
    Inputs,
    b_rows,
    compute_dtype,
    count_sequences,
)

__all__ = ["RetentionState", "each_sequence", "empty_state", "starting_state"]


class RetentionState(NamedTuple):
    """The memory after the last token; the next token decays it by `exp(log_decay)` first.

    G: [N, H, S, K, V], one matrix for each scale (eq. G-rec).
    b: [N, H, S, K] for the decayed normaliser (eq. b-rec), [N, H, 1, K] for the undecayed one
        (a plain sum of k), None without a normaliser.

    N counts sequences: the batch, or the sequences of `cu_seqlens`. Both are float32, and float64
    when the inputs are; they are the same whether a token may read itself or not.

    >>> state = RetentionState(torch.zeros(1, 2, 8, 16, 32), torch.zeros(1, 2, 8, 16))
    >>> state.G.shape[-2:]
    torch.Size([16, 32])
    """

    G: Tensor
    b: Tensor | None


def empty_state(
    sequences: int,
    heads: int,
    num_scales: int,
    key_dim: int,
    value_dim: int,
    *,
    normalizer: str = "decayed",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> RetentionState:
    """The state before the first token: all zeros.

    >>> empty_state(1, 4, 8, 64, 64).b.shape
    torch.Size([1, 4, 8, 64])
    """
    check_choice("normalizer", normalizer, NORMALIZERS)
    rows, like = b_rows(normalizer, num_scales), torch.empty(0, dtype=dtype, device=device)
    G = like.new_zeros(sequences, heads, num_scales, key_dim, value_dim)
    return RetentionState(G, like.new_zeros(sequences, heads, rows, key_dim) if rows else None)


def starting_state(inputs: Inputs) -> RetentionState:
    """The given state in the dtype of the sums, or zeros: one entry for each sequence.

    >>> q = torch.zeros(2, 5, 4, 16)
    >>> starting_state(Inputs(q, q, q, torch.zeros(2, 5, 4, 8), torch.zeros(8))).G.shape
    torch.Size([2, 4, 8, 16, 16])
    """
    q, v, G, b = inputs.q, inputs.v, inputs.G, inputs.b
    dtype = compute_dtype(q, v)
    if G is not None:
        return RetentionState(G.to(dtype), None if b is None else b.to(dtype))
    sizes = (q.shape[2], inputs.write.shape[-1], q.shape[3], v.shape[3])
    return empty_state(
        count_sequences(inputs), *sizes, normalizer=inputs.normalizer, dtype=dtype, device=q.device
    )


def each_sequence(
    run: Callable[..., tuple[Tensor, RetentionState]],
    tensors: Sequence[Tensor | None],
    state: RetentionState,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, RetentionState]:
    """Outputs and final states of `run(*tensors, state)` on the batch, or on each packed sequence.

    For backends whose speed does not matter. tensors [B, T, ...]; state holds one entry for each
    sequence. An empty sequence keeps its state.
    """
    if cu_seqlens is None:
        return run(*tensors, state)
    outputs, finals = [], []
    for index, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        pieces = [None if x is None else x[:, start:stop] for x in tensors]
        own = slice(index, index + 1)
        b = None if state.b is None else state.b[own]
        output, final = run(*pieces, RetentionState(state.G[own], b))
        outputs.append(output)
        finals.append(final)
    G = torch.cat([final.G for final in finals])
    if state.b is None:
        return torch.cat(outputs, 1), RetentionState(G, None)
    b = torch.cat([final.b for final in finals if final.b is not None])
    return torch.cat(outputs, 1), RetentionState(G, b)
