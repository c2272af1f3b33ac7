"""The search for learning rates: fair, on validation data, and nobody takes another's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lab.experiments.tiny import CONFIG, TASK
from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.cell import SIZES, RunFolder, Size
from vort.lab.experiments.recall import recall_cell, recall_table
from vort.lab.experiments.run import run_cells
from vort.lab.experiments.search import SEED, best_of, search_cells, searched, trials

PILOT = EXPERIMENTS["pilot"]


@pytest.mark.parametrize("size", SIZES)
def test_every_model_gets_the_same_number_of_trials_of_the_same_length(size: Size) -> None:
    cells = search_cells(PILOT, size, share=0.1)
    by_model: dict[str, list[Any]] = {}
    for cell in cells:
        by_model.setdefault(cell.model, []).append(cell)
    assert len({len(members) for members in by_model.values()}) == 1
    assert len({cell.training["steps"] for cell in cells}) == 1
    assert {cell.seed for cell in cells} == {SEED}
    assert {cell.training["test_sequences"] for cell in cells} == {0}
    rates = {cell.config["exponential_rate"] for cell in by_model["exponential"]}
    assert len(rates) >= 3


def test_the_best_trial_wins_on_validation_bits(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    cells = search_cells(PILOT, "laptop", ["vort"])
    for number, cell in enumerate(cells[:-1]):  # the last one broke down
        bits = {"all": {"bits": abs(number - 2.0)}}
        folder.write(cell, {"validation": bits, "steps": 3})
    found = best_of(PILOT, cells, folder)["vort"]
    assert found["best"] == trials(PILOT, cells[0])[2]
    assert found["trials"][-1]["bits"] is None
    assert not found["at_edge"]


def test_trials_start_from_the_same_weights_and_never_see_the_test_split(tmp_path: Path) -> None:
    task = {**TASK, "seed": SEED}
    cells = [
        replace(cell, config=CONFIG, task=task, training={**cell.training, "steps": 2})
        for cell in search_cells(PILOT, "laptop", ["vort"])[:2]
    ]
    folder = RunFolder(tmp_path)
    assert not [outcome.error for outcome in run_cells(cells, folder) if outcome.error]
    first, second = (folder.read(cell) for cell in cells)
    assert first is not None
    assert second is not None
    assert "test" not in first
    assert first["history"][0]["gradient_norm"] > 0
    assert cells[0].seed == cells[1].seed == SEED
    assert cells[0].training["learning_rate"] != cells[1].training["learning_rate"]
    # An interrupted search goes on.
    assert list(run_cells(cells, folder)) == []


def test_a_model_whose_trials_all_broke_down_is_an_error(tmp_path: Path) -> None:
    cells = search_cells(PILOT, "laptop", ["vort"])
    with pytest.raises(RuntimeError, match="no trial of a model came to an end"):
        best_of(PILOT, cells, RunFolder(tmp_path))


def test_bad_searches_are_explained() -> None:
    with pytest.raises(ValueError, match=r"share must lie in \(0, 1\], got 2"):
        search_cells(PILOT, "laptop", share=2)
    with pytest.raises(ValueError, match=r"models must be of vort, .*got dream"):
        search_cells(PILOT, "laptop", ["dream"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_cell_says_whose_search_it_uses_or_that_there_was_none(name: str, size: Size) -> None:
    for cell in EXPERIMENTS[name].cells(size, Path("somewhere")):
        if cell.search:
            found = searched(cell.search, size)
            assert found is not None
            assert cell.training["learning_rate"] == found["learning_rate"]


def test_an_unknown_task_or_row_takes_nobodys_rates() -> None:
    task = {"name": "mqar", "length": 256}
    new = recall_cell("mqar", "laptop", "vort", 0, task)
    assert (new.search, new.training["learning_rate"]) == ("", 4e-3)
    row = recall_cell("pilot", "laptop", "vort_new", 0, task, settings={})
    assert (row.search, row.training["learning_rate"]) == ("", 4e-3)
    like = recall_cell("mqar", "laptop", "vort", 0, task, search="pilot/vort")
    assert (like.search, like.training["learning_rate"]) == ("pilot/vort", 6e-3)
    exponential = recall_cell("mqar", "laptop", "exponential", 0, task)
    assert exponential.config["exponential_rate"] == 10 / 256


def test_a_new_table_can_be_searched_too() -> None:
    mine = recall_table(
        "mine",
        "Mine",
        "A test.",
        heading="Mine",
        task={"laptop": {"name": "mqar", "length": 64, "pairs": 8}},
        models={"laptop": ("vort", "exponential")},
    )
    assert len(search_cells(mine, "laptop")) == 16
