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


def test_a_result_that_is_replaced_goes_to_the_history_with_the_reason(tmp_path: Path) -> None:
    cell, changed = tiny(), tiny(training={"steps": 4})
    RunFolder(tmp_path).write(cell, {"value": 1, "made_by": {"commit": "a"}})
    assert RunFolder(tmp_path).history("pilot") == []
    made_by = {"commit": "b", "command": "vort"}
    RunFolder(tmp_path, "a bug").write(cell, {"value": 2, "made_by": made_by})
    RunFolder(tmp_path).write(changed, {"value": 3, "made_by": {}})  # the same place
    first, second = RunFolder(tmp_path).history("pilot")
    assert (first["value"], second["value"]) == (1, 2)
    assert first["replaced"] == {"reason": "a bug", "by": made_by}
    assert second["replaced"]["reason"] == ""
    assert first["made_by"] == {"commit": "a"}
    found = RunFolder(tmp_path).read(changed)
    assert found is not None
    assert found["value"] == 3


def test_the_history_goes_by_number_and_not_by_letter(tmp_path: Path) -> None:
    for value in range(12):
        RunFolder(tmp_path).write(tiny(), {"value": value})
    assert [r["value"] for r in RunFolder(tmp_path).history("pilot")] == list(range(11))


def test_a_run_made_elsewhere_is_taken_over_and_loses_nothing(tmp_path: Path) -> None:
    here, there = RunFolder(tmp_path / "here", "more steps"), RunFolder(tmp_path / "there")
    cells = [tiny(seed=seed) for seed in range(3)]
    for cell in cells[:2]:
        here.write(cell, {"value": 1})
    long = [{"step": n} for n in range(1000)]
    there.write(cells[0], {"value": 1})  # the same
    there.write(cells[1], {"value": 2})
    there.write(cells[2], {"value": 3, "history": long})
    there.write(tiny(tags={"trial": "learning_rate=1"}), {"value": 4})  # a search's
    assert here.replaces(there.root) == [here.cell(cells[1])]
    assert here.collect(there.root) == [cells[1].id, cells[2].id]
    assert here.collect(there.root) == []
    assert here.replaces(there.root) == []
    (old,) = here.history("pilot")
    assert (old["value"], old["replaced"]["reason"]) == (1, "more steps")
    assert here.finished(cells[2])
    record = here.read(cells[2])
    assert record is not None
    assert len(record["history"]) == 40
    assert [record["history"][n] for n in (0, -1)] == [long[0], long[-1]]


def test_a_cell_knows_results_of_other_settings_wherever_data_lie() -> None:
    cell = tiny(task={"name": "books", "source": "a"})
    record = {"model": dict(cell.config), "training": dict(cell.training)}
    assert cell.made_as(record)
    assert replace(cell, task={"name": "books", "source": "b"}).made_as(record)
    assert not replace(cell, training={**cell.training, "steps": 9}).made_as(record)
    assert not replace(cell, config={**cell.config, "num_scales": 9}).made_as(record)
