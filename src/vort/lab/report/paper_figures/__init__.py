"""The paper's figures, one a file, made from our own runs."""

from vort.lab.report.paper_figures.alpha_hist import ALPHA_HIST
from vort.lab.report.paper_figures.captions import caption_of, write_captions
from vort.lab.report.paper_figures.diffusion_plasticity import DIFFUSION_PLASTICITY
from vort.lab.report.paper_figures.figure import Found, Need, PaperFigure
from vort.lab.report.paper_figures.kernels_soe import KERNELS_SOE
from vort.lab.report.paper_figures.overview import OVERVIEW
from vort.lab.report.paper_figures.records import read_records
from vort.lab.report.paper_figures.retrieval_alloc import RETRIEVAL_ALLOC

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
