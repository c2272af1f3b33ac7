"""Theorem plasticity: its inequality on every run whose conditions hold, and runs where none do."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.plasticity.cases import BASIS, Case, case, loss_of_rows, scan
from vort.fractional.bounds import plasticity_rate
from vort.lab.experiments.plasticity import one_order
from vort.plasticity import Retrievals, descend, refine_orders

LOW = BASIS.order_min


@given(
    st.floats(0.06, 0.99),
    st.floats(0.1, 50),
    st.floats(0.05, 1),
    st.floats(1, 4),
)
def test_on_a_parabola_the_measured_rate_is_at_least_the_theorems(
    best: float, curvature: float, start: float, excess: float
) -> None:
    run = descend(
        lambda x: curvature / 2 * (x - best) ** 2,
        torch.tensor(start, dtype=torch.float64),
        low=LOW,
        iterations=30,
        smoothness=excess * curvature,
        optimum=0.0,
    )
    assert run.holds(curvature)
    limit = plasticity_rate(run.step, curvature, run.smoothness, 30)
    assert run.losses[-1] <= limit * run.losses[0] + 1e-13
    assert run.pl_constant >= curvature * (1 - 1e-6)


@settings(max_examples=10)
@given(st.integers(0, 10_000), st.floats(0.05, 1), st.sampled_from([0.0, 1.0]))
def test_one_order_for_all_tokens_obeys_the_bound_wherever_pl_holds(
    seed: int, start: float, sharpness: float
) -> None:
    problem = case(seed, length=30, batch=1, heads=1)
    problem = problem._replace(q=sharpness * problem.q)

    def losses(order: Tensor) -> Tensor:
        return loss_of_rows(problem, order[:, None, None].expand(-1, 30, 1))

    def loss(order: Tensor) -> Tensor:
        return losses(order[None])

    orders, values, slopes = scan(losses, LOW, 96)
    # A slope that vanishes anywhere but at the minimum: the theorem's condition fails.
    turns = int((slopes.sign().diff() != 0).sum())
    assume(turns == 0 or (turns == 1 and float(slopes[0]) < 0))
    first = torch.tensor(start, dtype=torch.float64)
    smoothness = 1.1 * float((slopes.diff() / orders.diff()).abs().max())
    bottom = orders[int(values.argmin())]
    optimum = min(descend(loss, bottom, low=LOW, iterations=40).losses)
    excess = values - optimum
    away = excess > 1e-9
    # The worst order may lie between two that were tried.
    mu = 0.95 * float((slopes[away] ** 2 / (2 * excess[away])).min())
    run = descend(loss, first, low=LOW, iterations=25, smoothness=smoothness, optimum=optimum)
    assert 0 < mu <= smoothness
    assert run.holds(mu)


@settings(max_examples=15)
@given(st.integers(0, 10_000), st.floats(0.05, 1), st.integers(1, 2))
def test_orders_of_all_tokens_obey_the_bound_of_their_path(
    seed: int, start: float, heads: int
) -> None:
    problem = case(seed, length=16, batch=1, heads=heads)
    first = torch.full_like(problem.order, start)
    run = refine_orders(problem.q, problem.k, first, problem.retrievals, BASIS, iterations=15)
    assert run.holds()
    rises = [after - before for before, after in pairwise(run.losses)]
    assert max(rises) <= 1e-12 * (1 + abs(run.losses[0]))
    assert run.step <= 1 / run.smoothness * (1 + 1e-12)
    assert bool(((run.order >= LOW) & (run.order <= 1)).all())


def test_a_convex_one_order_case_converges_at_least_as_fast_as_the_theorem_says() -> None:
    found = one_order()
    assert found["curvature"] > 0
    assert found["holds"]
    assert found["rate"] <= found["rate_bound"] < 1
    assert found["losses"][-1] - found["optimum"] < 1e-6
    for loss, bound in zip(found["losses"], found["bound"], strict=True):
        assert loss <= bound + 1e-8


def test_too_long_a_step_breaks_the_inequality_so_the_check_can_fail() -> None:
    run = descend(
        lambda x: 50 * (x - 0.5) ** 2,
        torch.tensor(0.6, dtype=torch.float64),
        low=LOW,
        iterations=10,
        smoothness=52.0,
        optimum=0.0,
    )
    assert not run.holds(50.0)


def two_minima() -> Case:
    """Token 0 is asked for once, 100 steps on, and stands in the way right after it was written.

    Queries 2 and 3 look for token 1 and match token 0 far better; query 100 looks for token 0.
    """
    length, far = 101, -30.0
    scores = torch.full((length, length), far, dtype=torch.float64)
    scores[2, 0] = scores[3, 0] = scores[100, 0] = 0.0
    scores[2, 1] = scores[3, 1] = -6.0
    scores[100, 50] = math.log(10)
    sources = torch.full((1, length), -1)
    sources[0, 2] = sources[0, 3] = 1
    sources[0, 100] = 0
    rows = math.sqrt(length) * torch.eye(length, dtype=torch.float64)
    return Case(
        rows[None, :, None],
        scores.T[None, :, None],
        torch.ones(1, length, 1, dtype=torch.float64),
        Retrievals.of(sources),
    )


def test_e21_one_order_can_have_two_minima() -> None:
    problem = two_minima()

    def losses(first: Tensor) -> Tensor:
        others = problem.order[:, 1:].expand(len(first), -1, -1)
        return loss_of_rows(problem, torch.cat([first[:, None, None], others], 1))

    def loss(first: Tensor) -> Tensor:
        return losses(first[None])

    low, high = (
        descend(loss, torch.tensor(start, dtype=torch.float64), low=LOW, iterations=60)
        for start in (0.15, 0.6)
    )
    assert float(low.order) == pytest.approx(LOW)
    assert float(high.order) == pytest.approx(1)
    assert abs(low.losses[-1] - high.losses[-1]) > 0.05
    # Between them the slope vanishes with the loss above both: |F'|² >= 2μ (F - F*) has no μ > 0.
    orders, values, slopes = scan(losses, LOW, 39)
    top = int(values.argmax())
    assert 0 < top < len(orders) - 1
    assert float(values[top]) > max(low.losses[-1], high.losses[-1]) + 0.3
    assert float(slopes[top - 1]) > 0 > float(slopes[top + 1])


def test_e18_the_printed_constant_stays_positive_where_projected_descent_stalls() -> None:
    def valley(x: Tensor) -> Tensor:
        away = (x[0] - 0.5) ** 2
        return (x[1] - 1.1 - 6 * away + 60 * away**2) ** 2 / 2

    start = torch.tensor([0.4, 0.3], dtype=torch.float64)
    run = descend(valley, start, low=LOW, iterations=300, optimum=0.0)
    assert run.losses[-1] == pytest.approx(0.005, abs=1e-6)
    assert run.order.tolist() == pytest.approx([0.5, 1.0], abs=1e-3)
    assert min(run.printed_pl_constants) >= 1 - 1e-9
    assert run.pl_constants[-1] < 1e-9
    # With the printed constant the theorem would promise the minimum, with ours nothing.
    assert not run.holds(min(run.printed_pl_constants))
    assert run.holds()


@pytest.mark.parametrize("start", [torch.tensor(1), torch.tensor([True, False])])
def test_whole_numbers_to_begin_with_do_not_round_where_descent_ends(start: Tensor) -> None:
    run = descend(lambda x: (x - 0.4).square().sum(), start, low=0.1, iterations=50)
    torch.testing.assert_close(run.order, torch.full(start.shape, 0.4))


def test_arguments_out_of_range_are_named() -> None:
    one = torch.tensor(0.5)
    with pytest.raises(ValueError, match="low must be below high = 1, got 1"):
        descend(torch.square, one, low=1.0)
    with pytest.raises(ValueError, match="iterations must be at least 1, got 0"):
        descend(torch.square, one, low=LOW, iterations=0)
    with pytest.raises(ValueError, match="smoothness must be positive and finite, got -1"):
        descend(torch.square, one, low=LOW, smoothness=-1)
    with pytest.raises(ValueError, match=r"loss must give a scalar, got shape \(2,\)"):
        descend(torch.square, torch.ones(2), low=LOW)
    with pytest.raises(FloatingPointError, match="must be finite, got a loss of nan"):
        descend(lambda x: x * math.nan, one, low=LOW)
