"""What every experiment offers: its cells, and a summary of their results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vort.lab.experiments.cell import Cell, Scale
from vort.lab.experiments.claims import Claim
from vort.lab.report.tables import Sheet

__all__ = ["Experiment", "Figure", "Summary"]


@dataclass(frozen=True)
class Figure:
    """A picture to be drawn into a file, and what it shows."""

    file: str
    caption: str
    draw: Callable[[Path], None]


@dataclass(frozen=True)
class Summary:
    """What an experiment found, for the terminal and the report; labels are names of models."""

    sheets: Sequence[Sheet]
    verdicts: Sequence[Claim] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self, command: str) -> dict[str, Any]:
        """Ready for JSON; figures by file name."""
        return {
            "sheets": [asdict(sheet) for sheet in self.sheets],
            "verdicts": [asdict(claim) for claim in self.verdicts],
            "figures": [
                {"file": figure.file, "caption": figure.caption, "command": command}
                for figure in self.figures
            ],
            "notes": list(self.notes),
            "labels": dict(self.labels),
        }


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    Attributes:
        name: for `--only` and file names.
        title: for people.
        about: what is done and how our reading of the paper fills in what it leaves open.
        cells: the cells of a scale; `data` is the folder of texts the user named, or None.
        summarise: the results of those cells that exist, in the order of the cells.
        uses: experiments whose results are summarised too, beside its own.
    """

    name: str
    title: str
    about: str
    cells: Callable[[Scale, Path | None], list[Cell]]
    summarise: Callable[[Sequence[Mapping[str, Any]], Scale], Summary]
    uses: tuple[str, ...] = field(default=())
