"""Charts as data: `report_charts.js` draws them, at whatever width the page has."""

from collections.abc import Mapping, Sequence
from typing import Any

from vort.lab.report.html.markup import Markup, join, table, tag
from vort.lab.report.html.scores import Condition, Point

__all__ = ["Charts"]


class Charts:
    """Collects the charts of a page; a model has one colour throughout.

    Attributes:
        specs: what the page's script reads.
    """

    def __init__(self) -> None:
        self.specs: list[dict[str, Any]] = []
        self._colours = {"vort": 0}  # as in the figures, VORT is blue
        self._labels: dict[str, str] = {}

    def of_conditions(
        self, conditions: Sequence[Condition], labels: Mapping[str, Any] | None = None
    ) -> Markup:
        """Accuracy by lag, then training curves, for every condition that has them.

        labels: what to call models, where that is not their name.
        """
        self._labels = {} if labels is None else {k: str(v) for k, v in labels.items()}
        by_lag = [
            self._add(
                condition.lags(),
                _titled("Accuracy by lag", condition),
                {"label": "lag, tokens (logarithmic)", "log": True},
                {"label": "accuracy", "percent": True},
                with_table=True,
            )
            for condition in conditions
        ]
        learning = [
            chart
            for condition in conditions
            for chart in (
                self._add(
                    condition.losses(),
                    _titled("Training loss", condition),
                    {"label": "step"},
                    {"label": "loss"},
                ),
                self._add(
                    condition.validation(),
                    _titled("Validation", condition),
                    {"label": "step"},
                    {"label": "bits"},
                ),
            )
        ]
        return join([_grid("Accuracy by lag", by_lag), _grid("Training", learning)])

    def _add(
        self,
        curves: Mapping[str, list[Point]],
        title: str,
        x: dict[str, Any],
        y: dict[str, Any],
        *,
        with_table: bool = False,
    ) -> Markup:
        if not any(len(points) > 1 for points in curves.values()):
            return Markup()
        series = [
            {
                "name": self._labels.get(name, name),
                "colour": self._colours.setdefault(name, len(self._colours)),
                "points": [[_short(v) for v in point[:4]] + [point[4]] for point in points],
            }
            for name, points in curves.items()
        ]
        number = len(self.specs)
        self.specs.append({"title": title, "x": x, "y": y, "series": series})
        parts = [tag("figcaption", title), tag("div", class_="canvas", id=f"chart-{number}")]
        if with_table:
            parts.append(_values({self._labels.get(k, k): v for k, v in curves.items()}))
        return tag("figure", *parts, class_="plot", data_chart=number)


def _titled(title: str, condition: Condition) -> str:
    return f"{title}: {condition.name}" if condition.name else title


def _grid(title: str, charts: Sequence[Markup]) -> Markup:
    drawn = [chart for chart in charts if chart]
    if not drawn:
        return Markup()
    note = "Lines are means over seeds, bands run from the lowest seed to the highest."
    return join(
        [tag("h3", title), tag("div", *drawn, class_="plots"), tag("p", note, class_="fine")]
    )


def _values(curves: Mapping[str, list[Point]]) -> Markup:
    places = sorted({(point[0], point[4]) for points in curves.values() for point in points})
    values = {name: {point[0]: point[1] for point in points} for name, points in curves.items()}
    rows = [
        [words, *(f"{100 * found[x]:.1f}" if x in found else "" for found in values.values())]
        for x, words in places
    ]
    return tag("details", tag("summary", "the numbers, %"), table(["", *curves], rows))


def _short(value: float) -> float:
    return float(f"{value:.5g}")
