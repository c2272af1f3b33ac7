"""Figure overview: growth of bank states, accuracy by distance and order, reads by time scale."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vort.fractional import gl_partial_sums
from vort.fractional.bounds import bank_growth
from vort.lab.report.figures.kernels import growth
from vort.lab.report.figures.paper_figure import Found, Need, PaperFigure
from vort.lab.report.figures.style import BLUE, GREY, ORANGE, SKY, SURFACE, canvas

__all__ = ["OVERVIEW"]

_STEPS = 1000
# Four kinds of query: experiment, kind in its `reads` (see `_mean`), name, line.
# Curves that lie on one another stay visible: broad and pale below, thin and dark above.
_QUERIES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("pilot", "first lag", "Zipf query, answer near", {"color": SKY, "lw": 5, "marker": "o"}),
    ("pilot", "last lag", "Zipf query, answer far", {"color": BLUE, "lw": 2, "marker": "s"}),
    ("label_copy", "lag", "entity named again (copy)", {"color": ORANGE, "lw": 2, "marker": "D"}),
    ("pilot", "filler", "filler, asks for nothing", {"color": GREY, "lw": 1.4, "marker": "."}),
)


def draw(path: Path, found: Found) -> None:
    """Three panels in a row."""
    with canvas(path, 14.6, 5.2) as drawing:
        left, middle, right = drawing.subfigures(1, 3, width_ratios=(1.02, 1, 1))
        _growth(left.add_subplot(projection="3d"))
        _landscape(middle.add_subplot(), found["pilot"]["by_order"])
        _reads(right, found)


def _growth(axis: Any) -> None:
    """The exact sums as a surface, the power t^a/Γ(a+1) and states of the recurrences on it."""
    orders = np.linspace(0.05, 1, 40)
    steps = np.unique(np.geomspace(1, _STEPS, 60).round().astype(int))
    sums = gl_partial_sums(np.array(orders), _STEPS - 1).numpy()[:, steps - 1]
    grid = np.meshgrid(np.log10(steps), orders)
    options = {"rcount": 60, "ccount": 60, "lw": 0, "antialiased": False, "rasterized": True}
    axis.plot_surface(*grid, np.log10(sums), cmap=SURFACE, **options)
    few = steps[::9]
    for order in (0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
        norms = growth(order, np.ones((_STEPS, 1)))[few - 1]
        label = "from the recurrences" if order == 1.0 else None
        places = np.log10(few), np.full(len(few), order), np.log10(norms)
        axis.plot(*places, ".", color="white", mec="black", mew=0.5, ms=6, zorder=10, label=label)
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


def _reads(drawing: Any, found: Found) -> None:
    """What four kinds of query read, by order of the token and by time scale; mean over heads."""
    upper, lower = drawing.subplots(2, 1)
    layers = {name: found[name]["reads"]["layers"][0] for name in ("pilot", "label_copy")}
    levels = found["pilot"]["reads"]["levels"]
    middles = (np.arange(levels) + 0.5) / levels
    for experiment, kind, label, line in _QUERIES:
        layer = layers[experiment]
        upper.plot(middles, _mean(layer, kind, "levels"), ms=5, label=label, **line)
        # From the quickest scale to the slowest.
        lower.plot(_mean(layer, kind, "shares")[::-1], ms=5, **line)
    edges = np.linspace(0, 1, levels + 1)
    for layer, label, style in zip(layers.values(), ("Zipf", "copy"), (":", "--"), strict=True):
        every = np.mean(layer["written"], axis=0)
        upper.stairs(every, edges, color="black", ls=style, label=f"all tokens, {label}")
    constants = layers["pilot"]["time_constants"]
    lower.axhline(1 / len(constants), color="black", lw=1, ls=":")
    lower.set_xticks(range(len(constants)), [_time(x) for x in reversed(constants)])
    upper.set(xlabel="order of the token that is read", ylabel="share", xlim=(0, 1))
    lower.set(xlabel="time constant of the scale (steps)", ylabel="share")
    for axis in (upper, lower):
        axis.set_ylim(bottom=0)
    upper.set_title("(c) what four kinds of query read, measured")
    drawing.legend(fontsize=8, loc="outside lower center", ncols=2)


def _mean(layer: Mapping[str, Any], wanted: str, key: str) -> np.ndarray:
    """Of a kind of query, or of all lags, each as often as it is asked; mean over heads."""
    kinds = layer["kinds"]
    lags = [name for name in kinds if name.startswith("lag ")]
    chosen = {"first lag": lags[:1], "last lag": lags[-1:], "lag": lags}.get(wanted, [wanted])
    counts = [kinds[name]["count"] for name in chosen]
    means = [np.mean(kinds[name][key], axis=0) for name in chosen]
    return np.asarray(np.average(means, axis=0, weights=counts))


def _time(steps: float | None) -> str:
    return "∞" if steps is None else f"{steps:.1f}" if steps < 10 else f"{steps:.0f}"


OVERVIEW = PaperFigure(
    "overview",
    draw,
    "(a) Norm that a bank state reaches after t tokens of norm 1, all alike: exact partial sums of "
    "the weights (surface) and the bound t^a/Γ(a+1) of proposition bankgrowth (dashed), computed; "
    "dots: states of the auxiliary recurrences (eq. aux-recurrence), run token by token. "
    "(b) Accuracy at the queries of Zipf retrieval by distance and by the order of the token that "
    "holds the answer. One trained VORT; the order of these tokens is imposed, all else is left as "
    "learned; the top row shows the orders that it gave them itself. The paper simulates this "
    "panel. (c) What four kinds of query read, mean over test queries and heads of VORT trained on "
    "Zipf retrieval (lag d as often as 1/d) and on label copy (mentions at uniform positions, so "
    "mostly long lags): queries whose answer is near or far by the task's classes of lag, entities "
    "that are named again, and fillers, which ask for nothing. Above: share of the retrieval "
    "weights p of eq. retrieval-loss, gates and read weights included, by order of the token that "
    "is read, beside the orders of all tokens; below: learned read weights over time scales, which "
    "the paper's equations do not have. A query shows its key and nothing that tells the distance. "
    "(b) and (c) are of one seed.",
    needs=(
        Need("pilot", "by_order"),
        Need("pilot", "reads", "levels"),
        Need("label_copy", "reads", "levels"),
    ),
)
