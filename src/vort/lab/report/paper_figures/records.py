"""The cells of a run that figures are drawn from."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vort.lab.report.paper_figures.figure import Need

__all__ = ["read_records"]


def read_records(folder: Path, needs: Iterable[Need]) -> dict[str, dict[str, Any]]:
    """For each experiment the first VORT cell that has all that is needed of it; none, no entry.

    The first in seed, then in name: figures show one model.
    """
    keys: dict[str, set[str]] = {}
    for need in needs:
        keys.setdefault(need.experiment, set()).add(need.key)
    found = {}
    for experiment, wanted in keys.items():
        records = [
            record
            for file in sorted((folder / experiment / "cells").glob("*.json"))
            if (record := _read(file)) is not None and wanted <= set(record)
        ]
        if records:
            found[experiment] = min(records, key=lambda record: record["cell"]["seed"])
    return found


def _read(file: Path) -> dict[str, Any] | None:
    """A cell of VORT; None for others and for what cannot be read."""
    try:
        record = json.loads(file.read_text())
        ours: bool = record["cell"]["model"] == "vort"
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return record if ours else None
