"""The paper's quadratures of the Laplace density, one order at a time: theorem soe, corrected."""

import math
from collections.abc import Iterable
from typing import Literal

import numpy as np
import scipy

from vort.fractional._checks import as_order, check_at_least, check_open_unit
from vort.fractional.density import density, mass_below, regular_density
from vort.fractional.soe import SumOfExponentials

Correction = Literal["E1", "E2", "E3"]
CORRECTIONS: frozenset[Correction] = frozenset(("E1", "E2", "E3"))
MAX_TERMS = 64
# From the next one on, e^x of the largest Laguerre node is no number any more, whatever the order.
MAX_LAGUERRE_TERMS = 185
# SciPy's inverse goes no lower than the smallest normal number, but for the last digits.
_SMALLEST_INVERSE = 2.3e-308
# The density without its singularity is analytic within 2π of 0, and cuts lie below 1/2.
_MOMENT_NODES = 16


def legendre_soe(
    order: float,
    terms: int,
    horizon: int,
    tolerance: float,
    *,
    corrections: Iterable[Correction] = CORRECTIONS,
) -> SumOfExponentials:
    """Gauss–Legendre nodes in log λ (theorem soe), with the errata applied.

    E1 takes the density that gives w_j rather than w_{j+1}; E2 puts the mass below λ_min on one
    slow node (it counts as one of `terms`); E3 moves λ_max out until the tail at lag 0 is within
    tolerance. `corrections=("E1",)` is the paper's rule with the right density, `()` the paper's
    rule to the letter. Order 1, where the density vanishes, is one node of rate 0 (E4).

    Args:
        order: in (0, 1].
        terms: number of exponentials.
        horizon: largest lag T the rule is meant for.
        tolerance: ε of the theorem; places the ends of the integration interval.

    >>> absolute, _ = legendre_soe(0.5, 32, 1000, 1e-4).errors(0.5, 1000)
    >>> bool(absolute.max() < 1e-4)
    True
    """
    order = float(as_order(order))
    terms = check_at_least(terms, 1, "terms")
    applied = _check_corrections(corrections)
    if order == 1.0:
        return _constant_kernel()
    low, high = integration_interval(order, horizon, tolerance, corrections=applied)
    slow = "E2" in applied
    nodes, omega = scipy.special.roots_legendre(max(terms - slow, 1))
    length = math.log(high / low)
    rates = low * np.exp((nodes + 1) * length / 2)
    weights = omega * length / 2 * rates * density(order, rates, paper="E1" not in applied)
    if slow:
        slow_rate, slow_mass = _slow_node(order, low if terms > 1 else math.inf)
        rates = np.concatenate([[slow_rate], rates])[:terms]
        weights = np.concatenate([[slow_mass], weights])[:terms]
    return SumOfExponentials(rates, weights)


def integration_interval(
    order: float,
    horizon: int,
    tolerance: float,
    *,
    corrections: Iterable[Correction] = CORRECTIONS,
) -> tuple[float, float]:
    """(λ_min, λ_max) of theorem soe; with E3, at most tolerance/4 lies above λ_max at lag 0."""
    order = float(as_order(order))
    horizon = check_at_least(horizon, 1, "horizon")
    tolerance = check_open_unit(tolerance, "tolerance")
    low, high = tolerance / (2 * horizon), 2 * math.log(2 * horizon / tolerance)
    if "E3" in _check_corrections(corrections) and order < 1:
        high = max(high, _rate_above_which(order, tolerance, 4))
    if low == 0 or not math.isfinite(high / low):
        raise ValueError(
            f"order and tolerance must leave an interval of rates that float64 can hold, "
            f"got [{low:g}, {high:g}] from order {order:g} and tolerance {tolerance:g}"
        )
    return low, high


def laguerre_soe(order: float, terms: int) -> SumOfExponentials:
    """Generalised Gauss–Laguerre nodes on the λ axis: the abstract's rule, bad at long lags.

    The weight function λ^-a e^{-aλ} takes the density's singularity and its tail, so the rule is
    as good as Gauss–Laguerre can be, and still has no node slow enough (E5).
    """
    order = float(as_order(order))
    terms = check_at_least(terms, 1, "terms")
    if order == 1.0:
        return _constant_kernel()
    if terms > MAX_LAGUERRE_TERMS:
        raise ValueError(f"terms must be at most {MAX_LAGUERRE_TERMS} in float64, got {terms}")
    nodes, omega = scipy.special.roots_genlaguerre(terms, -order)
    rates = nodes / order
    smooth = regular_density(order, rates) * np.exp(nodes)
    weights = omega * order ** (order - 1) * smooth
    return SumOfExponentials(rates, weights)


def terms_needed(order: float, horizon: int, tolerance: float) -> int:
    """The fewest terms with which `legendre_soe` is within `tolerance` at every lag 0 ... horizon.

    >>> terms_needed(1.0, 1000, 1e-3)
    1
    """
    # The interval takes half of the budget (theorem soe), the quadrature the rest.
    for terms in range(1, MAX_TERMS + 1):
        rule = legendre_soe(order, terms, horizon, tolerance)
        if rule.errors(order, horizon)[0].max() <= tolerance:
            return terms
    raise ValueError(
        f"tolerance must be reachable within {MAX_TERMS} terms, got {tolerance!r} "
        f"for order {order!r} and horizon {horizon!r}"
    )


def _constant_kernel() -> SumOfExponentials:
    return SumOfExponentials(np.zeros(1), np.ones(1))


def _rate_above_which(order: float, mass: float, parts: int) -> float:
    """The rate above which lies mass / parts of the density at lag 0: I_{e^-λ}(a, 1-a), inverted.

    At low orders e^-λ is too small for a float; there I_x(a, 1-a) is x^a sin(πa)/(πa) and no more.
    """
    inverse = scipy.special.betaincinv(order, 1 - order, mass / parts)
    if inverse > _SMALLEST_INVERSE:
        return -math.log(inverse)
    return -(math.log(mass) - math.log(parts) - math.log(np.sinc(order))) / order


def _slow_node(order: float, cut: float) -> tuple[float, float]:
    """Rate and weight of the one-point Gauss rule for the density on [0, cut]."""
    if math.isinf(cut):  # the whole density on one node: mass 1, at its median rate
        median = float(scipy.special.betaincinv(1 - order, order, 0.5))
        # Near 1 it has lost the digits that its complement needs.
        return -math.log1p(-median) if median < 0.5 else _rate_above_which(order, 1.0, 2), 1.0
    mass = float(mass_below(order, cut))
    # The first moment by Gauss–Jacobi in u = λ / cut, whose weight u^{1-a} is all that is singular.
    nodes, omega = scipy.special.roots_jacobi(_MOMENT_NODES, 0.0, 1 - order)
    smooth = regular_density(order, cut * (nodes + 1) / 2)
    moment = cut ** (1 - order) * 2 ** (order - 2) * float(omega @ smooth)
    return cut * (moment / mass), mass


def _check_corrections(corrections: Iterable[Correction]) -> frozenset[Correction]:
    applied = frozenset(corrections)
    unknown = applied - CORRECTIONS
    if unknown:
        raise ValueError(f"corrections must be among {sorted(CORRECTIONS)}, got {sorted(unknown)}")
    return applied
