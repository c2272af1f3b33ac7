"""Figure alpha-hist: how learned orders are distributed over kinds of tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vort.lab.experiments.cell import Cell, Scale
from vort.lab.experiments.claims import Claim
from vort.lab.experiments.experiment import Experiment, Figure, Summary
from vort.lab.experiments.scores import seeds_of
from vort.lab.report.tables import Sheet
from vort.lab.training.metrics import interval

__all__ = ["ORDERS"]

# In each task, the kind that the paper expects to be remembered longest, and what it is held
# against.
_PAIRS = {
    "zipf_retrieval": ("first", "filler"),
    "label_copy": ("first", "filler"),
    "books": ("entity", "other letters"),
}
# A difference that one seed may be believed about.
_CLEAR = 0.05
_NAMES = {"zipf_retrieval": "Zipf retrieval", "label_copy": "label copy", "books": "books"}
_KINDS = {"first": "anchor or first mention", "again": "query or later mention"}


def cells(scale: Scale, data: Path | None = None) -> list[Cell]:
    """None of its own: VORT's cells of the pilot, label copy and books keep their orders."""
    return []


def summarise(records: Sequence[Mapping[str, Any]], scale: Scale) -> Summary:
    """Mean orders by kind and task, and whether entities come out higher."""
    by_task: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        if "orders" in record:
            by_task.setdefault(record["cell"]["task"], []).append(record)
    rows, claims = [], []
    for task, members in by_task.items():
        for kind in members[0]["orders"]["layers"][0]:
            means = [_mean(member, kind) for member in members]
            found = interval([m for m in means if m is not None])
            half = "" if found.count < 2 else f" ± {found.half:.3f}"
            rows.append([_NAMES[task], _KINDS.get(kind, kind), f"{found.mean:.3f}{half}"])
        claims.append(_claim(task, members))
    sheet = Sheet("Learned orders, mean over heads", ["task", "tokens", "order"], rows)

    def draw(path: Path) -> None:
        from vort.lab.report.figures.results import draw_orders

        pictures = {_NAMES[task]: members[0]["orders"] for task, members in by_task.items()}
        draw_orders(path, pictures, _KINDS)

    caption = "Orders of the first seed's VORT, all heads together, by kind of token (first layer)."
    figures = [Figure("orders.png", caption, draw)] if rows else []
    return Summary([sheet] if rows else [], claims, figures)


def _mean(record: Mapping[str, Any], kind: str) -> float | None:
    values = [layer[kind]["mean"] for layer in record["orders"]["layers"] if layer[kind]["count"]]
    return sum(values) / len(values) if values else None


def _claim(task: str, members: Sequence[Mapping[str, Any]]) -> Claim:
    high, low = _PAIRS[task]
    pairs = [(_mean(member, high), _mean(member, low)) for member in members]
    gaps = [a - b for a, b in pairs if a is not None and b is not None]
    states = "entities (what must be remembered) get higher orders than other tokens"
    if not gaps:
        return Claim(
            "figure alpha-hist", f"{states}: {_NAMES[task]}", "no entities", "not reproduced"
        )
    found = interval(gaps)
    half = "" if found.count < 2 else f" ± {found.half:.3f}"
    clear = found.low > 0 if found.count > 1 else found.mean > _CLEAR
    return Claim(
        "figure alpha-hist",
        f"{states}: {_NAMES[task]}",
        f"difference {found.mean:+.3f}{half}, {seeds_of(found)}",
        "reproduced" if clear else "not reproduced",
    )


ORDERS = Experiment(
    "orders",
    "Learned orders (figure alpha-hist)",
    "Orders of VORT's tokens by kind, from the models of the other experiments; in text, names are "
    "found by the rule probe.",
    cells,
    summarise,
    uses=("pilot", "label_copy", "books"),
)
