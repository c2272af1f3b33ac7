"""From finished cells to scores and curves: seeds averaged, conditions and models apart."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vort.lab.report.html.run_directory import Experiment, Json, mapping, rows_of
from vort.lab.training.metrics import Interval, interval

__all__ = ["Condition", "conditions_of", "differing"]

POINTS = 240  # of a curve: more than a chart has room for
LANGUAGE = ("book", "text", "language")  # tasks that are scored in bits

Point = tuple[float, float, float, float, str]


@dataclass(frozen=True)
class Condition:
    """Cells that differ in model and seed alone.

    Attributes:
        name: what sets it apart from the other conditions, in words; "" if it is the only one.
        models: the cells of each model.
        language: whether it is scored in bits rather than in right answers.
    """

    name: str
    models: dict[str, list[Json]]
    language: bool

    @property
    def metric(self) -> str:
        """What scores are: bits or accuracy."""
        return "bits" if self.language else "accuracy"

    def buckets(self) -> list[str]:
        """Names of the test buckets, in the order they were written."""
        found: dict[str, None] = {}
        for cells in self.models.values():
            for cell in cells:
                found.update(dict.fromkeys(mapping(cell.get("test"))))
        return list(found)

    def score(self, model: str, bucket: str) -> Interval | None:
        """A model's mean over seeds on a bucket of the test set; None where nothing was scored."""
        found = [
            _real(mapping(mapping(cell.get("test")).get(bucket)).get(self.metric))
            for cell in self.models[model]
        ]
        values = [value for value in found if value is not None]
        return interval(values) if values else None

    def lags(self) -> dict[str, list[Point]]:
        """Accuracy by lag of each model: (lag, mean, lowest seed, highest seed, words)."""

        def points(cell: Json) -> Iterator[tuple[float, float, str]]:
            for row in rows_of(cell.get("lags")):
                low, high, value = (_real(row.get(key)) for key in ("low", "high", "accuracy"))
                if low is not None and high is not None and value is not None:
                    middle = math.sqrt(max(low, 1) * max(high, 1))
                    words = f"lag {low:,.0f}" if high <= low else f"lags {low:,.0f} to {high:,.0f}"
                    yield middle, value, words

        return self._curves(points)

    def losses(self) -> dict[str, list[Point]]:
        """Training loss by step."""

        def points(cell: Json) -> Iterator[tuple[float, float, str]]:
            for row in rows_of(cell.get("history")):
                step, loss = _real(row.get("step")), _real(row.get("loss"))
                if step is not None and loss is not None:
                    yield step, loss, f"step {step:,.0f}"

        return self._curves(points)

    def validation(self) -> dict[str, list[Point]]:
        """Bits on the validation set by step, buckets weighed by their counts."""

        def points(cell: Json) -> Iterator[tuple[float, float, str]]:
            for row in rows_of(cell.get("history")):
                step, bits = _real(row.get("step")), _mean_bits(row.get("validation"))
                if step is not None and bits is not None:
                    yield step, bits, f"step {step:,.0f}"

        return self._curves(points)

    def _curves(
        self, points: Callable[[Json], Iterable[tuple[float, float, str]]]
    ) -> dict[str, list[Point]]:
        curves = {}
        for model, cells in self.models.items():
            by_place: dict[float, list[float]] = {}
            words: dict[float, str] = {}
            for cell in cells:
                for place, value, label in points(cell):
                    by_place.setdefault(place, []).append(value)
                    words[place] = label
            curve = [
                (x, float(np.mean(ys)), min(ys), max(ys), words[x])
                for x, ys in sorted(by_place.items())
            ]
            if curve:
                kept = np.unique(np.linspace(0, len(curve) - 1, POINTS).round().astype(int))
                curves[model] = [curve[index] for index in kept.tolist()]
        return curves


def conditions_of(experiment: Experiment) -> list[Condition]:
    """The experiment's cells by condition, in the order of their names."""
    settings = {name: mapping(cell.get("cell")) for name, cell in experiment.cells.items()}
    varied = [key for key in differing(settings.values()) if key not in ("model", "seed")]
    groups: dict[tuple[str, ...], dict[str, list[Json]]] = {}
    for name, cell in experiment.cells.items():
        keys = tuple(_words(key, settings[name].get(key)) for key in varied)
        model = str(settings[name].get("model", name))
        groups.setdefault(keys, {}).setdefault(model, []).append(cell)
    return [
        Condition(", ".join(filter(None, keys)), _ours_first(models), _is_language(models))
        for keys, models in sorted(groups.items())
    ]


def differing(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Keys whose values are not the same everywhere."""
    every = list(settings)
    keys = dict.fromkeys(key for one in every for key in one)
    return [key for key in keys if len({repr(one.get(key)) for one in every}) > 1]


def _ours_first(models: dict[str, list[Json]]) -> dict[str, list[Json]]:
    return dict(sorted(models.items(), key=lambda item: not item[0].startswith("vort")))


def _words(key: str, value: Any) -> str:
    if value is None:
        return ""
    return str(value) if key == "task" else f"{key.replace('_', ' ')} {value}"


def _is_language(models: dict[str, list[Json]]) -> bool:
    cells = [cell for group in models.values() for cell in group]
    names = {str(mapping(cell.get("cell")).get("task", "")).lower() for cell in cells}
    if any(word in name for name in names for word in LANGUAGE):
        return True
    scores = [mapping(s) for cell in cells for s in mapping(cell.get("test")).values()]
    return bool(scores) and not any(_real(score.get("accuracy")) is not None for score in scores)


def _mean_bits(validation: Any) -> float | None:
    """Bits over all buckets; "all" among them changes nothing, being their mean."""
    pairs = []
    for score in map(mapping, mapping(validation).values()):
        bits, count = _real(score.get("bits")), _real(score.get("count"))
        if bits is not None:
            pairs.append((bits, 1.0 if count is None else count))
    total = sum(count for _, count in pairs)
    return sum(bits * count for bits, count in pairs) / total if total else None


def _real(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None
