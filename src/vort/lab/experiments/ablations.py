"""What each part is worth: parts off one at a time, and the same parts given to the rivals."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vort.lab.experiments.cell import Cell, Size
from vort.lab.experiments.experiment import Experiment, Record, Summary
from vort.lab.experiments.origins import rates_note
from vort.lab.experiments.recall import (
    LABEL_COPY_TASK,
    LAPTOP_NOTE,
    PILOT_ROWS,
    PILOT_TASK,
    kin_note,
    recall_cell,
)
from vort.lab.experiments.scores import (
    PaperTable,
    as_planned,
    by_row,
    label_of,
    margin,
    over_seeds,
    seeds_of,
    show,
)
from vort.lab.report.tables import Sheet
from vort.lab.verdicts import Claim, judge_equality

__all__ = ["ABLATIONS"]

# Rows of `MODELS`, and what they are called here. The first is what all others are held against.
ROWS: dict[str, str] = {
    "vort": "VORT (ours)",
    "vort_spread": "heads start apart",
    "vort_one_scale": "S = 1",
    "vort_banks": "banks instead of a continuous order",
    "vort_no_read": "no read weights",
    "vort_no_gate": "no write gate",
    "vort_no_gates": "no read weights, no write gate",
    "vort_half_features": "half the features",
    "vort_no_normalizer": "no normaliser",
    "vort_favor": "FAVOR+ instead of the learned map",
    "linear_gated": "no decay, write gate",
    "exponential_learned_gated": "Exponential, a learned rate per head + gate",
    "mixture_gated": "Mixture-5 + read weights + gate",
    "mixture_even_gated": "Mixture, as many rates as VORT + read weights + gate",
    "mixture_rates_gated": "Mixture at VORT's rates + read weights + gate",
    "mixture_rates_gain": "Mixture at VORT's rates + read weights + gate + gain of a token",
    "mixture_rates_free": "Mixture at VORT's rates + read weights + gate + gain for each rate",
    "uniform_power_law_gated": "one learned order + read weights + gate",
    "gla_gated": "GLA at VORT's state + read weights + gate",
    "power_law": "Power-Law, order .7",
    "power_law_s1": "Power-Law, S = 1",
    "power_law_exact": "Power-Law, exact convolution (quadratic)",
}
# On the task that has entities.
INPUTS: dict[str, str] = {
    "vort_with_inputs": "VORT with entropy and entity inputs",
    "vort_no_entropy": "entropy off",
    "vort_no_entity": "entity indicator off",
    "vort_no_inputs": "both off",
}
_LABELS = {**ROWS, **INPUTS}
_SEEDS: dict[Size, tuple[int, ...]] = {"laptop": (0,), "paper": (0, 1, 2)}
_LEFT_OUT: dict[Size, tuple[str, ...]] = {
    # Where minutes count.
    "laptop": (
        *("vort_spread", "vort_no_gates", "vort_half_features", "linear_gated", "gla_gated"),
        *("mixture_rates_gated", "mixture_rates_free"),
    ),
    # An exact convolution of 10,000 positions has 10^8 pairs a head.
    "paper": ("power_law_exact",),
}


def cells(size: Size, data: Path | None = None) -> list[Cell]:
    """One cell for each row and seed, but for what the pilot has."""
    tables = (
        ("pilot", {**PILOT_TASK[size], "beta": 1.0}, ROWS),
        ("label_copy", LABEL_COPY_TASK[size], INPUTS),
    )
    return [
        recall_cell("ablations", size, name, seed, task, table=table)
        for seed in _SEEDS[size]
        for table, task, rows in tables
        for name in rows
        if name not in PILOT_ROWS[size] and name not in _LEFT_OUT[size]
    ]


def summarise(records: Sequence[Record], size: Size) -> Summary:
    """A table for each task, and the paper's two statements about ablations."""
    # Of the pilot's rows those at the beta of these, 1; they have no other.
    seen = [
        record
        for record in records
        if record["cell"]["seed"] in _SEEDS[size] and record["cell"].get("beta", 1.0) == 1.0
    ]
    found = by_row(seen)
    sheets = [
        _sheet("Ablations on Zipf retrieval", ROWS, found),
        _sheet("Ablations on label copy: the router's inputs", INPUTS, found),
    ]
    notes = [
        *([LAPTOP_NOTE] if size == "laptop" else []),
        *(["One seed: differences of a few points say nothing."] if len(_SEEDS[size]) == 1 else []),
        "A normaliser divides a head's output by one number, and the norm behind it takes that out "
        "again: with no local attention beside it, it cannot matter.",
        *kin_note(seen, _label),
    ]
    unsearched = [record for record in seen if record.get("searched") is False]
    if unsearched:
        notes.append("Of rates that were not searched: " + rates_note(unsearched, _label))
    claims = _claims(by_row(as_planned(seen)))
    # The page finds them by these: its charts show VORT beside what is left of it.
    shared = [
        record["fingerprint"]
        for name in ROWS
        if name in PILOT_ROWS[size]
        for record in found.get(name, ())
    ]
    tables = [sheet for sheet in sheets if sheet.rows]
    return Summary(tables, claims, notes=notes, labels=_LABELS, more={"borrowed": shared})


def _label(row: str) -> str:
    model, bracket, changes = row.partition(" [")
    return _LABELS.get(model, label_of(model)) + bracket + changes


def _sheet(
    title: str,
    rows: Mapping[str, str],
    found: Mapping[str, Sequence[Record]],
) -> Sheet:
    # A row with changed settings stands below the one it was made from.
    present = [row for name in rows for row in found if row.partition(" [")[0] == name]
    if not present:
        return Sheet(title, (), ())
    first = found[present[0]][0]
    buckets = [name for name in first["test"] if name != "all"]
    lines = []
    for row in present:
        members = found[row]
        scores = [show(over_seeds(members, b, "accuracy", 100), 1) for b in buckets]
        lines.append([_label(row), f"{members[0]['state_numbers']:,}", *scores])
    return Sheet(title, ["what", "state", *(f"{b} (%)" for b in buckets)], lines)


def _claims(found: Mapping[str, Sequence[Record]]) -> list[Claim]:
    """The paper's two statements, each that two rows are the same."""
    if "power_law" not in found:
        return []
    scales = f"S = {found['power_law'][0]['model'].get('num_scales')}"
    statements = (
        # In percent of the accuracy: half a point at most.
        (
            "power_law_exact",
            "power_law",
            "the exact fractional convolution is within 0.5 % of S = 15",
            f"exact less {scales}",
            0.5,
        ),
        (
            "power_law_s1",
            "exponential",
            "S = 1 is the Exponential row: the gain comes from the kernel",
            "Power-Law at S = 1 less Exponential",
            2.0,
        ),
    )
    return [
        claim
        for one, other, states, what, tolerance in statements
        if one in found and other in found
        for claim in _equality(found[one], found[other], states, what, tolerance)
    ]


def _equality(
    one: Sequence[Record], other: Sequence[Record], states: str, what: str, tolerance: float
) -> list[Claim]:
    """That two rows are the same, in every class of lags."""
    table = PaperTable("ablation", "accuracy", {}, tolerance)
    buckets = [name for name in one[0]["test"] if name != "all"]
    gains = {bucket: margin(one, other, bucket, table) for bucket in buckets}
    known = {bucket: gain for bucket, gain in gains.items() if gain is not None}
    if not known:
        return []
    shown = ", ".join(f"{show(gain, 1)} at {bucket}" for bucket, gain in known.items())
    measured = f"{what}, in points: {shown}; {seeds_of(next(iter(known.values())))}"
    verdict = judge_equality(list(known.values()), tolerance)
    return [Claim("section experiments, ablation", states, measured, verdict)]


def _with_orders(size: Size, data: Path | None = None) -> list[Cell]:
    """All cells; of the router's inputs the orders are kept too, for figure alpha-hist."""
    return [
        replace(cell, after={"orders": {}}) if cell.model in INPUTS else cell
        for cell in cells(size, data)
    ]


ABLATIONS = Experiment(
    name="ablations",
    title="Ablations",
    about="VORT's parts off one at a time, its parts given to the rivals, and the paper's two "
    "ablations (S = 1, exact convolution) on its fixed-order Power-Law. Zipf retrieval at beta = "
    "1; the router's entropy and entity inputs on label copy, where there are entities.",
    cells=_with_orders,
    summarise=summarise,
    uses=("pilot",),
)
