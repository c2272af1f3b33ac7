"""One look for every figure: print-safe, and told apart without colour vision."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Okabe and Ito's palette, in an order that also steps in lightness.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, YELLOW, GREY = "#56B4E9", "#E69F00", "#666666"
SERIES = (PURPLE, SKY, GREEN, BLUE)

_RC = {
    "figure.dpi": 110,
    "savefig.dpi": 160,
    "savefig.bbox": "tight",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.hashsalt": "vort",
}


@contextmanager
def figure(path: str | Path, columns: int, width: float, height: float) -> Iterator[Any]:
    """Axes in a row, drawn in the house style and written to `path` when the block ends."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(_RC):
        drawing, axes = plt.subplots(
            1, columns, figsize=(width, height), squeeze=False, layout="constrained"
        )
        try:
            yield axes[0]
            drawing.savefig(target)
        finally:
            plt.close(drawing)
