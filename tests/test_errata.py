"""Errata that no other test shows; docs/errata.md names each test, and a test checks that."""

import cmath
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vort.fractional import PowerLawBasis, gl_weights, legendre_soe, mass_below
from vort.fractional.quadrature import integration_interval, terms_needed
from vort.lab.experiments.kernel import measured_rate
from vort.ops.retention import paper_banks, retention

ROOT = Path(__file__).parents[1]
Array = NDArray[np.float64]


class SmallMemory(NamedTuple):
    """Six tokens, one scale; sums and recurrences of section mechanism, spelled out beside it."""

    q: torch.Tensor  # [T, K], features applied
    k: torch.Tensor
    v: torch.Tensor  # [T, V]
    decay: float = 0.6

    def printed_sum(self, t: int, first: int = 1, *, decayed: bool = True) -> torch.Tensor:
        """Σ_{i <= t - first} (q_t . k_i) λ^{t-i} v_i, or without λ; first = 1 is i < t."""
        terms = [
            (self.q[t] @ self.k[i]) * (self.decay ** (t - i) if decayed else 1.0) * self.v[i]
            for i in range(t + 1 - first)
        ]
        return torch.stack([torch.zeros_like(self.v[0]), *terms]).sum(0)

    def recurrence(self) -> torch.Tensor:
        """q_t G_t with G_t = λ G_{t-1} + k_t v_tᵀ, as eq. G-rec and retrieval-final print it."""
        state, read = torch.zeros(self.q.shape[1], self.v.shape[1], dtype=torch.float64), []
        for q, k, v in zip(self.q, self.k, self.v, strict=True):
            state = self.decay * state + torch.outer(k, v)
            read.append(q @ state)
        return torch.stack(read)

    def retention(self, **options: Any) -> torch.Tensor:
        q, k, v = (x[None, :, None] for x in (self.q, self.k, self.v))
        write = torch.ones(1, len(self.q), 1, 1, dtype=torch.float64)
        log_decay = torch.tensor([math.log(self.decay)], dtype=torch.float64)
        return retention(q, k, v, write, log_decay, **options)[0][0, :, 0]


def small_memory() -> SmallMemory:
    torch.manual_seed(3)
    q, k = torch.rand(2, 6, 4, dtype=torch.float64) + 0.1
    return SmallMemory(q, k, torch.randn(6, 3, dtype=torch.float64))


@pytest.mark.parametrize(("order", "needed"), [(0.5, 3e3), (0.7, 3e8), (0.9, 4e32)])
def test_e2_proof_needs_a_horizon_out_of_reach(order: float, needed: float) -> None:
    tolerance = 1e-3
    assert float(mass_below(order, tolerance / (2 * 0.5 * needed))) > tolerance / 4
    assert float(mass_below(order, tolerance / (2 * 2 * needed))) < tolerance / 4


def test_e6_the_recurrences_sum_up_to_the_current_token_and_the_equation_does_not() -> None:
    memory = small_memory()
    printed, inclusive = (
        torch.stack([memory.printed_sum(t, first) for t in range(6)]) for first in (1, 0)
    )
    recurrence = memory.recurrence()
    torch.testing.assert_close(recurrence, inclusive)
    assert not torch.isclose(recurrence, printed).any()
    # What the recurrences have more is the current token, undecayed, and nothing else.
    own = (memory.q * memory.k).sum(-1, keepdim=True) * memory.v
    torch.testing.assert_close(recurrence - printed, own)
    for include_self, expected in ((False, printed), (True, inclusive)):
        found = memory.retention(include_self=include_self, normalizer="none")
        torch.testing.assert_close(found, expected)


def test_e7_eq_keyed_retrieval_divides_by_another_sum_than_b_rec_builds() -> None:
    memory = small_memory()
    sums = {
        decayed: torch.stack(
            [
                memory._replace(v=torch.ones(6, 1).double()).printed_sum(t, 0, decayed=decayed)
                for t in range(6)
            ]
        )
        for decayed in (True, False)
    }
    # Eq. b-rec is eq. G-rec with values of 1, and gives the decayed one.
    b_rec = memory._replace(v=torch.ones(6, 1).double()).recurrence()
    torch.testing.assert_close(b_rec, sums[True])
    assert bool((b_rec[1:] < 0.9 * sums[False][1:]).all())
    for name, decayed in (("decayed", True), ("undecayed", False)):
        found = memory.retention(normalizer=name, eps=1e-15)
        torch.testing.assert_close(found, memory.recurrence() / sums[decayed])
    # They are not two ways to write one thing: where every value is the same, a decayed sum gives
    # it back, and the undecayed one fades as the kernel does.
    alike = memory._replace(v=torch.ones(6, 1).double())
    kept, faded = (alike.retention(normalizer=n, eps=1e-15) for n in ("decayed", "undecayed"))
    torch.testing.assert_close(kept, torch.ones(6, 1).double())
    assert float(faded[-1]) < 0.6


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


def test_e15_captions_rate_is_far_below_the_error_that_the_caption_states() -> None:
    few, many, tolerance = 8, 15, 1e-3
    printed_length = math.log(1000)
    assert printed_length == pytest.approx(6.9, abs=0.01)
    low, high = integration_interval(0.5, 1000, tolerance, corrections=("E1",))
    assert math.log(high / low) == pytest.approx(17.9, abs=0.05)
    errors = {
        terms: float(
            legendre_soe(0.5, terms, 1000, tolerance, corrections=("E1",))
            .errors(0.5, 1000)[0]
            .max()
        )
        for terms in (few, many)
    }
    assert errors[many] == pytest.approx(1.3e-3, abs=5e-5)
    # The caption's rate contradicts its own 4e-3, and what is measured, by six orders of magnitude.
    at_captions_rate = math.exp(-(math.pi**2) * many / printed_length)
    assert at_captions_rate == pytest.approx(5e-10, rel=0.1)
    assert errors[many] > 1e6 * at_captions_rate
    # Nor is a constant missing: from 8 terms to 15 the caption's rate gains 2e4, the rule far less.
    promised = math.exp(math.pi**2 * (many - few) / printed_length)
    assert errors[few] / errors[many] < 1e-2 * promised


def test_e17_predictor_weights_are_summable() -> None:
    memory, count = 0.3, 100_000
    coefficients = np.cumprod([(j - 1 - memory) / j for j in range(1, count + 1)])
    slope = math.log(coefficients[-1] / coefficients[count // 10 - 1]) / math.log(10)
    assert slope == pytest.approx(-memory - 1, abs=1e-3)
    assert -coefficients.sum() == pytest.approx(1, abs=0.05)
    shocks = gl_weights(memory, count).numpy()
    assert shocks.sum() > 10


def test_e18_projected_descent_stalls_under_pl_from_every_start_between_the_crests() -> None:
    def height(x: Array) -> Array:
        return 1.1 + 6 * (x - 0.5) ** 2 - 60 * (x - 0.5) ** 4

    def slope(x: Array) -> Array:
        return 12 * (x - 0.5) - 240 * (x - 0.5) ** 3

    def gradient(x: Array, y: Array) -> tuple[Array, Array]:
        return (y - height(x)) * -slope(x), y - height(x)

    def descend(x: Array, y: Array, low: float, high: float) -> tuple[Array, Array]:
        for _ in range(12_000):
            dx, dy = gradient(x, y)
            x, y = np.clip(x - dx / smooth, low, high), np.clip(y - dy / smooth, low, high)
        return x, y

    # F = (y - g(x))²/2 has |∇F|² >= 2F everywhere, μ = 1; F* = 0 is reached inside the box.
    axis = np.linspace(0.05, 1, 96)
    x, y = np.meshgrid(axis, axis)
    dx, dy = gradient(x, y)
    assert bool((dx**2 + dy**2 >= (y - height(x)) ** 2 * (1 - 1e-12)).all())
    assert 0.05 < height(np.array(0.125)) < 1
    # L over the box, from the eigenvalues of the second derivative.
    bend = 12 - 720 * (x - 0.5) ** 2
    across = slope(x) ** 2 - (y - height(x)) * bend
    half = (across - 1) / 2
    root = np.sqrt(half**2 + slope(x) ** 2)
    smooth = float(np.maximum(across - half + root, np.abs(across - half - root)).max())
    assert smooth == pytest.approx(938, rel=1e-3)
    x, y = x[::4, ::4], y[::4, ::4]
    between = np.abs(x - 0.5) < math.sqrt(0.05)
    assert int(between.sum()) == 264
    end = descend(x, y, 0.05, 1)
    loss = (end[1] - height(end[0])) ** 2 / 2
    # All of them end at (.5, 1), where the gradient points out of the box; the others find F*.
    assert np.allclose(end[0][between], 0.5, atol=1e-4)
    assert np.array_equal(end[1][between], np.ones(264))
    assert np.allclose(loss[between], 0.005, atol=1e-6)
    assert float(loss[~between].max()) < 1e-8
    # It is the clipping that stops them: the same steps without it go on to F*.
    free = descend(x[between], y[between], -np.inf, np.inf)
    assert float(((free[1] - height(free[0])) ** 2).max()) < 1e-8


def test_e19_attention_is_cheaper_up_to_9_600_positions_not_19() -> None:
    banks, terms, features, width = 10, 15, 64, 512

    def break_even(states: int) -> int:
        """First length at which causal attention, summed position by position, costs as much."""
        attention = retention = length = 0
        while length == 0 or attention < retention:
            length += 1
            attention += 2 * length * width  # scores, and the sum of values they weigh
            retention += states * features * width
        return length

    assert break_even(banks * terms) == 9600 - 1  # causal: n (n + 1) d, where the paper has n² d
    assert break_even(12) == 768 - 1
    # The paper's length: retention has done five hundred times the work of attention by then.
    printed = banks * terms * features / width
    assert printed == 18.75
    cost = 19 * banks * terms * features * width / (19**2 * width)
    assert cost == pytest.approx(9600 / 19)


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
