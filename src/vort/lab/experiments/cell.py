"""A cell: one task, one model, one seed; what it is made of, and where a run keeps its result."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

from vort.files import read_regular, write_atomically

__all__ = ["SIZES", "Cell", "RunFolder", "Size"]

# How large an experiment is; `--scale` on the command line and "scale" in records.
Size = Literal["laptop", "paper"]
SIZES: tuple[Size, ...] = get_args(Size)
_LONGEST = 90  # characters of a tag in a file name


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Everything that decides one result; plain JSON values throughout.

    Attributes:
        experiment: the table or figure it belongs to.
        size: "laptop" or "paper".
        model: name of the row in that table.
        seed: of weights, data order and generated data.
        task: `name` of the task, and its settings.
        config: settings of `VortConfig`.
        training: settings of `TrainingConfig`, or of what the experiment measures instead.
        after: what to measure on the trained model besides its scores: names of
            `vort.lab.experiments.run.AFTER`, each with its options.
        tags: further coordinates in the table, such as beta.
        search: whose searched settings it is trained with, e.g. "pilot/vort"; "": nobody's.
    """

    experiment: str
    size: Size
    model: str
    seed: int
    task: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    after: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tags: Mapping[str, Any] = field(default_factory=dict)
    search: str = ""

    @property
    def id(self) -> str:
        """The file name: experiment, size, model, tags and seed.

        >>> Cell(experiment="pilot", size="laptop", model="vort", seed=1, tags={"beta": 1.5}).id
        'pilot-laptop-vort-beta1.5-seed1'
        """
        tags = [_in_file_name(f"{key}{value}") for key, value in self.tags.items()]
        parts = [self.experiment, self.size, self.model, *tags, f"seed{self.seed}"]
        return re.sub(r"[^A-Za-z0-9.+_-]", "_", "-".join(parts))

    @property
    def fingerprint(self) -> str:
        """A short hash of all settings: a result made with others is not this cell's.

        Where settings came from is none of them.
        """
        settings = {key: value for key, value in asdict(self).items() if key != "search"}
        return sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]

    def coordinates(self) -> dict[str, Any]:
        """Where the result stands in its table."""
        task = self.task.get("name", "")
        return {"task": task, "model": self.model, **self.tags, "seed": self.seed}

    def shortened(self, share: float) -> "Cell":
        """The same with this share of its training steps, under a name of its own."""
        if share == 1:
            return self
        training = dict(self.training)
        for key in ("steps", "epochs"):
            if key in training:
                training[key] = max(1, round(training[key] * share))
        return replace(self, training=training, tags={**self.tags, "share": share})


def _in_file_name(tag: str) -> str:
    """A tag as it is, or cut short with a hash, so that two never share a file."""
    plain = re.fullmatch(r"[A-Za-z0-9.+_= -]*", tag)
    if plain and len(tag) <= _LONGEST:
        return tag
    return f"{tag[:_LONGEST]}-{sha256(tag.encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and where everything in it is.

    ROOT/<experiment>/cells/<cell>.json          one finished cell each
    ROOT/<experiment>/checkpoints/<cell>-<hash>  of a cell on its way
    ROOT/<experiment>/summary.json, *.png        tables, verdicts, pictures
    ROOT/figures                                 the paper's figures
    ROOT/report.html                             all of it on a page
    """

    root: Path

    @property
    def figures(self) -> Path:
        """Of the paper's figures."""
        return self.root / "figures"

    @property
    def page(self) -> Path:
        """The report."""
        return self.root / "report.html"

    def part(self, experiment: str) -> Path:
        """Of one experiment."""
        return self.root / experiment

    def cell(self, cell: Cell) -> Path:
        """The result of a cell."""
        return self.part(cell.experiment) / "cells" / f"{cell.id}.json"

    def checkpoints(self, cell: Cell) -> Path:
        """Of a cell on its way; other settings, other checkpoints."""
        return self.part(cell.experiment) / "checkpoints" / f"{cell.id}-{cell.fingerprint}"

    def finished(self, cell: Cell) -> bool:
        """Whether this cell's result is there, made with the very same settings."""
        found = self.read(cell)
        return found is not None and found.get("fingerprint") == cell.fingerprint

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """The result of a cell, or None if there is none that can be read."""
        return _read(self.cell(cell))

    def changed(self, experiment: str, size: Size, share: float = 1) -> Iterator[dict[str, Any]]:
        """Results of cells with changed settings (`--set`), trained for this share of their steps.

        No table plans them, so they are found where they are.
        """
        for path in sorted((self.part(experiment) / "cells").glob("*-set*.json")):
            record = _read(path)
            if record is None or record.get("scale") != size or "set" not in record["cell"]:
                continue
            if record["cell"].get("share", 1) == share:
                yield record

    def write(self, cell: Cell, result: Mapping[str, Any]) -> Path:
        """Put a result in place, whole or not at all."""
        path = self.cell(cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "experiment": cell.experiment,
            "scale": cell.size,
            "cell": cell.coordinates(),
            "fingerprint": cell.fingerprint,
            "task": dict(cell.task),
            "model": dict(cell.config),
            "training": dict(cell.training),
            **result,
        }
        write_atomically(path, json.dumps(record, indent=1, allow_nan=False) + "\n")
        return path


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(read_regular(path))
    except (OSError, ValueError):
        return None
    return found
