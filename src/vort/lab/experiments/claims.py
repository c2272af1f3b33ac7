"""A statement of the paper, held against what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vort.lab.report.tables import Sheet

# The last two are for statements of our own.
Verdict = Literal[
    "exceeded",
    "reproduced",
    "reproduced in part",
    "reproduced once corrected",
    "not reproduced",
    "holds",
    "does not hold",
]


@dataclass(frozen=True)
class Claim:
    """One row of a verdict table.

    Attributes:
        where: the place in the paper, by its label.
        states: what the paper says there.
        measured: what came out here, in words and figures.
        verdict: computed from the measurement.
        erratum: the entry of docs/errata.md that explains a difference, if any.
    """

    where: str
    states: str
    measured: str
    verdict: Verdict
    erratum: str = ""


def judge(as_printed: bool, corrected: bool = False) -> Verdict:
    """The verdict for a claim that holds as printed, or only after a correction, or not at all."""
    if as_printed:
        return "reproduced"
    return "reproduced once corrected" if corrected else "not reproduced"


def claims_sheet(claims: Sequence[Claim], title: str) -> Sheet:
    """Verdicts as a table."""
    headings = ("where", "the statement", "measured", "verdict")
    rows = [
        (c.where, c.states, c.measured, f"{c.verdict} ({c.erratum})" if c.erratum else c.verdict)
        for c in claims
    ]
    return Sheet(title, headings, rows)
