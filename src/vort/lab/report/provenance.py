"""Where a figure came from: command, versions, device."""

import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy
import scipy
import torch

import vort


def plain_command(arguments: Sequence[str]) -> str:
    """A command line that tells nothing of the machine: absolute paths shrink to their last name.

    >>> plain_command(["/home/ada/bin/vort", "report", "--out=/data/run", "reports/laptop"])
    'vort report --out=run reports/laptop'
    """
    program = Path(arguments[0]).name
    return shlex.join(["vort" if program == "cli.py" else program, *map(_short, arguments[1:])])


def _short(argument: str) -> str:
    name, equals, value = argument.rpartition("=")
    return f"{name}{equals}{Path(value).name}" if Path(value).is_absolute() else argument


def provenance() -> dict[str, str]:
    """Command and versions of this run, for the foot of every table."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "command": plain_command(sys.argv),
        "vort": vort.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": device,
    }
