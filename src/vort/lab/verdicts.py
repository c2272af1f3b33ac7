"""What can be said of a statement that was measured: the only list of verdicts."""

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["VERDICTS", "Claim", "Tone", "Verdict", "judge"]

Tone = Literal["good", "fair", "bad"]
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
_TONES: tuple[Tone, ...] = ("good", "good", "fair", "fair", "bad", "good", "bad")
# How each is shown, on the terminal and on a page.
VERDICTS: dict[str, Tone] = dict(zip(get_args(Verdict), _TONES, strict=True))


@dataclass(frozen=True)
class Claim:
    """One row of a verdict table.

    Attributes:
        where: the place in the paper, by its label; "ours" for a statement of our own.
        states: what is said there.
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
