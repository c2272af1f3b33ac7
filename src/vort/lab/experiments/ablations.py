"""What each part is worth: parts off one at a time, and the same parts given to the rivals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vort.lab.experiments import label_copy, pilot
from vort.lab.experiments.cell import Cell, Scale
from vort.lab.experiments.claims import Claim
from vort.lab.experiments.experiment import Experiment, Summary
from vort.lab.experiments.models import FAVOR, PLAIN
from vort.lab.experiments.recall import LAPTOP_NOTE, recall_cell
from vort.lab.experiments.scores import group_by_model, over_seeds, show
from vort.lab.experiments.sizes import RECALL_TRAINING
from vort.lab.report.tables import Sheet

__all__ = ["ABLATIONS"]

_POWER_LAW = {"learn_rates": False, **PLAIN}

# Name -> (what changes, settings). The first is what all others are held against.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "vort": ("VORT (ours)", {}),
    "vort_one_scale": ("S = 1", {"num_scales": 1}),
    "vort_banks": ("banks instead of a continuous order", {"routing": "banks"}),
    "vort_no_read": ("no read weights", {"read_weights": False}),
    "vort_no_gate": ("no write gate", {"write_gate": False}),
    "vort_no_normalizer": ("no normaliser", {"normalizer": "none"}),
    "vort_favor": ("FAVOR+ instead of the learned map", dict(FAVOR)),
    "exponential_learned_gated": (
        "Exponential, a learned rate per head, + write gate",
        {"memory": "exponential"},
    ),
    "mixture_gated": ("Mixture-5 + read weights + write gate", {"memory": "mixture"}),
    "mixture_8_gated": (
        "the same with as many rates as VORT",
        {"memory": "mixture", "num_scales": 8},
    ),
    "uniform_power_law_gated": (
        "one learned order + read weights + write gate",
        {"memory": "uniform_power_law"},
    ),
    "power_law": ("Power-Law, order .7", {"memory": "uniform_power_law", **_POWER_LAW}),
    "power_law_s1": (
        "Power-Law, S = 1",
        {"memory": "uniform_power_law", **_POWER_LAW, "num_scales": 1},
    ),
    "power_law_exact": (
        "Power-Law, exact convolution (quadratic)",
        {"memory": "exact_power_law", **_POWER_LAW},
    ),
}

# The router's other inputs, on the task that has entities; entropy comes with a window.
INPUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "vort_with_inputs": (
        "VORT with entropy and entity inputs",
        {"sliding_window": 16, "use_entropy": True, "use_entity": True},
    ),
    "vort_no_entropy": (
        "entropy off",
        {"sliding_window": 16, "use_entropy": False, "use_entity": True},
    ),
    "vort_no_entity": (
        "entity indicator off",
        {"sliding_window": 16, "use_entropy": True, "use_entity": False},
    ),
    "vort_no_inputs": ("both off", {"sliding_window": 16}),
}
_SEEDS: dict[Scale, tuple[int, ...]] = {"laptop": (0,), "paper": (0,)}
# An exact convolution of 10,000 positions has 10^8 pairs a head: laptop size only.
_QUADRATIC = ("power_law_exact",)


# Rows that the pilot has trained already, with the same settings.
_SHARED = ("vort", "power_law")


def cells(scale: Scale, data: Path | None = None) -> list[Cell]:
    """One cell for each row and seed, but for what the pilot has."""
    found = []
    for seed in _SEEDS[scale]:
        for name, (_, settings) in ROWS.items():
            if name in _SHARED or (scale == "paper" and name in _QUADRATIC):
                continue
            task = {**pilot.TASK[scale], "beta": 1.0}
            found.append(_cell(scale, name, seed, task, RECALL_TRAINING[scale], settings))
        for name, (_, settings) in INPUTS.items():
            training = RECALL_TRAINING[scale]
            found.append(_cell(scale, name, seed, label_copy.TASK[scale], training, settings))
    return found


def _cell(
    scale: Scale,
    name: str,
    seed: int,
    task: Mapping[str, Any],
    training: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Cell:
    return recall_cell("ablations", scale, name, seed, task, training, settings=settings)


def summarise(records: Sequence[Mapping[str, Any]], scale: Scale) -> Summary:
    """A table for each task, and the paper's two statements about ablations."""
    found = group_by_model([r for r in records if r["cell"]["seed"] in _SEEDS[scale]])
    sheets = [
        _sheet("Ablations on Zipf retrieval", ROWS, found),
        _sheet("Ablations on label copy: the router's inputs", INPUTS, found),
    ]
    notes = [
        *([LAPTOP_NOTE] if scale == "laptop" else []),
        "One seed: differences of a few points say nothing. Learning rates are those of the model "
        "that a row is made from. A normaliser divides a head's output by one number, and the norm "
        "behind it takes that out again: with no local attention beside it, it cannot matter.",
    ]
    labels = {name: label for name, (label, _) in {**ROWS, **INPUTS}.items()}
    return Summary([s for s in sheets if s.rows], _claims(found), notes=notes, labels=labels)


def _sheet(
    title: str,
    rows: Mapping[str, tuple[str, Any]],
    found: Mapping[str, Sequence[Mapping[str, Any]]],
) -> Sheet:
    present = {name: label for name, (label, _) in rows.items() if name in found}
    if not present:
        return Sheet(title, (), ())
    first = found[next(iter(present))][0]
    buckets = [name for name in first["test"] if name != "all"]
    lines = []
    for name, label in present.items():
        members = found[name]
        scores = [show(over_seeds(members, b, "accuracy", 100), 1) for b in buckets]
        lines.append([label, f"{members[0]['state_numbers']:,}", *scores])
    return Sheet(title, ["what", "state", *(f"{b} (%)" for b in buckets)], lines)


def _claims(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Claim]:
    def at_long(name: str) -> float | None:
        if name not in found:
            return None
        bucket = [b for b in found[name][0]["test"] if b != "all"][-1]
        value = over_seeds(found[name], bucket, "accuracy", 100)
        return None if value is None else value.mean

    claims = []
    config = found["power_law"][0]["model"] if "power_law" in found else {}
    terms = f"S = {config.get('num_scales')}"
    many, exact, one = map(at_long, ("power_law", "power_law_exact", "power_law_s1"))
    if many is not None and exact is not None:
        claims.append(
            Claim(
                "section experiments, ablation",
                "the exact fractional convolution is within 0.5 % of S = 15",
                f"at long lags {exact:.1f} % exact, {many:.1f} % with {terms}",
                "reproduced" if abs(exact - many) <= 0.5 else "not reproduced",
            )
        )
    if many is not None and one is not None:
        claims.append(
            Claim(
                "section experiments, ablation",
                "S = 1 is the Exponential row: the gain comes from the kernel",
                f"at long lags {one:.1f} % with S = 1, {many:.1f} % with {terms}",
                "reproduced" if one < many - 2 else "not reproduced",
            )
        )
    return claims


ABLATIONS = Experiment(
    "ablations",
    "Ablations",
    "VORT's parts off one at a time, its parts given to the rivals, and the paper's two ablations "
    "(S = 1, exact convolution) on its fixed-order Power-Law. Zipf retrieval at beta = 1; the "
    "router's entropy and entity inputs on label copy, where there are entities.",
    cells,
    summarise,
    uses=("pilot",),
)
