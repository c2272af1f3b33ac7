"""The retrieval loss (eq. retrieval-loss) in memory linear in the length of a sequence."""

import math
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vort.ops.custom import checks_values, without_autocast
from vort.ops.gpu.launcher import transformed
from vort.ops.retention import retention
from vort.ops.retention.inputs import check_decay, check_decay_shape, compute_dtype
from vort.plasticity.retrievals import Retrievals

__all__ = ["Similarity", "retrieval_loss"]

Similarity = Literal["exp", "features"]

# Pairs of a block: a few tens of megabytes, whatever the length.
_PAIRS = 1 << 21


def retrieval_loss(
    q: Tensor,
    k: Tensor,
    write: Tensor,
    log_decay: Tensor,
    retrievals: Retrievals,
    *,
    read: Tensor | None = None,
    similarity: Similarity = "exp",
) -> Tensor:
    """L_ret = -sum_t log p_{i*(t), t} of each sequence and head, `[B, H]` (eq. retrieval-loss).

    Our reading of r_it: the similarity of query and key, times what the memory makes of it,
    sum_s read[t, s] exp(log_decay[s] (t - i)) write[i, s]. With `write` from `shared_basis` and no
    `read` that is the paper's w_{t-i}(order_i); with a write gate or read weights it is what the
    layer applies. The sum in p_it goes over i < t, as printed; each head is asked by itself.

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        write: `[B, T, H, S]`, from `shared_basis(order, basis)`: the way to the orders.
        log_decay: `[S]` or `[H, S]`, at most 0 and finite.
        retrievals: who asks for what.
        read: `[B, T, H, S]`, or None.
        similarity: "exp": exp(q . k / sqrt(d_k)) as printed; blocks of queries against all keys,
            computed again in the backward pass, so memory is linear in T and time in queries
            times T. "features": q . k of features already applied (phi(q) . phi(k) >= 0), where
            the denominator is one call of `retention`: time and memory linear in T.

    Gradients flow to all tensors. Sums are float32, float64 for float64 inputs. Values are checked
    on the CPU, and on a GPU, which would have to wait, under `VORT_DEBUG=1` alone.

    >>> from vort.fractional import PowerLawBasis
    >>> from vort.ops import shared_basis
    >>> q = k = torch.zeros(1, 3, 1, 4)
    >>> write, log_decay = shared_basis(torch.ones(1, 3, 1), PowerLawBasis.fit(1000, 8))
    >>> asked = Retrievals.of(torch.tensor([[-1, -1, 0]]))
    >>> retrieval_loss(q, k, write, log_decay, asked).exp().round().tolist()
    [[2.0]]
    """
    if similarity not in get_args(Similarity):
        raise ValueError(f'similarity must be "exp" or "features", got {similarity!r}')
    _check_shapes(q, k, write, log_decay, retrievals, read)
    if checks_values(q) and not transformed():
        _check_values(q, k, log_decay, retrievals, similarity)
    with without_autocast(q):
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        tensors = [None if x is None else x.to(dtype) for x in (q, k, write, read)]
        return _loss(tensors, log_decay.to(dtype), retrievals, similarity)


def _check_shapes(
    q: Tensor,
    k: Tensor,
    write: Tensor,
    log_decay: Tensor,
    retrievals: Retrievals,
    read: Tensor | None,
) -> None:
    if q.dim() != 4 or q.shape != k.shape or q.shape[:3] != write.shape[:-1]:
        raise ValueError(
            "q, k [B, T, H, K] and write [B, T, H, S] must agree, got shapes "
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(write.shape)}"
        )
    heads, scales = write.shape[2:]
    if read is not None and read.shape != write.shape:
        raise ValueError(
            f"read must have write's shape {list(write.shape)}, got {list(read.shape)}"
        )
    check_decay_shape(log_decay, heads, scales, "(S or H, S of write)")
    if retrievals.queries.shape[0] != q.shape[0]:
        raise ValueError(
            f"retrievals must have {q.shape[0]} rows as q has, got {retrievals.queries.shape[0]}"
        )


def _check_values(
    q: Tensor, k: Tensor, log_decay: Tensor, retrievals: Retrievals, similarity: Similarity
) -> None:
    check_decay(log_decay)
    if retrievals.queries.numel() == 0:
        return
    last = int(retrievals.queries.max())
    if last >= q.shape[1]:
        raise ValueError(f"retrievals must ask at positions below T = {q.shape[1]}, got {last}")
    if similarity == "features":
        _check_products(_take(q, retrievals.queries), _take(k, retrievals.sources), retrievals)


@torch.no_grad()
def _check_products(asking: Tensor, sources: Tensor, retrievals: Retrievals) -> None:
    dtype = compute_dtype(asking, sources)
    if not bool((torch.linalg.vecdot(asking.to(dtype), sources.to(dtype)) < 0).any()):
        return  # as almost always: angles take longer
    cosine = torch.cosine_similarity(asking.double(), sources.double(), -1)
    # Below 0 by more than what rounding of features to half precision makes.
    bad = (cosine < -0.02) & retrievals.asked[..., None]
    if bool(bad.any()):
        raise ValueError(
            "q and k must be features whose products are >= 0, got a cosine of "
            f"{float(cosine[bad][0]):.3g} between a query and its source"
        )


def _loss(
    tensors: list[Tensor | None], decay: Tensor, retrievals: Retrievals, similarity: Similarity
) -> Tensor:
    q, k, write, read = tensors
    assert q is not None
    assert k is not None
    assert write is not None
    decay = decay.expand(q.shape[2], write.shape[-1])
    asking = _take(q, retrievals.queries)
    reading = None if read is None else _take(read, retrievals.queries)
    found = _log_source(asking, reading, k, write, decay, retrievals, similarity)
    if similarity == "features":
        total = _log_total_by_features(q, k, write, decay, read, retrievals)
    else:
        total = _log_total_by_blocks(asking, reading, k, write, decay, retrievals)
    lost = (total - found).masked_fill(~retrievals.asked[..., None], 0)
    return lost.sum(1)


def _take(x: Tensor, positions: Tensor) -> Tensor:
    """`[B, N, ...]` of x `[B, T, ...]` at positions `[B, N]`."""
    return x[torch.arange(len(x), device=x.device)[:, None], positions]


def _log(x: Tensor) -> Tensor:
    """The logarithm of what is positive but for rounding."""
    return x.clamp_min(torch.finfo(x.dtype).tiny).log()


def _log_source(
    asking: Tensor,
    reading: Tensor | None,
    k: Tensor,
    write: Tensor,
    decay: Tensor,
    retrievals: Retrievals,
    similarity: Similarity,
) -> Tensor:
    """log r of each query and its source, `[B, N, H]`."""
    lag = retrievals.lags.to(decay.dtype)
    written = _take(write, retrievals.sources) * torch.exp(decay * lag[..., None, None])
    if reading is not None:
        written = written * reading
    product = (asking * _take(k, retrievals.sources)).sum(-1)
    similar = _log(product) if similarity == "features" else product / math.sqrt(k.shape[-1])
    return similar + _log(written.sum(-1))


def _log_total_by_features(
    q: Tensor,
    k: Tensor,
    write: Tensor,
    decay: Tensor,
    read: Tensor | None,
    retrievals: Retrievals,
) -> Tensor:
    """log of the sum of r over i < t, `[B, N, H]`: what a memory of ones would retrieve."""
    ones = torch.ones_like(q[..., :1])
    total, _ = retention(q, k, ones, write, decay, read=read, normalizer="none", include_self=False)
    return _log(_take(total, retrievals.queries).squeeze(-1))


def _log_total_by_blocks(
    asking: Tensor,
    reading: Tensor | None,
    k: Tensor,
    write: Tensor,
    decay: Tensor,
    retrievals: Retrievals,
) -> Tensor:
    """The same for exp(q . k / sqrt(d_k)), some queries at a time, none kept."""
    batch, length, heads, _ = k.shape
    size = max(1, _PAIRS // max(1, batch * length * heads))
    parts = []
    for first in range(0, asking.shape[1], size):
        block = slice(first, first + size)
        gate = None if reading is None else reading[:, block]
        given = (asking[:, block], gate, k, write, decay, retrievals.queries[:, block])
        parts.append(checkpoint(_log_total_of_block, *given, use_reentrant=False))
    return torch.cat(parts, 1) if parts else asking.new_zeros(batch, 0, heads)


def _log_total_of_block(
    asking: Tensor, reading: Tensor | None, k: Tensor, write: Tensor, decay: Tensor, queries: Tensor
) -> Tensor:
    """`[B, n, H]` for queries `[B, n]`; pairs are `[B, H, n, T]`, and no axis of scales."""
    position = torch.arange(k.shape[1], device=k.device)
    lag = queries[..., None] - position
    seen = lag[:, None] >= 1
    age = lag.clamp_min(1).to(k.dtype)[:, None]
    remembered: Tensor | None = None
    for scale in range(write.shape[-1]):
        part = torch.exp(decay[:, scale, None, None] * age) * write[..., scale].mT.unsqueeze(-2)
        if reading is not None:
            part = part * reading[..., scale].mT.unsqueeze(-1)
        remembered = part if remembered is None else remembered + part
    assert remembered is not None
    scores = torch.einsum("bnhk,bihk->bhni", asking, k) / math.sqrt(k.shape[-1])
    # A query at position 0 has nothing before it; it is never asked, and must not give NaN.
    scores = (scores + _log(remembered)).masked_fill(~seen, torch.finfo(k.dtype).min)
    return scores.logsumexp(-1).mT
