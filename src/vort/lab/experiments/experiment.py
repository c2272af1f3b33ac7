"""What every experiment offers: its cells or a measurement, and a summary of what came out."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from vort.lab.experiments.cell import Cell, Size
from vort.lab.report.tables import Sheet
from vort.lab.tasks import TASKS
from vort.lab.training import TrainingConfig
from vort.lab.verdicts import Claim
from vort.names import refuse_unknown

__all__ = ["Experiment", "Figure", "Record", "Summary", "claims_sheet"]

# The result of a cell, as it is kept.
Record = Mapping[str, Any]
# A cell has a seed of its own, and a table several cells.
_FIXED = {"name", "seed", "progress"}


@dataclass(frozen=True)
class Figure:
    """A picture to be drawn into a file, and what it shows."""

    file: str
    caption: str
    draw: Callable[[Path], None]


@dataclass(frozen=True)
class Summary:
    """What an experiment found, for the terminal and the report.

    Attributes:
        sheets: tables.
        verdicts: claims, judged.
        figures: to be drawn.
        notes: under the tables.
        labels: names of models, for people.
        more: whatever else is worth keeping, for programs.
    """

    sheets: Sequence[Sheet]
    verdicts: Sequence[Claim] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self, command: str) -> dict[str, Any]:
        """Ready for JSON; figures by file name."""
        return {
            "sheets": [asdict(sheet) for sheet in self.sheets],
            "verdicts": [_said(claim) for claim in self.verdicts],
            "figures": [
                {"file": figure.file, "caption": figure.caption, "command": command}
                for figure in self.figures
            ],
            "notes": list(self.notes),
            "labels": dict(self.labels),
            **self.more,
        }


def _said(claim: Claim) -> dict[str, str]:
    """A claim as it is read; whose rows it is about was for judging it."""
    return {name: value for name, value in asdict(claim).items() if name != "rows"}


def claims_sheet(claims: Sequence[Claim], title: str = "Claims") -> Sheet:
    """Verdicts as a table."""
    headings = ("where", "the statement", "measured", "verdict")
    rows = [
        (c.where, c.states, c.measured, f"{c.verdict} ({c.erratum})" if c.erratum else c.verdict)
        for c in claims
    ]
    return Sheet(title, headings, rows)


def _no_cells(size: Size, data: Path | None) -> list[Cell]:
    return []


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or figure of the paper.

    Attributes:
        name: for `--only` and file names.
        title: for people.
        about: what is done and how our reading of the paper fills in what it leaves open.
        summarise: from the results of its cells, as far as there are any, in their order. One that
            is `direct` gets none and measures by itself.
        cells: the cells of a size; `data` is the folder of texts the user named, or None.
        uses: experiments whose results are summarised too, beside its own.
        measure: what a cell does instead of training a model; its result, ready for JSON.
        direct: whether all is measured while it is summarised.
        alone: whether nothing else may run beside its cells: what is timed.
        searchable: whether `vort tune` can search settings for its models.
        decays: time constants to search for a fixed rate of decay, as shares of the length.
        past: what is shown of results that were replaced, where they have no classes of a test
            split: a heading, and from a result to its percentage, None without one.
    """

    name: str
    title: str
    about: str
    summarise: Callable[[Sequence[Record], Size], Summary]
    cells: Callable[[Size, Path | None], list[Cell]] = _no_cells
    uses: tuple[str, ...] = ()
    measure: Callable[[Cell], dict[str, Any]] | None = None
    direct: bool = False
    alone: bool = False
    searchable: bool = False
    decays: Mapping[Size, tuple[float, ...]] = field(default_factory=dict)
    past: tuple[str, Callable[[Record], float | None]] | None = None

    def settings(self, cell: Cell) -> dict[str, list[str]]:
        """What `--set` can change of a cell: the settings of its task, model and training."""
        if self.measure is None:
            task: list[str] = _names(TASKS[cell.task["name"]])
            training = _names(TrainingConfig)
        else:
            task, training = list(cell.task), list(cell.training)
        model: list[str] = []
        if cell.config:
            from vort.models import VortConfig

            model = _names(VortConfig)
        known = {"task": task, "model": model, "training": training}
        return {k: [name for name in names if name not in _FIXED] for k, names in known.items()}

    def changed(self, cell: Cell, changes: Mapping[str, Any]) -> Cell:
        """The cell with other settings, under a name and in a row of its own.

        Args:
            cell: of this experiment.
            changes: by name, e.g. {"training.learning_rate": 1e-3}; one that the cell does not
                have is an error.
        """
        known = [f"{k}.{name}" for k, names in self.settings(cell).items() for name in names]
        refuse_unknown(f"{self.name}, as {cell.model},", changes, known)
        parts = {"task": dict(cell.task), "model": dict(cell.config)}
        parts["training"] = dict(cell.training)
        for name, value in changes.items():
            part, _, key = name.partition(".")
            parts[part][key] = value
            # One or the other says how long a run is.
            other = {"steps": "epochs", "epochs": "steps"}.get(key) if part == "training" else None
            if other is not None and value is not None:
                parts[part].pop(other, None)
        words = [f"{name}={json.dumps(value)}" for name, value in sorted(changes.items())]
        return replace(
            cell,
            task=parts["task"],
            config=parts["model"],
            training=parts["training"],
            tags={**cell.tags, "set": " ".join(words)},
            search="" if "training.learning_rate" in changes else cell.search,
        )


def _names(settings: Any) -> list[str]:
    return [field.name for field in fields(settings) if not field.name.startswith("_")]
