"""Section plasticity as a part of the reproduction: one cell, its table, claims and figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vort.lab.experiments.cell import Cell, Scale
from vort.lab.experiments.experiment import Experiment, Figure, Summary
from vort.lab.report.tables import Sheet

__all__ = ["PLASTICITY"]

_SEEDS = (0, 1, 2)
GROUPS = {
    "with": "trained with L_ret",
    "without": "trained without",
    "refined": "free orders, refined",
}


def cells(scale: Scale, data: Path | None = None) -> list[Cell]:
    """One, at laptop size: all seeds together, since what is shown are intervals over them."""
    if scale == "paper":
        return []
    return [
        Cell(
            experiment="plasticity",
            scale=scale,
            model="vort",
            seed=_SEEDS[0],
            task={"name": "label_copy", "length": 128},
            training={"steps": 80, "learning_rate": 5e-3, "seeds": list(_SEEDS)},
            measure="plasticity",
        )
    ]


def measure(cell: Cell) -> dict[str, Any]:
    """What the cell keeps: the record of `vort.lab.experiments.plasticity.run`."""
    from vort.lab.experiments.plasticity import run

    record = run(length=cell.task["length"], **cell.training)
    return {"plasticity": record}


def summarise(records: Sequence[Mapping[str, Any]], scale: Scale) -> Summary:
    """Order of first mentions minus fillers by layer, claims, and orders over layers."""
    if not records:
        return Summary([], notes=["No results: measured at --scale laptop only."])
    from vort.lab.experiments.plasticity import claims

    cell, record = records[0], records[0]["plasticity"]
    layers = range(len(record["with"]["difference"]))
    rows = [
        [label, *(_shown(record[name]["difference"][layer]) for layer in layers), _accuracy(runs)]
        for name, label in GROUPS.items()
        for runs in [record[name]["runs"]]
    ]
    headings = ["orders", *(f"layer {layer + 1}" for layer in layers), "accuracy, longest lags"]
    sheet = Sheet("Order of first mentions minus that of fillers", headings, rows)

    def draw(path: Path) -> None:
        from vort.lab.report.figures.diffusion_plasticity import draw_plasticity

        draw_plasticity(path, record)

    settings = record["settings"]
    task = settings["task"]
    notes = [
        f"{len(settings['seeds'])} seeds of model and data; intervals are 95 %, Student's t.",
        f"Two layers in the paper's mode (no gates), {settings['steps']} steps on sequences of "
        f"{task['length']} with {task['entities']} entities, {cell['seconds']:.0f} s in all.",
    ]
    caption = (
        "Orders by layer on held-out sequences: one sequence of free orders refined layer by "
        "layer, and means by kind of token with 95 % intervals over seeds."
    )
    return Summary([sheet], claims(record), [Figure("plasticity.png", caption, draw)], notes)


def _shown(found: Mapping[str, Any]) -> str:
    if found["low"] is None:
        return f"{found['mean']:+.2f}"
    return f"{found['mean']:+.2f} ± {(found['high'] - found['low']) / 2:.2f}"


def _accuracy(runs: Sequence[Mapping[str, Any]]) -> str:
    """Mean over seeds in the last class of lags; blank where nothing was trained."""
    scores = [[*each["accuracy"].items()] for each in runs if "accuracy" in each]
    last = [dict(found) for found in scores]
    if not last:
        return ""
    name = [key for key in last[0] if key != "all"][-1]
    return f"{sum(100 * found[name] for found in last) / len(last):.0f} %"


PLASTICITY = Experiment(
    "plasticity",
    "Retrieval-driven plasticity (section plasticity, figure diffusion-plasticity b)",
    "Label copy, a small model in the paper's mode, trained with the retrieval loss beside the "
    "cross-entropy and without it; then orders that belong to tokens, not to a router, are refined "
    "by gradient descent on the queries and keys of the former, layer by layer. Nothing says what "
    "an order should be.",
    cells,
    summarise,
)
