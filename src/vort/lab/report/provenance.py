"""Where a figure came from: command, commit, versions and device of the process that made it."""

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch

import vort

__all__ = ["COMMIT", "code_of_models", "plain_command", "provenance", "under_version_control"]

# Asked before the repository, which a copy of the tree may lack, or have an older one of: a commit,
# with "-dirty" behind it if files were changed.
COMMIT = "VORT_COMMIT"
# What a trained model computes with; another version of it may give other figures.
_MODELS = ("fractional", "ops", "memories", "layers", "models")
_SOURCE = Path(vort.__file__).parent
# Grows while a search is taken up, and changes no figure that is made.
_GROWING = ":(exclude)lab/experiments/trials.jsonl"


def provenance() -> dict[str, Any]:
    """Command, commit, versions and device of this process, ready for JSON.

    `commit` is "unknown" and `dirty` None where neither a repository nor `VORT_COMMIT` says;
    `code` is a hash of what models compute with, see `code_of_models`.
    """
    commit, dirty = _commit()
    return {
        "command": plain_command(sys.argv),
        "commit": commit,
        "dirty": dirty,
        "code": code_of_models(),
        "vort": vort.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


@cache
def code_of_models() -> str:
    """A short hash of all files of the kernels and the model: two figures of one are comparable.

    No repository is needed to compare them.
    """
    found = sha256()
    for package in _MODELS:
        for path in sorted((_SOURCE / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                found.update(path.relative_to(_SOURCE).as_posix().encode() + b"\0")
                found.update(path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


@cache
def _commit() -> tuple[str, bool | None]:
    """The commit of the running source, and whether files of it were changed since."""
    given = os.environ.get(COMMIT, "")
    if given:
        return given.removesuffix("-dirty")[:12], given.endswith("-dirty")
    # A package installed within somebody else's repository is none of its files.
    if _git("ls-files", "--error-unmatch", "__init__.py") is not None:
        commit = _git("rev-parse", "--short=12", "HEAD")
        if commit is not None:
            return commit, bool(_git("status", "--porcelain", "--", ".", _GROWING))
    return "unknown", None


def under_version_control(folder: Path, files: Iterable[Path]) -> list[Path]:
    """Those of the files that a repository around the folder keeps; none where there is none."""
    wanted = [file for file in files if file.exists()]
    if not wanted or not folder.is_dir():
        return []
    kept = _git("ls-files", "-z", "--", ".", folder=folder)
    names = set() if kept is None else {(folder / name).resolve() for name in kept.split("\0")}
    return [file for file in wanted if file.resolve() in names]


def _git(*arguments: str, folder: Path | None = None) -> str | None:
    """What git says in a folder, that of the source by default; None where it does not."""
    command = ["git", *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder or _SOURCE, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()


def plain_command(arguments: Sequence[str]) -> str:
    """A command line that tells nothing of the machine: absolute paths shrink to their last name.

    >>> plain_command(["/home/ada/bin/vort", "report", "--out=/data/run", "reports/laptop"])
    'vort report --out=run reports/laptop'
    >>> plain_command(["/home/ada/vort/__main__.py", "report"])  # python -m vort
    'vort report'
    """
    path = Path(arguments[0])
    program = path.parent.name if path.name == "__main__.py" else path.name
    return shlex.join(["vort" if program == "cli.py" else program, *map(_short, arguments[1:])])


def _short(argument: str) -> str:
    name, equals, value = argument.rpartition("=")
    return f"{name}{equals}{Path(value).name}" if Path(value).is_absolute() else argument
