"""Figure alpha-hist: how learned orders are distributed over kinds of tokens."""

from collections.abc import Sequence
from pathlib import Path

from vort.lab.experiments.cell import Size
from vort.lab.experiments.experiment import Experiment, Figure, Record, Summary
from vort.lab.experiments.scores import seeds_of
from vort.lab.report.tables import Sheet
from vort.lab.training.metrics import interval
from vort.lab.verdicts import Claim

__all__ = ["ORDERS"]

# In each task, the kind that the paper expects to be remembered longest, and what it is held
# against.
_PAIRS = {"books": ("entity", "other letters")}
# A difference that one seed may be believed about.
_CLEAR = 0.05
_NAMES = {"zipf_retrieval": "Zipf retrieval", "label_copy": "label copy", "books": "books"}
_KINDS = {"first": "anchor or first mention", "again": "query or later mention"}


def summarise(records: Sequence[Record], size: Size) -> Summary:
    """Mean orders by kind and task, and whether entities come out higher."""
    by_task: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if "orders" in record:
            place = record["cell"]["task"], record["cell"].get("set", "")
            by_task.setdefault(place, []).append(record)
    rows, claims = [], []
    for place, members in by_task.items():
        for kind in members[0]["orders"]["layers"][0]:
            means = [_mean(member, kind) for member in members]
            found = interval([m for m in means if m is not None])
            half = "" if found.count < 2 else f" ± {found.half:.3f}"
            rows.append([_name(*place), _KINDS.get(kind, kind), f"{found.mean:.3f}{half}"])
        # Nothing is claimed of changed settings.
        if not place[1]:
            claims.append(_claim(place[0], members))
    sheet = Sheet("Learned orders, mean over heads", ["task", "tokens", "order"], rows)

    def draw(path: Path) -> None:
        from vort.lab.report.figures.results import draw_orders

        pictures = {_name(*place): members[0]["orders"] for place, members in by_task.items()}
        draw_orders(path, pictures, _KINDS)

    caption = "Orders of the first seed's VORT, all heads together, by kind of token (first layer)."
    figures = [Figure("orders.png", caption, draw)] if rows else []
    return Summary([sheet] if rows else [], claims, figures)


def _name(task: str, changes: str = "") -> str:
    name = _NAMES.get(task, task.replace("_", " "))
    return f"{name} [{changes}]" if changes else name


def _mean(record: Record, kind: str) -> float | None:
    values = [layer[kind]["mean"] for layer in record["orders"]["layers"] if layer[kind]["count"]]
    return sum(values) / len(values) if values else None


def _claim(task: str, members: Sequence[Record]) -> Claim:
    high, low = _PAIRS.get(task, ("first", "filler"))
    pairs = [(_mean(member, high), _mean(member, low)) for member in members]
    gaps = [a - b for a, b in pairs if a is not None and b is not None]
    states = "entities (what must be remembered) get higher orders than other tokens"
    if not gaps:
        return Claim(
            "figure alpha-hist", f"{states}: {_name(task)}", "no entities", "not reproduced"
        )
    found = interval(gaps)
    half = "" if found.count < 2 else f" ± {found.half:.3f}"
    clear = found.low > 0 if found.count > 1 else found.mean > _CLEAR
    return Claim(
        "figure alpha-hist",
        f"{states}: {_name(task)}",
        f"difference {found.mean:+.3f}{half}, {seeds_of(found)}",
        "reproduced" if clear else "not reproduced",
    )


ORDERS = Experiment(
    name="orders",
    title="Learned orders (figure alpha-hist)",
    about="Orders of VORT's tokens by kind, from the models of the other experiments; in text, "
    "names are found by the rule probe.",
    summarise=summarise,
    uses=("pilot", "label_copy", "books"),
)
