"""Figure alpha-hist: how learned orders are distributed over kinds of tokens."""

from pathlib import Path

from vort.lab.report.paper_figures.figure import Found, Need, PaperFigure
from vort.lab.report.score_figures import draw_orders

__all__ = ["ALPHA_HIST"]

_TASKS = {"pilot": "Zipf retrieval", "label_copy": "label copy", "books": "books"}
_KINDS = {
    "first": "anchor or first mention",
    "again": "query or later mention",
    "entity": "letters of names",
    "rest": "everything else",
}


def draw(path: Path, found: Found) -> None:
    """One panel for each task that the run has."""
    present = {title: found[name]["orders"] for name, title in _TASKS.items() if name in found}
    draw_orders(path, present, _KINDS)


ALPHA_HIST = PaperFigure(
    "alpha-hist",
    draw,
    "Orders that a trained VORT gives to the tokens of test sequences, all heads of the first "
    "layer together, by kind of token; dotted: means. Training supervises no order. In text, names "
    "are found by the rule probe; at laptop scale the texts are source code of Python's standard "
    "library.",
    any_of=tuple(Need(name, "orders") for name in _TASKS),
)
