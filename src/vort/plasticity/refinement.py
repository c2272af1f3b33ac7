"""Orders refined by what queries fail to retrieve, in one layer or layer by layer."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vort.fractional import PowerLawBasis
from vort.fractional._checks import check_order
from vort.plasticity.descent import Descent, descend
from vort.plasticity.loss import Similarity, retrieval_loss
from vort.plasticity.retrievals import Retrievals

__all__ = ["LayerScores", "order_loss", "refine_by_layer", "refine_orders"]


class LayerScores(NamedTuple):
    """Queries and keys of one layer, `[B, T, H, K]` each."""

    q: Tensor
    k: Tensor


def order_loss(
    q: Tensor,
    k: Tensor,
    order: Tensor,
    retrievals: Retrievals,
    basis: PowerLawBasis,
    *,
    similarity: Similarity = "exp",
) -> Tensor:
    """L_ret as a function of orders alone: a scalar, the sum over sequences, heads and queries.

    q, k `[B, T, H, K]`; order broadcasts to `[B, T, H]`, so a single number is one order for all
    tokens, the case of theorem plasticity. The gradient to each order goes through the weights
    c_s(order) of the basis; its rates do not depend on the order.

    >>> q = k = torch.zeros(1, 3, 1, 4)
    >>> asked = Retrievals.of(torch.tensor([[-1, -1, 0]]))
    >>> loss = order_loss(q, k, torch.tensor(1.0), asked, PowerLawBasis.fit(1000, 8))
    >>> round(float(loss.exp()), 3)
    2.0
    """
    try:
        every = order.expand(q.shape[:3])
    except RuntimeError:
        raise ValueError(
            f"order must broadcast to [B, T, H] = {list(q.shape[:3])}, got {list(order.shape)}"
        ) from None
    log_decay = torch.from_numpy(-basis.rates).to(q.device)
    write = basis.weights(every)
    return retrieval_loss(q, k, write, log_decay, retrievals, similarity=similarity).sum()


def refine_orders(
    q: Tensor,
    k: Tensor,
    order: Tensor,
    retrievals: Retrievals,
    basis: PowerLawBasis,
    *,
    iterations: int = 100,
    smoothness: float | None = None,
    optimum: float | None = None,
    similarity: Similarity = "exp",
) -> Descent:
    """Orders after projected descent on L_ret over [basis.order_min, 1], and the theorem beside it.

    A token that no query asks for only ever stands in the way: its gradient is positive, and its
    order falls to order_min. A token that is asked for rises until it stands in the way of others
    by as much. The refined orders know who will be asked for later: they are a target to learn
    from (see `retrieval_objective`), not something a causal model can have when it writes.

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        order: where to begin, in [order_min, 1]; broadcasts to `[B, T, H]`, and orders that are
            shared there stay so.
        retrievals: who asks for what.
        basis: w_j(order); its order_min is δ.
        iterations: steps.
        smoothness: L, if known; by default estimated, see `descend`.
        optimum: F*, if known; by default the lowest loss met.
        similarity: as in `retrieval_loss`.

    >>> basis = PowerLawBasis.fit(1000, 8)
    >>> q = k = torch.zeros(1, 20, 1, 4)
    >>> sources = torch.full((1, 20), -1); sources[0, 10:] = 3
    >>> run = refine_orders(q, k, torch.full((1, 20, 1), 0.5), Retrievals.of(sources), basis)
    >>> run.order[0, 3].item() > 0.9, run.order[0, 4].item() < 0.1, run.holds()
    (True, True, True)
    """
    _check_start(order, basis.order_min)
    q, k = q.detach().to(torch.float64), k.detach().to(torch.float64)
    return descend(
        lambda at: order_loss(q, k, at, retrievals, basis, similarity=similarity),
        order,
        low=basis.order_min,
        iterations=iterations,
        smoothness=smoothness,
        optimum=optimum,
    )


def refine_by_layer(
    layers: Sequence[LayerScores],
    order: Tensor,
    retrievals: Retrievals,
    basis: PowerLawBasis,
    *,
    iterations: int = 1,
    similarity: Similarity = "exp",
) -> list[Descent]:
    """One `Descent` for each layer, each starting from the orders of the layer before.

    Figure diffusion-plasticity (b) shows α_i^(l) over layers l, theorem plasticity has α^(l) after
    l steps: our reading is that a layer is a step (or `iterations` of them), taken on the loss of
    that layer's queries and keys. The theorem speaks of one loss: it bounds the steps within a
    layer, and over layers only where they share queries and keys.

    >>> scores = LayerScores(*torch.zeros(2, 1, 20, 1, 4))
    >>> sources = torch.full((1, 20), -1); sources[0, 10:] = 3
    >>> start, asked = torch.full((1, 20, 1), 0.5), Retrievals.of(sources)
    >>> runs = refine_by_layer([scores] * 6, start, asked, PowerLawBasis.fit(1000, 8))
    >>> [run.order[0, 3].item() > run.order[0, 4].item() for run in runs]
    [True, True, True, True, True, True]
    """
    runs: list[Descent] = []
    for q, k in layers:
        runs.append(
            refine_orders(
                q, k, order, retrievals, basis, iterations=iterations, similarity=similarity
            )
        )
        order = runs[-1].order
    return runs


def _check_start(order: Tensor, order_min: float) -> None:
    """Raise unless all orders lie in [order_min, 1], as near as their type comes to it."""
    kind = order.dtype if order.is_floating_point() else torch.float64
    nearest = float(torch.tensor(order_min, dtype=kind))
    check_order(order.to(torch.float64), low=min(order_min * (1 - 1e-6), nearest))
