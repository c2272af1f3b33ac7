"""Trials of settings on validation data: the same number and length for every model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vort.lab.experiments.cell import Cell, Scale, read_cell
from vort.lab.experiments.registry import EXPERIMENTS
from vort.lab.experiments.tuned import trials_for

__all__ = ["SEED", "TUNABLE", "best_of", "search_cells"]

TUNABLE = ("pilot", "label_copy", "books")

# Of no table, so that a setting is not chosen for the weights it is then judged with.
SEED = 100


def search_cells(
    experiment: str,
    scale: Scale,
    models: Sequence[str] | None = None,
    share: float = 0.5,
    data: Path | None = None,
) -> list[Cell]:
    """A cell for every trial of every model: its table's first cell, shortened, on seed 100.

    The first trial of every model comes before the second of any: side by side on a GPU, workers
    then compile kernels of different models, and find those of later trials compiled.
    """
    if experiment not in TUNABLE:
        raise ValueError(f"experiment must be of {', '.join(TUNABLE)}, got {experiment!r}")
    if not 0 < share <= 1:
        raise ValueError(f"share must lie in (0, 1], got {share}")
    firsts: dict[str, Cell] = {}
    for cell in EXPERIMENTS[experiment].cells(scale, data):
        firsts.setdefault(cell.model, cell)
    unknown = set(models or ()) - set(firsts)
    if unknown:
        known = ", ".join(firsts)
        raise ValueError(f"models must be of {known}, got {', '.join(sorted(unknown))}")
    chosen = [cell for name, cell in firsts.items() if models is None or name in models]
    rounds = zip(*(enumerate(_trials(cell)) for cell in chosen), strict=True)
    return [
        _trial(cell, number, trial, share)
        for each in rounds
        for cell, (number, trial) in zip(chosen, each, strict=True)
    ]


def _trials(cell: Cell) -> list[dict[str, Any]]:
    return trials_for(cell.experiment, cell.scale, cell.model, cell.task["length"])


def _trial(cell: Cell, number: int, trial: dict[str, Any], share: float) -> Cell:
    settings = dict(trial)
    training = {**cell.training, "learning_rate": settings.pop("learning_rate")}
    for key in ("steps", "epochs"):
        if key in training:
            training[key] = max(1, round(training[key] * share))
    # Test data play no part: they are not even scored.
    training["test_sequences"] = 0
    config = dict(cell.config)
    if "exponential_rate" in settings and not config.get("learn_rates", True):
        config["exponential_rate"] = settings["exponential_rate"]
    return replace(
        cell,
        seed=SEED,
        task={**cell.task, "seed": SEED},
        config=config,
        training=training,
        after={},
        tags={**cell.tags, "trial": number},
    )


def best_of(cells: Sequence[Cell], folder: Path) -> dict[str, Any]:
    """For each model: the best settings, all trials, and what they cost.

    A trial that broke down has no bits and cannot win.
    """
    found: dict[str, Any] = {}
    for cell in cells:
        record = read_cell(cell, folder)
        settings = _trials(cell)[cell.tags["trial"]]
        bits = None if record is None else record["validation"]["all"]["bits"]
        entry = found.setdefault(cell.model, {"trials": [], "steps": None})
        entry["trials"].append({**settings, "bits": bits})
        if record is not None:
            entry["steps"] = record["steps"]
    for entry in found.values():
        finished = [trial for trial in entry["trials"] if trial["bits"] is not None]
        if not finished:
            raise RuntimeError("no trial of a model came to an end: nothing to choose from")
        best = min(finished, key=lambda trial: trial["bits"])
        rates = sorted({trial["learning_rate"] for trial in entry["trials"]})
        entry["best"] = {key: value for key, value in best.items() if key != "bits"}
        # Of one or two rates each is at an edge, which says nothing.
        entry["at_edge"] = len(rates) > 2 and best["learning_rate"] in (rates[0], rates[-1])
    return found
