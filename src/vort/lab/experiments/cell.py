"""A cell: one task, one model, one seed; what it is made of, and where a run keeps its result."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, get_args

from vort.files import read_regular, write_atomically

__all__ = ["SIZES", "Cell", "RunFolder", "Size", "slim"]

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
        settings = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "search"}
        return sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]

    def coordinates(self) -> dict[str, Any]:
        """Where the result stands in its table."""
        task = self.task.get("name", "")
        return {"task": task, "model": self.model, **self.tags, "seed": self.seed}

    def made_as(self, record: Mapping[str, Any]) -> bool:
        """Whether a result was made with these settings of model and training.

        Other than by the fingerprint, where data lie makes no difference.
        """
        settings = json.loads(json.dumps([dict(self.config), dict(self.training)]))
        return bool(settings == [record.get("model"), record.get("training")])

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
    ROOT/<experiment>/history/<cell>.<n>.json    what stood in its place before, and why no longer
    ROOT/<experiment>/checkpoints/<cell>-<hash>  of a cell on its way
    ROOT/<experiment>/summary.json, *.png        tables, verdicts, pictures
    ROOT/figures                                 the paper's figures
    ROOT/report.html                             all of it on a page

    `reason`: why results that are there are replaced; it goes to the history with them.
    """

    root: Path
    reason: str = ""

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
        """Put a result in place, whole or not at all; what stands there goes to the history."""
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
        return self._put(self.cell(cell), record)

    def history(self, experiment: str) -> list[dict[str, Any]]:
        """Results that were replaced, a cell's oldest first; `replaced` says why and by what."""
        paths = (self.part(experiment) / "history").glob("*.json")
        found = (_read(path) for path in sorted(paths, key=_age))
        return [record for record in found if record is not None]

    def collect(self, other: Path) -> list[str]:
        """Take the finished cells of another run's folder, made small; the names of the new ones.

        One that differs from what stands in its place moves that to the history.
        """
        taken = []
        for path in sorted(other.glob("*/cells/*.json")):
            record = _read(path)
            if record is None or "trial" in record["cell"]:
                continue
            place = self.part(record["experiment"]) / "cells" / path.name
            small = slim(record)
            if small != _read(place):
                self._put(place, small)
                taken.append(path.stem)
        return taken

    def replaces(self, other: Path) -> list[Path]:
        """Results that `collect` would move to the history."""
        places = {
            path: self.root / path.relative_to(other) for path in other.glob("*/cells/*.json")
        }
        pairs = [(place, _read(path), _read(place)) for path, place in places.items()]
        return [p for p, new, old in pairs if new and old is not None and slim(new) != old]

    def _put(self, path: Path, record: Mapping[str, Any]) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        before = _read(path)
        if before is not None:
            self._to_history(path, before, record)
        write_atomically(path, json.dumps(record, indent=1, allow_nan=False) + "\n")
        return path

    def _to_history(self, path: Path, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        folder = path.parent.parent / "history"
        folder.mkdir(exist_ok=True)
        number = 1 + len(list(folder.glob(f"{path.stem}.*.json")))
        made_by = after.get("made_by", {})
        by = {key: made_by[key] for key in ("commit", "command") if key in made_by}
        record = {**slim(before), "replaced": {"reason": self.reason, "by": by}}
        write_atomically(folder / f"{path.stem}.{number}.json", json.dumps(record, indent=1) + "\n")


# Points of a training curve that are kept of a result that is committed.
_POINTS = 40


def slim(record: Mapping[str, Any]) -> dict[str, Any]:
    """A result with no more of its training curve than a picture shows; all else as it is."""
    history = record.get("history")
    if not isinstance(history, list) or len(history) <= _POINTS:
        return dict(record)
    places = [round(i * (len(history) - 1) / (_POINTS - 1)) for i in range(_POINTS)]
    return {**record, "history": [history[place] for place in places]}


def _age(path: Path) -> tuple[str, int]:
    name, _, number = path.stem.rpartition(".")
    return name, int(number) if number.isdigit() else 0


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(read_regular(path))
    except (OSError, ValueError):
        return None
    return found
