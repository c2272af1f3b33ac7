"""Minimax fit of one set of rates and weights to the GL kernels of all orders at once.

The unknowns are the log-rates and a low polynomial for each term; the objective is the largest
relative error over a grid of orders and lags, approached through p-norms with p = 2, 4, ... 128:
each is smooth, starts where the last one ended, and is solved in a few Gauss–Newton steps.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.polynomial import Chebyshev, Polynomial
from numpy.polynomial.chebyshev import chebvander
from numpy.typing import NDArray

from vort.fractional.gl import gl_kernel
from vort.threads import one_thread

Array = NDArray[np.float64]

_DEGREES = (3, 4)
_LARGEST_RATE = 6.0
_ROUNDING = 1e-12


def expected_error(horizon: int, terms: int) -> float:
    """Braess and Hackbusch's estimate for the best sum of exponentials for 1/x on [1, horizon].

    The lowest orders behave as 1/x and are the hardest; the fit comes within about a half of it.
    """
    return float(16 * np.exp(-(np.pi**2) * terms / np.log(8 * horizon)))


def prefactors(order: Array, terms: int) -> Array:
    """What multiplies exp(polynomial) in each term, `[..., terms]`.

    Inner terms are nodes of the density and vanish as sin(πa)/π. The rate-0 term holds the mass
    below the slowest node, ∝ 1/(1-a), the fastest term the mass above its neighbour, ∝ 1/a.
    """
    inner = np.sin(np.pi * (1 - order)) / np.pi
    columns = [np.sinc(1 - order), *[inner] * (terms - 2), inner / order]
    return np.stack(columns[:terms], -1)


@dataclass
class Fit:
    """Where a fit stands: log-rates `[S-1]` (the rate-0 term has none) and Chebyshev `[S, 4]`."""

    log_rates: Array
    polynomials: Array


class Problem:
    """The relative error of a fit, and its derivatives, on a grid of orders and lags."""

    def __init__(self, horizon: int, terms: int, order_min: float, orders: int, lags: int):
        self.terms, self.order_min = terms, order_min
        self.cosines = np.cos(np.pi * np.arange(orders - 1, -1, -1) / (orders - 1))
        self.orders = (1 + order_min) / 2 + (1 - order_min) / 2 * self.cosines
        self.lags = _fit_lags(horizon, lags)
        self.exact = gl_kernel(
            torch.from_numpy(self.orders)[:, None], torch.from_numpy(self.lags)
        ).numpy()
        # A cubic follows the order to about 2e-5; terms that reach further get a quartic.
        self.degree = _DEGREES[expected_error(horizon, terms) < 1e-4]
        self.vander = chebvander(self.cosines, self.degree)
        self.prefactors = prefactors(self.orders, terms)
        # The rate-0 term's exponent carries (1 - a), so that the basis is exact at order 1.
        self.damping = np.ones((orders, terms))
        self.damping[:, 0] = 1 - self.orders

    def start(self, horizon: int) -> Fit:
        """Midpoint quadrature in log λ: the closed form that the fit refines."""
        count = self.terms - 1
        log_rates = np.linspace(np.log(1.5 / horizon), np.log(_LARGEST_RATE), count)
        spacing = log_rates[1] - log_rates[0] if count > 1 else 1.0
        rates = np.exp(log_rates)
        slopes = -(rates + np.log(-np.expm1(-rates)))
        lines = [
            Polynomial([np.log(spacing) + y, b]) for y, b in zip(log_rates, slopes, strict=True)
        ]
        if lines:
            lines[-1] = Polynomial([0.0, -2.0])
            lines = [Polynomial([log_rates[0] - spacing / 2]), *lines]
        else:
            lines = [Polynomial([-np.log(horizon + 1.0) / 2])]
        domain = [self.order_min, 1.0]
        polynomials = [line.convert(kind=Chebyshev, domain=domain).coef for line in lines]
        return Fit(
            log_rates, np.stack([np.pad(c, (0, self.degree + 1 - len(c))) for c in polynomials])
        )

    def shares(self, fit: Fit) -> Array:
        """Each term's share of the exact weight, `[orders, lags, S]`; they sum to 1 + error."""
        rates = np.concatenate([[0.0], np.exp(fit.log_rates)])
        weights = self.prefactors * np.exp(self.damping * (self.vander @ fit.polynomials.T))
        decays = np.exp(-rates * self.lags[:, None])
        return np.asarray(weights[:, None, :] * decays / self.exact[:, :, None])

    def error(self, fit: Fit) -> Array:
        """Relative error at every grid point, flat."""
        return np.asarray(self.shares(fit).sum(-1) - 1).ravel()

    def linearised(self, fit: Fit) -> tuple[Array, Array]:
        """The error and its Jacobian with respect to log-rates, then polynomials."""
        shares = self.shares(fit)
        points = shares.shape[0] * shares.shape[1]
        along = (self.vander[:, :2] @ self._weight_slopes(fit).T)[:, None, :]
        by_rate = shares[..., 1:] * (along - np.exp(fit.log_rates) * self.lags[:, None])
        by_polynomial = (shares * self.damping[:, None, :])[..., None] * self.vander[
            :, None, None, :
        ]
        jacobian = np.concatenate(
            [by_rate.reshape(points, -1), by_polynomial.reshape(points, -1)], 1
        )
        return np.asarray(shares.sum(-1) - 1).ravel(), jacobian

    def shifted(self, fit: Fit, step: Array) -> Fit:
        """The fit moved by `step` over log-rates, then polynomials; weights follow their rates."""
        count = len(fit.log_rates)
        polynomials = fit.polynomials + step[count:].reshape(fit.polynomials.shape)
        polynomials[1:, :2] += step[:count, None] * self._weight_slopes(fit)
        return Fit(fit.log_rates + step[:count], polynomials)

    def _weight_slopes(self, fit: Fit) -> Array:
        """d log weight / d log rate of the closed form, linear in the order: Chebyshev `[S-1, 2]`.

        Coupled so, a step that shifts a node keeps the kernel in place to first order, and the
        trust regions can be wide.
        """
        rates = np.exp(fit.log_rates)
        with np.errstate(over="ignore"):
            steepness = rates + rates / np.expm1(rates)
        centre, half = (1 + self.order_min) / 2, (1 - self.order_min) / 2
        slopes = np.column_stack([1 - steepness * centre, -steepness * half])
        slopes[-1:] = 0.0
        return slopes


def fit_rates_and_polynomials(
    horizon: int, terms: int, order_min: float, *, draft: bool = False
) -> tuple[Array, Array, float]:
    """(rates `[S]`, power-basis polynomials `[S, degree + 1]`, largest relative error on the grid).

    `draft=True` uses a coarse grid and a low norm, for a quick estimate of the error.
    """
    grid = (14, 60) if draft else (24, 120) if terms <= 20 else (16, 100)
    problem = Problem(horizon, terms, order_min, *grid)
    fit = problem.start(horizon)
    iterations = 15 if draft or terms > 40 else 25
    with one_thread:
        for norm in (2, 4, 8) if draft else (2, 4, 8, 16, 32, 64, 128):
            fit = _minimise_norm(problem, fit, norm, iterations)
    rates = np.concatenate([[0.0], np.exp(fit.log_rates)])
    domain = [order_min, 1.0]
    powers = [Chebyshev(c, domain=domain).convert(kind=Polynomial).coef for c in fit.polynomials]
    padded = np.stack([np.pad(c, (0, problem.degree + 1 - len(c))) for c in powers])
    ascending = [*np.argsort(rates[:-1], kind="stable").tolist(), terms - 1]
    worst = float(np.abs(problem.error(fit)).max())
    return rates[ascending], np.asarray(padded[ascending], dtype=np.float64), worst


def _minimise_norm(problem: Problem, fit: Fit, norm: int, iterations: int) -> Fit:
    """Levenberg–Marquardt on Σ |error|^norm: each point counts by |error|^(norm - 2)."""
    damping = 1e-3
    for _ in range(iterations):
        error, jacobian = problem.linearised(fit)
        worst = np.abs(error).max()
        if worst < _ROUNDING:
            break
        emphasis = (np.abs(error) / worst) ** (norm - 2)
        curvature = (norm - 1) * jacobian.T @ (emphasis[:, None] * jacobian)
        gradient = jacobian.T @ (emphasis * error)
        scale = np.diag(np.diag(curvature) + 1e-12 * np.trace(curvature))
        before = emphasis @ (error / worst) ** 2
        for _ in range(10):
            step = np.linalg.solve(curvature + damping * scale, -gradient)
            candidate = problem.shifted(fit, np.clip(step, -2, 2))
            with np.errstate(all="ignore"):
                after = (np.abs(problem.error(candidate) / worst) ** norm).sum()
            if after < before:
                break
            damping *= 4
        else:
            break
        fit, damping = candidate, max(damping / 4, 1e-14)
        if after > 0.999 * before:
            break
    return fit


def _fit_lags(horizon: int, count: int) -> NDArray[np.int64]:
    geometric = np.geomspace(1, horizon, count)
    # The last ripple of the error, against the horizon, is narrower than the others.
    last = horizon * np.linspace(0.7, 1.0, 10)
    far = np.round(np.concatenate([geometric, last])).astype(np.int64)
    return np.unique(np.concatenate([np.arange(min(horizon, 40) + 1), far]))
