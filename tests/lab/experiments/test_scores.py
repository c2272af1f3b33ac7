"""Verdicts follow from figures and nothing else."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vort.lab.experiments.scores import (
    PaperTable,
    gain_in_words,
    margin,
    over_seeds,
    score_sheet,
    seed_interval,
    verdict,
    verdict_on_gain,
    within_seed,
)
from vort.lab.training.metrics import interval

ACCURACY = PaperTable("t", "accuracy", {"Exponential": (90.0, 50.0)}, 2.0)
BITS = PaperTable("t", "bits", {"Exponential": (1.5,)}, 0.02)


def record(model: str, seed: int, value: float, **tags: Any) -> dict[str, Any]:
    return {
        "cell": {"model": model, "seed": seed, **tags},
        "test": {"a": {"accuracy": value, "bits": value}, "b": {"accuracy": value, "bits": value}},
        "state_numbers": 10,
        "parameters": 20,
    }


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([60.0, 61.0, 62.0], "exceeded"),
        ([50.5, 50.0, 49.8], "reproduced"),
        ([50.5, 51.0, 49.0], "undecided"),
        ([40.0, 41.0, 42.0], "not reproduced"),
        ([51.0], "undecided"),
        ([80.0], "undecided"),
        ([80.0, 80.0], "undecided"),
        ([30.0, 50.0, 70.0], "undecided"),  # the mean is the paper's, and says nothing
    ],
)
def test_verdict_on_accuracy(values: list[float], expected: str) -> None:
    assert verdict(50.0, interval(values), ACCURACY) == expected


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([40.0], "undecided"),
        ([40.0, 41.0, 39.0], "exceeded"),
        ([26.0, 26.1, 25.9], "reproduced"),
        ([9.0, 10.0, 11.0], "reproduced in part"),  # better, but by less than the paper says
        ([-1.0, 0.0, 1.0], "not reproduced"),
        ([-5.0, 20.0, 60.0], "undecided"),  # the interval holds zero and the paper's
    ],
)
def test_a_gain_is_held_against_zero_and_against_the_papers(
    gains: list[float], expected: str
) -> None:
    assert verdict_on_gain(27.0, interval(gains), ACCURACY) == expected


def test_fewer_bits_are_better() -> None:
    assert verdict(1.5, interval([1.4, 1.401, 1.402]), BITS) == "exceeded"
    assert verdict(1.5, interval([1.6, 1.601, 1.602]), BITS) == "not reproduced"
    gain = margin([record("x", 0, 1.4)], [record("y", 0, 1.5)], "a", BITS)
    assert gain is not None
    assert gain.mean == pytest.approx(0.1)


def test_a_margin_compares_seed_by_seed() -> None:
    ours = [record("x", s, 0.6 + 0.1 * s) for s in range(3)]
    rival = [record("y", s, 0.5 + 0.1 * s) for s in range(3)]
    gain = margin(ours, rival, "b", ACCURACY)
    assert gain is not None
    assert gain.mean == pytest.approx(10)
    assert gain.half < 1e-6  # the seeds vary, the difference does not
    assert margin(ours[:1], rival[1:], "b", ACCURACY) is None  # no seed in common


def test_several_betas_of_a_seed_count_once() -> None:
    records = [record("x", 0, 0.4, beta=1.0), record("x", 0, 0.6, beta=2.0)]
    found = over_seeds(records, "a", "accuracy", 100)
    assert found is not None
    assert (found.mean, found.count) == (50.0, 1)


def test_betas_are_no_seeds_in_a_margin_either() -> None:
    betas = (1.0, 1.5, 2.0)
    ours = [record("x", 0, 0.5 + 0.1 * beta, beta=beta) for beta in betas]
    rival = [record("y", 0, 0.5, beta=beta) for beta in betas]
    gain = margin(ours, rival, "a", ACCURACY)
    assert gain is not None
    assert gain.count == 1
    assert gain.mean == pytest.approx(15)
    # A beta that one of them lacks is not compared with another.
    gain = margin(ours[1:], rival, "a", ACCURACY)
    assert gain is not None
    assert gain.mean == pytest.approx(17.5)
    assert margin(ours[:1], rival[1:], "a", ACCURACY) is None
    more = [record("x", 1, 0.7, beta=1.0)], [record("y", 1, 0.5, beta=1.0)]
    gain = margin([*ours, *more[0]], [*rival, *more[1]], "a", ACCURACY)
    assert gain is not None
    assert gain.count == 2
    assert gain.mean == pytest.approx((15 + 20) / 2)


@given(data=st.data(), seeds=st.integers(2, 5))
def test_an_interval_over_seeds_is_that_of_their_means(data: Any, seeds: int) -> None:
    values = {
        seed: data.draw(st.lists(st.floats(-1, 1), min_size=1, max_size=4)) for seed in range(seeds)
    }
    found = seed_interval((seed, x) for seed, several in values.items() for x in several)
    expected = interval([sum(several) / len(several) for several in values.values()])
    assert found == expected


def answered(model: str, seed: int, right: list[int], asked: list[int]) -> dict[str, Any]:
    words = " ".join(f"{r}/{a}" for r, a in zip(right, asked, strict=True))
    return {**record(model, seed, sum(right) / sum(asked)), "sequences": {"a": words}}


def test_one_seed_is_compared_sequence_by_sequence() -> None:
    rng = np.random.default_rng(0)
    asked = rng.integers(0, 9, 400)
    hard = rng.random(400)
    # Both find the same sequences hard; one is better by a tenth.
    one, other = (rng.binomial(asked, np.clip(1 - hard * x, 0, 1)) for x in (0.6, 0.8))
    ours = answered("x", 0, list(one), list(asked))
    rival = answered("y", 0, list(other), list(asked))
    found = within_seed([ours], [rival], "a", ACCURACY)
    assert found is not None
    assert found.count == 400
    assert found.mean == pytest.approx(100 * (one.sum() - other.sum()) / asked.sum())
    # As drawing sequences anew would have it.
    draws = rng.integers(400, size=(4000, 400))
    again = 100 * (one - other)[draws].sum(1) / asked[draws].sum(1)
    assert found.half == pytest.approx(1.96 * again.std(), rel=0.1)
    assert f"one seed (± {found.half:.1f} over its 400 sequences)" in gain_in_words(
        [ours], [rival], "a", ACCURACY
    )


def test_sequences_are_not_compared_where_they_are_others_or_unknown() -> None:
    ours, rival = answered("x", 0, [1, 2], [3, 3]), answered("y", 0, [1, 2], [3, 4])
    assert within_seed([ours], [rival], "a", ACCURACY) is None
    assert within_seed([ours], [record("y", 0, 0.5)], "a", ACCURACY) is None
    assert within_seed([ours], [answered("y", 1, [1, 2], [3, 3])], "a", ACCURACY) is None
    two = [answered(m, s, [1, 2], [3, 3]) for m in "xy" for s in (0, 1)]
    assert within_seed(two[:2], two[2:], "a", ACCURACY) is None  # seeds say it


def test_no_verdict_rests_on_sequences() -> None:
    sure = answered("x", 0, [9] * 500, [9] * 500), answered("y", 0, [0] * 500, [9] * 500)
    gain = margin([sure[0]], [sure[1]], "a", ACCURACY)
    assert gain is not None
    assert verdict_on_gain(27.0, gain, ACCURACY) == "undecided"


def test_the_sheet_shows_paper_ours_and_verdict() -> None:
    records = [record("exponential", s, 0.7 + 0.001 * s) for s in range(3)]
    sheet = score_sheet("title", records, ["a", "b"], ACCURACY)
    row = sheet.rows[0]
    assert row[-2:] == ["50", "exceeded"]
    assert row[2] == "70.1 ± 0.2"


def test_a_sheet_of_unequal_trainings_says_how_long_each_was() -> None:
    short, long = ({**record(m, 0, 0.7), "steps": n} for m, n in (("vort", 5), ("mixture", 5000)))
    sheet = score_sheet("title", [short, long], ["a", "b"], ACCURACY)
    place = list(sheet.headings).index("steps")
    assert [row[place] for row in sheet.rows] == ["5", "5,000"]
    assert "steps" not in score_sheet("title", [short], ["a", "b"], ACCURACY).headings
