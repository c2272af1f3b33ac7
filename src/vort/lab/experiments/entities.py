"""The entity indicator on text (eq. routing): a router told of names, and one that is not."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vort.lab.experiments.books import BOOKS_TASK, NO_BOOKS, books_cell, with_books
from vort.lab.experiments.cell import Cell, Size
from vort.lab.experiments.experiment import Experiment, Record, Summary
from vort.lab.experiments.origins import training_notes
from vort.lab.experiments.scores import (
    PaperTable,
    as_planned,
    by_row,
    label_of,
    labels_of,
    margin,
    score_sheet,
    seeds_of,
    show,
)
from vort.lab.report.tables import Sheet
from vort.lab.training.metrics import Interval, interval
from vort.lab.verdicts import Claim, judge_lead

__all__ = ["ENTITIES"]

# The paper describes this input and reports no result with it.
_TABLE = PaperTable("entities", "bits", {}, 0.02)
_ROWS = ("vort", "vort_entity")
_SEEDS = (0, 1, 2)
# Less than the table of books has, where minutes count.
_TASK: dict[Size, dict[str, Any]] = {
    "laptop": {**BOOKS_TASK["laptop"], "length": 512, "bounds": (64, 256)},
    "paper": dict(BOOKS_TASK["paper"]),
}
_TRAINING: dict[Size, dict[str, Any]] = {
    "laptop": {"steps": 40, "test_sequences": 32},
    "paper": {},
}


def cells(size: Size, data: Path | None = None) -> list[Cell]:
    """Both rows, three seeds; at paper size they need a folder of books."""
    return [
        books_cell("entities", size, model, seed, task, **_TRAINING[size])
        for task in with_books({**_TASK[size], "entities": True}, size, data)
        for seed in _SEEDS
        for model in _ROWS
    ]


def summarise(records: Sequence[Record], size: Size) -> Summary:
    """Bits by position, the orders of what is marked, and whether the indicator is of use."""
    if not records:
        return Summary([], notes=[NO_BOOKS] if size == "paper" else [])
    buckets = [name for name in records[0]["test"] if name != "all"]
    heading = "Books with the entity indicator: bits per character by position in the window"
    sheets = [score_sheet(heading, records, buckets, _TABLE)]
    found = by_row(as_planned(records))
    orders = [_orders(row, members) for row, members in found.items()]
    headings = ["model", "characters that are marked", "other characters", "difference"]
    sheets.append(Sheet("Learned orders, mean over heads", headings, orders))
    claims = []
    gain = None
    if all(row in found for row in _ROWS):
        gain = margin(found["vort_entity"], found["vort"], buckets[-1], _TABLE)
    if gain is not None:
        claims.append(
            Claim(
                "ours",
                "a router that is told of names needs fewer bits than one that is not, in the last "
                "class of positions",
                f"{show(gain, 3)} bits less, {seeds_of(gain)}",
                judge_lead([gain]),
            )
        )
    notes = [
        *training_notes(records),
        "Both are given the same windows; the indicator is 1 at the character by which a name is "
        "known to have ended, so that it tells nothing of what is to be predicted.",
    ]
    if size == "laptop":
        notes.append("Laptop size: source code of Python's standard library, which has few names.")
    return Summary(sheets, claims, notes=notes, labels=labels_of(records))


def _orders(row: str, members: Sequence[Record]) -> list[str]:
    """A line: the mean order of marked characters, of all others, and what lies between."""
    pairs = [pair for pair in map(_marked_and_others, members) if pair is not None]
    if not pairs:
        return [label_of(row), "–", "–", "–"]
    values: list[Interval] = [
        interval([marked for marked, _ in pairs]),
        interval([others for _, others in pairs]),
        interval([marked - others for marked, others in pairs]),
    ]
    return [label_of(row), *(show(value, 3) for value in values)]


def _marked_and_others(record: Record) -> tuple[float, float] | None:
    """Mean orders over all layers; None if nothing is marked."""
    sums, counts = [0.0, 0.0], [0, 0]
    for layer in record["orders"]["layers"]:
        for kind, entry in layer.items():
            side = int(kind != "marked")
            if entry["count"]:
                sums[side] += entry["mean"] * entry["count"]
                counts[side] += entry["count"]
    return (sums[0] / counts[0], sums[1] / counts[1]) if all(counts) else None


ENTITIES = Experiment(
    name="entities",
    title="The entity indicator on text (eq. routing)",
    about="VORT on next-character prediction, its router told where names end and not told, the "
    "rest the same. Names are found by the rule probe from what stands before alone; a mark on the "
    "name itself would give away what is to be predicted.",
    cells=cells,
    summarise=summarise,
)
