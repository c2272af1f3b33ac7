"""Learning rates (and Exponential's decay rate) for each model, searched on validation data.

Every model gets the same number of trials of the same length: most try learning rates alone, one
with a fixed rate of decay fewer of them at several decay rates. What came out is in `search.json`,
with all trials; `vort tune` makes it anew. The test split plays no part.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from vort.lab.experiments.cell import Cell, RunFolder, Size
from vort.lab.experiments.experiment import Experiment
from vort.lab.tasks import make_task

__all__ = ["SEED", "best_of", "has_fixed_decay", "search_cells", "searched", "trials"]

# Of no table, so that a setting is not chosen for the weights it is then judged with.
SEED = 100
# Learning rates for most models, and for those that try several decay rates as well.
_RATES: dict[Size, tuple[float, ...]] = {
    "laptop": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3e-3, 6e-3),
    "paper": (1e-3, 2e-3, 3e-3, 4e-3, 8e-3, 1.6e-2),
}
_FEW_RATES: dict[Size, tuple[float, ...]] = {"laptop": (4e-3, 8e-3), "paper": (2e-3, 4e-3)}


@cache
def _results() -> dict[str, Any]:
    text = files("vort.lab.experiments").joinpath("search.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def searched(search: str, size: Size) -> dict[str, Any] | None:
    """The best settings that a search found; None if there was no such search.

    search: whose, by experiment and model; nobody is taken for another.

    >>> searched("pilot/vort", "laptop"), searched("pilot/vort_new", "laptop")
    ({'learning_rate': 0.006}, None)
    """
    experiment, _, model = search.partition("/")
    found = _results().get(size, {}).get(experiment, {}).get(model)
    return None if found is None else dict(found["best"])


def has_fixed_decay(config: Any) -> bool:
    """Whether a model has one rate of decay that it does not learn."""
    return config.get("memory") == "exponential" and not config.get("learn_rates", True)


def trials(experiment: Experiment, cell: Cell) -> list[dict[str, Any]]:
    """The settings to try: `learning_rate`, and for a fixed decay `exponential_rate`.

    Args:
        experiment: the cell's.
        cell: of the model.
    """
    shares = experiment.decays.get(cell.size)
    if shares is None or not has_fixed_decay(cell.config):
        return [{"learning_rate": rate} for rate in _RATES[cell.size]]
    length = make_task(**cell.task).length
    return [
        {"learning_rate": rate, "exponential_rate": 1 / (share * length)}
        for rate in _FEW_RATES[cell.size]
        for share in shares
    ]


def search_cells(
    experiment: Experiment,
    size: Size,
    models: Sequence[str] | None = None,
    share: float = 0.5,
    data: Path | None = None,
) -> list[Cell]:
    """A cell for every trial of every model: its table's first cell, shortened, on seed 100.

    The first trial of every model comes before the second of any: side by side on a GPU, workers
    then compile kernels of different models, and find those of later trials compiled.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must lie in (0, 1], got {share}")
    firsts: dict[str, Cell] = {}
    for cell in experiment.cells(size, data):
        firsts.setdefault(cell.model, cell)
    unknown = set(models or ()) - set(firsts)
    if unknown:
        known = ", ".join(firsts) or "none, for want of cells"
        raise ValueError(f"models must be of {known}, got {', '.join(sorted(unknown))}")
    chosen = [cell for name, cell in firsts.items() if models is None or name in models]
    rounds = zip(*(enumerate(trials(experiment, cell)) for cell in chosen), strict=True)
    return [
        _trial(cell, number, trial, share)
        for each in rounds
        for cell, (number, trial) in zip(chosen, each, strict=True)
    ]


def _trial(cell: Cell, number: int, trial: dict[str, Any], share: float) -> Cell:
    settings = dict(trial)
    cell = cell.shortened(share)
    # Test data play no part: they are not even scored.
    rate = settings.pop("learning_rate")
    training = {**cell.training, "learning_rate": rate, "test_sequences": 0}
    return replace(
        cell,
        seed=SEED,
        task={**cell.task, "seed": SEED},
        config={**cell.config, **settings},
        training=training,
        after={},
        tags={**cell.tags, "trial": number},
        search="",
    )


def best_of(experiment: Experiment, cells: Sequence[Cell], folder: RunFolder) -> dict[str, Any]:
    """For each model: the best settings, all trials, and what they cost.

    A trial that broke down has no bits and cannot win.
    """
    found: dict[str, Any] = {}
    for cell in cells:
        record = folder.read(cell)
        settings = trials(experiment, cell)[cell.tags["trial"]]
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
