"""Section complexity: time and memory of a layer against length, and against softmax attention."""

from collections.abc import Mapping, Sequence
from math import log
from pathlib import Path
from typing import Any

from vort.lab.experiments.cell import Cell, Scale
from vort.lab.experiments.claims import Claim
from vort.lab.experiments.experiment import Experiment, Figure, Summary
from vort.lab.experiments.scores import group_by_model
from vort.lab.report.tables import Sheet

__all__ = ["COMPLEXITY"]

_LENGTHS: dict[Scale, tuple[int, ...]] = {
    "laptop": (1024, 4096, 8192),
    "paper": (2048, 4096, 8192, 16384, 32768, 65536),
}
_LAYER: dict[Scale, dict[str, Any]] = {
    "laptop": {"hidden_size": 128, "num_attention_heads": 4, "num_scales": 8},
    "paper": {"hidden_size": 1024, "num_attention_heads": 16, "num_scales": 8},
}
_BARE = {"sliding_window": 0, "use_entropy": False, "conv_size": 0, "rope_theta": None}
_MODELS: dict[str, dict[str, Any]] = {
    "vort": {},
    "exponential": {"memory": "exponential"},
    "softmax": {"memory": "softmax"},
}
LABELS = {"vort": "VORT", "exponential": "one rate", "softmax": "softmax attention"}


def cells(scale: Scale, data: Path | None = None) -> list[Cell]:
    """One for each model and length, short ones first."""
    return [
        Cell(
            experiment="complexity",
            scale=scale,
            model=model,
            seed=0,
            config={**_LAYER[scale], **_BARE, "horizon": 8192, **settings},
            training={"length": length, "batch": 1, "repeats": 3},
            measure="cost",
            tags={"length": length},
        )
        for length in _LENGTHS[scale]
        for model, settings in _MODELS.items()
    ]


def summarise(records: Sequence[Mapping[str, Any]], scale: Scale) -> Summary:
    """A table by length, how time grows, and where the layer overtakes attention."""
    found = {
        model: {r["length"]: r for r in members}
        for model, members in group_by_model(records).items()
    }
    lengths = sorted({r["length"] for r in records})
    rows = []
    for length in lengths:
        row = [f"{length:,}"]
        for model in _MODELS:
            one = found.get(model, {}).get(length)
            if one is None:
                row += ["–", "–"]
            else:
                row += [
                    f"{1e3 * one['times']['forward_backward']:.1f}",
                    f"{one['peak_bytes'] / 2**20:,.0f}",
                ]
        rows.append(row)
    headings = ["length", *(f"{LABELS[m]} ({unit})" for m in _MODELS for unit in ("ms", "MiB"))]
    sheet = Sheet("One layer, forward and backward, batch 1", headings, rows)

    def draw(path: Path) -> None:
        from vort.lab.report.figures.results import draw_cost

        draw_cost(path, {LABELS[m]: list(found[m].values()) for m in found})

    figures = [Figure("cost.png", "Time and peak memory of one layer by length.", draw)]
    return Summary([sheet], _claims(found), figures if rows else [])


def _claims(found: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[Claim]:
    ours, theirs = found.get("vort", {}), found.get("softmax", {})
    shared = sorted(set(ours) & set(theirs))
    if len(shared) < 2:
        return []

    def time(side: Mapping[int, Mapping[str, Any]], length: int) -> float:
        value: float = side[length]["times"]["forward_backward"]
        return value

    # The last doublings: at short lengths fixed costs hide the power.
    low, high = shared[-2], shared[-1]
    powers = [log(time(side, high) / time(side, low)) / log(high / low) for side in (ours, theirs)]
    faster = [n for n in shared if time(ours, n) < time(theirs, n)]
    where = f"from {faster[0]:,} positions on" if faster else f"not up to {shared[-1]:,} positions"
    return [
        Claim(
            "section complexity",
            "time is linear in length, attention's is quadratic",
            f"between {low:,} and {high:,} it grows as n^{powers[0]:.2f}, attention's as "
            f"n^{powers[1]:.2f}",
            "reproduced" if powers[0] < 1.25 else "not reproduced",
        ),
        Claim(
            "section complexity",
            "the break-even with attention is at about 19 positions, in operations",
            f"in time, the layer overtakes fused attention {where}",
            "not reproduced",
            "E19",
        ),
    ]


COMPLEXITY = Experiment(
    "complexity",
    "Complexity: time and memory by length",
    "One layer of each kind, the same projections, forward and backward at batch 1, median of "
    "three after a warm-up, each in a process of its own.",
    cells,
    summarise,
)
