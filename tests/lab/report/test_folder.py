"""A run folder, written and read again."""

import os
from pathlib import Path

import pytest

from tests.lab.report.cases import cell_of, make_run, write
from vort.lab.experiments import EXPERIMENTS
from vort.lab.report.folder import read_cells, read_run, write_summary
from vort.lab.report.provenance import provenance
from vort.lab.report.run_page import report_page


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


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A folder beside the run, with a result that nobody meant to share."""
    folder = tmp_path / "private"
    (folder / "cells").mkdir(parents=True)
    (folder / "key.png").write_bytes(b"a secret of the machine")
    write(folder / "summary.json", {"title": "a secret of the machine"})
    write(folder / "cells" / "a.json", {**cell_of("vort", 1.0, 0), "scale": "a secret"})
    return folder


@pytest.mark.parametrize("what", ["summary.json", "x.png", "cells/x.json", "cells", "part"])
def test_links_out_of_the_folder_are_named_and_not_followed(
    tmp_path: Path, secret: Path, what: str
) -> None:
    run = make_run(tmp_path / "run")
    link, target = {
        "summary.json": (run / "kernel" / "summary.json", secret / "summary.json"),
        "x.png": (run / "kernel" / "x.png", secret / "key.png"),
        "cells/x.json": (run / "pilot" / "cells" / "x.json", secret / "cells" / "a.json"),
        "cells": (run / "kernel" / "cells", secret / "cells"),
        "part": (run / "part", secret),
    }[what]
    link.unlink(missing_ok=True)
    link.symlink_to(target)
    found = read_run(run)
    page = report_page(found)
    (problem,) = [words for words in found.problems if "leads out of run" in words]
    assert link.name in problem or what == "cells"
    assert "a secret" not in page
    assert "YSBzZWNyZXQ" not in page  # base64 of the same


def test_links_within_the_folder_are_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "kernel" / "again.png").symlink_to(run / "pilot" / "orders.png")
    (tmp_path / "link").symlink_to(run)
    found = read_run(tmp_path / "link")
    assert report_page(found).count("data:image/png") == 2
    assert found.problems == []


@pytest.mark.parametrize("what", ["summary.json", "x.png", "cells/x.json"])
def test_pipes_are_named_and_not_waited_for(tmp_path: Path, what: str) -> None:
    run = make_run(tmp_path)
    file = run / "pilot" / what
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    found = read_run(run)
    report_page(found)
    (problem,) = [words for words in found.problems if file.name in words]
    assert "must be a file, not a pipe" in problem
