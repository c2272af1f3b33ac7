"""Where a figure came from: command, versions, device."""

import platform
import shlex
import sys
from pathlib import Path

import numpy
import scipy
import torch

import vort


def provenance() -> dict[str, str]:
    """Command and versions of this run, for the foot of every table."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "command": command,
        "vort": vort.__version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "device": device,
    }
