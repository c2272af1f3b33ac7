"""Small retrieval problems in float64."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from vort.fractional import PowerLawBasis
from vort.plasticity import Retrievals, retrieval_loss

BASIS = PowerLawBasis.fit(1000, 8)
FINE_BASIS = PowerLawBasis.fit(1000, tolerance=2e-5)


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    order: Tensor
    retrievals: Retrievals


def case(
    seed: int = 0,
    length: int = 24,
    batch: int = 2,
    heads: int = 2,
    size: int = 4,
    share: float = 0.4,
) -> Case:
    """Random queries, keys, orders, and a source for about `share` of all positions."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, length, heads)
    q, k = torch.randn(2, *shape, size, generator=generator, dtype=torch.float64)
    order = 0.06 + 0.93 * torch.rand(shape, generator=generator, dtype=torch.float64)
    before = (torch.rand(batch, length, generator=generator) * torch.arange(length)).long()
    asks = torch.rand(batch, length, generator=generator) < share
    asks[:, 0], asks[:, -1] = False, True
    return Case(q, k, order, Retrievals.of(torch.where(asks, before, -1)))


cases = st.builds(
    case,
    seed=st.integers(0, 10_000),
    length=st.integers(2, 40),
    batch=st.integers(1, 3),
    heads=st.integers(1, 2),
    share=st.sampled_from([0.0, 0.3, 1.0]),
)


def scan(loss: Callable[[Tensor], Tensor], low: float, points: int) -> tuple[Tensor, ...]:
    """Orders in [low, 1], and the loss (`[P] -> [P]`) and its derivative at each of them."""
    orders = torch.linspace(low, 1, points, dtype=torch.float64)
    leaf = orders.clone().requires_grad_()
    values = loss(leaf)
    (slopes,) = torch.autograd.grad(values.sum(), leaf)
    return orders, values.detach(), slopes


def loss_of_rows(problem: Case, order: Tensor) -> Tensor:
    """L_ret `[P]` of one sequence for P sets of orders `[P, T, H]`."""
    rows = [x.expand(len(order), *x.shape[1:]) for x in (problem.q, problem.k)]
    retrievals = Retrievals(*(x.expand(len(order), -1) for x in problem.retrievals))
    decay = torch.from_numpy(-BASIS.rates)
    return retrieval_loss(*rows, BASIS.weights(order), decay, retrievals).sum(1)
