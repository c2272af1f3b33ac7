import math
import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate

from vort.fractional import laguerre_soe, legendre_soe, mass_above, mass_below, terms_needed
from vort.fractional.quadrature import MAX_LAGUERRE_TERMS, _slow_node, integration_interval

PAPER = {"horizon": 1000, "tolerance": 1e-3}


def worst(order: float, terms: int, corrections: tuple[str, ...]) -> float:
    rule = legendre_soe(order, terms, corrections=corrections, **PAPER)  # type: ignore[arg-type]
    return float(rule.errors(order, PAPER["horizon"])[0].max())


@settings(max_examples=50)
@given(st.floats(0.05, 1.0), st.integers(10, 5000), st.sampled_from([1e-2, 1e-3, 1e-4]))
def test_corrected_rule_meets_any_tolerance_within_64_terms(
    order: float, horizon: int, tolerance: float
) -> None:
    terms = terms_needed(order, horizon, tolerance)
    rule = legendre_soe(order, terms, horizon, tolerance)
    assert rule.errors(order, horizon)[0].max() <= tolerance
    assert (rule.weights >= 0).all()
    assert (rule.rates >= 0).all()
    assert rule.terms <= terms


def test_e1_to_the_letter_the_rule_is_off_by_half_at_lag_zero() -> None:
    assert worst(0.5, 60, ()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("order", "error"), [(0.7, 0.011), (0.9, 0.23), (0.99, 0.86)])
def test_e2_mass_below_lambda_min_is_lost_whatever_the_terms(order: float, error: float) -> None:
    assert worst(order, 60, ("E1", "E3")) == pytest.approx(error, rel=0.05)
    assert worst(order, 200, ("E1", "E3")) == pytest.approx(error, rel=0.05)
    assert worst(order, 60, ("E1", "E2", "E3")) < 1e-8


def test_e3_tail_above_lambda_max_is_lost_at_low_orders() -> None:
    assert worst(0.1, 60, ("E1", "E2")) == pytest.approx(0.054, rel=0.05)
    assert worst(0.1, 60, ("E1", "E2", "E3")) <= 2.6e-4


@pytest.mark.parametrize("tolerance", [1e-2, 1e-3, 1e-6])
@pytest.mark.parametrize("order", [1e-12, 1e-6, 1e-3, 0.005, 0.01, 0.02])
def test_e3_tail_is_within_tolerance_where_its_end_is_no_float_any_more(
    order: float, tolerance: float
) -> None:
    _, high = integration_interval(order, 1000, tolerance)
    assert float(mass_above(order, high)) == pytest.approx(tolerance / 4, rel=1e-9)
    rule = legendre_soe(order, 60, 1000, tolerance)
    assert float(rule.errors(order, 1000)[0].max()) <= 0.26 * tolerance


@pytest.mark.parametrize("order", [1e-4, 0.02, 0.027, 0.5, 0.9])
def test_a_single_node_stands_at_the_median_rate(order: float) -> None:
    rate, weight = _slow_node(order, math.inf)
    assert (float(mass_above(order, rate)), weight) == pytest.approx((0.5, 1.0), rel=1e-12)


@pytest.mark.parametrize(
    ("order", "cut"),
    [(1e-9, 1e-280), (0.02, 0.5), (0.5, 1e-280), (0.9, 0.5), (0.999, 1e-9), (1 - 1e-12, 0.5)],
)
def test_the_slow_node_stands_at_the_mean_rate_of_the_mass_below_it(
    order: float, cut: float
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rate, mass = _slow_node(order, cut)
    assert mass == pytest.approx(float(mass_below(order, cut)), rel=1e-14)
    # By parts: the mean is the cut less the mean of the share that lies below each smaller rate.
    share = [
        integrate.quad(
            lambda u: float(mass_below(order, cut * u)) / mass, low, high, epsabs=1e-14, limit=200
        )[0]
        for low, high in pairwise([0, 1e-12, 1e-6, 1e-3, 0.03, 0.3, 1])
    ]
    assert rate / cut == pytest.approx(1 - math.fsum(share), rel=1e-9, abs=1e-12)


def test_e3_extreme_orders_and_tolerances_give_a_rule_or_are_refused() -> None:
    assert np.isfinite(legendre_soe(0.5, 60, 100, 1e-300).weights).all()
    assert terms_needed(1e-6, 1000, 1e-3) == 1
    for order, tolerance in [(1e-310, 1e-3), (0.5, 5e-324)]:
        with pytest.raises(ValueError, match="must leave an interval of rates that float64 can"):
            legendre_soe(order, 60, 100, tolerance)


def test_e4_order_one_is_a_single_node_of_rate_zero() -> None:
    rule = legendre_soe(1.0, 15, **PAPER)  # type: ignore[arg-type]
    assert rule.rates.tolist() == [0.0]
    assert np.array_equal(rule.kernel(np.arange(5)), np.ones(5))


def test_e5_laguerre_loses_long_lags() -> None:
    relative = laguerre_soe(0.5, 64).errors(0.5, 1000)[1]
    assert relative[:8].max() < 1e-5
    assert relative[100] > 0.5
    assert relative[1000] > 0.99


@pytest.mark.parametrize("order", [0.01, 0.5, 0.99])
def test_laguerre_takes_the_terms_that_float64_can_hold(order: float) -> None:
    assert np.isfinite(laguerre_soe(order, MAX_LAGUERRE_TERMS).weights).all()
    with pytest.raises(ValueError, match="terms must be at most 185 in float64, got 186"):
        laguerre_soe(order, MAX_LAGUERRE_TERMS + 1)


def test_e11_figure_claim_of_4e_3_at_15_terms_holds_with_the_right_density() -> None:
    assert worst(0.5, 15, ("E1",)) < 4e-3
    assert worst(0.5, 15, ()) > 0.4


def test_a_single_term_is_allowed_and_positive() -> None:
    rule = legendre_soe(0.5, 1, **PAPER)  # type: ignore[arg-type]
    assert rule.terms == 1
    assert rule.weights[0] == 1.0


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="terms must be a whole number >= 1, got 0"):
        legendre_soe(0.5, 0, 1000, 1e-3)
    with pytest.raises(ValueError, match="horizon must be a whole number >= 1, got 0"):
        legendre_soe(0.5, 5, 0, 1e-3)
    with pytest.raises(ValueError, match=r"tolerance must lie in \(0, 1\), got 2"):
        legendre_soe(0.5, 5, 10, 2)
    with pytest.raises(ValueError, match="corrections must be among"):
        legendre_soe(0.5, 5, 10, 0.1, corrections=("E9",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="within 64 terms, got 1e-15"):
        terms_needed(0.5, 300, 1e-15)
