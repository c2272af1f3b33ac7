"""Runs of cells: only what is missing, failures told, nothing lost to a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.experiments.tiny import tiny
from vort.lab.experiments.cell import RunFolder
from vort.lab.experiments.run import run_cells

ROOT = Path(__file__).parents[3]


def test_a_second_run_does_only_what_is_missing(tmp_path: Path) -> None:
    cells = [tiny(seed=seed) for seed in range(3)]
    assert [o.error for o in run_cells(cells[:2], RunFolder(tmp_path))] == ["", ""]
    before = RunFolder(tmp_path).cell(cells[0]).stat().st_mtime_ns
    assert [o.cell.seed for o in run_cells(cells, RunFolder(tmp_path))] == [2]
    assert RunFolder(tmp_path).cell(cells[0]).stat().st_mtime_ns == before


def test_restart_does_cells_again(tmp_path: Path) -> None:
    list(run_cells([tiny()], RunFolder(tmp_path)))
    assert len(list(run_cells([tiny()], RunFolder(tmp_path), restart=True))) == 1


def test_a_cell_that_fails_is_told_and_stops_no_other(tmp_path: Path) -> None:
    broken = tiny(model="broken", config={"hidden_size": "wide"})
    outcomes = list(run_cells([broken, tiny()], RunFolder(tmp_path)))
    assert "hidden_size" in outcomes[0].error
    assert not outcomes[1].error
    assert RunFolder(tmp_path).finished(tiny())


def test_the_same_cell_gives_the_same_result_alone_and_beside_others(tmp_path: Path) -> None:
    cells = [tiny(seed=seed) for seed in range(2)]
    list(run_cells(cells, RunFolder(tmp_path / "alone")))
    list(run_cells(cells, RunFolder(tmp_path / "beside"), workers=2))
    for cell in cells:
        alone, beside = (RunFolder(tmp_path / name).read(cell) for name in ("alone", "beside"))
        assert alone is not None
        assert beside is not None
        assert alone["test"] == beside["test"]


def test_a_record_says_all_that_a_table_needs(tmp_path: Path) -> None:
    list(run_cells([tiny(after={"orders": {}})], RunFolder(tmp_path)))
    record = RunFolder(tmp_path).read(tiny(after={"orders": {}}))
    assert record is not None
    assert set(record["test"]) == {"<=4", "4-16", ">16", "all"}
    assert sum(lag["count"] for lag in record["lags"]) == record["test"]["all"]["count"] == 8 * 4
    assert record["state_bytes"] == 4 * record["state_numbers"]
    assert record["made_by"]["device"]
    assert record["steps"] == 3
    assert record["searched"] is False
    assert set(record["orders"]["layers"][0]) == {"first", "again", "filler"}
    assert not list((tmp_path / "pilot" / "checkpoints").iterdir())


SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from tests.lab.experiments.tiny import tiny, TRAINING
from vort.lab.experiments.cell import RunFolder
from vort.lab.experiments.run import run_cells
cells = [tiny(seed=s, training={**TRAINING, "steps": 40}) for s in range(4)]
for outcome in run_cells(cells, RunFolder(Path(sys.argv[1]))):
    assert not outcome.error, outcome.error
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_loses_no_finished_cell(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    folder = tmp_path / "pilot" / "cells"
    for wanted in (1, 2):
        child = subprocess.Popen(command, cwd=ROOT, env=environment)
        deadline = time.monotonic() + 120
        while len(list(folder.glob("*.json"))) < wanted:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
    kept = {path.name: path.read_text() for path in folder.glob("*.json")}
    assert len(kept) >= 2
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    assert len(list(folder.glob("*.json"))) == 4
    for name, text in kept.items():
        assert (folder / name).read_text() == text
        json.loads(text)
