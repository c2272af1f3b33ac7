"""Errata that no other test shows; docs/errata.md names each test, and a test checks that."""

import cmath
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from vort.fractional import PowerLawBasis, gl_weights, legendre_soe, mass_below
from vort.fractional.quadrature import integration_interval, terms_needed
from vort.lab.experiments.kernel import measured_rate
from vort.ops.retention import paper_banks, retention

ROOT = Path(__file__).parents[1]


def small_memory(**options: object) -> torch.Tensor:
    torch.manual_seed(3)
    q, k = torch.rand(2, 1, 6, 1, 4, dtype=torch.float64)
    v = torch.randn(1, 6, 1, 3, dtype=torch.float64)
    write = torch.ones(1, 6, 1, 1, dtype=torch.float64)
    log_decay = torch.tensor([-0.5], dtype=torch.float64)
    return retention(q, k, v, write, log_decay, **options)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(("order", "needed"), [(0.5, 3e3), (0.7, 3e8), (0.9, 4e32)])
def test_e2_proof_needs_a_horizon_out_of_reach(order: float, needed: float) -> None:
    tolerance = 1e-3
    assert float(mass_below(order, tolerance / (2 * 0.5 * needed))) > tolerance / 4
    assert float(mass_below(order, tolerance / (2 * 2 * needed))) < tolerance / 4


def test_e6_the_two_sums_differ_by_the_current_token() -> None:
    inclusive, strict = (
        small_memory(include_self=flag, normalizer="none") for flag in (True, False)
    )
    assert torch.equal(strict[:, 0], torch.zeros_like(strict[:, 0]))
    assert bool(((inclusive - strict).abs().amax(-1) > 0).all())


def test_e7_the_two_denominators_differ() -> None:
    decayed, undecayed = (small_memory(normalizer=n) for n in ("decayed", "undecayed"))
    torch.testing.assert_close(decayed[:, 0], undecayed[:, 0])
    assert bool(((decayed - undecayed).abs().amax(-1)[:, 1:] > 0).all())


def test_e11_measured_rate_lies_between_strip_and_caption() -> None:
    low, high = integration_interval(0.5, 1000, 1e-3, corrections=("E1",))
    length = math.log(high / low)
    assert length == pytest.approx(17.9, abs=0.05)
    assert 2 * math.pi / length < measured_rate(0.5) < math.pi**2 / length
    assert math.exp(measured_rate(0.5)) == pytest.approx(1.55, abs=0.02)


def test_e24_terms_grow_faster_than_log_t_over_epsilon() -> None:
    tolerances = [10.0**-k for k in range(1, 7)]
    ratios = [terms_needed(0.5, 1000, eps) / math.log(1000 / eps) for eps in tolerances]
    assert ratios == sorted(ratios)
    assert ratios[-1] > 3 * ratios[0]
    # Divided by a second logarithm they level off.
    scaled = [ratio / math.log(1 / eps) for ratio, eps in zip(ratios, tolerances, strict=True)]
    assert max(scaled[1:]) < 1.5 * min(scaled[1:])


@pytest.mark.parametrize("order", [0.6, 0.8, 1.0])
def test_e25_banks_fed_with_independent_inputs_have_hurst_exponent_of_at_most_one_half(
    order: float,
) -> None:
    weights = gl_weights(order, 400_000).numpy()

    def moved(steps: int) -> float:
        later = np.square(weights[steps:] - weights[:-steps]).sum()
        return float(later + np.square(weights[:steps]).sum())

    slope = math.log(moved(4000) / moved(1000)) / math.log(4)
    assert slope <= 1 + 1e-9
    assert slope == pytest.approx(2 * order - 1, abs=0.06)


def test_e12_banks_have_a_gradient_only_straight_through() -> None:
    order = torch.tensor([[[0.62]]], dtype=torch.float64, requires_grad=True)
    write, _ = paper_banks(order, 5, 6, 100)
    nudged, _ = paper_banks(order.detach() + 1e-6, 5, 6, 100)
    assert torch.equal(write.detach(), nudged)
    write.sum().backward()
    assert order.grad is not None
    assert bool(torch.isfinite(order.grad).all())
    assert float(order.grad.abs().sum()) > 0


def test_e13_five_rates_follow_a_power_law() -> None:
    assert PowerLawBasis.fit(1000, 5, order_min=0.65).certificate.relative < 0.012
    assert PowerLawBasis.fit(10_000, 6).certificate.relative < 0.084


def test_e14_density_is_unbounded_on_the_strip() -> None:
    def size(share: float, order: float = 0.5) -> float:
        rate = 2 * math.pi * cmath.exp(1j * share * math.pi / 2)
        return abs(rate * cmath.exp(-order * rate) * (1 - cmath.exp(-rate)) ** -order)

    sizes = [size(1 - 10.0**-digits) for digits in (1, 2, 3, 4, 5)]
    assert sizes == sorted(sizes)
    assert sizes[-1] > 100 * sizes[0]


def test_e15_caption_rate_and_error_disagree() -> None:
    assert math.exp(-(math.pi**2) * 15 / 6.9) < 1e-9
    assert math.log(1000) == pytest.approx(6.9, abs=0.01)


def test_e17_predictor_weights_are_summable() -> None:
    memory, count = 0.3, 100_000
    coefficients = np.cumprod([(j - 1 - memory) / j for j in range(1, count + 1)])
    slope = math.log(coefficients[-1] / coefficients[count // 10 - 1]) / math.log(10)
    assert slope == pytest.approx(-memory - 1, abs=1e-3)
    assert -coefficients.sum() == pytest.approx(1, abs=0.05)
    shocks = gl_weights(memory, count).numpy()
    assert shocks.sum() > 10


def test_e18_projected_descent_can_stall_under_pl() -> None:
    def ridge(x: float) -> tuple[float, float]:
        bump = 0.8 * math.exp(-(((x - 0.5) / 0.2) ** 2))
        return 0.5 + bump, -bump * 2 * (x - 0.5) / 0.04

    def loss_and_gradient(x: float, y: float) -> tuple[float, tuple[float, float]]:
        height, slope = ridge(x)
        return 0.5 * (y - height) ** 2, ((y - height) * -slope, y - height)

    # F = (y - g(x))²/2 satisfies |∇F|² >= 2F everywhere, and F = 0 is reached inside the box.
    for x in np.linspace(0.05, 1, 40):
        for y in np.linspace(0.05, 1, 40):
            loss, gradient = loss_and_gradient(x, y)
            assert gradient[0] ** 2 + gradient[1] ** 2 >= 2 * loss * (1 - 1e-12)
    x, y = 0.5, 0.3
    for _ in range(1000):
        _, gradient = loss_and_gradient(x, y)
        x, y = (min(1.0, max(0.05, p - 0.02 * g)) for p, g in zip((x, y), gradient, strict=True))
    assert loss_and_gradient(x, y)[0] > 0.04


def test_e19_break_even() -> None:
    banks, terms, features, width = 10, 15, 64, 512
    length = banks * terms * features * width // width
    assert length == 9600
    assert banks * terms * features / width == pytest.approx(18.75)


def test_e22_nodes_of_the_papers_rule_are_the_same_for_every_order() -> None:
    rules = [legendre_soe(order, 15, 1000, 1e-3, corrections=()) for order in (0.1, 0.5, 0.9)]
    for rule in rules[1:]:
        assert np.array_equal(rule.rates, rules[0].rates)
        assert not np.allclose(rule.weights, rules[0].weights)


def test_every_erratum_names_a_test_that_exists() -> None:
    text = (ROOT / "docs" / "errata.md").read_text()
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    entries = re.split(r"^### ", text, flags=re.MULTILINE)[1:]
    assert [entry.split(" ")[0] for entry in entries] != []
    assert {int(e[1 : e.index(" ")]) for e in entries} == set(range(1, 26))
    for entry in entries:
        for name in re.findall(r"`(test_\w+)`", entry):
            assert f"def {name}(" in sources, name
        if not entry.startswith("E20"):
            assert "*Shown by*" in entry, entry.splitlines()[0]
