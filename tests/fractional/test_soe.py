"""The plain memory M of section mechanism: recurrences against the sums they stand for."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vort.fractional import (
    SumOfExponentials,
    bank_memories,
    fractional_sum_direct,
    legendre_soe,
    terms_needed,
)
from vort.fractional.bounds import bank_growth, bank_orders
from vort.ops.retention import paper_banks, retention

orders = st.floats(0.05, 1.0)


def tokens(seed: int, length: int, width: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(length, width))


@settings(max_examples=40)
@given(orders, st.integers(1, 12), st.integers(0, 99))
def test_each_auxiliary_state_is_its_own_geometric_sum(order: float, terms: int, seed: int) -> None:
    rule, values = legendre_soe(order, terms + 1, 200, 1e-3), tokens(seed, 40)
    states = rule.states(values)
    assert states.shape == (40, rule.terms, 3)
    for t in (0, 1, 17, 39):
        ages = t - np.arange(t + 1)
        for s, (rate, weight) in enumerate(zip(rule.rates, rule.weights, strict=True)):
            expected = (weight * np.exp(-rate * ages)) @ values[: t + 1]
            assert np.allclose(states[t, s], expected, rtol=1e-12, atol=1e-12)


@settings(max_examples=20)
@given(orders, st.integers(0, 99))
def test_together_they_are_the_fractional_sum_to_the_tolerance(order: float, seed: int) -> None:
    horizon, tolerance = 120, 1e-4
    rule = legendre_soe(order, terms_needed(order, horizon, tolerance), horizon, tolerance)
    values = tokens(seed, horizon)
    exact = fractional_sum_direct(torch.from_numpy(values), order, dim=0).numpy()
    # Theorem soe is about each weight; over t tokens their errors add up.
    allowed = tolerance * np.cumsum(np.abs(values), 0)
    assert bool((np.abs(rule.states(values).sum(1) - exact) <= allowed + 1e-12).all())


@pytest.mark.parametrize("banks", [1, 4])
def test_a_bank_holds_the_tokens_routed_to_it_and_ages_at_the_others(banks: int) -> None:
    grid = bank_orders(banks, 0.05)
    rules = [legendre_soe(float(order), 9, 100, 1e-3) for order in grid]
    values = tokens(1, 60)
    wanted = np.random.default_rng(2).uniform(0.05, 1, 60)
    chosen = np.abs(wanted[:, None] - grid).argmin(1)
    found = bank_memories(rules, chosen, values)
    for t in (0, 5, 59):
        for k, rule in enumerate(rules):
            terms = [rule.kernel(t - i) * values[i] for i in range(t + 1) if chosen[i] == k]
            expected = np.sum(terms, 0) if terms else np.zeros(3)
            assert np.allclose(found[t, k], expected, rtol=1e-12, atol=1e-12)
    # The keyed memory has the same states where every key and query is 1.
    write, log_decay = paper_banks(torch.from_numpy(wanted)[None, :, None], banks, 9, 100)
    blank = torch.ones(1, 60, 1, 1, dtype=torch.float64)
    given_values = torch.from_numpy(values)[None, :, None]
    keyed, _ = retention(blank, blank, given_values, write, log_decay, normalizer="none")
    assert np.allclose(keyed[0, :, 0].numpy(), found.sum(1), rtol=1e-9, atol=1e-9)


@settings(max_examples=20)
@given(st.floats(0.1, 1.0), st.integers(0, 99))
def test_recurrences_stay_below_the_growth_bound_and_equal_values_reach_it(
    order: float, seed: int
) -> None:
    length, tolerance = 200, 1e-4
    rule = legendre_soe(order, terms_needed(order, length, tolerance), length, tolerance)
    directions = tokens(seed, length)
    units = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    alike = np.broadcast_to(units[:1], units.shape)
    for t in (1, 10, length):
        exact, power = bank_growth(order, t)
        norms = [np.linalg.norm(rule.states(x[:t])[-1].sum(0)) for x in (units, alike)]
        assert norms[0] <= exact + tolerance * t
        assert norms[1] == pytest.approx(exact, abs=tolerance * t)
        assert exact <= power * (1 + 1e-12)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([0, 1, 5], r"chosen must be banks 0 \.\.\. 1, got 5 at index 2"),
        ([0, -1, 0], "got -1 at index 1"),
        ([0, 1, 0.5], "got 0.5 at index 2"),
        ([0], r"\[T, V\] and \[T\], got shapes \(3, 1\) and \(1,\)"),
    ],
)
def test_a_token_of_no_bank_is_refused(chosen: list[float], message: str) -> None:
    rule = SumOfExponentials(np.zeros(1), np.ones(1))
    with pytest.raises(ValueError, match=message):
        bank_memories([rule, rule], chosen, np.ones((3, 1)))


def test_states_of_one_exponential_by_hand() -> None:
    rule = SumOfExponentials(np.array([math.log(2)]), np.array([3.0]))
    assert rule.states([[1.0], [1.0], [0.0]])[:, 0, 0].tolist() == [3.0, 4.5, 2.25]
