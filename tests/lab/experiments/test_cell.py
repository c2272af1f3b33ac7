"""A result belongs to the settings it was made with, and is there whole or not at all."""

import json
from dataclasses import replace
from pathlib import Path

from tests.lab.experiments.tiny import tiny
from vort.lab.experiments.cell import RunFolder


def test_a_cell_is_finished_only_with_the_very_same_settings(tmp_path: Path) -> None:
    cell = tiny()
    assert not RunFolder(tmp_path).finished(cell)
    RunFolder(tmp_path).write(cell, {"test": {}})
    assert RunFolder(tmp_path).finished(cell)
    other = replace(cell, training={**cell.training, "steps": 4})
    assert not RunFolder(tmp_path).finished(other)


def test_a_damaged_result_is_no_result(tmp_path: Path) -> None:
    cell = tiny()
    path = RunFolder(tmp_path).write(cell, {"test": {}})
    path.write_text(path.read_text()[:20])
    assert RunFolder(tmp_path).read(cell) is None
    assert not RunFolder(tmp_path).finished(cell)


def test_writing_leaves_nothing_half_done_behind(tmp_path: Path) -> None:
    cell = tiny()
    RunFolder(tmp_path).write(cell, {"seconds": 1.0})
    assert [p.name for p in RunFolder(tmp_path).cell(cell).parent.iterdir()] == [f"{cell.id}.json"]
    record = json.loads(RunFolder(tmp_path).cell(cell).read_text())
    assert record["cell"] == {"task": "zipf_retrieval", "model": "vort", "seed": 0}


def test_names_keep_to_plain_characters() -> None:
    assert tiny(model="a/b c", tags={"beta": 1.5}).id == "pilot-laptop-a_b_c-beta1.5-seed0"


def test_a_cell_is_no_other_for_having_taken_its_rate_from_a_search() -> None:
    assert tiny(search="pilot/vort").fingerprint == tiny().fingerprint


def test_a_shorter_training_has_a_file_of_its_own() -> None:
    short = tiny(training={"steps": 30}).shortened(0.1)
    assert short.training["steps"] == 3
    assert short.id == "pilot-laptop-vort-share0.1-seed0"
    assert tiny().shortened(1) == tiny()
