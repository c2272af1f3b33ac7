"""Figures of long texts: maps by length and depth, and accuracy against the size of the state."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vort.lab.report.figures.results import line_looks
from vort.lab.report.figures.style import SURFACE, canvas, figure

__all__ = ["draw_by_state", "draw_needle_maps"]

Map = Sequence[Sequence[float | None]]
# Beside each other on a page; more go below.
_MAPS_IN_A_ROW = 6


def draw_needle_maps(
    path: str | Path,
    maps: Mapping[str, Mapping[str, Map]],
    lengths: Sequence[int],
    depths: Sequence[float],
    kinds: Mapping[str, str],
    trained: int,
) -> None:
    """Percent by length (across) and depth (down): a column a model, a row a kind of question.

    More models than fit beside each other go on below.

    Args:
        path: of the picture.
        maps: by model and kind, a list of depths for each length; None: not measured.
        lengths: in tokens.
        depths: from 0 to 1.
        kinds: their names for people.
        trained: the longest length in training.
    """
    kept = list(maps.items())
    bands = [kept[first : first + _MAPS_IN_A_ROW] for first in range(0, len(kept), _MAPS_IN_A_ROW)]
    columns = max((len(band) for band in bands), default=1)
    rows = max(len(bands), 1) * len(kinds)
    with canvas(path, 1.1 + 2.5 * columns, 0.7 + 2.6 * rows) as drawing:
        axes = drawing.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        image = None
        for number, band in enumerate(bands):
            block = axes[number * len(kinds) : (number + 1) * len(kinds)]
            for axis in block[:, len(band) :].flat:
                axis.set_visible(False)
            for column, (label, of_model) in enumerate(band):
                block[0, column].set_title(_wrapped(label), fontsize=9)
                for axis, kind in zip(block[:, column], kinds, strict=True):
                    image = _draw_map(axis, of_model[kind], lengths, trained)
                below = block[-1, column]
                names = [_short(length) for length in lengths]
                below.set_xticks(range(len(lengths)), names, fontsize=8)
                below.tick_params(labelbottom=True)
                below.set_xlabel("tokens", fontsize=9)
            for axis, words in zip(block[:, 0], kinds.values(), strict=True):
                axis.set_ylabel(f"{words}\ndepth", fontsize=9)
                shown = range(0, len(depths), 3)
                axis.set_yticks(list(shown), [f"{depths[at]:.0%}" for at in shown], fontsize=8)
        if image is not None:
            drawing.colorbar(image, ax=axes, label="right (%)", shrink=0.7)


def _draw_map(axis: Any, found: Map, lengths: Sequence[int], trained: int) -> Any:
    """One model's answers of one kind; dashed, the longest length in training."""
    values = np.array([[np.nan if x is None else x for x in row] for row in found]).T
    axis.set_facecolor("#dddddd")
    image = axis.imshow(values, aspect="auto", cmap=SURFACE, vmin=0, vmax=100)
    axis.grid(visible=False)
    longest = np.searchsorted(lengths, trained, side="right") - 0.5
    if longest > -0.5:
        axis.axvline(longest, color="white", ls="--", lw=1.2)
    return image


def _short(length: int) -> str:
    return f"{length // 1024}K" if length >= 1024 else str(length)


def _wrapped(label: str, width: int = 24) -> str:
    """A label on lines of no more than so many characters, words whole."""
    lines = [""]
    for word in label.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def draw_by_state(
    path: str | Path, panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]]
) -> None:
    """Accuracy against bytes of state on a logarithmic axis, one curve a model, one panel a task.

    panels: by title and model, (bytes, percent) of each width.
    """
    with figure(path, len(panels), 1.8 + 3.4 * len(panels), 3.6) as axes:
        for axis, (title, curves) in zip(axes, panels.items(), strict=True):
            for (label, points), look in zip(curves.items(), line_looks(), strict=False):
                places, values = zip(*sorted(points), strict=True)
                width = 2.6 if label.startswith("VORT (") else 1.5
                axis.plot(places, values, label=label, lw=width, **look)
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda x, place: f"{x / 1024:g}K")
            axis.minorticks_off()
            axis.set(xlabel="state, bytes", ylim=(0, 102), title=title)
        axes[0].set_ylabel("accuracy (%)")
        axes[-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
