"""Figure alpha-hist: how learned orders are distributed over kinds of tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vort.lab.experiments.cell import Size
from vort.lab.experiments.experiment import Experiment, Figure, Record, Summary
from vort.lab.experiments.scores import seed_interval, seeds_of, show
from vort.lab.report.tables import Sheet
from vort.lab.verdicts import Claim, judge_sign

__all__ = ["ORDERS"]

# In each task, the kind that the paper expects to be remembered longest, and what it is held
# against.
_PAIRS = {"books": ("entity", "other letters")}
_NAMES = {"zipf_retrieval": "Zipf retrieval", "label_copy": "label copy", "books": "books"}
_KINDS = {"first": "anchor or first mention", "again": "query or later mention"}
# Rows of the ablations on label copy, by what their router is fed beside the hidden state. The
# paper's has both; of the second and the third only the entity indicator tells the first apart.
_FED = {
    "vort": "",
    "vort_with_inputs": "fed entity and entropy",
    "vort_no_entity": "fed entropy alone",
    "vort_no_entropy": "fed entity alone",
    "vort_no_inputs": "fed neither",
}
_IN_FIGURE = ("vort", "vort_with_inputs", "vort_no_entity")


class Place(NamedTuple):
    """Which models belong together: a task, what the router is fed, and changed settings."""

    task: str
    model: str
    changes: str

    def __str__(self) -> str:
        """As people say it."""
        name = _NAMES.get(self.task, self.task.replace("_", " "))
        fed = _FED[self.model]
        return (f"{name}, {fed}" if fed else name) + (f" [{self.changes}]" if self.changes else "")


def summarise(records: Sequence[Record], size: Size) -> Summary:
    """Mean orders by kind and task, and whether entities come out higher."""
    found: dict[Place, list[Record]] = {}
    for record in records:
        cell = record["cell"]
        if "orders" in record and cell["model"] in _FED:
            place = Place(cell["task"], cell["model"], cell.get("set", ""))
            found.setdefault(place, []).append(record)
    rows, claims = [], []
    for place, members in found.items():
        for kind in members[0]["orders"]["layers"][0]:
            means = [(member["cell"]["seed"], _mean(member, kind)) for member in members]
            over = seed_interval((seed, mean) for seed, mean in means if mean is not None)
            rows.append([str(place), _KINDS.get(kind, kind), show(over, 3)])
        # Nothing is claimed of changed settings, nor of what is there for comparison.
        if not place.changes and place.model in ("vort", "vort_with_inputs"):
            claims.append(_claim(place, members))
    sheet = Sheet("Learned orders, mean over heads", ["task", "tokens", "order"], rows)

    def draw(path: Path) -> None:
        from vort.lab.report.figures.results import draw_orders

        pictures = {
            str(place): members[0]["orders"]
            for place, members in found.items()
            if place.model in _IN_FIGURE
        }
        draw_orders(path, pictures, _KINDS)

    caption = (
        "Orders of the first seed's VORT, all heads together, by kind of token (first layer); "
        "where it is said, the router is fed who is an entity."
    )
    figures = [Figure("orders.png", caption, draw)] if rows else []
    return Summary([sheet] if rows else [], claims, figures)


def _mean(record: Record, kind: str) -> float | None:
    values = [layer[kind]["mean"] for layer in record["orders"]["layers"] if layer[kind]["count"]]
    return sum(values) / len(values) if values else None


def _claim(place: Place, members: Sequence[Record]) -> Claim:
    high, low = _PAIRS.get(place.task, ("first", "filler"))
    pairs = [(m["cell"]["seed"], _mean(m, high), _mean(m, low)) for m in members]
    gaps = [(seed, a - b) for seed, a, b in pairs if a is not None and b is not None]
    states = "entities (what must be remembered) get higher orders than other tokens"
    found = seed_interval(gaps)
    if found is None:
        return Claim("figure alpha-hist", f"{states}: {place}", "no entities", "undecided")
    half = "" if found.count < 2 else f" ± {found.half:.3f}"
    return Claim(
        "figure alpha-hist",
        f"{states}: {place}",
        f"difference {found.mean:+.3f}{half}, {seeds_of(found)}",
        judge_sign([found]),
    )


ORDERS = Experiment(
    name="orders",
    title="Learned orders (figure alpha-hist)",
    about="Orders of VORT's tokens by kind, from the models of the other experiments; in text, "
    "names are found by the rule probe. On label copy also with a router that is fed who is an "
    "entity, and without, from the ablations.",
    summarise=summarise,
    uses=("pilot", "label_copy", "books", "ablations"),
)
