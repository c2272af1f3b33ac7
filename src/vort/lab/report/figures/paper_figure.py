"""A figure of the paper: what it needs of a run, how it is drawn, what it says of itself."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vort.files import write_atomically
from vort.lab.report.folder import mapping, read_cells
from vort.lab.report.provenance import provenance

__all__ = ["Found", "Need", "PaperFigure", "caption_of", "read_records", "write_captions"]

_VERSIONS = ("vort", "torch", "numpy", "scipy", "python", "device")
# Records of cells by `Need.source`.
Found = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Need:
    """A measure that a cell of an experiment, VORT's, must have kept, and what must be in it."""

    experiment: str
    key: str
    part: str = ""
    model: str = "vort"

    @property
    def source(self) -> str:
        """Whose cell, as `Found` names it: the experiment, and the model where it is not VORT."""
        return self.experiment if self.model == "vort" else f"{self.experiment}/{self.model}"

    def __str__(self) -> str:
        """As people say it.

        >>> print(Need("pilot", "strip"), "and", Need("plasticity", "plasticity"))
        strip of pilot and plasticity
        """
        name = f"{self.part} of {self.key}" if self.part else self.key
        return name if name == self.experiment else f"{name} of {self.experiment}"

    def met(self, record: Mapping[str, Any]) -> bool:
        """Whether a cell has it; one of an earlier version may lack the part."""
        if mapping(record.get("cell")).get("model") != self.model or self.key not in record:
            return False
        return not self.part or self.part in mapping(record[self.key])


@dataclass(frozen=True)
class PaperFigure:
    """One figure, made anew.

    Attributes:
        name: the paper's label, and the name of its files.
        draw: makes the picture at a path, from the records that the needs name.
        caption: what is shown, panel by panel.
        needs: all of these must be there.
        any_of: at least one of these, where there are any.
        seed: of random numbers drawn for the picture itself, if there are any.
    """

    name: str
    draw: Callable[[Path, Found], None]
    caption: str
    needs: tuple[Need, ...] = field(default=())
    any_of: tuple[Need, ...] = field(default=())
    seed: int | None = None

    def missing(self, found: Found) -> tuple[Need, ...]:
        """What must be measured before this can be drawn; empty if nothing."""
        lacking = tuple(need for need in self.needs if need.source not in found)
        if self.any_of and not any(need.source in found for need in self.any_of):
            lacking += tuple(need for need in self.any_of if need.model == "vort")
        return lacking


def read_records(folder: Path, needs: Iterable[Need]) -> dict[str, dict[str, Any]]:
    """For each source the first cell that has all that is needed of it; none, no entry.

    The first in seed, then in name: figures show one model. What cannot be read is passed over.
    """
    by_source: dict[str, list[Need]] = {}
    for need in needs:
        by_source.setdefault(need.source, []).append(need)
    found = {}
    for source, wanted in by_source.items():
        records = [
            record
            for record in read_cells(folder / wanted[0].experiment, []).values()
            if all(need.met(record) for need in wanted)
        ]
        if records:
            found[source] = min(records, key=lambda record: record["cell"]["seed"])
    return found


def caption_of(figure: PaperFigure, found: Found, files: Sequence[str]) -> dict[str, Any]:
    """Caption, files and origin of a figure, ready for JSON."""
    drawn = {need.source for need in (*figure.needs, *figure.any_of)} & set(found)
    return {
        "name": figure.name,
        "files": list(files),
        "caption": figure.caption,
        "measured": [_origin(found[name]) for name in sorted(drawn)],
        "drawn": {"seed": figure.seed, **provenance()},
    }


def _origin(record: Mapping[str, Any]) -> dict[str, Any]:
    """Of a cell: what was run, with which seed and settings."""
    settings = record.get("plasticity", {}).get("settings", {})
    made_by = record.get("made_by", {})
    return {
        "experiment": record["experiment"],
        "scale": record["scale"],
        "cell": dict(record["cell"]),
        "seeds": settings.get("seeds", [record["cell"]["seed"]]),
        "fingerprint": record.get("fingerprint"),
        "training": dict(record.get("training", {})),
        "command": made_by.get("command"),
        "versions": {name: made_by[name] for name in _VERSIONS if name in made_by},
    }


def write_captions(folder: Path, captions: Sequence[Mapping[str, Any]]) -> None:
    """Write `captions.json` and `captions.md`; pictures drawn there before keep theirs."""
    by_name = _former(folder) | {caption["name"]: caption for caption in captions}
    text = json.dumps(list(by_name.values()), indent=1, ensure_ascii=False)
    write_atomically(folder / "captions.json", text + "\n")
    parts = ["# Figures", *(_markdown(caption) for caption in by_name.values())]
    write_atomically(folder / "captions.md", "\n\n".join(parts) + "\n")


def _former(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Captions of pictures that are there already, by name."""
    try:
        found = json.loads((folder / "captions.json").read_text(encoding="utf-8"))
        return {x["name"]: x for x in found if (folder / x["files"][0]).exists()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _markdown(caption: Mapping[str, Any]) -> str:
    name, drawn = caption["name"], caption["drawn"]
    lines = [f"## {name}", f"![{name}]({caption['files'][0]})", caption["caption"]]
    origins = [
        f"- {origin['experiment']}, {origin['scale']} scale, "
        f"{_seeds(origin['seeds'])}{_steps(origin['training'])}: "
        f"`{origin['command']}` ({_versions(origin['versions'])})"
        for origin in caption["measured"]
    ]
    seed = "" if drawn["seed"] is None else f", random numbers from seed {drawn['seed']}"
    origins.append(f"- drawn by `{drawn['command']}` ({_versions(drawn)}){seed}")
    return "\n\n".join([*lines, "\n".join(origins)])


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def _steps(training: Mapping[str, Any]) -> str:
    return f", {training['steps']} steps" if "steps" in training else ""


def _versions(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {found[name]}" for name in _VERSIONS if name in found)
