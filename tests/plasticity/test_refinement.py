"""Orders that are free to move: who rises, who falls, layer by layer."""

import pytest
import torch

from tests.plasticity.cases import BASIS, case
from vort.lab.tasks import LabelCopy
from vort.lab.training import interval
from vort.plasticity import (
    LayerScores,
    Retrievals,
    order_loss,
    refine_by_layer,
    refine_orders,
    retrieval_weights,
)


def test_first_mentions_rise_above_fillers_though_nothing_says_so() -> None:
    differences = []
    for seed in range(3):
        task = LabelCopy(length=96, entities=3, mentions=3, seed=seed)
        batch = task.batch("train", [0])
        retrievals = Retrievals.of(batch["sources"])
        q, k = torch.randn(2, 1, 96, 1, 8, generator=torch.Generator().manual_seed(seed))
        start = torch.full((1, 96, 1), 0.5)
        order = refine_orders(q, k, start, retrievals, BASIS, iterations=25).order[..., 0]
        first, filler = retrievals.is_source(96), batch["entity_mask"] == 0
        differences.append(float(order[first].mean() - order[filler].mean()))
    assert interval(differences).low > 0.2


def test_e23_later_mentions_are_entities_and_fall_with_the_fillers() -> None:
    task = LabelCopy(length=96, entities=3, mentions=3)
    batch = task.batch("train", [0])
    retrievals = Retrievals.of(batch["sources"])
    blank = torch.zeros(1, 96, 1, 2)
    start = torch.full((1, 96, 1), 0.5)
    order = refine_orders(blank, blank, start, retrievals, BASIS, iterations=25).order[..., 0]
    first, entity = retrievals.is_source(96), batch["entity_mask"].bool()
    asked_about = torch.arange(96) < retrievals.queries.max()
    assert float(order[entity & ~first & asked_about].max()) < 0.5
    assert float(order[first].mean()) > 0.5


def test_refined_orders_retrieve_more() -> None:
    problem = case(3, length=30, batch=1, heads=1)
    run = refine_orders(*problem, BASIS, iterations=30)
    (queries,), (sources,), _ = problem.retrievals
    before, after = (
        retrieval_weights(problem.q, problem.k, order)[0, 0, queries, sources].log().mean()
        for order in (problem.order, run.order)
    )
    assert float(after) > float(before) + 0.1


def test_orders_that_are_shared_stay_shared() -> None:
    problem = case()
    by_head = refine_orders(
        problem.q, problem.k, torch.full((1, 1, 2), 0.5), problem.retrievals, BASIS, iterations=3
    )
    assert by_head.order.shape == (1, 1, 2)
    assert by_head.order.dtype == torch.float32


def test_orders_may_begin_as_whole_numbers() -> None:
    problem = case()
    runs = [
        refine_orders(problem.q, problem.k, start, problem.retrievals, BASIS, iterations=3)
        for start in (torch.tensor(1), torch.tensor(1.0))
    ]
    assert torch.equal(runs[0].order, runs[1].order)


@pytest.mark.parametrize("value", [1.5, 0.01, -1.0, float("nan")])
def test_orders_outside_the_basis_are_refused(value: float) -> None:
    problem = case()
    order = torch.tensor([0.5, value])
    with pytest.raises(
        ValueError, match=rf"order must lie in \[0.05, 1\], got {value:g} at index 1"
    ):
        refine_orders(problem.q, problem.k, order, problem.retrievals, BASIS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_lowest_order_is_taken_in_any_type(dtype: torch.dtype) -> None:
    problem = case()
    lowest = torch.tensor(BASIS.order_min, dtype=dtype)
    refine_orders(problem.q, problem.k, lowest, problem.retrievals, BASIS, iterations=1)


def test_each_layer_starts_where_the_one_before_it_ended() -> None:
    layers = [LayerScores(*case(seed, batch=1)[:2]) for seed in range(3)]
    _, _, start, retrievals = case(0, batch=1)
    runs = refine_by_layer(layers, start, retrievals, BASIS, iterations=2)
    for before, layer, run in zip([None, *runs], layers, runs, strict=False):
        order = start if before is None else before.order
        loss = order_loss(*layer, order, retrievals, BASIS)
        assert run.losses[0] == pytest.approx(float(loss), rel=1e-12)


def test_layers_that_share_scores_consolidate_step_by_step() -> None:
    task = LabelCopy(length=64, entities=2, mentions=3)
    batch = task.batch("train", [0])
    retrievals = Retrievals.of(batch["sources"])
    blank = LayerScores(*torch.zeros(2, 1, 64, 1, 2))
    runs = refine_by_layer([blank] * 6, torch.full((1, 64, 1), 0.5), retrievals, BASIS)
    first = retrievals.is_source(64)
    gaps = [float(run.order[first].mean() - run.order[~first].mean()) for run in runs]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 0.2


def test_e23_a_step_for_one_layer_can_undo_another() -> None:
    """Layers with other queries and keys have other losses, so no theorem speaks of them all."""
    one, other = (LayerScores(*case(seed, batch=1, heads=1)[:2]) for seed in (0, 1))
    _, _, start, retrievals = case(0, batch=1, heads=1)
    first, second = refine_by_layer([one, other], start, retrievals, BASIS, iterations=60)
    undone = float(order_loss(*one, second.order, retrievals, BASIS))
    assert second.losses[-1] < second.losses[0]
    assert undone > first.losses[-1] + 0.01
