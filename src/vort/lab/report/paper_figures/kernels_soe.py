"""Figure kernels-soe: weights on log-log axes, and the convergence of sums of exponentials."""

from pathlib import Path

from vort.fractional import PowerLawBasis
from vort.lab.report.kernel_figures import draw_kernels_soe
from vort.lab.report.paper_figures.figure import Found, PaperFigure

__all__ = ["KERNELS_SOE"]

_HORIZON = 1000


def draw(path: Path, found: Found) -> None:
    """The figure of `vort reproduce --only kernel`; no run is needed."""
    draw_kernels_soe(path, _HORIZON, PowerLawBasis.fit(_HORIZON, 8))


KERNELS_SOE = PaperFigure(
    "kernels-soe",
    draw,
    "(a) Weights w_j of four orders and the paper's exponential e^{-.025 j}, computed. (b) Worst "
    "absolute error of a sum of S exponentials at order .5 for lags to 1000: the paper's "
    "quadrature as printed, with the density corrected, with E1 to E4 corrected (docs/errata.md), "
    "and the rates that this library shares among all orders, each at its worst order. Right, not "
    "in the paper: relative error by lag at order .7.",
)
