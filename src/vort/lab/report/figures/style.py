"""One look for every figure: print-safe, and told apart without colour vision."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from vort.files import write_atomically

# Okabe and Ito's palette, in an order that also steps in lightness.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, YELLOW, GREY = "#56B4E9", "#E69F00", "#666666"
SERIES = (PURPLE, SKY, GREEN, BLUE)
# For values on a surface: even steps in lightness, so that it survives a black-and-white printer.
SURFACE = "cividis"

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
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "svg.hashsalt": "vort",
}


@contextmanager
def figure(path: str | Path, columns: int, width: float, height: float) -> Iterator[Any]:
    """Axes in a row, drawn in the house style and written to `path` when the block ends."""
    with canvas(path, width, height) as drawing:
        yield drawing.subplots(1, columns, squeeze=False)[0]


@contextmanager
def canvas(path: str | Path, width: float, height: float) -> Iterator[Any]:
    """An empty drawing in the house style for panels of any kind, written as `figure` does.

    The suffix of `path` says the format: .png, .svg or .pdf. The same drawing gives the same file.
    """
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(_RC):
        drawing = plt.figure(figsize=(width, height), layout="constrained")
        try:
            yield drawing
            dated = {"Date": None} if target.suffix == ".svg" else {}
            picture = BytesIO()
            drawing.savefig(picture, format=target.suffix[1:] or "png", metadata=dated)
            write_atomically(target, picture.getvalue())
        finally:
            plt.close(drawing)
