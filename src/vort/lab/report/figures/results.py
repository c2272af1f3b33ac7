"""Figures made of the results of cells: accuracy by lag, bits by position, cost, and alpha-hist."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from vort.lab.report.figures.paper_figure import Found, Need, PaperFigure
from vort.lab.report.figures.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    YELLOW,
    canvas,
    figure,
)

__all__ = [
    "ALPHA_HIST",
    "draw_by_lag",
    "draw_by_position",
    "draw_cost",
    "draw_orders",
    "draw_reading",
    "line_looks",
]

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, GREY)
_DASHES = ("-", "--", "-.", ":")
_MARKERS = "os^DvPX<>"
# Percent of wrong answers that are drawn as none on a logarithmic axis.
_NEVER = 0.02
# What figure alpha-hist shows, as far as a run has it.
_ORDERS = {
    Need("pilot", "orders"): "Zipf retrieval",
    Need("books", "orders"): "books",
    Need("label_copy", "orders"): "label copy",
    Need("ablations", "orders", model="vort_no_entity"): "label copy, entities not told",
    Need("ablations", "orders", model="vort_with_inputs"): "label copy, entities told",
}
_KINDS = {
    "first": "anchor or first mention",
    "again": "query or later mention",
    "entity": "letters of names",
    "rest": "everything else",
}
Record = Mapping[str, Any]


def line_looks() -> Iterator[dict[str, Any]]:
    """Looks such that no two of the first 28 curves are alike; of one colour, two things differ."""
    for number, colour in enumerate(cycle(_COLOURS)):
        dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
        yield {"color": colour, "ls": dash, "marker": _MARKERS[number % len(_MARKERS)], "ms": 4.5}


def draw_by_lag(path: str | Path, curves: Mapping[str, Sequence[Record]], title: str) -> None:
    """Accuracy against lag, one curve a model, bands over seeds; beside it what is wrong.

    The latter on a logarithmic axis, where those that are nearly always right lie apart. What is
    never wrong stands at its lower end.
    """
    with figure(path, 2, 12.6, 4.6) as (left, right):
        for (label, records), line in zip(curves.items(), line_looks(), strict=False):
            lags, values = _by_lag(records)
            ours = label.startswith("VORT (")
            look = {"lw": 2.6, "zorder": 3} if ours else {"lw": 1.5}
            left.plot(lags, 100 * values.mean(0), label=label, **look, **line)
            wrong = np.maximum(100 * (1 - values.mean(0)), _NEVER)
            right.plot(lags, wrong, label=label, **look, **line)
            if len(values) > 1:
                low, high = 100 * values.min(0), 100 * values.max(0)
                left.fill_between(lags, low, high, color=line["color"], alpha=0.12, lw=0)
        left.set(xscale="log", xlabel="lag", ylabel="accuracy (%)", ylim=(0, 102), title=title)
        right.set(xscale="log", yscale="log", xlabel="lag", ylabel="wrong (%)")
        right.set(ylim=(0.8 * _NEVER, 110), title="The same, wrong answers")
        right.yaxis.set_major_formatter("{x:g}")
        right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _by_lag(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Middles of the lag classes that all records have, and accuracies `[seeds, classes]`."""
    tables = [{(x["low"], x["high"]): x["accuracy"] for x in r["lags"]} for r in records]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    middles = np.array([np.sqrt(low * high) for low, high in shared])
    return middles, np.array([[table[key] for key in shared] for table in tables])


def draw_by_position(
    path: str | Path, curves: Mapping[str, Sequence[Record]], buckets: Sequence[str]
) -> None:
    """Bits per character in each class of positions, mean and range over seeds."""
    places = np.arange(len(buckets))
    with figure(path, 1, 8.4, 4.2) as (axis,):
        for (label, records), line in zip(curves.items(), line_looks(), strict=False):
            bits = np.array([[r["test"][b]["bits"] for b in buckets] for r in records])
            mean = bits.mean(0)
            spread = np.abs(np.stack([bits.min(0), bits.max(0)]) - mean)
            width = 2.6 if label.startswith("VORT (") else 1.5
            axis.errorbar(places, mean, spread, label=label, lw=width, capsize=2, **line)
        axis.set_xticks(places, buckets)
        axis.set(xlabel="position in the window", ylabel="bits per character")
        axis.set_title("Bits by position: what a memory adds to a window")
        axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def draw_reading(
    path: str | Path, curves: Mapping[str, Mapping[int, float]], trained: int, title: str
) -> None:
    """Bits against position, and bits more than the first row; dotted: the trained length.

    The second picture ends where the rows do that lie together: one far off leaves it.

    curves: of each row, the bits of every class by where that ends; a point stands in its middle.
    """
    ours = next(iter(curves.values()))
    more = {
        label: {end: bits[end] - ours[end] for end in bits if end in ours}
        for label, bits in curves.items()
    }
    with figure(path, 2, 12.6, 4.4) as (left, right):
        for (label, bits), line in zip(curves.items(), line_looks(), strict=False):
            width = 2.6 if bits is ours else 1.5
            for axis, values in ((left, bits), (right, more[label])):
                ends = np.array(sorted(values))
                # Of the first class, which begins at 0, the middle in the logarithm is nowhere.
                begins = np.append(ends[0] / 4, ends[:-1])
                points = [values[int(end)] for end in ends]
                axis.plot(np.sqrt(begins * ends), points, label=label, lw=width, **line)
        for axis in (left, right):
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:,.0f}")
            axis.axvline(trained, color=GREY, ls=":", lw=1.2)
        left.set_yscale("log")
        for part in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
            part(lambda bits, place: f"{bits:.4g}")
        left.set(xlabel="position", ylabel="bits per character", title=title)
        largest = sorted(max(map(abs, values.values())) for values in more.values())
        near = 1.15 * largest[len(largest) * 3 // 4]
        least = min(min(values.values()) for values in more.values())
        if near:
            right.set_ylim(1.15 * max(least, -near) - 0.05 * near, near)
        right.set(xlabel="position", title=f"Bits more than {next(iter(curves))}")
        right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def draw_cost(path: str | Path, curves: Mapping[str, Sequence[Record]]) -> None:
    """Milliseconds and peak MiB of a layer against length, both axes logarithmic."""
    from matplotlib.ticker import LogLocator

    with figure(path, 2, 9.6, 3.8) as (left, right):
        for (label, records), line in zip(curves.items(), line_looks(), strict=False):
            lengths = [r["length"] for r in records]
            times = [1e3 * r["times"]["forward_backward"] for r in records]
            peaks = [r["peak_bytes"] / 2**20 for r in records]
            left.loglog(lengths, times, label=label, **line)
            right.loglog(lengths, peaks, label=label, **line)
        for axis in (left, right):
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda x, place: f"{x / 1024:g}K")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter(lambda y, place: f"{y:,g}")
            axis.minorticks_off()
        left.set(xlabel="length", ylabel="ms", title="Forward and backward")
        right.set(xlabel="length", ylabel="MiB", title="Peak memory")
        left.legend(fontsize=8)


def draw_orders(path: str | Path, tasks: Mapping[str, Any], kinds: Mapping[str, str]) -> None:
    """Histograms of orders by kind of token, one panel a task (figure alpha-hist)."""
    columns = 2 if len(tasks) == 4 else min(len(tasks), 3)
    rows = -(-len(tasks) // columns)
    with canvas(path, 4.6 * columns, 3.6 * rows) as drawing:
        axes = drawing.subplots(rows, columns, squeeze=False)
        for axis in axes.flat[len(tasks) :]:
            axis.set_axis_off()
        for axis, (title, orders) in zip(axes.flat, tasks.items(), strict=False):
            bins = np.linspace(0, 1, orders["bins"] + 1)
            layer = {kind: found for kind, found in orders["layers"][0].items() if found["count"]}
            for (kind, found), colour in zip(layer.items(), (ORANGE, GREEN, BLUE), strict=False):
                label = f"{kinds.get(kind, kind)}, mean {found['mean']:.2f}"
                axis.stairs(found["histogram"], bins, color=colour, fill=True, alpha=0.2)
                axis.stairs(found["histogram"], bins, color=colour, label=label, lw=1.6)
                axis.axvline(found["mean"], ymax=0.72, color=colour, ls=":", lw=1.2)
            # Room for the legend, which would hide the highest bars.
            highest = max((max(found["histogram"]) for found in layer.values()), default=1.0)
            axis.set(xlabel="order", title=title, xlim=(0, 1), ylim=(0, 1.38 * highest))
            axis.legend(fontsize=8, loc="upper left")
        for axis in axes[:, 0]:
            axis.set_ylabel("share of tokens and heads")


def _alpha_hist(path: Path, found: Found) -> None:
    """One panel for each model that the run has."""
    present = {
        title: found[need.source]["orders"]
        for need, title in _ORDERS.items()
        if need.source in found
    }
    draw_orders(path, present, _KINDS)


ALPHA_HIST = PaperFigure(
    "alpha-hist",
    _alpha_hist,
    "Orders that a trained VORT gives to the tokens of test sequences, all heads of the first "
    "layer together, by kind of token; dotted: means. Training supervises no order. Two panels of "
    "label copy differ in one thing: whether the router is told who is an entity (eq. routing); "
    "both have a window of local attention and are told its entropy. In text, names are found by "
    "the rule probe; at laptop scale the texts are source code of Python's standard library.",
    any_of=tuple(_ORDERS),
)
