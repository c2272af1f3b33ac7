"""A cell: one task, one model, one seed; what it is made of and the file its result goes to."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

__all__ = ["SCALES", "Cell", "Scale", "finished", "read_cell", "write_cell"]

Scale = Literal["laptop", "paper"]
SCALES: tuple[Scale, ...] = ("laptop", "paper")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Everything that decides one result; plain JSON values throughout.

    Attributes:
        experiment: the table or figure it belongs to.
        scale: "laptop" or "paper".
        model: name of the row in that table.
        seed: of weights, data order and generated data.
        task: `name` of the task, and its settings.
        config: settings of `VortConfig`.
        training: settings of `TrainingConfig`.
        after: what to measure on the trained model besides its scores: names of
            `vort.lab.experiments.measures.AFTER`, each with its options.
        measure: "train", or what else the cell does instead; see `work`.
        tags: further coordinates in the table, such as beta.
    """

    experiment: str
    scale: Scale
    model: str
    seed: int
    task: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    measure: str = "train"
    tags: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The file name: experiment, scale, model, tags and seed.

        >>> Cell(experiment="pilot", scale="laptop", model="vort", seed=1, tags={"beta": 1.5}).id
        'pilot-laptop-vort-beta1.5-seed1'
        """
        tags = [f"{key}{value}" for key, value in self.tags.items()]
        parts = [self.experiment, self.scale, self.model, *tags, f"seed{self.seed}"]
        return re.sub(r"[^A-Za-z0-9.+_-]", "_", "-".join(parts))

    @property
    def fingerprint(self) -> str:
        """A short hash of all settings: a result made with others is not this cell's."""
        return sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def alone(self) -> bool:
        """Whether nothing else may run beside it: what is timed."""
        return self.measure == "cost"

    def coordinates(self) -> dict[str, Any]:
        """Where the result stands in its table."""
        task = self.task.get("name", "")
        return {"task": task, "model": self.model, **self.tags, "seed": self.seed}


def path_of(cell: Cell, folder: Path) -> Path:
    """Where the result of a cell is kept in a run's folder."""
    return folder / cell.experiment / "cells" / f"{cell.id}.json"


def finished(cell: Cell, folder: Path) -> bool:
    """Whether the folder holds this cell's result, made with the very same settings."""
    found = read_cell(cell, folder)
    return found is not None and found.get("fingerprint") == cell.fingerprint


def read_cell(cell: Cell, folder: Path) -> dict[str, Any] | None:
    """The result of a cell, or None if there is none that can be read."""
    try:
        found: dict[str, Any] = json.loads(path_of(cell, folder).read_text())
    except (OSError, ValueError):
        return None
    return found


def write_cell(cell: Cell, folder: Path, result: Mapping[str, Any]) -> Path:
    """Put the result in place, whole or not at all."""
    path = path_of(cell, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "experiment": cell.experiment,
        "scale": cell.scale,
        "cell": cell.coordinates(),
        "fingerprint": cell.fingerprint,
        "task": dict(cell.task),
        "model": dict(cell.config),
        "training": dict(cell.training),
        **result,
    }
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.write(json.dumps(record, indent=1, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    return path
