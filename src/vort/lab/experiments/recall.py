"""What the two recall tables share: cells of a task, and a summary with the paper's claims."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vort.lab.experiments.cell import Cell, Scale
from vort.lab.experiments.claims import Claim
from vort.lab.experiments.experiment import Figure, Summary
from vort.lab.experiments.models import MODELS
from vort.lab.experiments.scores import (
    PaperTable,
    group_by_model,
    label_of,
    margin,
    score_sheet,
    seeds_of,
    show,
    training_notes,
    verdict_on_gain,
)
from vort.lab.experiments.sizes import recall_config
from vort.lab.experiments.tuned import tuned

__all__ = ["LAPTOP_NOTE", "recall_cell", "recall_claims", "recall_summary"]

LAPTOP_NOTE = (
    "Laptop size: a smaller model on shorter sequences, with lag classes shortened in proportion. "
    "Verdicts against the paper's figures are about direction; its sizes need --scale paper."
)

# For models and scales that were not searched.
_UNTUNED: dict[Scale, float] = {"laptop": 4e-3, "paper": 2e-3}
# Rows whose time in training is quadratic.
QUADRATIC = ("softmax",)


def recall_cell(
    experiment: str,
    scale: Scale,
    model: str,
    seed: int,
    task: Mapping[str, Any],
    training: Mapping[str, Any],
    *,
    settings: Mapping[str, Any] | None = None,
    **rest: Any,
) -> Cell:
    """A cell of a recall table: the row's settings at this scale, with its tuned rates.

    settings: of the model, where it is no row of `MODELS`.
    """
    # Ablations are held against the table of their task.
    table = {"label_copy": "label_copy"}.get(task["name"], "pilot")
    found = tuned(table, scale, model, _UNTUNED[scale])
    row = dict(MODELS[model].settings if settings is None else settings)
    config = recall_config(scale, row)
    if row.get("memory") == "exponential" and not row.get("learn_rates", True):
        config["exponential_rate"] = found.pop("exponential_rate", 10 / task["length"])
    found.pop("exponential_rate", None)
    return Cell(
        experiment=experiment,
        scale=scale,
        model=model,
        seed=seed,
        task={**task, "seed": seed},
        config=config,
        training={**training, **found},
        **rest,
    )


def recall_claims(
    records: Sequence[Mapping[str, Any]], table: PaperTable, buckets: Sequence[str]
) -> list[Claim]:
    """The paper's claims about a recall table that can be computed from these results."""
    found = group_by_model(records)
    long = buckets[-1]
    claims = []
    for suffix in ("_favor", ""):
        names = [f"{name}{suffix}" for name in ("power_law", "exponential", "mixture")]
        claims += [
            _kernel_claim(found, names[0], rival, long, table)
            for rival in names[1:]
            if names[0] in found and rival in found
        ]
    if "vort" in found:
        claims += _own_claim(found, long, table)
    return claims


def _kernel_claim(
    found: Mapping[str, list[Mapping[str, Any]]],
    ours: str,
    rival: str,
    long: str,
    table: PaperTable,
) -> Claim:
    compared = margin(found[ours], found[rival], long, table)
    rows = [table.rows[MODELS[name].paper_row][-1] for name in (ours, rival)]
    paper = table.sign * (rows[0] - rows[1])
    gain = compared.difference
    return Claim(
        f"table {table.label}",
        f"{label_of(ours)} is {paper:.1f} points better than {label_of(rival)} at long lags",
        f"{show(gain, 1)} points, {seeds_of(gain)}",
        verdict_on_gain(paper, compared, table),
    )


def _own_claim(
    found: Mapping[str, list[Mapping[str, Any]]], long: str, table: PaperTable
) -> list[Claim]:
    rivals = [name for name in found if name != "vort" and name not in QUADRATIC]
    if not rivals:
        return []
    gains = {name: margin(found["vort"], found[name], long, table) for name in rivals}
    closest = min(gains, key=lambda name: gains[name].difference.mean)
    gain = gains[closest].difference
    clear = all(gain.beyond(table.tolerance) for gain in gains.values())
    room = "the interval over seeds" if gain.count > 1 else f"{table.tolerance:g} points"
    return [
        Claim(
            "ours",
            "VORT (ours) is better at long lags than every rival that trains in linear time, by "
            f"more than {room}",
            f"closest is {label_of(closest)}: {show(gain, 1)} points, {seeds_of(gain)}",
            "holds" if clear else "does not hold",
        )
    ]


def recall_summary(
    title: str, records: Sequence[Mapping[str, Any]], table: PaperTable, scale: Scale
) -> Summary:
    """Table, claims and accuracy by lag of a recall task."""
    if not records:
        return Summary([])
    order = list(records[0]["test"])
    buckets = [name for name in order if name != "all"]
    shown = [*records, *_heavy_hitters(records)]
    sheet = score_sheet(title, shown, buckets, table, label=_label)
    notes = [*([LAPTOP_NOTE] if scale == "laptop" else []), *training_notes(records)]
    if any("h2o" in record for record in records):
        notes.append(
            "The H2O row is full attention in training, quadratic in length, and decodes with a "
            "cache as large as VORT's state."
        )

    most = max(record["steps"] for record in records)

    def draw(path: Path) -> None:
        from vort.lab.report.figures.results import draw_by_lag

        lines = {}
        for model, members in group_by_model(shown).items():
            steps = members[0]["steps"]
            less = "" if steps == most else f", {steps:,} steps"
            lines[_label(model) + less] = members
        draw_by_lag(path, lines, title)

    caption = "Test accuracy by lag between source and query; bands are the range over seeds."
    # Models that were trained for less are shown, but nothing is claimed of them.
    whole = [record for record in records if record["steps"] == most]
    claims = recall_claims(whole, table, buckets)
    labels = {record["cell"]["model"]: label_of(record["cell"]["model"]) for record in records}
    return Summary([sheet], claims, [Figure("by_lag.png", caption, draw)], notes, labels)


def _label(model: str) -> str:
    return "attention, H2O cache" if model == "h2o" else label_of(model)


def _heavy_hitters(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Results of softmax models under H2O's policy, as rows of their own."""
    return [
        {
            **record,
            **{key: record["h2o"][key] for key in ("test", "lags", "state_numbers")},
            "cell": {**record["cell"], "model": "h2o"},
        }
        for record in records
        if "h2o" in record
    ]
