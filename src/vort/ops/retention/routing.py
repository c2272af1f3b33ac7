"""From a token's order to what it writes: the shared-rate basis, or the paper's banks."""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from vort.fractional import PowerLawBasis
from vort.fractional._checks import check_order, looks_at_values
from vort.fractional.bounds import bank_orders
from vort.fractional.quadrature import legendre_soe
from vort.ops.order_weights import order_weights

__all__ = ["nearest_bank", "paper_banks", "shared_basis"]


def shared_basis(
    order: Tensor,
    basis: PowerLawBasis,
    gate: Tensor | None = None,
    *,
    validate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """write `[B, T, H, S]` and log_decay `[S]` for orders `[B, T, H]`: one set of states for all.

    Args:
        order: in [order_min, 1] of the basis.
        basis: rates and weights.
        gate: `[B, T, H]`, scales all that a token writes; None: 1.
        validate: check the orders; by default only where that costs no synchronisation.

    >>> order = torch.full((1, 5, 2), 0.7)
    >>> write, log_decay = shared_basis(order, PowerLawBasis.fit(horizon=1000, terms=8))
    >>> write.shape, log_decay.shape
    (torch.Size([1, 5, 2, 8]), torch.Size([8]))
    """
    write = order_weights(basis, order, gate, validate=validate)
    # A copy: all models share what the basis keeps.
    return write, basis.log_decay_on(order.device).clone()


def paper_banks(
    order: Tensor,
    banks: int,
    scales: int,
    horizon: int,
    *,
    order_min: float = 0.05,
    tolerance: float = 1e-3,
    validate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """write `[B, T, H, S']` and log_decay `[S']` for the paper's routing (eq. bank-update).

    Bank k of K has the fixed order `order_min + (1 - order_min) k / K` and `scales` of its own
    (theorem soe, as corrected in `vort.fractional.quadrature`); a token writes to the nearest bank
    alone. S' = (K - 1) scales + 1: the bank of order 1 needs one only.

    The nearest bank has no gradient (the paper does not say how it is trained). Forwards the
    choice is one-hot; backwards it is straight-through, as if a token shared its writing linearly
    between the two neighbouring banks. Beyond the first bank the line goes on, so that an order
    below it still feels a pull.

    Args:
        order: `[B, T, H]`, in (0, 1].
        banks: K.
        scales: exponentials of each bank.
        horizon: the largest lag.
        order_min: d of the banks' orders.
        tolerance: of the rules, see `legendre_soe`.
        validate: check the orders; by default only where that costs no synchronisation.

    >>> write, log_decay = paper_banks(torch.full((1, 5, 2), 0.7), banks=4, scales=6, horizon=100)
    >>> write.shape, int((write[0, 0, 0] != 0).sum())
    (torch.Size([1, 5, 2, 19]), 6)
    """
    orders, owners, weights, rates = _bank_rules(banks, scales, horizon, order_min, tolerance)
    # Half precision would cost the kernels their shape.
    order = order if order.dtype == torch.float64 else order.float()
    if looks_at_values(order) if validate is None else validate:
        check_order(order)
    choice = nearest_bank(order, orders.to(order))
    repeated = choice.index_select(-1, owners.to(order.device))
    return repeated * weights.to(choice), -rates.to(choice)


@lru_cache(maxsize=32)
def _bank_rules(
    banks: int, scales: int, horizon: int, order_min: float, tolerance: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bank orders [K]; of all scales [S'], one bank's after another's: bank, weight and rate."""
    orders = bank_orders(banks, order_min)
    rules = [legendre_soe(float(order), scales, horizon, tolerance) for order in orders]
    weights = np.concatenate([rule.weights for rule in rules])
    rates = np.concatenate([rule.rates for rule in rules])
    with torch.inference_mode(False):  # a later call may train
        owners = torch.arange(banks).repeat_interleave(torch.tensor([x.terms for x in rules]))
        return torch.from_numpy(orders), owners, torch.from_numpy(weights), torch.from_numpy(rates)


def nearest_bank(order: Tensor, banks: Tensor) -> Tensor:
    """One-hot of the nearest bank [..., K], with the gradient of linear interpolation."""
    nearest = (order.unsqueeze(-1) - banks).abs().argmin(-1)
    hard = _one_hot(nearest, order, banks)
    if len(banks) == 1:
        return hard
    right = torch.searchsorted(banks, order.detach().contiguous()).clamp(1, len(banks) - 1)
    share = (order - banks[right - 1]) / (banks[right] - banks[right - 1])
    to_right, to_left = _one_hot(right, order, banks), _one_hot(right - 1, order, banks)
    soft = to_right * share.unsqueeze(-1) + to_left * (1 - share).unsqueeze(-1)
    # Only the gradient of `soft` is wanted; subtracting it from itself adds an exact 0.
    return hard + (soft - soft.detach())


def _one_hot(index: Tensor, order: Tensor, banks: Tensor) -> Tensor:
    """As PyTorch's, which torch.func cannot map over where it takes gradients too."""
    return (index.unsqueeze(-1) == torch.arange(len(banks), device=index.device)).to(order.dtype)
