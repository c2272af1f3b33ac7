"""The Laplace density of the GL weights: w_j = ∫ e^{-λj} ρ(λ) dλ (eq. rho-def, corrected by E1)."""

import math
from itertools import pairwise

import numpy as np
import scipy  # whose parts load when they are first asked for
from numpy.typing import ArrayLike, NDArray

from vort.fractional._checks import check_open_unit
from vort.fractional.gl import gl_weights

Array = NDArray[np.float64]

# Beyond this rate e^-rate is no normal number.
_LARGEST_RATE = 708.0


def density(order: float, rate: ArrayLike, *, paper: bool = False) -> Array:
    """ρ(λ) = e^{-aλ} (1 - e^{-λ})^{-a} sin(πa)/π at each rate λ > 0, for order a in (0, 1).

    `paper=True` gives the printed form, which carries a further e^{-λ} and so yields w_{j+1} (E1).
    """
    lam = np.asarray(rate, dtype=np.float64)
    return np.asarray(regular_density(order, lam, paper=paper) * lam**-order)


def regular_density(order: float, rate: ArrayLike, *, paper: bool = False) -> Array:
    """ρ(λ) λ^a: the density without its singularity, finite at rate 0."""
    check_open_unit(order, "order")
    lam = np.asarray(rate, dtype=np.float64)
    log_decay = -order * (lam + np.log(scipy.special.exprel(-lam))) - (lam if paper else 0.0)
    return np.asarray(math.sin(math.pi * order) / math.pi * np.exp(log_decay))


def mass_below(order: float, rate: ArrayLike, lag: ArrayLike = 0) -> Array:
    """∫_0^rate e^{-λ lag} ρ(λ) dλ in closed form: what a rule that starts at `rate` leaves out."""
    weight, lags = _weights_at(order, lag)
    return np.asarray(weight * _share_below(order, np.asarray(rate, np.float64), lags)[0])


def mass_above(order: float, rate: ArrayLike, lag: ArrayLike = 0) -> Array:
    """∫_rate^∞ e^{-λ lag} ρ(λ) dλ in closed form: what a rule that stops at `rate` leaves out."""
    weight, lags = _weights_at(order, lag)
    return np.asarray(weight * _share_below(order, np.asarray(rate, np.float64), lags)[1])


def weight_from_density(order: float, lag: int, *, paper: bool = False) -> float:
    """The weight that the density integrates to, by adaptive quadrature in log λ.

    The inverse check of `density`: it equals `gl_weights(order, lag)[lag]`, and with `paper=True`
    the weight of the next lag instead.
    """
    check_open_unit(order, "order")
    power = 1 / (1 - order)

    def integrand(y: float) -> float:
        lam = y**power
        return float(regular_density(order, lam, paper=paper) * power * math.exp(-lag * lam))

    # y = λ^{1-a} takes the singularity at 0 away; past λ = 80/(a + lag) nothing is left.
    scale = 1 / (order + lag)
    ends = [0.0, *(float((c * scale) ** (1 - order)) for c in (1e-3, 0.1, 1.0, 5.0, 20.0, 80.0))]
    pieces = [
        scipy.integrate.quad(integrand, low, high, epsabs=0, epsrel=1e-12, limit=200)[0]
        for low, high in pairwise(ends)
    ]
    return math.fsum(pieces)


def _share_below(order: float, rate: Array, lags: Array) -> tuple[Array, Array]:
    """Shares of a weight below and above a rate: incomplete beta functions of 1 - e^-rate.

    Taken from whichever of e^-rate and 1 - e^-rate is the smaller: near 1 it has lost the digits
    that its complement needs.
    """
    slow = rate < math.log(2)
    small = np.where(slow, -np.expm1(-rate), np.exp(-rate))
    first = np.where(slow, 1 - order, order + lags)
    second = np.where(slow, order + lags, 1 - order)
    near, far = (
        scipy.special.betainc(first, second, small),
        scipy.special.betaincc(first, second, small),
    )
    # Far out the share above is its leading term: the next is e^-rate times as large.
    power = order + lags
    beyond = -power * np.maximum(rate, _LARGEST_RATE) - np.log(power)
    beyond = beyond - scipy.special.betaln(power, 1 - order)
    below = np.where(rate > _LARGEST_RATE, -np.expm1(beyond), np.where(slow, near, far))
    return below, np.where(rate > _LARGEST_RATE, np.exp(beyond), np.where(slow, far, near))


def _weights_at(order: float, lag: ArrayLike) -> tuple[Array, Array]:
    check_open_unit(order, "order")
    lags = np.asarray(lag, dtype=np.float64)
    whole = (lags >= 0) & (lags == np.floor(lags)) & np.isfinite(lags)
    if not whole.all():
        raise ValueError(f"lag must be whole numbers >= 0, got {lags[~whole].flat[0]:g}")
    horizon = int(lags.max(initial=0))
    table = gl_weights(order, horizon).numpy()
    return np.asarray(table[lags.astype(np.int64)]), lags
