"""Figure diffusion-plasticity: noise in memory states, and orders by layer after plasticity."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vort.fractional import fractional_sum
from vort.lab.report.figures.paper_figure import Found, Need, PaperFigure
from vort.lab.report.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, SURFACE, canvas

__all__ = ["DIFFUSION_PLASTICITY", "draw_plasticity"]

_SEED = 0
_HURST = 0.8
_KINDS = {
    "first_mention": (ORANGE, "o", "first mentions (E)"),
    "later_mention": (BLUE, "s", "later mentions"),
    "filler": (GREY, "v", "fillers"),
}
_GROUPS = {
    "refined": "free orders, refined",
    "with": r"router trained with $L_{\rm ret}$",
    "without": "router trained without",
}


def draw(path: Path, found: Found) -> None:
    """Panel (a) as a path and as what its spread says; panel (b) below."""
    with canvas(path, 12.6, 8.6) as drawing:
        upper, lower = drawing.subfigures(2, 1, height_ratios=(1.12, 1))
        left, right = upper.subfigures(1, 2, width_ratios=(1, 1.05))
        _path(left.add_subplot(projection="3d"))
        _spread(right.add_subplot())
        _plasticity(lower, found["plasticity"]["plasticity"], "(b) ")


def draw_plasticity(path: str | Path, record: Mapping[str, Any]) -> None:
    """Panel (b) alone: orders token by token and by kind, from a record of the experiment."""
    with canvas(path, 12.6, 4.1) as drawing:
        _plasticity(drawing, record, "")


def _noise(rows: int, steps: int) -> Tensor:
    return torch.randn(
        rows, steps, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64
    )


def _fractional_motion(rows: int, steps: int) -> Tensor:
    """Noise of memory order H - 1/2, summed up by a bank of order 1."""
    return fractional_sum(fractional_sum(_noise(rows, steps), _HURST - 0.5), 1.0)


def _path(axis: Any) -> None:
    steps = 1500
    x, y, z = _fractional_motion(3, steps).numpy()
    axis.computed_zorder = False  # the ends lie on top of the path
    points = axis.scatter(x, y, z, c=np.arange(steps), cmap=SURFACE, s=5, depthshade=False)
    for place, name in ((0, "start"), (-1, "end")):
        axis.scatter(x[place], y[place], z[place], color=ORANGE, s=34, zorder=9)
        axis.text(x[place], y[place], z[place], f"  {name}", fontsize=9, zorder=10)
    axis.set(xlabel="$M_x$", ylabel="$M_y$", zlabel="$M_z$")
    axis.tick_params(labelsize=8)
    axis.view_init(elev=20, azim=-60)
    axis.set_title(f"(a) three components of a state, H = {_HURST}", pad=0, x=-0.02)
    bar = axis.figure.colorbar(points, ax=axis, shrink=0.6, pad=0.11)
    bar.set_label("step")
    bar.outline.set_visible(False)


def _spread(axis: Any) -> None:
    """Mean squared way of a state within τ steps, and the slope 2H that each case must have."""
    rows, steps, settled = 96, 4096, 2048
    white = _noise(rows, steps)
    states = {
        f"order 1, noise of order {_HURST - 0.5:.1f}": (
            _fractional_motion(rows, steps),
            2 * _HURST,
            ORANGE,
        ),
        "order 1, white noise": (fractional_sum(white, 1.0), 1.0, GREEN),
        "order 0.8, white noise": (fractional_sum(white, 0.8), 0.6, BLUE),
        "order 0.6, white noise": (fractional_sum(white, 0.6), 0.2, PURPLE),
    }
    ways = np.unique(np.geomspace(1, 1000, 25).round().astype(int))
    for label, (state, slope, colour) in states.items():
        late = state[:, settled:]
        squares = [float((late[:, way:] - late[:, :-way]).square().mean()) for way in ways]
        name = f"{label}: H = {slope / 2:.1f}"
        axis.loglog(ways, squares, "o", ms=4, color=colour, label=name)
        # Fitted in height alone: the slope is the theory's.
        height = np.exp(np.mean(np.log(squares[8:]) - slope * np.log(ways[8:])))
        axis.loglog(ways, height * ways**slope, color=colour, lw=1.2)
    axis.set(xlabel=r"steps $\tau$", ylabel=r"mean $|M_{t+\tau} - M_t|^2$")
    axis.set_title("(a) what such a path takes: points measured, lines slope $2H$")
    axis.legend(fontsize=8.5, title="bank and what it is fed", title_fontsize=8.5)


def _plasticity(drawing: Any, record: Mapping[str, Any], name: str) -> None:
    """One sequence token by token, and means by kind: free orders, trained with and without."""
    left, right = drawing.subfigures(1, 2, width_ratios=(1.08, 1))
    _tokens(left.add_subplot(), record["refined"]["runs"][0]["example"], name)
    axes = right.subplots(1, len(_GROUPS), sharey=True)
    for axis, (group, title) in zip(axes, _GROUPS.items(), strict=True):
        _by_layer(axis, record[group]["runs"], start=group == "refined")
        axis.set_title(title, fontsize=9.5)
    axes[0].set_ylabel("order, mean and 95 % interval")
    axes[1].set_xlabel("layer")
    handles = axes[-1].get_legend_handles_labels()
    right.legend(*handles, loc="outside lower center", ncols=3, fontsize=9)


def _tokens(axis: Any, example: Mapping[str, Any], name: str) -> None:
    orders = np.array(example["orders"])
    image = axis.imshow(orders, origin="lower", aspect="auto", cmap=SURFACE, vmin=0, vmax=1)
    kinds = np.array(example["kinds"])
    for kind, height in (("first_mention", 0.62), ("later_mention", 0.58)):
        colour, marker, _ = _KINDS[kind]
        for place in np.flatnonzero(kinds == kind):
            y = len(orders) - 1 + height
            if kind == "first_mention":
                axis.text(place, y - 0.07, "E", ha="center", color=colour, weight="bold")
            else:
                axis.plot(place, y, marker, color=colour, ms=3.5, clip_on=False)
    axis.grid(visible=False)
    axis.spines[:].set_visible(False)
    axis.set_yticks(range(len(orders)), ["start", *(str(n) for n in range(1, len(orders)))])
    axis.set(xlim=(-0.5, orders.shape[1] - 0.5), ylim=(-0.5, len(orders) - 0.5))
    axis.set(xlabel="token (E: first mention, square: later mention)", ylabel="after layer")
    axis.set_title(f"{name}orders of one sequence, refined layer by layer", pad=22)
    bar = axis.figure.colorbar(image, ax=axis, pad=0.02)
    bar.set_label("order")
    bar.outline.set_visible(False)


def _by_layer(axis: Any, runs: Any, *, start: bool) -> None:
    from vort.lab.training.metrics import interval

    layers = np.arange(1, len(runs[0]["orders"]) + 1)
    for number, (kind, (colour, marker, label)) in enumerate(_KINDS.items()):
        over = [interval([run["orders"][n - 1][kind] for run in runs]) for n in layers]
        means = [found.mean for found in over]
        halves = [found.half if found.count > 1 else 0.0 for found in over]
        line = {"color": colour, "marker": marker, "ms": 5, "capsize": 3, "label": label}
        # Side by side, or intervals would hide one another.
        places = layers + 0.09 * (number - 1)
        axis.errorbar(places, means, halves, **line)
        if start:
            axis.plot([0, places[0]], [0.5, means[0]], color=colour, lw=1, ls=":")
    if start:
        axis.plot(0, 0.5, "k.", ms=7)
    axis.set_xticks([*([0] if start else []), *layers])
    axis.set_xticklabels([*(["start"] if start else []), *map(str, layers)])
    axis.set(xlim=(-0.25 if start else 0.6, layers[-1] + 0.4), ylim=(0, 1.03))


DIFFUSION_PLASTICITY = PaperFigure(
    "diffusion-plasticity",
    draw,
    "(a) Left: a path of Hurst exponent .8 through three components of a memory state, coloured "
    "by time; right: the mean squared way of states within τ steps, measured over 96 runs. A bank "
    "of order a > 1/2 that is fed white noise has H = a - 1/2, at most a random walk's (order 1); "
    "of a lower order its spread stays bounded. The persistent drift of the paper's path (H = .8) "
    "is no doing of the kernel, whose order would have to be 1.3: it takes inputs that remember, "
    "here noise of order .3, summed by a bank of order 1. "
    "(b) Left: orders of one held-out sequence of label copy, one for each token, "
    "refined by gradient descent on the retrieval loss in one layer after the other, from .5; "
    "what is written late hardly stands in the way of any query and hardly moves. Right: mean "
    "orders by kind of token and layer, with 95 % intervals over seeds, for these and for the "
    "router of a model trained with the retrieval loss and without it. Free orders of first "
    "mentions, which later tokens ask for, rise; later mentions are entities too and fall with the "
    "fillers, for nobody asks for them (errata, E23).",
    needs=(Need("plasticity", "plasticity"),),
    seed=_SEED,
)
