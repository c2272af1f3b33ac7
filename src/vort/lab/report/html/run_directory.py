"""A run directory as the experiments leave it, read with patience: parts may be missing or damaged.

RUN/<experiment>/cells/<cell>.json   one finished cell each
RUN/<experiment>/summary.json        title, tables, figures, verdicts, command
RUN/<experiment>/results.json        claims and tables of `vort reproduce`
RUN/<experiment>/*.png, *.svg        pictures
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["PICTURES", "Experiment", "Json", "Run", "mapping", "read_run", "rows_of"]

# The paper's order; experiments it does not know follow by name.
ORDER = (
    *("kernel", "pilot", "label_copy", "books", "ablations", "complexity", "orders"),
    "plasticity",
)
PICTURES = {".png": "image/png", ".svg": "image/svg+xml", ".jpg": "image/jpeg"}
Json = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """One folder of a run.

    Attributes:
        name: of the folder.
        summary: `summary.json`, or what stands for it; {} if there is none.
        cells: finished cells by name, as they were written.
        pictures: files, those that the summary lists first.
        problems: what could not be read, in words.
    """

    name: str
    summary: Json = field(default_factory=dict)
    cells: dict[str, Json] = field(default_factory=dict)
    pictures: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The summary's, or the folder's name made readable."""
        given = self.summary.get("title")
        return str(given) if given else self.name.replace("_", " ").capitalize()


@dataclass(frozen=True)
class Run:
    """A run directory.

    Attributes:
        folder: where it is.
        experiments: its parts, by name.
    """

    folder: Path
    experiments: list[Experiment]

    @property
    def problems(self) -> list[str]:
        """What could not be read, anywhere."""
        return [text for experiment in self.experiments for text in experiment.problems]


def read_run(folder: Path) -> Run:
    """The experiments of a run directory, or the folder itself where it is one experiment.

    Raises NotADirectoryError where there is none, and ValueError where it holds no experiment.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    if _is_experiment(folder):
        return Run(folder, [_read_experiment(folder)])
    found = [path for path in folder.iterdir() if path.is_dir() and _is_experiment(path)]
    place = {name: index for index, name in enumerate(ORDER)}
    parts = sorted(found, key=lambda path: (place.get(path.name, len(ORDER)), path.name))
    if not parts:
        raise ValueError(
            f"{folder} holds no experiment: a folder with summary.json, results.json or cells/"
        )
    return Run(folder, [_read_experiment(part) for part in parts])


def mapping(value: Any) -> Json:
    """The value if it is an object, else {}."""
    return dict(value) if isinstance(value, Mapping) else {}


def rows_of(value: Any) -> list[Json]:
    """The objects in a list; [] for anything else."""
    return [dict(item) for item in value if isinstance(item, Mapping)] if _is_list(value) else []


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_experiment(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("summary.json", "results.json", "cells"))


def _read_experiment(folder: Path) -> Experiment:
    problems: list[str] = []
    summary = _read_json(folder / "summary.json", problems) or {}
    results = _read_json(folder / "results.json", problems)
    if results is not None:
        summary = {**_summary_of_results(results), **summary}
    cells = {}
    for file in sorted((folder / "cells").glob("*.json")):
        cell = _read_json(file, problems)
        if cell is not None:
            cells[file.stem] = cell
    pictures = list(_pictures(folder, summary, problems))
    return Experiment(folder.name, summary, cells, pictures, problems)


def _read_json(file: Path, problems: list[str]) -> Json | None:
    """The object in a file; None, and a line in `problems`, where there is none to read."""
    if not file.exists():
        return None
    name = "/".join(file.parts[-3 if file.parent.name == "cells" else -2 :])
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        problems.append(f"{name} could not be read: {problem}")
        return None
    if not isinstance(found, dict):
        problems.append(f"{name} holds a {type(found).__name__}, not an object")
        return None
    return found


def _summary_of_results(results: Json) -> Json:
    """What `vort reproduce` keeps, in the words of a summary: claims are verdicts, lists tables."""
    made_by = mapping(results.get("made_by"))
    sheets = []
    for name, value in results.items():
        rows = rows_of(value)
        if name == "claims" or not rows:
            continue
        headings = list(rows[0])
        body = [[row.get(heading, "") for heading in headings] for row in rows]
        sheets.append({"title": name.replace("_", " "), "headings": headings, "rows": body})
    return {
        "verdicts": rows_of(results.get("claims")),
        "sheets": sheets,
        "made_by": made_by,
        "command": made_by.get("command", ""),
    }


def _pictures(folder: Path, summary: Json, problems: list[str]) -> Iterator[Path]:
    found = {path.name: path for path in sorted(folder.iterdir()) if path.suffix in PICTURES}
    for figure in rows_of(summary.get("figures")):
        name = str(figure.get("file", ""))
        if name in found:
            yield found.pop(name)
        else:
            problems.append(f"{folder.name}: the figure {name!r} is not there")
    yield from found.values()
