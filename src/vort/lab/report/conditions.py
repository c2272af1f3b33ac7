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
BY_LAG = "Accuracy by lag"
LOOKS = 32  # lines that `report_charts.js` can draw so that no two are alike
CROWDED = 6  # lines beyond which a legend alone sends the eye back and forth
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

        return self._curves(points, [*self.models.items(), *self._heavy_hitters()])

    def _heavy_hitters(self) -> Iterator[tuple[str, list[Json]]]:
        """Full attention decoded under H2O's policy: a line of its own, from the same cells."""
        cells = [mapping(cell.get("h2o")) for group in self.models.values() for cell in group]
        if any(cells):
            yield "h2o", cells

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

        return self._curves(points, self.models.items())

    def _curves(
        self,
        points: Callable[[Json], Iterable[tuple[float, float, str]]],
        lines: Iterable[tuple[str, list[Json]]],
    ) -> dict[str, list[Point]]:
        curves = {}
        for model, cells in lines:
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
        crowded: whether it has so many lines that it needs the whole width, for their names.
    """

    number: int
    title: str
    table: Grid | None = None
    crowded: bool = False


class Charts:
    """Collects the charts of a page.

    No two lines of an experiment look alike; VORT is blue everywhere, as in the figures, and a
    model that was drawn before keeps its look where nobody else has it.

    Attributes:
        specs: what the page's script reads.
    """

    def __init__(self) -> None:
        self.specs: list[dict[str, Any]] = []
        self._known = {"vort": 0}

    def of_conditions(
        self, conditions: Sequence[Condition], labels: Mapping[str, Any]
    ) -> dict[str, list[Chart]]:
        """Accuracy by lag, then training curves, for every condition that has them.

        labels: what to call models, where that is not their name.
        """
        names = {"h2o": "attention, H2O cache"} | {k: str(value) for k, value in labels.items()}
        looks = self._looks(dict.fromkeys(m for c in conditions for m in (*c.models, *c.lags())))
        by_lag: list[Chart | None] = []
        training: list[Chart | None] = []
        for condition in conditions:
            lags = condition.lags()
            x = {"label": "lag, tokens (logarithmic)", "log": True}
            y = {"label": "accuracy", "percent": True}
            title = _titled(BY_LAG, condition)
            by_lag.append(self._add(lags, title, x, y, names, looks, _values(lags, names)))
        for condition in conditions:
            for curves, title, unit in (
                (condition.losses(), "Training loss", "loss"),
                (condition.validation(), "Validation", "bits"),
            ):
                x, y = {"label": "step"}, {"label": unit}
                training.append(self._add(curves, _titled(title, condition), x, y, names, looks))
        found = {BY_LAG: by_lag, "Training": training}
        drawn = {title: [chart for chart in charts if chart] for title, charts in found.items()}
        return {title: charts for title, charts in drawn.items() if charts}

    def _looks(self, models: Iterable[str]) -> dict[str, int]:
        """A look for each model of an experiment."""
        looks: dict[str, int] = {}
        later = []
        for model in models:
            look = self._known.get(model)
            if look is None or look in looks.values():
                later.append(model)
            else:
                looks[model] = look
        # Blue stays VORT's own where there are enough others.
        free = [look for look in range(1, LOOKS) if look not in looks.values()]
        for place, model in enumerate(later):
            looks[model] = free[place] if place < len(free) else place % LOOKS
            self._known.setdefault(model, looks[model])
        return looks

    def _add(
        self,
        curves: Mapping[str, list[Point]],
        title: str,
        x: Mapping[str, Any],
        y: Mapping[str, Any],
        names: Mapping[str, str],
        looks: Mapping[str, int],
        table: Grid | None = None,
    ) -> Chart | None:
        """None where no curve has two points."""
        if not any(len(points) > 1 for points in curves.values()):
            return None
        series = [
            {
                "name": names.get(model, model),
                "look": looks[model],
                "points": [[_short(v) for v in point[:4]] + [point[4]] for point in points],
            }
            for model, points in curves.items()
        ]
        self.specs.append({"title": title, "x": x, "y": y, "series": series})
        return Chart(len(self.specs) - 1, title, table, len(series) > CROWDED)


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


def conditions_of(part: Part, others: Sequence[Part] = ()) -> list[Condition]:
    """The experiment's cells by condition, in the order of their names.

    others: parts of the run that hold the cells its summary has `borrowed`, by their fingerprints;
        they join the conditions of its own cells.
    """
    cells = {**_borrowed(part, others), **part.cells}
    settings = {name: mapping(cell.get("cell")) for name, cell in cells.items()}
    own = [settings[name] for name in part.cells]
    varied = [key for key in differing(own) if key not in ("model", "seed")]
    groups: dict[tuple[str, ...], dict[str, list[Json]]] = {}
    for name, cell in cells.items():
        keys = tuple(_words(key, settings[name].get(key)) for key in varied)
        model = str(settings[name].get("model", name))
        groups.setdefault(keys, {}).setdefault(model, []).append(cell)
    labels = list(mapping(part.summary.get("labels")))
    return [
        Condition(", ".join(filter(None, keys)), _in_order(models, labels), _is_language(models))
        for keys, models in sorted(groups.items())
    ]


def differing(settings: Iterable[Mapping[str, Any]]) -> list[str]:
    """Keys whose values are not the same everywhere."""
    every = list(settings)
    keys = dict.fromkeys(key for one in every for key in one)
    return [key for key in keys if len({repr(one.get(key)) for one in every}) > 1]


def _borrowed(part: Part, others: Sequence[Part]) -> dict[str, Json]:
    """Cells of other parts that this one's tables show too."""
    wanted = part.summary.get("borrowed")
    if not isinstance(wanted, list) or not part.cells:
        return {}
    prints = {print_ for print_ in wanted if isinstance(print_, str)}
    return {
        f"{other.name}/{name}": cell
        for other in others
        if other is not part
        for name, cell in other.cells.items()
        if isinstance(cell.get("fingerprint"), str) and cell["fingerprint"] in prints
    }


def _in_order(models: dict[str, list[Json]], labels: Sequence[str]) -> dict[str, list[Json]]:
    """VORT first, then its variants, then the others; in each group as the summary lists them."""
    place = {name: index for index, name in enumerate(labels)}

    def key(item: tuple[str, list[Json]]) -> tuple[bool, bool, int]:
        name = item[0]
        return name != "vort", not name.startswith("vort"), place.get(name, len(place))

    return dict(sorted(models.items(), key=key))


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
