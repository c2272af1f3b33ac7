"""From finished cells to scores, curves and charts: seeds averaged, conditions and models apart."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vort.lab.report.folder import Json, Part, mapping, rows_of
from vort.lab.report.tables import Grid, grid
from vort.lab.training.metrics import Interval, interval

__all__ = ["Chart", "Charts", "Condition", "conditions_of", "differing"]

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
        return self._by_step(lambda row: _real(row.get("loss")))

    def validation(self) -> dict[str, list[Point]]:
        """Bits on the validation set by step, buckets weighed by their counts."""
        return self._by_step(lambda row: _mean_bits(row.get("validation")))

    def _by_step(self, value_of: Callable[[Json], float | None]) -> dict[str, list[Point]]:
        def points(cell: Json) -> Iterator[tuple[float, float, str]]:
            for row in rows_of(cell.get("history")):
                step, value = _real(row.get("step")), value_of(row)
                if step is not None and value is not None:
                    yield step, value, f"step {step:,.0f}"

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


@dataclass(frozen=True)
class Chart:
    """The place of a chart on the page.

    Attributes:
        number: of its specification, which `report_charts.js` draws at whatever width there is.
        title: in words.
        table: its values, where they are shown as a table too.
    """

    number: int
    title: str
    table: Grid | None = None


class Charts:
    """Collects the charts of a page; a model has one colour throughout.

    Attributes:
        specs: what the page's script reads.
    """

    def __init__(self) -> None:
        self.specs: list[dict[str, Any]] = []
        self._colours = {"vort": 0}  # as in the figures, VORT is blue

    def of_conditions(
        self, conditions: Sequence[Condition], labels: Mapping[str, Any]
    ) -> dict[str, list[Chart]]:
        """Accuracy by lag, then training curves, for every condition that has them.

        labels: what to call models, where that is not their name.
        """
        names = {key: str(value) for key, value in labels.items()}
        by_lag: list[Chart | None] = []
        training: list[Chart | None] = []
        for condition in conditions:
            lags = condition.lags()
            x = {"label": "lag, tokens (logarithmic)", "log": True}
            y = {"label": "accuracy", "percent": True}
            title = _titled("Accuracy by lag", condition)
            by_lag.append(self._add(lags, title, x, y, names, _values(lags, names)))
        for condition in conditions:
            for curves, title, unit in (
                (condition.losses(), "Training loss", "loss"),
                (condition.validation(), "Validation", "bits"),
            ):
                x, y = {"label": "step"}, {"label": unit}
                training.append(self._add(curves, _titled(title, condition), x, y, names))
        found = {"Accuracy by lag": by_lag, "Training": training}
        drawn = {title: [chart for chart in charts if chart] for title, charts in found.items()}
        return {title: charts for title, charts in drawn.items() if charts}

    def _add(
        self,
        curves: Mapping[str, list[Point]],
        title: str,
        x: Mapping[str, Any],
        y: Mapping[str, Any],
        names: Mapping[str, str],
        table: Grid | None = None,
    ) -> Chart | None:
        """None where no curve has two points."""
        if not any(len(points) > 1 for points in curves.values()):
            return None
        series = [
            {
                "name": names.get(model, model),
                "colour": self._colours.setdefault(model, len(self._colours)),
                "points": [[_short(v) for v in point[:4]] + [point[4]] for point in points],
            }
            for model, points in curves.items()
        ]
        self.specs.append({"title": title, "x": x, "y": y, "series": series})
        return Chart(len(self.specs) - 1, title, table)


def _titled(title: str, condition: Condition) -> str:
    return f"{title}: {condition.name}" if condition.name else title


def _values(curves: Mapping[str, list[Point]], names: Mapping[str, str]) -> Grid:
    """Curves as a table in percent."""
    places = sorted({(point[0], point[4]) for points in curves.values() for point in points})
    values = {
        names.get(model, model): {point[0]: point[1] for point in points}
        for model, points in curves.items()
    }
    rows = [
        [words, *(f"{100 * found[x]:.1f}" if x in found else "" for found in values.values())]
        for x, words in places
    ]
    return grid(["", *values], rows)


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def conditions_of(part: Part) -> list[Condition]:
    """The experiment's cells by condition, in the order of their names."""
    settings = {name: mapping(cell.get("cell")) for name, cell in part.cells.items()}
    varied = [key for key in differing(settings.values()) if key not in ("model", "seed")]
    groups: dict[tuple[str, ...], dict[str, list[Json]]] = {}
    for name, cell in part.cells.items():
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
