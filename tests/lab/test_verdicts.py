"""A verdict needs an interval that excludes the alternative, and three seeds."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vort.lab.verdicts import (
    RULES,
    VERDICTS,
    judge_difference,
    judge_equality,
    judge_figure,
    judge_floor,
    judge_lead,
    judge_power,
    judge_sign,
    rules,
)

NUMBERS = st.floats(-200, 200)
HALVES = st.floats(0, 100)


@dataclass(frozen=True)
class Of:
    """An interval around a mean."""

    mean: float
    half: float
    count: int = 3

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half


@given(mean=NUMBERS, half=HALVES, paper=st.floats(0, 100), count=st.integers(1, 2))
def test_one_seed_decides_nothing_and_two_do_not_either(
    mean: float, half: float, paper: float, count: int
) -> None:
    found = Of(mean, half, count)
    assert judge_figure(found, 2.0) == "undecided"
    assert judge_difference(found, paper, 2.0) == "undecided"
    assert judge_equality([found, Of(0, 0)], 2.0) == "undecided"
    assert judge_lead([Of(100, 0), found]) == "undecided"
    assert judge_floor([Of(100, 0), found], 2.0) == "undecided"
    assert judge_sign([found]) == "undecided"
    assert judge_power(found) == "undecided"


@given(mean=NUMBERS, half=HALVES, wider=st.floats(0, 300))
def test_a_wider_interval_never_turns_one_verdict_on_a_figure_into_another(
    mean: float, half: float, wider: float
) -> None:
    """It may only leave the claim undecided: a wide interval reproduces nothing."""
    narrow = judge_figure(Of(mean, half), 2.0)
    wide = judge_figure(Of(mean, half + wider), 2.0)
    assert wide in (narrow, "undecided")


@given(mean=NUMBERS, half=HALVES, wider=st.floats(0, 300), paper=st.floats(3, 100))
def test_a_wider_interval_never_makes_more_of_a_difference(
    mean: float, half: float, wider: float, paper: float
) -> None:
    order = ["undecided", "reproduced in part", "reproduced", "exceeded"]
    narrow = judge_difference(Of(mean, half), paper, 2.0)
    wide = judge_difference(Of(mean, half + wider), paper, 2.0)
    if narrow == "not reproduced":
        assert wide in ("not reproduced", "undecided")
    elif wide == "not reproduced":
        # Zero is no longer excluded, the paper's size still is.
        assert narrow == "reproduced in part"
    else:
        assert order.index(wide) <= order.index(narrow)


@pytest.mark.parametrize(
    ("mean", "half", "expected"),
    [
        (-20.7, 27.5, "undecided"),  # 62.0 ± 27.5 against 82.7
        (0.4, 12.9, "undecided"),
        (0.4, 1.0, "reproduced"),
        (-1.0, 1.5, "undecided"),
        (5.0, 2.9, "exceeded"),
        (5.0, 3.1, "undecided"),
        (-5.0, 2.9, "not reproduced"),
        (-5.0, 3.1, "undecided"),
    ],
)
def test_a_figure(mean: float, half: float, expected: str) -> None:
    assert judge_figure(Of(mean, half), 2.0) == expected


@pytest.mark.parametrize(
    ("mean", "half", "expected"),
    [
        (59.0, 10.0, "exceeded"),
        (30.0, 4.0, "reproduced"),
        (30.0, 6.0, "reproduced in part"),  # better for certain, as much or not
        (9.0, 2.0, "reproduced in part"),
        (9.0, 10.0, "not reproduced"),  # nothing at all is possible, the paper's 27 is not
        (9.0, 20.0, "undecided"),
        (-9.0, 2.0, "not reproduced"),
    ],
)
def test_a_difference(mean: float, half: float, expected: str) -> None:
    assert judge_difference(Of(mean, half), 27.0, 2.0) == expected


def test_two_rows_are_the_same_in_all_classes_or_not_at_all() -> None:
    same, far, noisy = Of(0.5, 1.0), Of(-66.4, 1.0), Of(0.0, 9.0)
    assert judge_equality([same, same], 2.0) == "reproduced"
    # S = 1 beside the Exponential row: close at long lags, far apart at short ones.
    assert judge_equality([far, Of(-54.5, 1.0), Of(1.0, 0.5)], 2.0) == "not reproduced"
    assert judge_equality([same, noisy], 2.0) == "undecided"
    assert judge_equality([noisy, far], 2.0) == "not reproduced"
    assert judge_equality([], 2.0) == "undecided"


def test_a_lead_is_one_over_every_rival() -> None:
    ahead, open_, behind = Of(10, 5), Of(3, 5), Of(-10, 5)
    assert judge_lead([ahead, ahead]) == "holds"
    assert judge_lead([ahead, open_]) == "undecided"
    assert judge_lead([ahead, behind]) == "does not hold"
    assert judge_lead([]) == "undecided"


def test_a_floor_holds_where_no_interval_reaches_below_it() -> None:
    at, open_, below = Of(95, 0), Of(96, 2), Of(90, 2)
    assert judge_floor([at, Of(99, 1)], 95) == "holds"
    assert judge_floor([at, open_], 95) == "undecided"
    assert judge_floor([at, open_, below], 95) == "does not hold"
    assert judge_floor([], 95) == "undecided"


def test_the_sign_of_a_difference() -> None:
    more, less, either = Of(1, 0.5), Of(-1, 0.5), Of(1, 1.5)
    assert judge_sign([more, more]) == "reproduced"
    assert judge_sign([more, less]) == "not reproduced"
    assert judge_sign([more, either]) == "undecided"
    assert judge_sign([]) == "undecided"


@pytest.mark.parametrize(
    ("mean", "half", "expected"),
    [
        (1.02, 0.1, "reproduced"),
        (1.02, 0.3, "undecided"),  # 1.25 is possible
        (0.6, 0.1, "undecided"),  # less than linear: fixed costs, too short to say
        (1.2, 0.04, "not reproduced"),
        (1.8, 0.1, "not reproduced"),
    ],
)
def test_an_exponent(mean: float, half: float, expected: str) -> None:
    assert judge_power(Of(mean, half, 6)) == expected
    assert judge_power(Of(mean, half, 3)) == "undecided"


def test_every_rule_is_in_words_and_names_its_verdicts() -> None:
    texts = rules()
    assert len(texts) == len(RULES) + 1
    assert all(text.endswith(".") and "*undecided*" in text for text in texts)
    said = " ".join(texts)
    for verdict in set(VERDICTS) - {"reproduced once corrected"}:
        assert f"*{verdict}*" in said
