"""From the cells of a folder to tables and verdicts: the one way, of a run or of what is kept."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.cell import RunFolder, Size
from vort.lab.experiments.experiment import Experiment, Record, Summary
from vort.lab.experiments.origins import history_sheet, with_origins
from vort.lab.experiments.scores import row_of

__all__ = ["Summarised", "summarise"]


@dataclass(frozen=True)
class Summarised:
    """What a folder says of an experiment.

    Attributes:
        experiment: which.
        size: "laptop" or "paper".
        share: of the cells' training.
        summary: tables, verdicts, figures and notes.
        records: the results it was made from.
    """

    experiment: Experiment
    size: Size
    share: float
    summary: Summary
    records: list[dict[str, Any]]

    def __bool__(self) -> bool:
        """Whether there is anything to show."""
        return bool(self.records) or self.experiment.direct

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON, with the command that makes it."""
        made_by = [record["made_by"] for record in self.records]
        command = f"vort reproduce --scale {self.size} --only "
        # Of what it uses, that which has cells of this size.
        used = [n for n in self.experiment.uses if EXPERIMENTS[n].cells(self.size, Path("books"))]
        command += ",".join((*used, self.experiment.name))
        command += "" if self.share == 1 else f" --share {self.share:g}"
        return {
            "title": self.experiment.title,
            "about": self.experiment.about,
            "scale": self.size,
            "trained_on": sorted({f"{made['device']}, torch {made['torch']}" for made in made_by}),
            "command": command,
            **self.summary.to_dict(command),
        }


def summarise(
    experiment: Experiment,
    folder: RunFolder,
    size: Size,
    *,
    data: Path | None = Path("books"),
    share: float = 1.0,
) -> Summarised:
    """All that a folder has of an experiment: its cells, those of others it uses, and its history.

    Args:
        experiment: of `EXPERIMENTS`.
        folder: of the run.
        size: "laptop" or "paper".
        data: folder of texts; nothing of it is read.
        share: of each cell's training.
    """
    records: list[dict[str, Any]] = []
    other: dict[str, dict[str, None]] = {}
    for source in (experiment, *(EXPERIMENTS[name] for name in experiment.uses)):
        for cell in source.cells(size, data):
            short = cell.shortened(share)
            record = folder.read(short)
            if record is not None:
                records.append(record)
                if not short.made_as(record):
                    other.setdefault(source.name, {})[row_of(record)] = None
    for name in (experiment.name, *experiment.uses):
        records += folder.changed(name, size, share)
    summary = experiment.summarise(records, size)
    if summary.sheets:
        shown = [record for record in records if _shows(experiment, summary, record)]
        own = [record for record in records if record["experiment"] == experiment.name]
        summary = with_origins(summary, experiment.name, shown, _marked(experiment, other, shown))
        # What an experiment uses has a history of its own.
        replaced = folder.history(experiment.name)
        past = history_sheet(replaced, own, experiment.past)
        sheets = [*summary.sheets, *([past] if past else [])]
        summary = replace(summary, sheets=sheets)
    return Summarised(experiment, size, share, summary, records)


def _marked(
    experiment: Experiment, other: Mapping[str, Iterable[str]], shown: Sequence[Record]
) -> dict[str, list[str]]:
    """Of rows made with other settings than are planned now those to mark, by experiment.

    A row that the experiment has itself and made as planned is not marked for a namesake of
    another that it uses: that one is told of under its own experiment.
    """
    found: dict[str, list[str]] = {}
    own = {row_of(record) for record in shown if record["experiment"] == experiment.name}
    rows = {row_of(record) for record in shown}
    for source, members in other.items():
        for row in members:
            if row in rows:
                whose = source if source != experiment.name and row in own else experiment.name
                found.setdefault(whose, []).append(row)
    return {whose: list(dict.fromkeys(names)) for whose, names in found.items()}


def _shows(experiment: Experiment, summary: Summary, record: Mapping[str, Any]) -> bool:
    """Whether a table shows this result: its own, or one of another experiment that it uses."""
    if record["experiment"] == experiment.name or experiment.name in record:
        return True
    return record["cell"]["model"] in summary.labels
