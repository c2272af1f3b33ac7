"""A result belongs to the settings it was made with, and is there whole or not at all."""

import json
from dataclasses import replace
from pathlib import Path

from tests.lab.experiments.tiny import tiny
from vort.lab.experiments.cell import finished, path_of, read_cell, write_cell


def test_a_cell_is_finished_only_with_the_very_same_settings(tmp_path: Path) -> None:
    cell = tiny()
    assert not finished(cell, tmp_path)
    write_cell(cell, tmp_path, {"test": {}})
    assert finished(cell, tmp_path)
    assert not finished(replace(cell, training={**cell.training, "steps": 4}), tmp_path)


def test_a_damaged_result_is_no_result(tmp_path: Path) -> None:
    cell = tiny()
    path = write_cell(cell, tmp_path, {"test": {}})
    path.write_text(path.read_text()[:20])
    assert read_cell(cell, tmp_path) is None
    assert not finished(cell, tmp_path)


def test_writing_leaves_nothing_half_done_behind(tmp_path: Path) -> None:
    cell = tiny()
    write_cell(cell, tmp_path, {"seconds": 1.0})
    assert [p.name for p in path_of(cell, tmp_path).parent.iterdir()] == [f"{cell.id}.json"]
    record = json.loads(path_of(cell, tmp_path).read_text())
    assert record["cell"] == {"task": "zipf_retrieval", "model": "vort", "seed": 0}


def test_names_keep_to_plain_characters() -> None:
    assert tiny(model="a/b c", tags={"beta": 1.5}).id == "pilot-laptop-a_b_c-beta1.5-seed0"
