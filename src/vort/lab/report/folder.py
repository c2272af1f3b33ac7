"""A run folder: what experiments leave in it, and all of it read again with patience.

RUN/<experiment>/cells/<cell>.json   one finished cell each
RUN/<experiment>/summary.json        title, about, command, tables, figures, verdicts, notes
RUN/<experiment>/*.png, *.svg        pictures

Any part may be missing or damaged, and none may be elsewhere: a link that leads out of the folder
is not followed, so that a page one shares holds nothing that was not in it.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vort.files import read_regular, write_atomically
from vort.lab.report.provenance import provenance

__all__ = [
    "PICTURES",
    "Json",
    "Part",
    "Run",
    "mapping",
    "read_cells",
    "read_run",
    "rows_of",
    "write_summary",
]

PICTURES = {".png": "image/png", ".svg": "image/svg+xml", ".jpg": "image/jpeg"}
Json = dict[str, Any]


def write_summary(folder: Path, record: Mapping[str, Any]) -> Path:
    """Write `summary.json`, where it came from added; whole or not at all.

    record: title, about, command, sheets, verdicts, figures, notes, as the page shows them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "summary.json"
    write_atomically(path, json.dumps({**record, "made_by": provenance()}, indent=1) + "\n")
    return path


@dataclass(frozen=True)
class Part:
    """What one experiment left in a run.

    Attributes:
        name: of the folder.
        summary: `summary.json`; {} if there is none.
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
    """A run folder.

    Attributes:
        folder: where it is.
        parts: one for each experiment.
    """

    folder: Path
    parts: list[Part]

    @property
    def problems(self) -> list[str]:
        """What could not be read, anywhere."""
        return [text for part in self.parts for text in part.problems]


def read_run(folder: Path, order: Iterable[str] = ()) -> Run:
    """The experiments of a run folder, or the folder itself where it is one experiment.

    order: names of experiments that come first, such as `vort.lab.experiments.EXPERIMENTS`; the
        others follow by name.

    Raises NotADirectoryError where there is none, and ValueError where it holds no experiment.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    if _is_experiment(folder):
        return Run(folder, [_read_part(folder, folder)])
    found = [path for path in folder.iterdir() if path.is_dir() and _is_experiment(path)]
    place = {name: index for index, name in enumerate(order)}
    folders = sorted(found, key=lambda path: (place.get(path.name, len(place)), path.name))
    if not folders:
        raise ValueError(f"{folder} holds no experiment: a folder with summary.json or cells/")
    return Run(folder, [_read_part(path, folder) for path in folders])


def mapping(value: Any) -> Json:
    """The value if it is an object, else {}."""
    return dict(value) if isinstance(value, Mapping) else {}


def rows_of(value: Any) -> list[Json]:
    """The objects in a list; [] for anything else."""
    items = value if isinstance(value, (list, tuple)) else []
    return [dict(item) for item in items if isinstance(item, Mapping)]


def _is_experiment(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("summary.json", "cells"))


def _read_part(folder: Path, run: Path) -> Part:
    if not folder.resolve().is_relative_to(run.resolve()):
        return Part(folder.name, problems=[f"{folder.name} is a link that leads out of {run.name}"])
    problems: list[str] = []
    summary = _read_json(folder / "summary.json", problems, run) or {}
    cells = read_cells(folder, problems, run)
    pictures = list(_pictures(folder, summary, problems))
    return Part(folder.name, summary, cells, pictures, problems)


def read_cells(folder: Path, problems: list[str], run: Path | None = None) -> dict[str, Json]:
    """The finished cells of an experiment's folder by name; what is damaged goes to `problems`.

    run: the folder that links may not lead out of; the one above if absent.
    """
    files = sorted((folder / "cells").glob("*.json"))
    read = {file.stem: _read_json(file, problems, run or folder.parent) for file in files}
    return {name: cell for name, cell in read.items() if cell is not None}


def _read_json(file: Path, problems: list[str], run: Path) -> Json | None:
    """The object in a file; None, and a line in `problems`, where there is none to read."""
    if not file.exists():
        return None
    name = "/".join(file.parts[-3 if file.parent.name == "cells" else -2 :])
    try:
        found = json.loads(read_regular(file, run).decode())
    except (OSError, ValueError, RecursionError) as problem:
        problems.append(f"{name} could not be read: {problem}")
        return None
    if not isinstance(found, dict):
        problems.append(f"{name} holds a {type(found).__name__}, not an object")
        return None
    return found


def _pictures(folder: Path, summary: Json, problems: list[str]) -> Iterator[Path]:
    found = {path.name: path for path in sorted(folder.iterdir()) if path.suffix in PICTURES}
    for figure in rows_of(summary.get("figures")):
        name = str(figure.get("file", ""))
        if name in found:
            yield found.pop(name)
        else:
            problems.append(f"{folder.name}: the figure {name!r} is not there")
    yield from found.values()
