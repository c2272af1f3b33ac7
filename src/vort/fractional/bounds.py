"""The paper's theorems and propositions as functions, each in its corrected statement."""

import math
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
import scipy
import torch
from numpy.typing import ArrayLike, NDArray

from vort.fractional._checks import as_order, check_at_least, check_open_unit, check_positive
from vort.fractional.density import mass_above, mass_below
from vort.fractional.gl import gl_kernel, gl_partial_sums
from vort.fractional.quadrature import integration_interval
from vort.names import check_choice

Array = NDArray[np.float64]
Kernel = Literal["continuous", "gl"]
Form = Literal["tight", "paper"]


def quantisation_bound(
    order: float,
    other: float,
    lag: ArrayLike,
    *,
    order_min: float | None = None,
    kernel: Kernel = "continuous",
) -> Array:
    """Bound on |k_order(t) - k_other(t)| for each lag t >= 1 (theorem quant).

    Args:
        order: one order in (0, 1].
        other: the order it is replaced by, such as its bank's.
        lag: lags t, real and >= 1 for `"continuous"`, whole and >= 0 for `"gl"`.
        order_min: δ of the theorem; by default the smaller order, which is tighter and also valid.
        kernel: `"continuous"` for the paper's t^{a-1}/Γ(a), `"gl"` for the weights w_t themselves
            (the paper states no bound for those).
    """
    check_choice("kernel", kernel, get_args(Kernel))
    low, high = sorted((float(as_order(order)), float(as_order(other, "other"))))
    floor = low if order_min is None else float(as_order(order_min, "order_min"))
    if floor > low:
        raise ValueError(f"order_min must be at most both orders, got {floor:g} > {low:g}")
    lags = np.asarray(lag, dtype=np.float64)
    if kernel == "gl":
        # ∂w/∂a = w (ψ(t + a) - ψ(a)); w and ψ grow with a.
        largest = gl_kernel(high, torch.from_numpy(np.atleast_1d(lags))).numpy().reshape(lags.shape)
        slope = scipy.special.digamma(lags + high) - scipy.special.digamma(floor)
        return np.asarray((high - low) * largest * slope)
    if np.any(lags < 1):
        raise ValueError(f"lag must be at least 1, got {lags.min():g}")
    largest = lags ** (high - 1) / scipy.special.gamma(high)
    return np.asarray((high - low) * largest * (np.log(lags) - scipy.special.digamma(floor)))


def bank_orders(banks: int, order_min: float) -> Array:
    """The paper's bank orders δ + (1 - δ) k / K for k = 1 ... K: spacing (1 - δ)/K (E10)."""
    banks = check_at_least(banks, 1, "banks")
    order_min = check_open_unit(order_min, "order_min")
    orders = np.asarray(order_min + (1 - order_min) * np.arange(1, banks + 1) / banks)
    orders[-1] = 1.0  # a case of its own, which rounding must not miss
    return orders


def quantisation_bound_for_banks(banks: int, order_min: float, lag: ArrayLike) -> Array:
    """Bound on |k_a(t) - k_bank(t)| over every a in [order_min, 1], with K banks.

    There is no bank at `order_min`, so the lowest orders are a whole spacing away, not half (E10).
    At t = 1 the bound is (1-δ)/K |ψ(δ)|, not the O((log t)/K) of the paper, which vanishes there.
    """
    grid = bank_orders(banks, order_min)
    edges = [(order_min, grid[0])]
    for low, high in pairwise(grid):
        edges += [((low + high) / 2, low), ((low + high) / 2, high)]
    return np.asarray(np.max([quantisation_bound(a, b, lag) for a, b in edges], axis=0))


def mixture_energy(order: float, steps: float) -> float:
    """N(T) = ∫_1^T t^{2a-2} dt (eq. N-def)."""
    order = float(as_order(order))
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps!r}")
    exponent = 2 * order - 1
    # expm1 keeps the limit log T at order 1/2.
    return math.log(steps) * float(scipy.special.exprel(exponent * math.log(steps)))


def separation_bound(
    order: float,
    mixture_weights: ArrayLike,
    mixture_rates: ArrayLike,
    steps: float,
    *,
    form: Form = "tight",
) -> float:
    """Lower bound on ∫_1^T (f(t) - t^{a-1})² dt for f = Σ_m π_m e^{-λ_m t} (eq. separation).

    `"tight"` is N - 2 C_f Γ(a) Λ^-a, with Λ the slowest rate. `"paper"` subtracts a further
    C_f² R, which is valid but has no reason: the term enters the expansion with a plus sign, and R
    already holds the π's (E9). Either may be negative, and then says nothing.
    """
    check_choice("form", form, get_args(Form))
    order = float(as_order(order))
    pi, lam = _check_mixture(mixture_weights, mixture_rates)
    total, slowest = float(pi.sum()), float(lam.min())
    cross = total * math.gamma(order) * math.pow(slowest, -order)
    bound = mixture_energy(order, steps) - 2 * cross
    if form == "tight":
        return bound
    overlap = float((np.outer(pi, pi) / np.add.outer(lam, lam)).sum())
    return bound - total**2 * overlap


def separation_error(
    order: float, mixture_weights: ArrayLike, mixture_rates: ArrayLike, steps: float
) -> float:
    """The integral that `separation_bound` bounds, in closed form."""
    order = float(as_order(order))
    pi, lam = _check_mixture(mixture_weights, mixture_rates)
    upper = scipy.special.gammaincc(order, lam) - scipy.special.gammaincc(order, lam * steps)
    cross = math.gamma(order) * float((pi * lam**-order * upper).sum())
    sums = np.add.outer(lam, lam)
    squares = np.outer(pi, pi) * (np.exp(-sums) - np.exp(-sums * steps)) / sums
    return mixture_energy(order, steps) - 2 * cross + float(squares.sum())


def bank_growth(order: float, steps: int, value_bound: float = 1.0) -> tuple[float, float]:
    """(exact, power) bounds on the norm of a bank state after `steps` tokens of norm <= bound.

    The exact one is V Σ_{j<t} w_j = V Γ(t+a)/(Γ(a+1)Γ(t)) (E8); the power V t^a/Γ(a+1), which the
    paper gives as its asymptote, is above it at every t, since Γ is log-convex.
    """
    order = float(as_order(order))
    steps = check_at_least(steps, 1, "steps")
    scale = check_positive(value_bound, "value_bound")
    exact = scale * float(gl_partial_sums(order, steps - 1)[-1])
    return exact, scale * steps**order / math.gamma(order + 1)


def soe_error_bound(order: float, terms: int, horizon: int, tolerance: float) -> float:
    """Bound on max_{j <= T} |ŵ_j - w_j| for `legendre_soe` with its corrections (theorem soe).

    Three parts: the slow node for the mass below λ_min, the tail above λ_max, and the
    Gauss–Legendre error for a function analytic in a Bernstein ellipse, with the best ellipse.
    The theorem's own strip |v| < π/2 has no finite M_g: the density is singular at λ = 2πi, on its
    edge, so the ellipse must stay inside (E14).
    """
    order = float(as_order(order))
    terms = check_at_least(terms, 2, "terms")
    if order == 1.0:
        return 0.0
    low, high = integration_interval(order, horizon, tolerance)
    below = 0.5 * (horizon * low) ** 2 * float(mass_below(order, low))
    above = float(mass_above(order, high))
    return below + above + _legendre_bound(order, terms - 1, low, high)


def _legendre_bound(order: float, points: int, low: float, high: float) -> float:
    """min over ellipses of (64/15) M ρ^{-2(n-1)} / (1 - ρ^-2) · L/2, for n points (Trefethen)."""
    half = math.log(high / low) / 2
    angles = np.linspace(0, math.pi, 2001)
    best = math.inf
    for share in np.linspace(0.02, 0.999, 150):
        eta = math.asinh(share * math.pi / 2 / half)
        u = half * (1 + np.cosh(eta + 1j * angles))
        lam = low * np.exp(u)
        size = np.abs(lam * np.exp(-order * (lam + np.log(-np.expm1(-lam)))))
        largest = size.max() * math.sin(math.pi * order) / math.pi
        decay = math.exp(-2 * eta * (points - 1)) / -math.expm1(-2 * eta)
        best = min(best, 64 / 15 * largest * decay * half)
    return best


def plasticity_rate(step: float, pl_constant: float, smoothness: float, iterations: int) -> float:
    """(1 - ημ)^l, the factor on F - F* after l gradient steps (eq. pl-rate).

    Holds for one order, also when steps are clipped to [δ, 1]. For the orders of many tokens at
    once, clipped to a box, the condition does not even give convergence (E18).

    Args:
        step: η, in (0, 1/L].
        pl_constant: μ > 0 with |F'|² >= 2μ (F - F*); never more than L.
        smoothness: L, a bound on |F''|.
        iterations: l.
    """
    smoothness = check_positive(smoothness, "smoothness")
    mu = check_positive(pl_constant, "pl_constant")
    if mu > smoothness:
        raise ValueError(f"pl_constant must be at most smoothness {smoothness:g}, got {mu:g}")
    if not 0 < step <= 1 / smoothness:
        raise ValueError(f"step must lie in (0, 1/smoothness = {1 / smoothness:g}], got {step!r}")
    return float((1 - step * mu) ** check_at_least(iterations, 0, "iterations"))


def _check_mixture(weights: ArrayLike, rates: ArrayLike) -> tuple[Array, Array]:
    pi, lam = np.atleast_1d(np.asarray(weights, float)), np.atleast_1d(np.asarray(rates, float))
    if pi.shape != lam.shape or pi.ndim != 1:
        raise ValueError(
            f"mixture_weights and mixture_rates must be two vectors of one length, "
            f"got shapes {pi.shape} and {lam.shape}"
        )
    if not np.all(pi >= 0):
        raise ValueError(f"mixture_weights must be >= 0, got {pi.min():g}")
    if not np.all(lam > 0):
        raise ValueError(f"mixture_rates must be > 0, got {lam.min():g}")
    return pi, lam
