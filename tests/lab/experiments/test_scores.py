"""Verdicts follow from figures and nothing else."""

from typing import Any

import pytest

from vort.lab.experiments.scores import (
    PaperTable,
    margin,
    over_seeds,
    score_sheet,
    verdict,
    verdict_on_gain,
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
        ([50.5, 51.0, 49.0], "reproduced"),
        ([40.0, 41.0, 42.0], "not reproduced"),
        ([51.0], "reproduced"),
        ([53.0], "exceeded"),
        ([30.0, 50.0, 70.0], "reproduced"),  # the interval is wide
    ],
)
def test_verdict_on_accuracy(values: list[float], expected: str) -> None:
    assert verdict(50.0, interval(values), ACCURACY) == expected


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([40.0], "exceeded"),
        ([26.0], "reproduced"),
        ([5.0], "reproduced in part"),  # better, but by less than the paper says
        ([1.0], "not reproduced"),
        ([9.0, 10.0, 11.0], "reproduced in part"),
        ([-5.0, 20.0, 60.0], "not reproduced"),  # the interval holds zero
    ],
)
def test_a_smaller_gain_than_the_papers_is_reproduced_in_part(
    gains: list[float], expected: str
) -> None:
    assert verdict_on_gain(27.0, interval(gains), ACCURACY) == expected


def test_fewer_bits_are_better() -> None:
    assert verdict(1.5, interval([1.4]), BITS) == "exceeded"
    assert verdict(1.5, interval([1.6]), BITS) == "not reproduced"
    gain = margin([record("x", 0, 1.4)], [record("y", 0, 1.5)], "a", BITS)
    assert gain is not None
    assert gain.mean == pytest.approx(0.1)


def test_a_margin_compares_seed_by_seed_and_one_seed_is_never_clear() -> None:
    ours = [record("x", s, 0.6 + 0.1 * s) for s in range(3)]
    rival = [record("y", s, 0.5 + 0.1 * s) for s in range(3)]
    gain, single = (margin(ours[:n], rival[:n], "b", ACCURACY) for n in (3, 1))
    assert gain is not None
    assert gain.mean == pytest.approx(10)
    assert gain.clear  # the seeds vary, the difference does not
    assert single is not None
    assert not single.clear
    assert margin(ours[:1], rival[1:], "b", ACCURACY) is None  # no seed in common


def test_several_betas_of_a_seed_count_once() -> None:
    records = [record("x", 0, 0.4, beta=1.0), record("x", 0, 0.6, beta=2.0)]
    found = over_seeds(records, "a", "accuracy", 100)
    assert found is not None
    assert (found.mean, found.count) == (50.0, 1)


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
