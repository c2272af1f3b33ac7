import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vort.fractional import gl_kernel, gl_partial_sums, legendre_soe
from vort.fractional.bounds import (
    bank_growth,
    bank_orders,
    mixture_energy,
    plasticity_rate,
    quantisation_bound,
    quantisation_bound_for_banks,
    separation_bound,
    separation_error,
    soe_error_bound,
)

orders = st.floats(0.01, 1.0)
mixtures = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.floats(1e-4, 5.0)), min_size=1, max_size=6
).map(lambda pairs: tuple(zip(*pairs, strict=True)))


def continuous_kernel(order: float, lag: float) -> float:
    return float(mpmath.mpf(lag) ** (order - 1) / mpmath.gamma(order))


@given(orders, orders, st.floats(1.0, 1e7))
def test_quantisation_bound_holds_for_the_continuous_kernel(a: float, b: float, t: float) -> None:
    gap = abs(continuous_kernel(a, t) - continuous_kernel(b, t))
    tight = float(quantisation_bound(a, b, t))
    stated = float(quantisation_bound(a, b, t, order_min=0.01))
    assert gap <= tight * (1 + 1e-9) + 1e-15
    assert tight <= stated * (1 + 1e-12)


@given(orders, orders, st.integers(0, 10**6))
def test_quantisation_bound_holds_for_the_gl_weights(a: float, b: float, lag: int) -> None:
    pair = gl_kernel(torch.tensor([a, b], dtype=torch.float64), torch.tensor(lag))
    gap = abs(float(pair[0] - pair[1]))
    assert gap <= float(quantisation_bound(a, b, lag, kernel="gl")) * (1 + 1e-9) + 1e-15


@given(st.integers(1, 20), st.floats(0.01, 0.5), st.floats(1.0, 1e5), st.floats(0, 1))
def test_bank_bound_holds_for_the_nearest_bank(
    banks: int, order_min: float, lag: float, share: float
) -> None:
    order = order_min + (1 - order_min) * share
    grid = bank_orders(banks, order_min)
    nearest = grid[np.abs(grid - order).argmin()]
    gap = abs(continuous_kernel(order, lag) - continuous_kernel(nearest, lag))
    bound = float(quantisation_bound_for_banks(banks, order_min, lag))
    assert gap <= bound * (1 + 1e-9)


def test_e10_lowest_orders_are_a_whole_spacing_from_a_bank() -> None:
    grid = bank_orders(10, 0.1)
    assert np.allclose(np.diff(grid), 0.09)
    assert grid[0] - 0.1 == pytest.approx(0.09)
    assert grid[-1] == 1.0
    assert float(quantisation_bound_for_banks(10, 0.1, 1.0)) > 0.05


@given(orders, mixtures, st.floats(1.0, 1e5))
def test_separation_bound_holds_and_the_tight_one_is_tighter(
    order: float, mixture: tuple[tuple[float, ...], tuple[float, ...]], steps: float
) -> None:
    weights, rates = mixture
    error = separation_error(order, weights, rates, steps)
    tight = separation_bound(order, weights, rates, steps)
    paper = separation_bound(order, weights, rates, steps, form="paper")
    scale = 1e-9 * (1 + abs(error) + abs(tight))
    assert paper <= tight <= error + scale


@given(st.floats(0.05, 1.0), st.floats(0.01, 3.0), st.floats(1.0, 50.0))
def test_separation_error_is_the_integral(order: float, rate: float, steps: float) -> None:
    def gap(t: mpmath.mpf) -> mpmath.mpf:
        return (2 * mpmath.exp(-rate * t) - t ** (order - 1)) ** 2

    numeric = float(mpmath.quad(gap, mpmath.linspace(1, steps, 6)))
    assert separation_error(order, [2.0], [rate], steps) == pytest.approx(numeric, abs=1e-8)


def test_energy_at_order_one_half_is_the_logarithm() -> None:
    assert mixture_energy(0.5, 100.0) == pytest.approx(math.log(100))
    assert mixture_energy(0.5 + 1e-9, 100.0) == pytest.approx(math.log(100), rel=1e-6)
    assert mixture_energy(0.9, 1.0) == 0.0


def test_e16_separation_below_order_one_half_can_say_nothing() -> None:
    assert separation_bound(0.3, [1.0], [0.01], 1e9) < 0


@given(st.floats(1e-3, 1.0), st.integers(1, 10**4), st.floats(0.1, 10.0))
def test_bank_growth_bounds_hold(order: float, steps: int, value: float) -> None:
    exact, power = bank_growth(order, steps, value)
    direct = value * float(gl_partial_sums(order, steps - 1)[-1])
    assert exact == pytest.approx(direct, rel=1e-12)
    assert exact <= power * (1 + 1e-12)


def test_bank_growth_approaches_its_power() -> None:
    exact, power = bank_growth(0.3, 10**6)
    assert exact / power == pytest.approx(1, abs=1e-5)


@settings(max_examples=40)
@given(
    st.floats(0.05, 0.99), st.integers(2, 64), st.integers(2, 4000), st.sampled_from([1e-2, 1e-4])
)
def test_soe_error_bound_holds(order: float, terms: int, horizon: int, tolerance: float) -> None:
    rule = legendre_soe(order, terms, horizon, tolerance)
    measured = float(rule.errors(order, horizon)[0].max())
    assert measured <= soe_error_bound(order, terms, horizon, tolerance)


def test_soe_error_bound_reaches_the_tolerance_with_enough_terms() -> None:
    bounds = [soe_error_bound(0.5, terms, 1000, 1e-3) for terms in (20, 40, 60, 120)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] < 1e-3


@given(st.floats(0.1, 10.0), st.floats(0.01, 1.0), st.floats(0.05, 1.0), st.integers(0, 50))
def test_plasticity_rate_bounds_gradient_descent_on_a_quadratic(
    smoothness: float, ratio: float, share: float, iterations: int
) -> None:
    step = share / smoothness
    curvatures = np.array([smoothness, smoothness * ratio])
    point = np.array([0.3, -0.7])
    start = float(curvatures @ point**2)
    for _ in range(iterations):
        point = point - step * curvatures * point
    factor = plasticity_rate(step, smoothness * ratio, smoothness, iterations)
    assert float(curvatures @ point**2) <= factor * start * (1 + 1e-9)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="step must lie in"):
        plasticity_rate(0.6, 1.0, 2.0, 3)
    with pytest.raises(ValueError, match="pl_constant must be at most smoothness 2"):
        plasticity_rate(0.5, 3.0, 2.0, 3)
    with pytest.raises(ValueError, match="mixture_rates must be > 0"):
        separation_bound(0.7, [1.0], [0.0], 10)
    with pytest.raises(ValueError, match="two vectors of one length"):
        separation_bound(0.7, [1.0, 2.0], [0.1], 10)
    with pytest.raises(ValueError, match=r"lag must be at least 1, got 0.5"):
        quantisation_bound(0.3, 0.4, 0.5)
    with pytest.raises(ValueError, match="form must be one of tight, paper, got 'papper'"):
        separation_bound(0.7, [1.0], [0.1], 100, form="papper")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="kernel must be one of continuous, gl, got 'GL'"):
        quantisation_bound(0.3, 0.5, [1, 2], kernel="GL")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="order_min must be at most both orders"):
        quantisation_bound(0.3, 0.4, 2, order_min=0.35)
