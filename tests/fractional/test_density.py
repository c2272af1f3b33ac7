import math
from typing import Any

import mpmath
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy import integrate

from vort.fractional import density, gl_weights, mass_above, mass_below, weight_from_density

orders = st.floats(0.02, 0.98)


@given(orders, st.integers(0, 5000))
def test_density_integrates_to_the_weight(order: float, lag: int) -> None:
    exact = float(gl_weights(order, lag)[lag])
    assert abs(weight_from_density(order, lag) / exact - 1) < 1e-10


@given(orders, st.integers(0, 200))
def test_e1_printed_density_gives_the_next_weight(order: float, lag: int) -> None:
    following = float(gl_weights(order, lag + 1)[lag + 1])
    assert abs(weight_from_density(order, lag, paper=True) / following - 1) < 1e-10


@example(0.05, 20.0, 0)
@example(0.5, 1e-6, 300)
@given(orders, st.floats(1e-6, 20.0), st.integers(0, 300))
def test_mass_below_and_above_make_up_the_weight(order: float, rate: float, lag: int) -> None:
    exact = float(gl_weights(order, lag)[lag])
    total = float(mass_below(order, rate, lag) + mass_above(order, rate, lag))
    assert abs(total / exact - 1) < 1e-10


def test_mass_between_two_rates_is_the_integral_of_the_density() -> None:
    low, high, lag = 0.01, 3.0, 7
    numeric, _ = integrate.quad(lambda x: float(density(0.4, x)) * math.exp(-lag * x), low, high)
    closed = float(mass_below(0.4, high, lag) - mass_below(0.4, low, lag))
    assert abs(numeric - closed) < 1e-9


@pytest.mark.parametrize("order", [1e-6, 1e-3, 0.01])
def test_masses_are_right_where_e_to_the_minus_rate_is_no_float_any_more(order: float) -> None:
    rates = [700.0, 709.0, 1 / order, 20 / order, math.inf]
    above = mass_above(order, rates)
    expected = [float(mpmath.exp(-order * x) * mpmath.sincpi(order)) for x in rates]
    assert above.tolist() == pytest.approx(expected, rel=1e-12)
    assert (mass_below(order, rates) + above).tolist() == pytest.approx([1.0] * 5, rel=1e-12)


@pytest.mark.parametrize("lag", [-1, 0.5, math.nan, math.inf])
@pytest.mark.parametrize("mass", [mass_below, mass_above])
def test_masses_are_known_at_whole_lags_alone(mass: Any, lag: float) -> None:
    with pytest.raises(ValueError, match=f"lag must be whole numbers >= 0, got {lag}"):
        mass(0.5, 0.1, [0, lag, 1])


@pytest.mark.parametrize("order", [0.0, 1.0, float("nan")])
def test_density_needs_an_order_inside_the_interval(order: float) -> None:
    with pytest.raises(ValueError, match=r"order must lie in \(0, 1\)"):
        density(order, 1.0)
