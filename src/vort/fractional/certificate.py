"""How far a shared-rate basis can be from the GL kernel, over every order and every lag."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from vort.fractional.gl import gl_weights, log_tail_weight

Array = NDArray[np.float64]

_ORDERS = 400
_WHOLE_LAGS = 512
_LAG_RATIO = 1.004


@dataclass(frozen=True)
class Certificate:
    """Bounds on |ŵ/w - 1| and |ŵ - w| for all orders in [order_min, 1], all lags 0 ... horizon.

    Attributes:
        relative: bound on the relative error.
        absolute: bound on the absolute error (w_0 = 1, so it is in units of the newest token).
        worst_order: order of the largest relative error seen.
        worst_lag: lag of the largest relative error seen.
        method: how the bounds were established, in words.
    """

    relative: float
    absolute: float
    worst_order: float
    worst_lag: float
    method: str


def certify(
    weights: Callable[[Array], Array], rates: Array, order_min: float, horizon: int
) -> Certificate:
    """Bound the errors of Σ_s weights(order)[:, s] e^{-rates[s] lag} on a grid plus a remainder.

    Between grid points a smooth function exceeds its neighbours by at most an eighth of its second
    difference; both second differences are measured, and doubled, since they too are sampled.
    """
    orders = order_min + (1 - order_min) * np.linspace(0, 1, _ORDERS)
    lags, whole = _lag_grid(horizon)
    exact = _exact_weights(orders, lags, whole)
    approximate = weights(orders) @ np.exp(-rates[:, None] * lags)
    relative = approximate / exact - 1
    along_order = _second_difference(relative)
    # Whole lags are all sampled: nothing lies between them.
    along_lag = _second_difference(relative[:, whole - 1 :].T) if whole < len(lags) else 0.0
    remainder = 2 * (along_order + along_lag) / 8
    order_index, lag_index = np.unravel_index(np.abs(relative).argmax(), relative.shape)
    return Certificate(
        relative=float(np.abs(relative).max() + remainder),
        absolute=float((exact * (np.abs(relative) + remainder)).max()),
        worst_order=float(orders[order_index]),
        worst_lag=float(lags[lag_index]),
        method=(
            f"{len(orders)} orders in [{order_min:g}, 1] x {len(lags)} lags in [0, {horizon}] "
            f"(every whole lag to {whole - 1}, then ratio {_LAG_RATIO:g}); between grid points a "
            f"quarter of the largest second difference is added, {remainder:.1e}"
        ),
    )


def _lag_grid(horizon: int) -> tuple[Array, int]:
    """Every whole lag below 512, real lags in constant ratio beyond; and how many are whole."""
    whole = min(horizon + 1, _WHOLE_LAGS)
    start = whole - 1
    if horizon <= start:
        return np.arange(whole, dtype=np.float64), whole
    steps = int(np.ceil(np.log(horizon / start) / np.log(_LAG_RATIO)))
    beyond = np.geomspace(start, horizon, steps + 1)[1:]
    return np.concatenate([np.arange(whole, dtype=np.float64), beyond]), whole


def _exact_weights(orders: Array, lags: Array, whole: int) -> Array:
    column = torch.from_numpy(orders)
    head = gl_weights(column, whole - 1).numpy()
    if whole == len(lags):
        return np.asarray(head)
    tail = log_tail_weight(column[:, None], torch.from_numpy(lags[whole:])).exp().numpy()
    return np.concatenate([head, tail], axis=1)


def _second_difference(values: Array) -> float:
    """The largest |second difference| along the first axis."""
    return float(np.abs(np.diff(values, 2, axis=0)).max(initial=0.0))
