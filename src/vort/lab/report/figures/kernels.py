"""Figure kernels-soe: weights on log-log axes, and the convergence of sums of exponentials.

Beside it the picture of a power law against exponentials, and the growth of the plain memory.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from vort.fractional import (
    PowerLawBasis,
    bank_memories,
    gl_kernel,
    gl_weights,
    laguerre_soe,
    legendre_soe,
)
from vort.fractional.bounds import bank_growth, bank_orders
from vort.fractional.quadrature import Correction
from vort.lab.report.figures.paper_figure import Found, PaperFigure
from vort.lab.report.figures.style import BLUE, GREEN, GREY, ORANGE, SERIES, figure

__all__ = ["KERNELS_SOE", "draw_growth", "draw_kernels_soe", "draw_power_law", "growth"]

_HORIZON = 1000
_ORDERS = (0.3, 0.5, 0.7, 0.9)


def draw_power_law(path: str | Path, basis: PowerLawBasis) -> None:
    """The kernels that a few exponentials follow, beside the exponentials themselves."""
    lags = np.unique(np.round(np.geomspace(1, basis.horizon, 300)).astype(np.int64))
    with figure(path, 2, 9.6, 3.7) as (left, right):
        _exact_kernels(left, lags)
        for half_life, style in ((10, ":"), (100, "--"), (1000, "-.")):
            decay = 0.5 ** (lags / half_life)
            label = f"exponential, half-life {half_life:,}"
            left.plot(lags, decay, style, color=GREY, lw=1.3, label=label)
        left.set(ylim=(2e-4, 1.4), title="A power law forgets slowly, an exponential all at once")
        left.legend(fontsize=8, loc="lower left")
        _mixture(right, lags, basis, order=0.7)


def draw_kernels_soe(path: str | Path, horizon: int, basis: PowerLawBasis) -> None:
    """Figure kernels-soe (a) and (b) of the paper, and the relative error by lag, all measured."""
    lags = np.unique(np.round(np.geomspace(1, horizon, 400)).astype(np.int64))
    with figure(path, 3, 14.5, 4.0) as (left, middle, right):
        _exact_kernels(left, lags)
        left.plot(lags, np.exp(-0.025 * lags), "--", color=GREY, label=r"$e^{-0.025 j}$")
        left.set(ylim=(1e-5, 1.4), title="(a) GL weights and an exponential")
        left.legend(fontsize=8, loc="lower left")
        _convergence(middle)
        _relative_error(right, lags, horizon, basis)


def growth(order: float, values: np.ndarray) -> np.ndarray:
    """|M_t| after each token of values `[T, V]`, from the recurrences of eq. aux-recurrence."""
    # Forty terms are exact to 3e-6 of the norm after a thousand steps.
    states = legendre_soe(order, 40, len(values), 1e-4).states(values)
    return np.asarray(np.linalg.norm(states.sum(1), axis=-1))


def draw_growth(path: str | Path, horizon: int = _HORIZON, banks: int = 10) -> None:
    """Norms of the plain memory's states, alone and in banks, below the bound of bankgrowth."""
    draw = np.random.default_rng(0)
    steps = np.arange(1, horizon + 1)
    directions = draw.normal(size=(horizon, 16))
    units = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    alike = np.broadcast_to(units[:1], units.shape)
    with figure(path, 2, 10.6, 4.2) as (left, right):
        for order, colour in zip(_ORDERS, SERIES, strict=True):
            left.loglog(steps, growth(order, alike), color=colour, label=f"order {order}")
            left.loglog(steps, growth(order, units), color=colour, lw=0.9)
            left.loglog(*_bound(order, horizon), "--", color="black", lw=0.9)
        left.set(title=r"$M_t$: tokens alike (thick), of random direction (thin)")
        grid = bank_orders(banks, 0.05)
        chosen = np.abs(draw.uniform(0.05, 1, horizon)[:, None] - grid).argmin(1)
        rules = [legendre_soe(float(order), 15, horizon, 1e-3) for order in grid]
        norms = np.linalg.norm(bank_memories(rules, chosen, alike), axis=-1)
        shown = range(1, banks, 2)
        for k, colour in zip(shown, (*SERIES, ORANGE), strict=False):
            late = norms[:, k] > 0  # before its first token a bank is empty
            label = f"bank {k + 1}, order {grid[k]:.2f}"
            right.loglog(steps[late], norms[late, k], color=colour, lw=1.2, label=label)
            right.loglog(*_bound(float(grid[k]), horizon), "--", color=colour, lw=0.8)
        right.set(title=f"$M_t^{{(k)}}$: {banks} banks, orders of tokens drawn evenly")
        for axis in (left, right):
            axis.plot([], [], "--", color="black", lw=0.9, label=r"bound $t^{a}/\Gamma(a+1)$")
            axis.set(xlabel="steps $t$", ylim=(0.03, 2 * horizon))
            axis.legend(fontsize=8, loc="upper left")
        left.set_ylabel("norm of the state, tokens of norm 1")


def _bound(order: float, horizon: int) -> tuple[np.ndarray, list[float]]:
    steps = np.unique(np.geomspace(1, horizon, 30).round().astype(int))
    return steps, [bank_growth(order, int(t))[1] for t in steps]


def _exact_kernels(axis: Any, lags: np.ndarray) -> None:
    for order, colour in zip(_ORDERS, SERIES, strict=True):
        weights = gl_kernel(order, torch.from_numpy(lags)).numpy()
        axis.loglog(lags, weights, color=colour, label=f"order {order}")
    axis.set(xlabel="lag", ylabel="weight")


def _mixture(axis: Any, lags: np.ndarray, basis: PowerLawBasis, order: float) -> None:
    terms = basis.weights(order).numpy() * np.exp(-lags[:, None] * basis.rates)
    axis.loglog(lags, terms, color=GREY, lw=0.9, alpha=0.8)
    axis.loglog(lags, terms.sum(1), color=BLUE, lw=4, alpha=0.35, label="their sum")
    exact = gl_kernel(order, torch.from_numpy(lags)).numpy()
    axis.loglog(lags, exact, color=BLUE, lw=1.2, label=f"power law, order {order}")
    worst = basis.certificate.relative
    axis.set(
        ylim=(2e-4, 1.4),
        xlabel="lag",
        title=f"{basis.terms} shared rates follow every order to {worst:.2%}",
    )
    axis.legend(fontsize=8, loc="lower left")


def _convergence(axis: Any) -> None:
    """Panel (b): worst absolute error at order .5 and T = 1000 against the number of terms."""
    order, horizon, tolerance = 0.5, 1000, 1e-3
    counts = np.arange(3, 41)
    rules: dict[str, tuple[tuple[Correction, ...], str, str]] = {
        "as printed": ((), ORANGE, ":"),
        "density corrected (E1)": (("E1",), ORANGE, "-"),
        "E1 to E4 corrected": (("E1", "E2", "E3"), GREEN, "-"),
    }
    for label, (corrections, colour, style) in rules.items():
        errors = [
            legendre_soe(order, int(n), horizon, tolerance, corrections=corrections)
            .errors(order, horizon)[0]
            .max()
            for n in counts
        ]
        axis.semilogy(counts, errors, style, color=colour, label=f"Gauss-Legendre, {label}")
    few = np.arange(3, 13)
    ours = [PowerLawBasis.fit(horizon, int(n)).certificate.absolute for n in few]
    axis.semilogy(few, ours, "o-", ms=3, color=BLUE, label="shared rates, every order")
    axis.plot(15, 4e-3, "k+", ms=10, label="the paper's figure: 4e-3 at S = 15")
    axis.set(
        xlabel="terms S",
        ylabel="worst absolute error",
        ylim=(1e-7, 2),
        title="(b) convergence, order .5, T = 1000",
    )
    axis.legend(fontsize=7.5, loc="lower left")


def _relative_error(axis: Any, lags: np.ndarray, horizon: int, basis: PowerLawBasis) -> None:
    order = 0.7
    exact = gl_weights(order, horizon).numpy()[lags]
    kernels = {
        "Gauss-Laguerre, S = 15": (laguerre_soe(order, 15).kernel(lags), GREY),
        "Gauss-Legendre, S = 15 (E1)": (
            legendre_soe(order, 15, horizon, 1e-3, corrections=("E1",)).kernel(lags),
            ORANGE,
        ),
        "Gauss-Legendre, S = 15 (E1 to E4)": (
            legendre_soe(order, 15, horizon, 1e-3).kernel(lags),
            GREEN,
        ),
        f"shared rates, S = {basis.terms}": (
            basis.kernel(order, torch.from_numpy(lags)).numpy(),
            BLUE,
        ),
    }
    for label, (values, colour) in kernels.items():
        axis.loglog(lags, np.abs(values / exact - 1) + 1e-9, color=colour, lw=1.3, label=label)
    axis.axhline(basis.certificate.relative, color=BLUE, ls=":", lw=1)
    axis.set(
        xlabel="lag",
        ylabel="relative error",
        ylim=(1e-6, 2),
        title=f"relative error by lag, order {order}; dotted: certificate",
    )
    axis.legend(fontsize=7.5, loc="lower right")


def _kernels_soe(path: Path, found: Found) -> None:
    """The figure of `vort reproduce --only kernel`; no run is needed."""
    draw_kernels_soe(path, _HORIZON, PowerLawBasis.fit(_HORIZON, 8))


KERNELS_SOE = PaperFigure(
    "kernels-soe",
    _kernels_soe,
    "(a) Weights w_j of four orders and the paper's exponential e^{-.025 j}, computed. (b) Worst "
    "absolute error of a sum of S exponentials at order .5 for lags to 1000: the paper's "
    "quadrature as printed, with the density corrected, with E1 to E4 corrected (docs/errata.md), "
    "and the rates that this library shares among all orders, each at its worst order. Right, not "
    "in the paper: relative error by lag at order .7.",
)
