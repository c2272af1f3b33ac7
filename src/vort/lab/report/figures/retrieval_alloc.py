"""Figure retrieval-alloc: power laws against exponentials, and orders token by token."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vort.fractional import gl_kernel
from vort.lab.report.figures.paper_figure import Found, Need, PaperFigure
from vort.lab.report.figures.style import BLUE, GREY, ORANGE, SERIES, canvas

__all__ = ["RETRIEVAL_ALLOC"]

_FARTHEST = 100_000
_KINDS = {
    "first": (ORANGE, "shows key and label (E)"),
    "again": (BLUE, "asks for the label"),
    "filler": (GREY, "filler"),
}


def draw(path: Path, found: Found) -> None:
    """Kernels on the left; on the right one strip of tokens for each task."""
    with canvas(path, 14.6, 5.4) as drawing:
        left, right = drawing.subfigures(1, 2, width_ratios=(1, 2.25))
        _kernels(left.add_subplot())
        left.legend(fontsize=8.5, loc="outside lower center", ncols=2)
        upper, lower = right.subplots(2, 1)
        _strip(upper, found["pilot"]["strip"], "(b) learned orders, Zipf retrieval")
        _strip(lower, found["label_copy"]["strip"], "learned orders, label copy")
        upper.set_xlabel("")
        upper.legend(*_handles(), fontsize=8.5, loc="lower right", ncols=4, bbox_to_anchor=(1, 1.0))


def _kernels(axis: Any) -> None:
    """Weights by distance, each 1 at distance 1."""
    lags = np.unique(np.geomspace(1, _FARTHEST, 300).round().astype(np.int64))
    for order, colour in zip((0.3, 0.5, 0.7, 0.9), SERIES, strict=True):
        weights = gl_kernel(order, torch.from_numpy(lags)).numpy()
        axis.loglog(lags, weights / weights[0], color=colour, label=f"power law, order {order}")
    for horizon, style in ((10, ":"), (100, "--"), (1000, "-.")):
        label = f"exponential, horizon {horizon:,}"
        axis.loglog(lags, np.exp(-(lags - 1) / horizon), style, color="black", lw=1.2, label=label)
    axis.set(ylim=(1e-5, 1.6), xlabel="distance", ylabel="weight, 1 at distance 1")
    axis.set_title("(a) power laws and exponentials")


def _strip(axis: Any, strip: Mapping[str, Any], title: str) -> None:
    """Orders as bars, filled as far as tokens are written; arcs lead from queries to answers."""
    kinds = np.array(strip["kinds"])
    layer = strip["layers"][0]
    orders, gates = (np.mean(layer[name], axis=0) for name in ("order", "gate"))
    places = np.arange(len(kinds)) + strip["start"]
    for kind, (colour, _) in _KINDS.items():
        where = kinds == kind
        axis.bar(places[where], orders[where], width=0.8, color=colour, zorder=2)
        axis.plot(places[where], gates[where], "_", color="black", ms=3.6, mew=1.3, zorder=3)
    for query, source in enumerate(strip["sources"]):
        if source is not None:
            _arc(axis, places[source], places[query])
    for place, height in zip(places[kinds == "first"], orders[kinds == "first"], strict=True):
        axis.text(place, height + 0.03, "E", ha="center", fontsize=8, weight="bold", color=ORANGE)
    axis.set(xlim=(places[0] - 1, places[-1] + 1), ylim=(-0.34, 1.12))
    axis.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axis.grid(axis="x", visible=False)
    axis.set(xlabel="position in a test sequence", ylabel="order")
    axis.set_title(title)


def _arc(axis: Any, source: float, query: float) -> None:
    """Below the bars, deeper the longer the way."""
    way = np.linspace(0, np.pi, 40)
    depth = 0.06 + 0.24 * min(1.0, (query - source) / 100)
    middle, half = (source + query) / 2, (query - source) / 2
    axis.plot(middle - half * np.cos(way), -0.03 - depth * np.sin(way), color=BLUE, lw=0.9)


def _handles() -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    patches: list[Any] = [Patch(color=colour) for colour, _ in _KINDS.values()]
    gate = Line2D([], [], color="black", marker="_", ls="", mew=1.3)
    return [*patches, gate], [*(label for _, label in _KINDS.values()), "write gate"]


RETRIEVAL_ALLOC = PaperFigure(
    "retrieval-alloc",
    draw,
    "(a) Power-law weights w_j of four orders against exponentials of three horizons, each divided "
    "by its weight at distance 1, computed. (b) Orders that a trained VORT gives to consecutive "
    "tokens of a test sequence (bars) and the share of each token that it writes at all (dash), "
    "mean over heads; E: tokens that show a key with its label, which a query asks for later; arcs "
    "lead from a query to the token that holds its answer. Nothing tells the model which tokens "
    "are entities and training supervises no order; in the paper's figure entities have order 1 "
    "by assumption and the others an order from their entropy.",
    needs=(Need("pilot", "strip"), Need("label_copy", "strip")),
)
