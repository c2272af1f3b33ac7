"""The folder of one experiment: its pictures, and `summary.json` with all that a page shows."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vort.lab.report.provenance import provenance


def write_summary(folder: Path, record: Mapping[str, Any]) -> Path:
    """Write `summary.json`, where it came from added; whole or not at all.

    record: title, about, command, sheets, verdicts, figures, notes; see `vort.lab.report.html`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "summary.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({**record, "made_by": provenance()}, indent=1) + "\n")
    os.replace(partial, path)
    return path
