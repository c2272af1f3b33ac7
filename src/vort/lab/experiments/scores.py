"""From the results of cells to tables: means over seeds, intervals, verdicts against the paper."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vort.lab.experiments.experiment import Record
from vort.lab.experiments.models import MODELS
from vort.lab.report.tables import Sheet
from vort.lab.training.metrics import Interval, interval
from vort.lab.verdicts import Claim, Verdict, judge_difference, judge_figure, judge_lead

__all__ = [
    "PaperTable",
    "as_planned",
    "by_row",
    "gain_in_words",
    "label_of",
    "labels_of",
    "lead_in_points",
    "margin",
    "over_seeds",
    "row_of",
    "score_sheet",
    "seed_interval",
    "seeds_of",
    "show",
    "verdict",
    "verdict_on_gain",
    "within_seed",
]


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper: its label, the score it shows, and its figures by row and bucket.

    Attributes:
        label: by which the paper refers to it.
        score: "accuracy" (in percent, higher is better) or "bits" (lower is better).
        rows: the figures, one for each bucket of the task, in order.
        tolerance: what counts as the same figure where seeds say nothing closer.
    """

    label: str
    score: str
    rows: Mapping[str, tuple[float, ...]]
    tolerance: float

    @property
    def factor(self) -> int:
        """From our figures to the paper's: accuracies are percentages there."""
        return 100 if self.score == "accuracy" else 1

    @property
    def sign(self) -> int:
        """1 where higher is better, else -1."""
        return 1 if self.score == "accuracy" else -1


def row_of(record: Record) -> str:
    """The row that a result stands in: its model, and what was changed of it with `--set`.

    >>> row_of({"cell": {"model": "vort", "set": "model.num_scales=4"}})
    'vort [model.num_scales=4]'
    """
    model, changes = record["cell"]["model"], record["cell"].get("set")
    return model if changes is None else f"{model} [{changes}]"


def label_of(row: str) -> str:
    """What tables call a row."""
    model, bracket, changes = row.partition(" [")
    label = MODELS[model].label if model in MODELS else model.replace("_", " ")
    return label + bracket + changes


def labels_of(records: Sequence[Record]) -> dict[str, str]:
    """What tables call the models of results, by their names."""
    models = (record["cell"]["model"] for record in records)
    return {model: label_of(model) for model in models}


def by_row(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Results by row, in the order they come."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(row_of(record), []).append(record)
    return found


def as_planned(records: Sequence[Record]) -> list[Record]:
    """Those of unchanged settings: claims are about no others."""
    return [record for record in records if "set" not in record["cell"]]


def over_seeds(
    records: Sequence[Record], bucket: str, score: str, factor: int = 1
) -> Interval | None:
    """Mean and interval of a score over the seeds that have it.

    Several results of one seed (at several beta, say) are averaged first: they share weights and
    data, and are no further seeds.
    """
    pairs = [
        (record["cell"]["seed"], factor * record["test"][bucket][score])
        for record in records
        if bucket in record.get("test", {})
    ]
    return seed_interval(pairs)


def seed_interval(pairs: Iterable[tuple[int, float]]) -> Interval | None:
    """Mean and interval over seeds of values that have one each; several of a seed count once.

    >>> found = seed_interval([(0, 1.0), (0, 3.0), (1, 4.0)])
    >>> found.mean, found.count
    (3.0, 2)
    """
    by_seed: dict[int, list[float]] = {}
    for seed, value in pairs:
        by_seed.setdefault(seed, []).append(value)
    means = [sum(values) / len(values) for values in by_seed.values()]
    return interval(means) if means else None


def verdict(paper: float, ours: Interval, table: PaperTable) -> Verdict:
    """Our figure against the paper's; see `vort.lab.verdicts.judge_figure`."""
    gain = Interval(table.sign * (ours.mean - paper), ours.half, ours.count)
    return judge_figure(gain, table.tolerance)


def verdict_on_gain(paper: float, ours: Interval, table: PaperTable) -> Verdict:
    """A difference between two rows against the paper's; see `judge_difference`."""
    return judge_difference(ours, paper, table.tolerance)


def margin(
    ours: Sequence[Record], rival: Sequence[Record], bucket: str, table: PaperTable
) -> Interval | None:
    """How much better `ours` is in a bucket, over the seeds they share; None if there are none.

    Pairs are results of one seed under one condition; those of several conditions are averaged
    within their seed.
    """
    pairs = [
        (a["cell"]["seed"], table.sign * table.factor * (x - y))
        for a, b in _pairs(ours, rival)
        for x, y in [[record["test"][bucket][table.score] for record in (a, b)]]
    ]
    return seed_interval(pairs)


def _pairs(ours: Sequence[Record], rival: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Results of two rows that share seed, task and condition."""

    def place(record: Record) -> tuple[Any, ...]:
        return tuple(v for k, v in sorted(record["cell"].items()) if k != "model")

    others = {place(record): record for record in rival}
    return [(record, others[place(record)]) for record in ours if place(record) in others]


def within_seed(
    ours: Sequence[Record], rival: Sequence[Record], bucket: str, table: PaperTable
) -> Interval | None:
    """How much better `ours` is in the one seed they share, and its interval over sequences.

    Both were asked the same sequences, so these are compared pair by pair. It says how far other
    test data would move the difference, and nothing of other weights: no verdict rests on it. None
    where there are several seeds, or no counts for each sequence. Its `count` is of sequences.
    """
    from scipy.stats import t  # takes longer to load than most tables to make

    pairs = _pairs(ours, rival)
    if len(pairs) != 1 or table.score != "accuracy":
        return None
    answers = [_answers(record, bucket) for record in pairs[0]]
    (right, asked), (other, same) = answers
    if len(asked) < 2 or not np.array_equal(asked, same) or not asked.sum():
        return None
    gains, total = right - other, asked.sum()
    mean = gains.sum() / total
    # Sequences have unequally many questions: the deviation of a ratio.
    rest = gains - mean * asked
    count = len(asked)
    error = np.sqrt(count / (count - 1) * (rest**2).sum()) / total
    factor = table.sign * table.factor
    half = float(t.ppf(0.975, count - 1) * error)
    return Interval(float(factor * mean), abs(factor) * half, count)


def _answers(record: Record, bucket: str) -> tuple[Any, Any]:
    """Right answers and questions of each sequence; none where a result does not have them."""
    words = record.get("sequences", {}).get(bucket, "").split()
    found = np.array([word.split("/") for word in words], dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def gain_in_words(
    ours: Sequence[Record], rival: Sequence[Record], bucket: str, table: PaperTable
) -> str:
    """A difference between two rows with all that is known of how far it can be trusted."""
    gain = margin(ours, rival, bucket, table)
    if gain is None:
        return ""
    digits, unit = (1, "points") if table.score == "accuracy" else (3, "bits less")
    words = f"{show(gain, digits)} {unit}, {seeds_of(gain)}"
    inner = within_seed(ours, rival, bucket, table)
    if inner is not None:
        words += f" (± {inner.half:.{digits}f} over its {inner.count:,} sequences)"
    return words


def lead_in_points(states: str, gains: Mapping[str, Interval | None]) -> list[Claim]:
    """The claim that a row of ours is ahead of every rival, told by the closest; none: no rivals.

    states: the claim in words.
    gains: by rival, in points; None where they share no seed.
    """
    known = {row: gain for row, gain in gains.items() if gain is not None}
    if not known:
        return []
    closest = min(known, key=lambda row: known[row].mean)
    gain = known[closest]
    measured = f"closest is {label_of(closest)}: {show(gain, 1)} points, {seeds_of(gain)}"
    return [Claim("ours", states, measured, judge_lead(list(known.values())))]


def seeds_of(value: Interval) -> str:
    """How many seeds stand behind a figure, in words."""
    return "one seed" if value.count == 1 else f"{value.count} seeds"


def show(value: Interval | None, digits: int) -> str:
    """A mean with its interval, where there is one."""
    if value is None:
        return "–"
    if value.count < 2:
        return f"{value.mean:.{digits}f}"
    return f"{value.mean:.{digits}f} ± {value.half:.{digits}f}"


def score_sheet(
    title: str,
    records: Sequence[Record],
    buckets: Sequence[str],
    table: PaperTable,
    *,
    label: Callable[[str], str] = label_of,
) -> Sheet:
    """A line for each row: state, every bucket, the paper's figure for the last, and the verdict.

    Models of a table have equally many parameters; the notes say how many. Where some were trained
    for longer than others, a column says how long.
    """
    digits = 1 if table.score == "accuracy" else 3
    lengths = {record.get("steps") for record in records}
    rows = []
    for row, members in by_row(records).items():
        cells = [over_seeds(members, bucket, table.score, table.factor) for bucket in buckets]
        # Rows with changed settings are no row of the paper.
        name = MODELS[row].paper_row if row in MODELS else ""
        paper = table.rows.get(name)
        judged = "" if paper is None or cells[-1] is None else verdict(paper[-1], cells[-1], table)
        first = members[0]
        rows.append(
            [
                label(row),
                *([f"{first['steps']:,}"] if len(lengths) > 1 else []),
                f"{first['state_numbers']:,}",
                *(show(cell, digits) for cell in cells),
                "" if paper is None else f"{paper[-1]:g}",
                judged,
            ]
        )
    steps = ["steps"] if len(lengths) > 1 else []
    return Sheet(title, ["model", *steps, "state", *buckets, "paper", "verdict"], rows)
