"""The definition: scores, weights and loss of every pair of positions. Quadratic; the oracle."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from vort.fractional import gl_kernel
from vort.plasticity.retrievals import Retrievals

__all__ = ["Kernel", "retrieval_loss_exact", "retrieval_scores", "retrieval_weights"]

Kernel = Callable[[Tensor, Tensor], Tensor]


def retrieval_scores(q: Tensor, k: Tensor, order: Tensor, kernel: Kernel = gl_kernel) -> Tensor:
    """log r_it = q_t . k_i / sqrt(d_k) + log w_{t-i}(order_i), -inf unless i < t; `[B, H, T, T]`.

    q, k `[B, T, H, K]`; order broadcasts to `[B, T, H]`. Row t, column i is what query t gives to
    token i. `kernel(order, lag)` gets order `[B, H, 1, T]` and lag `[T, T]`: `gl_kernel` for the
    exact weights, `PowerLawBasis.kernel` for the sum of exponentials that the model uses.

    >>> blank = torch.zeros(1, 3, 1, 2)
    >>> retrieval_scores(blank, blank, torch.tensor(0.5)).exp()[0, 0].tolist()
    [[0.0, 0.0, 0.0], [0.5, 0.0, 0.0], [0.375, 0.5, 0.0]]
    """
    length = q.shape[1]
    position = torch.arange(length, device=q.device)
    lag = position[:, None] - position
    every = order.expand(q.shape[:3]).transpose(1, 2).unsqueeze(-2)
    # Lags of pairs that do not count are set to 1: their logarithm and gradient stay finite.
    remembered = kernel(every, lag.clamp_min(1)).log()
    similar = torch.einsum("bthk,bihk->bhti", q, k) / math.sqrt(q.shape[-1])
    return (similar + remembered).masked_fill(lag < 1, -math.inf)


def retrieval_weights(q: Tensor, k: Tensor, order: Tensor, kernel: Kernel = gl_kernel) -> Tensor:
    """p_it = r_it / sum_{i' < t} r_i't, `[B, H, T, T]`: each row but the first adds to 1.

    Shapes as for `retrieval_scores`; row 0, which has nothing before it, is 0.

    >>> blank = torch.zeros(1, 3, 1, 2)
    >>> retrieval_weights(blank, blank, torch.tensor(1.0))[0, 0].tolist()
    [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]
    """
    scores = retrieval_scores(q, k, order, kernel)
    return torch.cat([torch.zeros_like(scores[:, :, :1]), scores[:, :, 1:].softmax(-1)], 2)


def retrieval_loss_exact(
    q: Tensor, k: Tensor, order: Tensor, retrievals: Retrievals, kernel: Kernel = gl_kernel
) -> Tensor:
    """L_ret = -sum_t log p_{i*(t), t} of each sequence and head, `[B, H]` (eq. retrieval-loss).

    What `retrieval_loss` is checked against; shapes as for `retrieval_scores`.

    >>> blank = torch.zeros(1, 3, 1, 2)
    >>> asked = Retrievals.of(torch.tensor([[-1, -1, 0]]))
    >>> retrieval_loss_exact(blank, blank, torch.tensor(1.0), asked).exp().tolist()
    [[2.0]]
    """
    scores = retrieval_scores(q, k, order, kernel)
    row = torch.arange(len(q), device=q.device)[:, None]
    asking = scores[row, :, retrievals.queries]
    found = asking.gather(-1, retrievals.sources[..., None, None].expand(*asking.shape[:3], 1))
    lost = asking.logsumexp(-1) - found.squeeze(-1)
    return lost.masked_fill(~retrievals.asked[..., None], 0).sum(1)
