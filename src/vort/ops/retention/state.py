"""What the memory is between two calls: the states G and b."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "RetentionState",
    "compute_dtype",
    "empty_state",
    "starting_state",
    "state_terms",
]


class RetentionState(NamedTuple):
    """The memory after the last token; the next token decays it by `exp(log_decay)` first.

    G: [N, H, S, K, V], one matrix for each time scale (eq. G-rec).
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


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype of states and sums: float64 where any input is float64, else float32.

    >>> compute_dtype(torch.zeros(1, dtype=torch.bfloat16))
    torch.float32
    """
    wide = any(x is not None and x.dtype == torch.float64 for x in tensors)
    return torch.float64 if wide else torch.float32


def state_terms(normalizer: str, terms: int) -> int:
    """How many rows per head b has: one for each time scale, or a single undecayed one.

    >>> state_terms("decayed", 8), state_terms("undecayed", 8), state_terms("none", 8)
    (8, 1, 0)
    """
    return {"decayed": terms, "undecayed": 1, "none": 0}[normalizer]


def empty_state(
    sequences: int,
    heads: int,
    terms: int,
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
    rows = state_terms(normalizer, terms)
    zeros = torch.zeros(sequences, heads, terms, key_dim, value_dim, dtype=dtype, device=device)
    if rows == 0:
        return RetentionState(zeros, None)
    return RetentionState(
        zeros, torch.zeros(sequences, heads, rows, key_dim, dtype=dtype, device=device)
    )


def starting_state(
    initial_state: RetentionState | None,
    q: Tensor,
    v: Tensor,
    write: Tensor,
    normalizer: str,
    cu_seqlens: Tensor | None,
) -> RetentionState:
    """The given state in the dtype of the sums, or zeros: one entry for each sequence.

    >>> q = torch.zeros(2, 5, 4, 16)
    >>> starting_state(None, q, q, torch.zeros(2, 5, 4, 8), "none", None).G.shape
    torch.Size([2, 4, 8, 16, 16])
    """
    dtype = compute_dtype(q, v)
    if initial_state is not None:
        G, b = initial_state
        return RetentionState(G.to(dtype), None if b is None else b.to(dtype))
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return empty_state(
        sequences,
        q.shape[2],
        write.shape[-1],
        q.shape[3],
        v.shape[3],
        normalizer=normalizer,
        dtype=dtype,
        device=q.device,
    )
