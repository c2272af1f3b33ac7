"""Figure overview: growth of bank states, accuracy by distance and order, reads by time scale."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vort.fractional import gl_partial_sums
from vort.fractional.bounds import bank_growth
from vort.lab.report.figures.paper_figure import Found, Need, PaperFigure
from vort.lab.report.figures.style import BLUE, GREY, ORANGE, SKY, SURFACE, YELLOW, canvas

__all__ = ["OVERVIEW"]

_STEPS = 1000
# Curves that lie on one another stay visible: broad and pale below, thin and dark above.
_ZIPF_LINES: tuple[dict[str, Any], ...] = (
    {"color": SKY, "lw": 5, "marker": "o", "ms": 9},
    {"color": BLUE, "lw": 2, "marker": "s", "ms": 5},
    {"color": "black", "lw": 1, "ls": ":", "marker": ".", "ms": 5},
)
_COPY_LINES: tuple[dict[str, Any], ...] = (
    {"color": YELLOW, "lw": 5, "marker": "o", "ms": 9},
    {"color": ORANGE, "lw": 2, "marker": "D", "ms": 5},
    {"color": "black", "lw": 1, "ls": "--", "marker": ".", "ms": 5},
)


def draw(path: Path, found: Found) -> None:
    """Three panels in a row."""
    with canvas(path, 14.6, 4.5) as drawing:
        left, middle, right = drawing.subfigures(1, 3, width_ratios=(1.02, 1, 1))
        _growth(left.add_subplot(projection="3d"))
        _landscape(middle.add_subplot(), found["pilot"]["by_order"])
        _reads(right.add_subplot(), found["pilot"]["reads"], found["label_copy"]["reads"])


def _growth(axis: Any) -> None:
    """The exact sums as a surface, the power t^a/Γ(a+1) as lines on it."""
    orders = np.linspace(0.05, 1, 40)
    steps = np.unique(np.geomspace(1, _STEPS, 60).round().astype(int))
    sums = gl_partial_sums(np.array(orders), _STEPS - 1).numpy()[:, steps - 1]
    grid = np.meshgrid(np.log10(steps), orders)
    options = {"rcount": 60, "ccount": 60, "lw": 0, "antialiased": False, "rasterized": True}
    axis.plot_surface(*grid, np.log10(sums), cmap=SURFACE, **options)
    for order in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
        power = [bank_growth(order, int(t))[1] for t in steps]
        label = r"bound $t^{\alpha}/\Gamma(\alpha+1)$" if order == 1.0 else None
        curve = axis.plot(np.log10(steps), np.full(len(steps), order), np.log10(power), zorder=9)
        curve[0].set(color=ORANGE, lw=1.6, ls="--", label=label)
    ticks = range(4)
    for which in (axis.set_xticks, axis.set_zticks):
        which(ticks, [f"$10^{n}$" for n in ticks])
    axis.set_yticks([0.2, 0.4, 0.6, 0.8, 1.0])
    axis.set(xlabel="steps $t$", ylabel="order", zlabel="norm of the state", ylim=(0.05, 1))
    axis.set_title(r"(a) bank states grow as $t^{\alpha}$", pad=0, x=-0.03)
    axis.view_init(elev=22, azim=-128)
    axis.legend(loc="upper right", fontsize=8.5, bbox_to_anchor=(1.04, 0.93))


def _landscape(axis: Any, record: Mapping[str, Any]) -> None:
    """Accuracy by imposed order and class of lag; with the learned orders in the top row."""
    rows = [row["accuracy"] for row in record["imposed"]]
    names = [f"{row['order']:g}" for row in record["imposed"]]
    mean, learned = _together(record["learned"])
    # A little air sets what was learned apart from what was imposed.
    places = [*range(len(rows)), len(rows) + 0.35]
    for place, row in zip(places, [*rows, learned], strict=True):
        values = np.array([row], dtype=float)
        box = (-0.5, values.shape[1] - 0.5, place - 0.5, place + 0.5)
        axis.imshow(100 * values, extent=box, aspect="auto", cmap=SURFACE, vmin=0, vmax=100)
        for column, value in enumerate(values[0]):
            colour = "white" if value < 0.55 else "black"
            shown = f"{100 * value:.0f}" if np.isfinite(value) else "–"
            axis.text(column, place, shown, ha="center", va="center", color=colour)
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    axis.set_yticks(places, [*names, f"learned\n({mean:.2f})"])
    lags = [f"{low}–{high}" for low, high in record["lags"]]
    axis.set_xticks(range(len(lags)), lags, fontsize=9)
    axis.set(ylim=(-0.5, places[-1] + 0.5), xlabel="distance")
    axis.set_ylabel("order of the token that holds the answer", y=0.43)
    axis.set_title("(b) retrieval accuracy (%), measured")


def _together(rows: Sequence[Mapping[str, Any]]) -> tuple[float, list[float | None]]:
    """Mean order and accuracies of all sources, whatever order they have learned."""
    counts = np.array([row["count"] for row in rows])
    right = np.array([[x or 0.0 for x in row["accuracy"]] for row in rows]) * counts
    total = counts.sum(0)
    orders = np.array([row["order"] for row in rows])
    pooled = [r / n if n else None for r, n in zip(right.sum(0), total, strict=True)]
    return float((orders * counts.sum(1)).sum() / total.sum()), pooled


def _reads(axis: Any, pilot: Mapping[str, Any], copy: Mapping[str, Any]) -> None:
    """Shares of the time scales in what queries read: first layer, mean over heads."""
    for record, task, lines in ((pilot, "Zipf", _ZIPF_LINES), (copy, "copy", _COPY_LINES)):
        layer = record["layers"][0]
        classes = [name for name in layer["kinds"] if name.startswith("lag ")]
        for name, line in zip(classes, lines, strict=False):
            axis.plot(_shares(layer, name), label=f"{task} query, {_lag(name)}", **line)
    scales = len(layer["time_constants"])
    axis.axhline(1 / scales, color=GREY, lw=1, ls=":")
    axis.text(0, 1 / scales, "all alike", fontsize=8, color=GREY, va="bottom")
    axis.set_xticks(range(scales), [_time(x) for x in reversed(layer["time_constants"])])
    axis.set(xlabel="time constant of the scale (steps)", ylabel="share of the reading")
    axis.set_ylim(bottom=0)
    axis.set_title("(c) learned read weights over time scales")
    axis.legend(fontsize=8.5, loc="upper left")


def _shares(layer: Mapping[str, Any], kind: str) -> np.ndarray:
    """From the quickest scale to the slowest."""
    shares: np.ndarray = np.mean(layer["kinds"][kind]["shares"], axis=0)
    return shares[::-1]


def _lag(name: str) -> str:
    return name.replace("<=", "≤ ").replace(">", "> ").replace("-", "–")


def _time(steps: float | None) -> str:
    return "∞" if steps is None else f"{steps:.1f}" if steps < 10 else f"{steps:.0f}"


OVERVIEW = PaperFigure(
    "overview",
    draw,
    "(a) Norm that a bank state reaches after t tokens of norm 1, all alike: exact partial sums of "
    "the weights (surface) and the bound t^a/Γ(a+1) of proposition bankgrowth (dashed), computed. "
    "(b) Accuracy at the queries of Zipf retrieval by distance and by the order of the token that "
    "holds the answer. One trained VORT; the order of these tokens is imposed, all else is left as "
    "learned; the top row shows the orders that it gave them itself. The paper simulates this "
    "panel. (c) Shares of the time scales in what queries read, mean over test queries of VORT "
    "trained on Zipf retrieval (lag d as often as 1/d) and on label copy (mentions at uniform "
    "positions, so mostly long lags). The two models read different scales, in line with the lags "
    "each was trained on; within a task, queries whose answers lie near or far are read alike, "
    "since a query shows its key and nothing that tells the distance. The paper's equations have "
    "no such weights. (b) and (c) are of one seed.",
    needs=(
        Need("pilot", "by_order"),
        Need("pilot", "reads"),
        Need("label_copy", "reads"),
    ),
)
