import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck

from vort.fractional import (
    fractional_sum,
    fractional_sum_direct,
    frequency_response,
    gl_kernel,
    gl_partial_sums,
    gl_weights,
)

orders = st.floats(1e-6, 1.0)


def reference_weight(order: float, lag: int) -> mpmath.mpf:
    with mpmath.workdps(50):
        a, j = mpmath.mpf(order), mpmath.mpf(lag)
        return mpmath.gamma(j + a) / (mpmath.gamma(a) * mpmath.gamma(j + 1))


def test_weights_agree_with_mpmath_at_a_thousand_random_orders_and_lags() -> None:
    draw = np.random.default_rng(7)
    order = np.concatenate([draw.uniform(1e-3, 1, 900), 10.0 ** draw.uniform(-8, 0, 100)])
    lag = np.concatenate(
        [draw.integers(0, 100, 300), (10.0 ** draw.uniform(0, 7, 700)).astype(np.int64)]
    )
    draw.shuffle(lag)
    ours = gl_kernel(torch.from_numpy(order), torch.from_numpy(lag)).numpy()
    exact = [reference_weight(a, int(j)) for a, j in zip(order, lag, strict=True)]
    relative = [abs(float((w - e) / e)) for w, e in zip(ours, exact, strict=True)]
    assert max(relative) < 1e-12


def test_weights_table_equals_the_kernel_at_each_lag() -> None:
    order = torch.tensor([[0.1, 0.5], [0.9, 1.0]], dtype=torch.float64)
    table = gl_weights(order, 100)
    assert table.shape == (2, 2, 101)
    assert torch.equal(table, gl_kernel(order[..., None], torch.arange(101)))


def test_weights_are_stable_at_ten_million_lags() -> None:
    weights = gl_weights(0.3, 10_000_000)
    assert abs(float(weights[-1] / float(reference_weight(0.3, 10_000_000))) - 1) < 1e-12
    assert bool((weights.diff() < 0).all())


@given(orders, st.integers(0, 400))
def test_partial_sums_are_the_sums_of_the_weights(order: float, horizon: int) -> None:
    sums = gl_weights(order, horizon).cumsum(0)
    torch.testing.assert_close(gl_partial_sums(order, horizon), sums, rtol=1e-12, atol=0)


def test_order_one_is_the_plain_sum() -> None:
    assert torch.equal(gl_weights(1.0, 40), torch.ones(41, dtype=torch.float64))


@given(st.floats(0.05, 1.0), st.floats(0.01, 2 * math.pi - 0.01))
def test_frequency_response_is_the_transform_of_the_lemma(order: float, omega: float) -> None:
    expected = (1 - complex(math.cos(omega), math.sin(omega))) ** -order
    got = complex(frequency_response(order, omega))
    assert abs(got - expected) < 1e-9 * abs(expected)
    modulus = abs(2 * math.sin(omega / 2)) ** -order
    assert abs(abs(got) - modulus) < 1e-12 * modulus


def test_frequency_response_is_what_damped_weights_sum_to() -> None:
    radius, omega, order = 0.99, 0.3, 0.6
    weights = gl_weights(order, 4000)
    lags = torch.arange(4001, dtype=torch.float64)
    series = (weights * radius**lags * torch.exp(1j * omega * lags)).sum()
    expected = (1 - radius * complex(math.cos(omega), math.sin(omega))) ** -order
    assert abs(complex(series) - expected) < 1e-10


def test_frequency_response_refuses_the_pole() -> None:
    with pytest.raises(ValueError, match="omega must not be a multiple"):
        frequency_response(0.5, [0.1, 0.0])


@given(st.floats(0.01, 1.0), st.integers(0, 70), st.integers(1, 3))
def test_fft_sum_equals_the_direct_sum(order: float, steps: int, channels: int) -> None:
    x = torch.randn(2, channels, steps, dtype=torch.float64)
    expected = fractional_sum_direct(x, order)
    torch.testing.assert_close(fractional_sum(x, order), expected, rtol=1e-11, atol=1e-11)


def test_sum_takes_an_order_for_each_channel_and_any_time_axis() -> None:
    x = torch.randn(5, 50, 3, dtype=torch.float64)
    order = torch.tensor([0.2, 0.7, 1.0], dtype=torch.float64)
    together = fractional_sum(x, order, dim=1)
    for channel in range(3):
        alone = fractional_sum(x[..., channel], float(order[channel]))
        torch.testing.assert_close(together[..., channel], alone)


def test_sums_of_fractional_order_compose_to_the_plain_sum() -> None:
    x = torch.randn(300, dtype=torch.float64)
    twice = fractional_sum(fractional_sum(x, 0.35), 0.65)
    torch.testing.assert_close(twice, x.cumsum(0), rtol=1e-10, atol=1e-10)


def test_sum_passes_gradcheck_in_x_and_order() -> None:
    x = torch.randn(3, 40, dtype=torch.float64, requires_grad=True)
    order = torch.tensor([0.15, 0.5, 0.9], dtype=torch.float64, requires_grad=True)
    assert gradcheck(fractional_sum, (x, order))
    assert gradcheck(lambda a: gl_weights(a, 60), (order,))
    assert gradcheck(lambda a: gl_kernel(a[:, None], torch.tensor([0, 5, 40, 999])), (order,))


def test_sum_keeps_the_dtype_of_x() -> None:
    x = torch.randn(20)
    assert fractional_sum(x, 0.5).dtype == torch.float32
    low = fractional_sum(x.bfloat16(), 0.5)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), fractional_sum(x, 0.5), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (1.2, r"order must lie in \(0, 1\], got 1.2"),
        (0.0, r"order must lie in \(0, 1\], got 0"),
        (float("nan"), r"order must lie in \(0, 1\], got nan"),
        ([0.5, 0.5, 0.5, 1.2], r"got 1.2 at index 3"),
        ([[0.5, -1.0]], r"got -1 at index \(0, 1\)"),
    ],
)
def test_a_bad_order_is_named_with_its_place(order: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gl_weights(order, 3)


@pytest.mark.parametrize("lag", [-3, -3.0, 0.5, 31.5, 32.5, math.nan, math.inf])
def test_a_lag_that_is_no_whole_number_is_named(lag: float) -> None:
    with pytest.raises(ValueError, match=f"lag must be whole numbers >= 0, got {lag:g}"):
        gl_kernel(0.5, torch.tensor([1, 40, lag]))


def test_whole_lags_may_be_of_any_type() -> None:
    lags = torch.tensor([0, 5, 40])
    assert torch.equal(gl_kernel(0.5, lags.double()), gl_kernel(0.5, lags))
    mapped = torch.vmap(lambda lag: gl_kernel(0.5, lag))(lags)
    assert torch.equal(mapped, gl_kernel(0.5, lags))


def test_lags_without_numbers_have_a_shape() -> None:
    order, lag = torch.full((2, 1), 0.5, device="meta"), torch.arange(5, device="meta")
    assert gl_kernel(order, lag).shape == (2, 5)
    with FakeTensorMode():
        assert gl_kernel(torch.full((2, 1), 0.5), torch.arange(5)).shape == (2, 5)


@pytest.mark.parametrize("horizon", [-1, 2.5, True])
def test_a_bad_horizon_is_named(horizon: object) -> None:
    with pytest.raises(ValueError, match="horizon must be a whole number >= 0"):
        gl_weights(0.5, horizon)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", [fractional_sum, fractional_sum_direct])
def test_whole_numbers_have_no_fractional_sum(function: Any) -> None:
    with pytest.raises(ValueError, match=r"x must be floating point, got torch\.int64"):
        function(torch.ones(4, dtype=torch.int64), 0.5)
