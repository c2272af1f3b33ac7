"""From the results of cells to tables: means over seeds, intervals, verdicts against the paper."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vort.experiments.models import MODELS
from vort.report.tables import Sheet
from vort.training.metrics import Interval, interval

__all__ = [
    "Comparison",
    "PaperTable",
    "group_by_model",
    "label_of",
    "margin",
    "over_seeds",
    "score_sheet",
    "verdict",
]

Record = Mapping[str, Any]


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper: its label, the score it shows, and its figures by row and bucket.

    Attributes:
        label: by which the paper refers to it.
        score: "accuracy" (in percent, higher is better) or "bits" (lower is better).
        columns: headings, one for each bucket of the task, in order.
        rows: the figures.
        tolerance: what counts as the same figure where seeds say nothing closer.
    """

    label: str
    score: str
    columns: tuple[str, ...]
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


@dataclass(frozen=True)
class Comparison:
    """A difference between two rows over the same seeds, positive where the first is better."""

    difference: Interval

    @property
    def clear(self) -> bool:
        """Whether it is above zero by more than its interval; never with a single seed."""
        return self.difference.count > 1 and self.difference.low > 0


def label_of(model: str) -> str:
    """What tables call a model."""
    return MODELS[model].label if model in MODELS else model.replace("_", " ")


def group_by_model(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Results by model, in the order they come."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["cell"]["model"], []).append(record)
    return found


def over_seeds(
    records: Sequence[Record], bucket: str, score: str, factor: int = 1
) -> Interval | None:
    """Mean and interval of a score over the seeds that have it.

    Several results of one seed (at several beta, say) are averaged first, as the paper does.
    """
    by_seed: dict[int, list[float]] = {}
    for record in records:
        if bucket in record.get("test", {}):
            value = factor * record["test"][bucket][score]
            by_seed.setdefault(record["cell"]["seed"], []).append(value)
    means = [sum(values) / len(values) for values in by_seed.values()]
    return interval(means) if means else None


def verdict(paper: float, ours: Interval, table: PaperTable) -> str:
    """Our mean against the paper's figure: "exceeded", "reproduced" or "not reproduced".

    Better by more than the interval (or the table's tolerance, if that is wider) exceeds it; within
    that distance reproduces it.
    """
    half = ours.half if ours.count > 1 else 0.0
    room = max(half, table.tolerance)
    gain = table.sign * (ours.mean - paper)
    if gain > room:
        return "exceeded"
    return "reproduced" if gain >= -room else "not reproduced"


def margin(
    ours: Sequence[Record], rival: Sequence[Record], bucket: str, table: PaperTable
) -> Comparison:
    """How much better `ours` is in a bucket, seed by seed."""

    def scores(records: Sequence[Record]) -> dict[tuple[Any, ...], float]:
        return {
            tuple(v for k, v in sorted(r["cell"].items()) if k != "model"): table.factor
            * r["test"][bucket][table.score]
            for r in records
        }

    a, b = scores(ours), scores(rival)
    shared = [table.sign * (a[key] - b[key]) for key in a if key in b]
    if not shared:
        raise ValueError("ours and rival must share at least one seed, got none")
    return Comparison(interval(shared))


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
    """One row a model: state, parameters, every bucket, the paper's figure and the verdict.

    The verdict is on the last bucket, the one the paper's claim is about.
    """
    digits = 1 if table.score == "accuracy" else 3
    rows = []
    for model, members in group_by_model(records).items():
        cells = [over_seeds(members, bucket, table.score, table.factor) for bucket in buckets]
        name = MODELS[model].paper_row if model in MODELS else ""
        paper = table.rows.get(name)
        judged = "" if paper is None or cells[-1] is None else verdict(paper[-1], cells[-1], table)
        first = members[0]
        rows.append(
            [
                label(model),
                f"{first['state_numbers']:,}",
                f"{first['parameters']:,}",
                *(show(cell, digits) for cell in cells),
                "" if paper is None else " / ".join(f"{x:g}" for x in paper),
                judged,
            ]
        )
    unit = "%" if table.score == "accuracy" else "bits"
    headings = ["model", "state", "parameters", *(f"{b} ({unit})" for b in buckets)]
    return Sheet(title, [*headings, "paper", "verdict on the last"], rows)
