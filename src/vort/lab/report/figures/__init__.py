"""Every picture of the lab: the paper's figures, made from our runs, and those of the tables."""

from vort.lab.report.figures.diffusion_plasticity import DIFFUSION_PLASTICITY
from vort.lab.report.figures.kernels import KERNELS_SOE
from vort.lab.report.figures.overview import OVERVIEW
from vort.lab.report.figures.paper_figure import (
    Found,
    Need,
    PaperFigure,
    caption_of,
    read_records,
    write_captions,
)
from vort.lab.report.figures.results import ALPHA_HIST
from vort.lab.report.figures.retrieval_alloc import RETRIEVAL_ALLOC

__all__ = [
    "PAPER_FIGURES",
    "Found",
    "Need",
    "PaperFigure",
    "caption_of",
    "read_records",
    "write_captions",
]

# In the order of the paper.
PAPER_FIGURES = (OVERVIEW, RETRIEVAL_ALLOC, DIFFUSION_PLASTICITY, KERNELS_SOE, ALPHA_HIST)
