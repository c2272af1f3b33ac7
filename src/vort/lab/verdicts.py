"""What can be said of a statement that was measured: the only list of verdicts, and their rules.

The rules are in the docstrings of the functions here; the results page prints them as they stand.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

__all__ = [
    "LEAST_SEEDS",
    "RULES",
    "VERDICTS",
    "Claim",
    "Range",
    "Tone",
    "Verdict",
    "judge",
    "judge_difference",
    "judge_equality",
    "judge_figure",
    "judge_floor",
    "judge_lead",
    "judge_power",
    "judge_sign",
    "rules",
]

Tone = Literal["good", "fair", "open", "bad"]
# The last two are for statements of our own.
Verdict = Literal[
    "exceeded",
    "reproduced",
    "reproduced in part",
    "reproduced once corrected",
    "undecided",
    "not reproduced",
    "holds",
    "does not hold",
]
_TONES: tuple[Tone, ...] = ("good", "good", "fair", "fair", "open", "bad", "good", "bad")
# How each is shown, on the terminal and on a page.
VERDICTS: dict[str, Tone] = dict(zip(get_args(Verdict), _TONES, strict=True))
# Fewer decide nothing, however clear they look.
LEAST_SEEDS = 3
# Exponents of a time that is linear in length, and one that is so no longer.
_LINEAR = (0.9, 1.1)
_SUPERLINEAR = 1.25


class Range(Protocol):
    """An interval: its ends, and how many seeds it is of."""

    @property
    def low(self) -> float:
        """Lower end."""

    @property
    def high(self) -> float:
        """Upper end."""

    @property
    def count(self) -> int:
        """Seeds."""


@dataclass(frozen=True)
class Claim:
    """One row of a verdict table.

    Attributes:
        where: the place in the paper, by its label; "ours" for a statement of our own.
        states: what is said there.
        measured: what came out here, in words and figures.
        verdict: computed from the measurement.
        erratum: the entry of docs/errata.md that explains a difference, if any.
        rows: of a table that are held against each other. Where some of them were made with other
            settings than are planned now, and others not, nothing is decided.
    """

    where: str
    states: str
    measured: str
    verdict: Verdict
    erratum: str = ""
    rows: tuple[str, ...] = ()


def judge(as_printed: bool, corrected: bool = False) -> Verdict:
    """The verdict for a claim that holds as printed, or only after a correction, or not at all."""
    if as_printed:
        return "reproduced"
    return "reproduced once corrected" if corrected else "not reproduced"


def judge_figure(gain: Range, tolerance: float) -> Verdict:
    """The verdict on a figure of the paper.

    A figure of the paper is *exceeded* where the interval around ours lies above it as a whole, by
    more than the tolerance; *reproduced* where all of it lies within the tolerance; *not
    reproduced* where all of it lies below by more than that. Any other interval holds figures of
    two kinds, and the claim is *undecided*.
    """
    if gain.count < LEAST_SEEDS:
        return "undecided"
    if gain.low > tolerance:
        return "exceeded"
    if gain.high < -tolerance:
        return "not reproduced"
    return "reproduced" if gain.low >= -tolerance and gain.high <= tolerance else "undecided"


def judge_difference(gain: Range, paper: float, tolerance: float) -> Verdict:
    """The verdict on a difference that the paper states.

    A difference that the paper states between two models is *reproduced* where the interval of ours
    excludes zero and lies at the paper's size or above, less the tolerance (*exceeded*: above it by
    more than the tolerance); *reproduced in part* where it excludes zero, but not a smaller
    difference than the paper's; *not reproduced* where it holds zero, or is negative, and excludes
    the paper's size; *undecided* where it holds both.
    """
    if gain.count < LEAST_SEEDS:
        return "undecided"
    if gain.low <= 0:
        return "not reproduced" if gain.high < paper - tolerance else "undecided"
    if gain.low > paper + tolerance:
        return "exceeded"
    return "reproduced" if gain.low >= paper - tolerance else "reproduced in part"


def judge_equality(differences: Sequence[Range], tolerance: float) -> Verdict:
    """The verdict on two rows that are said to be the same.

    That two rows are the same is *reproduced* where the interval of their difference lies within
    the tolerance in every class of lags, *not reproduced* where it lies beyond in any, and
    *undecided* otherwise.
    """
    if not differences or any(each.count < LEAST_SEEDS for each in differences):
        return "undecided"
    if any(each.low > tolerance or each.high < -tolerance for each in differences):
        return "not reproduced"
    within = all(each.low >= -tolerance and each.high <= tolerance for each in differences)
    return "reproduced" if within else "undecided"


def judge_lead(gains: Sequence[Range]) -> Verdict:
    """The verdict on a lead of ours.

    That a model of ours is better than every rival *holds* where the interval of its lead lies
    above zero for each of them, *does not hold* where it lies below zero for any, and is
    *undecided* otherwise.
    """
    if not gains or any(each.count < LEAST_SEEDS for each in gains):
        return "undecided"
    if any(each.high < 0 for each in gains):
        return "does not hold"
    return "holds" if all(each.low > 0 for each in gains) else "undecided"


def judge_floor(scores: Sequence[Range], floor: float) -> Verdict:
    """The verdict on a score of ours that is nowhere below a floor.

    That a score of ours is nowhere below a floor *holds* where its interval lies at the floor or
    above in every place, *does not hold* where it lies below in any, and is *undecided* otherwise.
    """
    if not scores or any(each.count < LEAST_SEEDS for each in scores):
        return "undecided"
    if any(each.high < floor for each in scores):
        return "does not hold"
    return "holds" if all(each.low >= floor for each in scores) else "undecided"


def judge_sign(differences: Sequence[Range]) -> Verdict:
    """The verdict on which of two is larger.

    That one thing is larger than another is *reproduced* where the interval of the difference lies
    above zero, *not reproduced* where it lies below, and *undecided* where it holds zero; of
    several differences, such as those of every layer, all must lie above, and none below.
    """
    if not differences or any(each.count < LEAST_SEEDS for each in differences):
        return "undecided"
    if any(each.high < 0 for each in differences):
        return "not reproduced"
    return "reproduced" if all(each.low > 0 for each in differences) else "undecided"


def judge_power(exponent: Range) -> Verdict:
    """The verdict on an exponent of time.

    That time is linear in length is *reproduced* where the interval of the exponent, from a line
    through the logarithms of lengths and times, excludes 1.25 and all above and meets [0.9, 1.1];
    *not reproduced* where it lies above 1.1; *undecided* otherwise, and with fewer than four
    lengths.
    """
    low, high = _LINEAR
    if exponent.count < 4:
        return "undecided"
    if exponent.low > high:
        return "not reproduced"
    return "reproduced" if exponent.high < _SUPERLINEAR and exponent.high >= low else "undecided"


RULES: tuple[Callable[..., Verdict], ...] = (
    *(judge_figure, judge_difference, judge_equality, judge_sign, judge_lead, judge_floor),
    judge_power,
)


def rules() -> list[str]:
    """The rule of each kind of claim, a sentence or two each."""
    seeds = (
        f"Fewer than {LEAST_SEEDS} seeds decide nothing: the verdict is *undecided*, whatever the "
        "figures. Nor does a row with the settings planned now against one without them (‡), nor "
        "one whose learning rate was tried at full length against one whose rate was not."
    )
    texts = ((inspect.getdoc(rule) or "").partition("\n\n")[2] for rule in RULES)
    return [seeds, *(" ".join(text.split()) for text in texts)]
