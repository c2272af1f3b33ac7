"""A run folder, written and read again."""

from pathlib import Path

from tests.lab.report.cases import make_run, write
from vort.lab.experiments import EXPERIMENTS
from vort.lab.report.folder import provenance, read_cells, read_run, write_summary


def test_a_summary_reads_back_with_where_it_came_from(tmp_path: Path) -> None:
    record = {"title": "A <title>", "sheets": [], "notes": ["ä"]}
    write_summary(tmp_path / "deep" / "part", record)
    assert [file.name for file in (tmp_path / "deep" / "part").iterdir()] == ["summary.json"]
    (part,) = read_run(tmp_path / "deep").parts
    assert part.summary == {**record, "made_by": provenance()}
    assert part.title == "A <title>"
    assert read_run(tmp_path / "deep" / "part").parts == [part]


def test_parts_stand_in_the_order_asked_for_and_others_follow_by_name(tmp_path: Path) -> None:
    for name in ("zebra", "books", "ant", "pilot", "kernel"):
        write_summary(tmp_path / name, {})
    names = [part.name for part in read_run(tmp_path, EXPERIMENTS).parts]
    assert names == ["kernel", "pilot", "books", "ant", "zebra"]


def test_damaged_cells_are_named_and_the_others_kept(tmp_path: Path) -> None:
    pilot = make_run(tmp_path) / "pilot"
    write(pilot / "cells" / "list.json", [1])
    (pilot / "cells" / "half.json").write_text("{")
    problems: list[str] = []
    assert len(read_cells(pilot, problems)) == 18
    assert problems[0].startswith("pilot/cells/half.json could not be read")
    assert problems[1] == "pilot/cells/list.json holds a list, not an object"
    assert read_cells(tmp_path / "nothing", problems) == {}
