"""What `vort train` is asked for, what a run was begun with, and whether the two agree."""

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from vort.files import write_atomically

__all__ = ["RunSettings"]

FILE = "run.json"
# Settings that have an option of their own; others are reached by --training-set.
OPTIONS = (
    *("steps", "epochs", "batch_size", "learning_rate", "accumulation", "seed", "log", "workers"),
)


@dataclass(frozen=True)
class RunSettings:
    """Settings of task, model and training, and the name of a size if there is one.

    In a file, the path of a text is relative to the run, so that the two can move together and
    commands work from any folder; here it is absolute.
    """

    task: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    size: str = ""

    def write(self, folder: Path) -> None:
        """To `run.json` in a folder."""
        task = _with_source(self.task, lambda path: _relative(path, folder))
        found: dict[str, Any] = {"task": task, "model": self.model, "training": self.training}
        found |= {"size": self.size} if self.size else {}
        write_atomically(folder / FILE, json.dumps(found, indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "RunSettings":
        """Those of the run in a folder."""
        file = folder / FILE
        if not file.is_file():
            raise FileNotFoundError(f"{folder} holds no run of vort train: no {FILE} in it")
        try:
            found = cls(**json.loads(file.read_text()))
            found._check()
        except (TypeError, ValueError) as problem:
            raise ValueError(f"{file} is damaged: {problem}") from problem
        task = _with_source(found.task, lambda path: str((folder.absolute() / path).resolve()))
        # Runs of earlier versions, which had no output gate unless they say so.
        model = {"output_gate": False, **found.model}
        return cls(task, model, found.training, found.size)

    def _check(self) -> None:
        """Raise unless these can be a run's own, which has a task with a name."""
        for part in ("task", "model", "training"):
            value = getattr(self, part)
            if not isinstance(value, dict):
                raise TypeError(f"{part} must be settings by name, got {value!r}")
        if not isinstance(self.task.get("name"), str):
            raise TypeError(f"task must have a name, got {self.task!r}")
        if not isinstance(self.size, str):
            raise TypeError(f"size must be a name, got {self.size!r}")

    def refuse_others(self, given: "RunSettings", folder: Path) -> None:
        """Raise at the first setting of `given` that differs from these, a run's own."""
        import vort.lab.experiments  # noqa: F401  # some define tasks of their own
        from vort.lab.tasks import TASKS
        from vort.lab.training import TrainingConfig
        from vort.models import VortConfig
        from vort.names import check_choice

        if given.size and given.size != self.size:
            _refuse("--size", self.size or None, given.size, folder)
        check_choice("task", given.task.get("name", self.task["name"]), TASKS)
        # How a run is shown and fed may change.
        outcome = TrainingConfig(steps=1).outcome()
        for part, kind in (("task", TASKS[self.task["name"]]), ("model", VortConfig)):
            _compare(part, getattr(self, part), getattr(given, part), _defaults(kind), folder)
        asked = {key: value for key, value in given.training.items() if key in outcome}
        _compare("training", self.training, asked, _defaults(TrainingConfig), folder)


def _compare(
    part: str, own: Mapping[str, Any], given: Mapping[str, Any], default: Any, folder: Path
) -> None:
    for key, value in given.items():
        before = own.get(key, default.get(key))
        if json.dumps(before) != json.dumps(value) and before != value:
            _refuse(_option(part, key), before, value, folder)


def _refuse(option: str, before: Any, value: Any, folder: Path) -> None:
    shown = "absent" if before is None else repr(before)
    raise ValueError(
        f"{option} must be {shown}, as when the run in {folder} began, got {value!r}: leave it "
        "out, or begin another run"
    )


def _option(part: str, key: str) -> str:
    """How a setting is spelled on the command line."""
    if part == "training" and key in OPTIONS:
        return "--" + key.replace("_", "-")
    if part == "task" and key in ("source", "name", "seed"):
        return {"source": "--text", "name": "TASK", "seed": "--seed"}[key]
    return f"--{part}-set {key}"


def _defaults(kind: Any) -> dict[str, Any]:
    return {x.name: x.default for x in fields(kind) if x.default is not MISSING}


def _with_source(task: dict[str, Any], change: Any) -> dict[str, Any]:
    """A task whose source, where it is a path, is changed."""
    from vort.lab.tasks.corpus import is_path

    source = task.get("source")
    if source is None or not is_path(str(source)):
        return task
    return {**task, "source": change(str(source))}


def _relative(path: str, folder: Path) -> str:
    try:
        return os.path.relpath(path, folder.resolve())
    except ValueError:  # on another drive
        return path
