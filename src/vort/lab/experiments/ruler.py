"""RULER's eleven synthetic tasks as one task to train on: averages by length, answers by task."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vort.lab.experiments.cell import Cell, Size
from vort.lab.experiments.experiment import Experiment, Record, Summary
from vort.lab.experiments.needles import (
    OURS,
    QUADRATIC,
    TRAINING,
    long_config,
    searched_rate,
    seeds_and_rows,
)
from vort.lab.experiments.origins import training_notes
from vort.lab.experiments.recall import has_note
from vort.lab.experiments.scores import (
    as_planned,
    by_row,
    label_of,
    labels_of,
    lead_in_points,
    seed_interval,
    show,
)
from vort.lab.report.tables import Sheet
from vort.lab.training.metrics import Interval
from vort.lab.verdicts import Claim

__all__ = ["RULER_TABLE"]

_TASK: dict[str, Any] = {
    "name": "ruler",
    "kind": "all",
    "length": 4096,
    "mixed": (512, 1024, 2048, 4096),
    "apart": 8,
    # 300 steps: what is asked, before it lies far apart.
    "short_first": 2400,
    # As many as the codes of a text of 131,072 tokens take, and as are learned in so few steps.
    "few_keys": 512,
    "few_numbers": 64,
}
_TRAINING: dict[str, Any] = {**TRAINING["paper"], "steps": 3000}
_LONGER: dict[str, Any] = {"lengths": (4096, 8192, 32_768, 131_072), "sequences": 220}
# Lengths that VORT's average is held against its rivals' at.
_JUDGED = ("32768", "131072")


def cells(size: Size, data: Path | None = None) -> list[Cell]:
    """One model for all eleven tasks, the first seed of every row first; at paper size alone.

    Rates are those that were searched for needles.
    """
    if size == "laptop":
        return []
    found = [(seed, row, searched_rate(size, row)) for seed, row in seeds_and_rows(size)]
    return [
        Cell(
            experiment="ruler",
            size=size,
            model=model,
            seed=seed,
            task={**_TASK, "seed": seed},
            config=long_config(size, model),
            training={**_TRAINING, **rate},
            search=search,
            after={"ruler": _LONGER},
        )
        for seed, model, (search, rate) in found
    ]


def _of_tasks(record: Record, length: str) -> dict[str, float]:
    """Answers of each task that are right, in percent."""
    found = record["ruler"]["scores"][length]
    return {task: 100 * right / max(1, asked) for task, (right, asked) in found.items()}


def _average(record: Record, length: str) -> float:
    shares = _of_tasks(record, length)
    return sum(shares.values()) / len(shares)


def _counts(asked: Mapping[str, int]) -> str:
    return ", ".join(f"{task} {count}" for task, count in asked.items())


def _rounded(value: Interval | None) -> str:
    return "–" if value is None else f"{value.mean:.0f}"


def summarise(records: Sequence[Record], size: Size) -> Summary:
    """The average of all tasks by length, then answers by task at each."""
    if not records:
        return Summary([])
    found, lengths = by_row(records), list(records[0]["ruler"]["scores"])
    tasks = list(records[0]["ruler"]["scores"][lengths[0]])

    def state(members: Sequence[Record], length: str) -> str:
        return f"{members[0]['ruler']['state_numbers'][length]:,}"

    def over(members: Sequence[Record], length: str, task: str | None = None) -> Interval | None:
        return seed_interval(
            (
                m["cell"]["seed"],
                _average(m, length) if task is None else _of_tasks(m, length)[task],
            )
            for m in members
        )

    sheets = [
        Sheet(
            "RULER's eleven synthetic tasks: answers right (%), average of tasks by length",
            ["model", "state", *(f"{int(length):,}" for length in lengths)],
            [
                [
                    label_of(row),
                    state(members, lengths[-1]),
                    *(show(over(members, length), 1) for length in lengths),
                ]
                for row, members in found.items()
            ],
        )
    ]
    for length in lengths:
        rows = [
            [
                label_of(row),
                state(members, length),
                *(_rounded(over(members, length, task)) for task in tasks),
            ]
            for row, members in found.items()
        ]
        title = f"The same by task, in {int(length):,} tokens"
        sheets.append(Sheet(title, ["model", "state", *tasks], rows))
    asked = {task: each for task, (_, each) in records[0]["ruler"]["scores"][lengths[0]].items()}
    notes = [
        "An answer is right if all its tokens are, given what stands before them. State: numbers "
        "kept after a text of that length (of the longest, where lengths stand side by side).",
        f"Answers that a figure of one seed is of: {_counts(asked)}.",
        *training_notes(records, paper=False),
        *has_note(records),
    ]
    return Summary(sheets, _claims(as_planned(records)), notes=notes, labels=labels_of(records))


def _claims(records: Sequence[Record]) -> list[Claim]:
    found, claims = by_row(records), []
    rivals = [row for row in found if row not in (*OURS, *QUADRATIC)]
    for row in OURS:
        for length in _JUDGED:
            if row in found and length in records[0]["ruler"]["scores"]:
                states = (
                    f"the average of {OURS[row]} over RULER's eleven synthetic tasks in "
                    f"{int(length):,} tokens is ahead of every rival that trains in linear time"
                )
                gains = {rival: _gain(found[row], found[rival], length) for rival in rivals}
                claims += lead_in_points(states, gains)
    return claims


def _gain(ours: Sequence[Record], rival: Sequence[Record], length: str) -> Interval | None:
    """How much larger our average is in points, seed by seed."""
    averages = {record["cell"]["seed"]: _average(record, length) for record in ours}
    return seed_interval(
        (m["cell"]["seed"], averages[m["cell"]["seed"]] - _average(m, length))
        for m in rival
        if m["cell"]["seed"] in averages
    )


RULER_TABLE = Experiment(
    name="ruler",
    title="RULER's eleven synthetic tasks",
    about="One model for all eleven, trained on texts of 512 to 4,096 tokens in a vocabulary of "
    "words, the answers at the end, and tested to 131,072. An answer is right if all its tokens "
    "are, given what stands before them.",
    cells=cells,
    summarise=summarise,
)
