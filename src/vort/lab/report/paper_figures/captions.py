"""What every picture shows and where it came from, for people and for programs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vort.lab.report.paper_figures.figure import Found, PaperFigure
from vort.lab.report.provenance import provenance

__all__ = ["caption_of", "write_captions"]

_VERSIONS = ("vort", "torch", "numpy", "scipy", "python", "device")


def caption_of(figure: PaperFigure, found: Found, files: Sequence[str]) -> dict[str, Any]:
    """Caption, files and origin of a figure, ready for JSON."""
    drawn = {need.experiment for need in (*figure.needs, *figure.any_of)} & set(found)
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
    (folder / "captions.json").write_text(text + "\n", encoding="utf-8")
    parts = ["# Figures", *(_markdown(caption) for caption in by_name.values())]
    (folder / "captions.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


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
