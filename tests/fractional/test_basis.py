import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck

from vort.fractional import PowerLawBasis, gl_kernel, gl_weights
from vort.fractional import basis as basis_module
from vort.fractional.basis import shipped_bases


def measured_error(basis: PowerLawBasis, every_lag_to: int = 20_000) -> tuple[float, float]:
    """Worst (relative, absolute) error over 200 random orders: every lag, then 3,000 sampled."""
    draw = torch.Generator().manual_seed(1)
    orders = 0.05 + 0.95 * torch.rand(200, dtype=torch.float64, generator=draw)
    lags = torch.arange(min(basis.horizon, every_lag_to) + 1)
    if basis.horizon > every_lag_to:
        beyond = np.geomspace(every_lag_to, basis.horizon, 3000).round().astype(np.int64)
        lags = torch.cat([lags, torch.from_numpy(beyond)])
    decays = torch.exp(torch.from_numpy(-basis.rates)[:, None] * lags)
    worst = [0.0, 0.0]
    for some in orders.split(20):
        exact = gl_kernel(some[:, None], lags)
        error = (basis.weights(some) @ decays - exact).abs()
        worst = [max(worst[0], float((error / exact).max())), max(worst[1], float(error.max()))]
    return worst[0], worst[1]


@pytest.mark.parametrize(
    ("horizon", "terms", "bound"),
    [(10**4, 12, 2e-3), (10**4, 10, 4.5e-3), (10**6, 16, 2.5e-3), (10**3, 8, 4.1e-3)],
)
def test_relative_error_over_every_lag_is_within_the_design(
    horizon: int, terms: int, bound: float
) -> None:
    basis = PowerLawBasis.fit(horizon, terms)
    relative, absolute = measured_error(basis)
    assert relative <= bound
    assert relative <= basis.certificate.relative <= 1.3 * relative
    assert absolute <= basis.certificate.absolute <= 1.3 * absolute


@settings(max_examples=25)
@given(
    st.integers(1, 3000), st.integers(1, 14), st.sampled_from([0.01, 0.05, 0.3]), st.integers(0, 99)
)
def test_certificate_is_never_below_what_is_measured(
    horizon: int, terms: int, order_min: float, seed: int
) -> None:
    basis = PowerLawBasis.fit(horizon, terms, order_min=order_min)
    draw = torch.Generator().manual_seed(seed)
    orders = order_min + (1 - order_min) * torch.rand(40, dtype=torch.float64, generator=draw)
    exact = gl_weights(orders, horizon)
    error = (basis.kernel(orders[:, None], torch.arange(horizon + 1)) - exact).abs()
    assert float((error / exact).max()) <= basis.certificate.relative
    assert float(error.max()) <= basis.certificate.absolute
    assert bool((basis.weights(orders) >= 0).all())


@given(st.floats(0.05, 1.0), st.sampled_from(sorted(shipped_bases())))
def test_weights_are_positive(order: float, key: tuple[int, int, float]) -> None:
    weights = shipped_bases()[key].weights(order)
    assert weights.shape == (key[1],)
    assert bool((weights >= 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_order_one_is_exact(dtype: torch.dtype) -> None:
    basis = PowerLawBasis.fit(10**4, 12)
    one_hot = torch.zeros(12, dtype=dtype)
    one_hot[0] = 1
    assert torch.equal(basis.weights(torch.ones((), dtype=dtype)), one_hot)
    assert basis.rates[0] == 0


def test_tolerance_finds_the_fewest_terms() -> None:
    basis = PowerLawBasis.fit(10**4, tolerance=2e-3)
    assert basis.certificate.relative <= 2e-3
    fewer = PowerLawBasis.fit(10**4, basis.terms - 1)
    assert fewer.certificate.relative > 2e-3


def test_terms_that_cost_accuracy_are_said_to() -> None:
    with pytest.warns(UserWarning, match="32 terms are too many for horizon 10: .* of 7 terms"):
        many = PowerLawBasis.fit(10, 32)
    assert many.certificate.relative > 2 * PowerLawBasis.fit(10, 7).certificate.relative


@pytest.mark.parametrize("arguments", [{"terms": 12}, {"terms": 3}, {"tolerance": 2e-4}])
def test_terms_that_are_worth_it_are_not_warned_about(arguments: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        PowerLawBasis.fit(10, **arguments)


def test_a_shipped_basis_is_compared_with_none_that_must_be_fitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError(f"a fit of {arguments}")

    monkeypatch.setattr(basis_module, "fit_rates_and_polynomials", refuse)
    for horizon, terms, order_min in shipped_bases():
        PowerLawBasis.fit(horizon, terms, order_min=order_min)


def test_weights_pass_gradcheck() -> None:
    basis = PowerLawBasis.fit(10**4, 12)
    orders = torch.tensor([0.06, 0.3, 0.5, 0.77, 0.99], dtype=torch.float64, requires_grad=True)
    assert gradcheck(basis.weights, (orders,))
    assert gradcheck(lambda a: basis.kernel(a[:, None], torch.tensor([0, 3, 500])), (orders,))


def test_gradient_to_the_order_follows_the_exact_kernel() -> None:
    basis = PowerLawBasis.fit(10**4, 12)
    lags = torch.tensor([0, 1, 10, 100, 1000, 10000])
    grads = []
    for kernel in (basis.kernel, gl_kernel):
        order = torch.full((6,), 0.6, dtype=torch.float64, requires_grad=True)
        kernel(order, lags).sum().backward()
        grads.append(order.grad)
    approximate, exact = grads
    assert approximate is not None
    assert exact is not None
    # w_0 = 1 has no gradient; elsewhere the error of the basis is smooth in the order.
    assert (approximate[1:] - exact[1:]).abs().max() < 0.01 * exact[1:].abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_take_any_shape_and_keep_precision(dtype: torch.dtype) -> None:
    basis = PowerLawBasis.fit(1000, 8)
    order = torch.full((2, 3, 4), 0.5, dtype=dtype)
    weights = basis.weights(order)
    assert weights.shape == (2, 3, 4, 8)
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(weights[0, 0, 0].double(), basis.weights(0.5), rtol=1e-5, atol=1e-7)


def test_weights_compile_without_a_break() -> None:
    basis = PowerLawBasis.fit(1000, 8)
    order = torch.rand(16) * 0.9 + 0.1
    compiled = torch.compile(basis.weights, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(order), basis.weights(order))


def test_log_decay_is_what_retention_takes() -> None:
    log_decay = PowerLawBasis.fit(1000, 8).log_decay
    assert log_decay.dtype == torch.float32
    assert log_decay[0] == 0
    assert bool((log_decay.diff() < 0).all())


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_saved_basis_loads_bit_identically(tmp_path: Path, suffix: str) -> None:
    basis = PowerLawBasis.fit(777, 5)
    basis.save(tmp_path / f"basis{suffix}")
    loaded = PowerLawBasis.load(tmp_path / f"basis{suffix}")
    assert loaded.to_dict() == basis.to_dict()
    assert torch.equal(loaded.weights(0.4), basis.weights(0.4))


def test_bad_files_are_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.json or \.safetensors"):
        PowerLawBasis.load(tmp_path / "basis.pt")
    with pytest.raises(ValueError, match=r"must end in \.json or \.safetensors"):
        PowerLawBasis.fit(1000, 8).save(tmp_path / "basis.pkl")
    entry = PowerLawBasis.fit(1000, 8).to_dict()
    (tmp_path / "odd.json").write_text(json.dumps({**entry, "surprise": 1}))
    with pytest.raises(ValueError, match="surprise"):
        PowerLawBasis.load(tmp_path / "odd.json")
    (tmp_path / "short.json").write_text(json.dumps({**entry, "rates": entry["rates"][:-1]}))
    with pytest.raises(ValueError, match=r"got shapes \(7,\)"):
        PowerLawBasis.load(tmp_path / "short.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rates": [0.0, -1.0]}, "rates must be >= 0 and finite, got -1"),
        ({"rates": [math.nan, 1.0]}, "rates must be >= 0 and finite, got nan"),
        ({"rates": [0.0, math.inf]}, "rates must be >= 0 and finite, got inf"),
        ({"polynomials": [[0.0], [math.nan]]}, "polynomials must be finite, got nan"),
        ({"order_min": 5}, r"order_min must lie in \(0, 1\), got 5"),
        ({"order_min": "x"}, r"order_min must lie in \(0, 1\), got 'x'"),
        ({"horizon": "x"}, "horizon must be a whole number >= 1, got 'x'"),
    ],
)
def test_numbers_that_make_no_basis_are_refused(change: dict[str, Any], message: str) -> None:
    entry = PowerLawBasis.fit(10, 2).to_dict()
    with pytest.raises(ValueError, match=message):
        PowerLawBasis.from_dict({**entry, **change})


def test_shipped_bases_are_what_fitting_gives() -> None:
    for key in [(1_000, 8, 0.05), (8_192, 12, 0.05)]:
        horizon, terms, order_min = key
        fresh = PowerLawBasis.fit(horizon, terms, order_min=order_min, use_shipped=False)
        stored = shipped_bases()[key]
        assert stored.certificate.relative == pytest.approx(fresh.certificate.relative, rel=0.02)
        again = PowerLawBasis.fit(horizon, terms, order_min=order_min, use_shipped=False)
        assert np.array_equal(fresh.rates, again.rates)
        assert np.array_equal(fresh.polynomials, again.polynomials)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"horizon": 0, "terms": 4}, "horizon must be a whole number >= 1, got 0"),
        ({"horizon": 10, "terms": 0}, "terms must be a whole number >= 1, got 0"),
        ({"horizon": 10, "terms": 65}, "terms must be at most 64, got 65"),
        ({"horizon": math.inf, "terms": 4}, "horizon must be a whole number >= 1, got inf"),
        ({"horizon": 10, "terms": math.nan}, "terms must be a whole number >= 1, got nan"),
        ({"horizon": 10}, "either terms or tolerance"),
        ({"horizon": 10, "terms": 4, "tolerance": 0.1}, "either terms or tolerance"),
        ({"horizon": 10, "tolerance": 0.0}, r"tolerance must lie in \(0, 1\), got 0"),
        ({"horizon": 10**4, "tolerance": 1e-9}, "reachable within 64 terms and at least 5e-06"),
        ({"horizon": 10, "terms": 4, "order_min": 1.0}, r"order_min must lie in \(0, 1\), got 1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerLawBasis.fit(**arguments)  # type: ignore[arg-type]


def test_orders_outside_the_basis_are_named() -> None:
    basis = PowerLawBasis.fit(1000, 8)
    with pytest.raises(ValueError, match=r"order must lie in \[0.05, 1\], got 0.01 at index 1"):
        basis.weights(torch.tensor([0.5, 0.01]))
    with pytest.raises(ValueError, match=r"order must lie in \(0, 1\], got nan"):
        basis.weights(float("nan"))


@pytest.mark.parametrize("order", [0.05, 0.5, 1 - 2e-4, 1 - 1e-5, 1.0])
def test_weights_have_a_second_derivative_at_every_order(order: float) -> None:
    basis = PowerLawBasis.fit(1000, 8)

    def weights(x: torch.Tensor) -> torch.Tensor:
        return basis.weights(x, validate=False)

    x = torch.tensor(order, dtype=torch.float64)
    slope = torch.func.jacfwd(weights)
    step = 1e-5
    expected = (slope(x + step) - slope(x - step)) / (2 * step)
    torch.testing.assert_close(torch.func.jacfwd(slope)(x), expected, rtol=1e-5, atol=1e-5)


def test_many_orders_at_once_by_vmap() -> None:
    basis, orders = PowerLawBasis.fit(1000, 8), torch.rand(5, dtype=torch.float64) * 0.9 + 0.1
    torch.testing.assert_close(torch.vmap(basis.weights)(orders), basis.weights(orders))
    found = torch.vmap(lambda order: gl_weights(order, 50))(orders)
    torch.testing.assert_close(found, gl_weights(orders, 50))
