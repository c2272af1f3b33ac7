"""Runs of cells: only what is missing, failures told, nothing lost to a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab.experiments.tiny import TASK, TRAINING, tiny
from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.cell import RunFolder
from vort.lab.experiments.run import data_workers, run_as_they_come, run_cells
from vort.lab.experiments.search import EARLIER

ROOT = Path(__file__).parents[3]


def test_a_second_run_does_only_what_is_missing(tmp_path: Path) -> None:
    cells = [tiny(seed=seed) for seed in range(3)]
    assert [o.error for o in run_cells(cells[:2], RunFolder(tmp_path))] == ["", ""]
    before = RunFolder(tmp_path).cell(cells[0]).stat().st_mtime_ns
    assert [o.cell.seed for o in run_cells(cells, RunFolder(tmp_path))] == [2]
    assert RunFolder(tmp_path).cell(cells[0]).stat().st_mtime_ns == before


def test_long_cells_come_first_and_those_that_are_timed_last(tmp_path: Path) -> None:
    cells = [c for name in ("label_copy", "complexity", "pilot", "plasticity")
             for c in EXPERIMENTS[name].cells("laptop", None)]  # fmt: skip
    order: list[str] = []
    left = run_cells(cells, RunFolder(tmp_path), fits=lambda c: order.append(c.experiment) or False)  # type: ignore[func-returns-value]
    assert list(left) == []
    assert order[:2] == ["pilot", "plasticity"]  # the pilot's attention, which decodes by token
    assert list(dict.fromkeys(order[2:])) == ["label_copy", "pilot", "complexity"]


def test_cells_that_are_next_to_nothing_come_after_the_others(tmp_path: Path) -> None:
    """So that a worker who is done before the last has something left to do."""
    small = tiny(model="small", training={**TRAINING, "steps": 1})
    large = [tiny(seed=seed, training={**TRAINING, "steps": 200}) for seed in range(2)]
    order: list[str] = []
    cells = [small, *large, *EXPERIMENTS["complexity"].cells("laptop", None)]
    list(run_cells(cells, RunFolder(tmp_path), fits=lambda c: order.append(c.model) or False))  # type: ignore[func-returns-value]
    assert order[:3] == [large[0].model, large[1].model, "small"]


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


def test_side_by_side_no_more_processes_draw_data_than_there_are_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cores, cells, expected in ((16, 5, 2), (16, 6, 1), (2, 2, 0), (64, 4, 3)):
        monkeypatch.setattr("vort.lab.experiments.run._cores", cores // cells)
        assert data_workers(3) == expected
        assert cells * (expected + 1) <= cores


def test_work_that_appears_on_the_way_is_done_and_what_does_not_fit_is_left(
    tmp_path: Path,
) -> None:
    waiting = [tiny(seed=0)]
    folder = RunFolder(tmp_path)
    seen = []
    for outcome in run_as_they_come(lambda: waiting.pop() if waiting else None, folder):
        seen.append(outcome.cell.seed)
        if outcome.cell.seed < 2:
            waiting.append(tiny(seed=outcome.cell.seed + 1))
    assert seen == [0, 1, 2]
    cells = [tiny(seed=seed) for seed in range(3, 6)]
    done = run_cells(cells, folder, fits=lambda cell: cell.seed != 4)
    assert [outcome.cell.seed for outcome in done] == [3, 5]
    assert not folder.finished(cells[1])


def test_a_training_that_broke_down_is_told_from_other_errors(tmp_path: Path) -> None:
    broken = tiny(training={**TRAINING, "learning_rate": 1e30, "log_every": 1, "clip_norm": None})
    (outcome,) = run_cells([broken], RunFolder(tmp_path))
    assert outcome.broke_down
    (other,) = run_cells([tiny(config={"hidden_size": "wide"})], RunFolder(tmp_path))
    assert other.error
    assert not other.broke_down


def test_a_record_says_which_commit_it_is_of_and_which_search(tmp_path: Path) -> None:
    list(run_cells([tiny(search="pilot/vort")], RunFolder(tmp_path)))
    record = RunFolder(tmp_path).read(tiny())
    assert record is not None
    names = {"command", "commit", "dirty", "code", "device", "torch", "vort", "python"}
    assert names <= set(record["made_by"])
    assert (record["searched"], record["searched_in"]) == ("pilot/vort", EARLIER)


def test_a_seed_is_that_of_the_weights_and_of_the_data(tmp_path: Path) -> None:
    # Endless data come in one order: with the data's seed the same, weights alone can differ.
    task = {**TASK, "train_sequences": None}
    cells = [tiny(seed=a, task={**task, "seed": b}) for a, b in ((0, 0), (1, 0), (0, 1))]
    first = []
    for number, cell in enumerate(cells):
        folder = RunFolder(tmp_path / str(number))
        list(run_cells([cell], folder))
        record = folder.read(cell)
        assert record is not None
        first.append(record["history"][0]["loss"])
    assert len(set(first)) == 3


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
