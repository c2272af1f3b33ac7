"""`vort tune`: all workers busy, nothing done twice, no trial begun that would not be over."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vort.cli import app
from vort.lab.commands.tune import Search
from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.cell import Cell, RunFolder
from vort.lab.experiments.recall import recall_table
from vort.lab.experiments.run import Outcome
from vort.lab.experiments.search import RATES, read_lines, row_searches, searched

ROWS = ["vort", "power_law", "mixture"]


@pytest.fixture(autouse=True)
def _nothing_taken_up(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> None:
    """Trials that were taken up are done: none here, whatever the repository has."""
    # What cells are trained with is read once for all tests.
    searched("pilot/vort", "paper")
    empty = tmp_path_factory.mktemp("trials") / "trials.jsonl"
    monkeypatch.setattr("vort.lab.experiments.search.FILE", empty)


def search_in(folder: Path, **options: Any) -> Search:
    searches = row_searches(EXPERIMENTS["pilot"], "paper", ROWS)
    return Search(searches, RunFolder(folder), **options)


def finish(search: Search, cell: Cell, bits: float, seconds: float = 1.0) -> str:
    """Let a trial end as training would."""
    rest = {"steps": cell.training["steps"], "seconds": seconds, "tokens_per_second": 320_000}
    made_by = {"device": "cpu", "commit": "abc"}
    task = {"length": 10_000}
    scores = {"validation": {"all": {"bits": bits}}}
    search.folder.write(cell, {**scores, **rest, "task": task, "made_by": made_by})
    return search.done(Outcome(cell))


def take_all(search: Search) -> Iterator[Cell]:
    while (cell := search.take()) is not None:
        yield cell


def test_rows_take_turns_and_a_row_that_is_ready_need_not_wait(tmp_path: Path) -> None:
    search = search_in(tmp_path)
    first = list(islice(take_all(search), 6))
    assert [cell.model for cell in first] == [*ROWS, *ROWS]
    for cell in [*first, *take_all(search)]:
        # One row's trials are still under way.
        if cell.model != "power_law":
            finish(search, cell, abs(cell.training["learning_rate"] - RATES[3]))
    # Mixture's decays come after its rates; VORT has none to wait for.
    following = list(take_all(search))
    assert {(cell.model, cell.tags["stage"]) for cell in following} == {("vort", 2), ("mixture", 1)}
    assert len([cell for cell in following if cell.model == "vort"]) == 3


def test_nothing_that_is_done_or_under_way_is_begun_again(tmp_path: Path) -> None:
    search = search_in(tmp_path)
    cells = list(take_all(search))
    assert len({cell.id for cell in cells}) == len(cells) == 7 + 4 + 7
    for cell in cells[:5]:
        finish(search, cell, 1.0)
    again = list(take_all(search_in(tmp_path)))
    assert {cell.id for cell in again} == {cell.id for cell in cells[5:]}
    assert search_in(tmp_path).count() == (5, 36)


def test_no_trial_is_begun_that_would_not_be_over_in_time(tmp_path: Path) -> None:
    search = search_in(tmp_path, seconds=3600.0)
    for cell in list(take_all(search)):
        # A step takes a second: 195 s each, and a quarter of a run 781.
        finish(search, cell, cell.training["learning_rate"] + 1, seconds=195.0)
    assert list(take_all(search))
    late = search_in(tmp_path, seconds=300.0)
    assert {cell.tags["stage"] for cell in take_all(late)} == {1}  # what is beyond an edge fits
    assert list(take_all(search_in(tmp_path, seconds=100.0))) == []
    said = search_in(tmp_path, seconds=100.0).standing()
    assert said[-1].startswith("not over yet: stage 1 of 3 rows")


def test_a_training_that_broke_down_is_kept_as_such_and_other_errors_are_not(
    tmp_path: Path,
) -> None:
    search = search_in(tmp_path)
    first, second = search.take(), search.take()
    assert first is not None
    assert second is not None
    assert "broke down" in search.done(Outcome(first, "FloatingPointError: nan", broke_down=True))
    assert "failed" in search.done(Outcome(second, "MemoryError"))
    assert search.failed == 1
    rest = {cell.id for cell in take_all(search)}
    assert not {first.id, second.id} & rest  # not in this run
    again = {cell.id for cell in take_all(search_in(tmp_path))}
    assert second.id in again
    assert first.id not in again


@pytest.fixture
def tiny_table(monkeypatch: pytest.MonkeyPatch) -> str:
    sizes = {"length": 32, "pairs": 3, "keys": 4, "bounds": (4, 16)}
    counts = {"validation_sequences": 4, "test_sequences": 4, "train_sequences": None}
    table = recall_table(
        "small",
        "Small",
        "A test.",
        heading="Small",
        task={"laptop": {"name": "zipf_retrieval", **sizes, **counts}},
        models={"laptop": ("vort", "exponential")},
        decays={"laptop": (0.1, 0.3, 1.0)},
    )
    monkeypatch.setitem(EXPERIMENTS, "small", table)
    training = {"steps": 16, "batch_size": 2, "evaluation_sequences": 4}
    monkeypatch.setattr("vort.lab.experiments.recall.RECALL_TRAINING", {"laptop": training})
    return "small"


def test_the_command_goes_through_all_stages_and_its_trials_are_taken_up(
    tiny_table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trials.jsonl"
    monkeypatch.setattr("vort.lab.experiments.search.FILE", file)
    out = ["--out", str(tmp_path / "tuning"), "--workers", "1"]
    runner = CliRunner()
    one = runner.invoke(app, ["tune", tiny_table, "--rows", "vort", "--minutes", "60", *out])
    assert one.exit_code == 0, one.output
    both = runner.invoke(app, ["tune", tiny_table, *out])
    assert both.exit_code == 0, both.output
    assert "stage 1  vort" not in both.output  # done before
    assert "stage 3  exponential" in both.output
    taken = runner.invoke(app, ["tune", "--collect", str(tmp_path / "tuning")])
    lines = read_lines(file)
    assert f"{len(lines)} trials taken up" in taken.output
    for row in ("vort", "exponential"):
        steps = {1: 1, 2: 4, 3: 16}
        own = [line for line in lines if line["row"] == row]
        assert all(line["steps"] == steps[line["stage"]] for line in own)
        counts = [sum(line["stage"] == n and not line["beyond"] for line in own) for n in steps]
        assert counts == [7, 3, 2]
    again = runner.invoke(app, ["tune", "--collect", str(tmp_path / "tuning")])
    assert "0 trials taken up" in again.output
    whole = runner.invoke(app, ["tune", tiny_table, "--rows", "vort", "--rates", "2e-2,2e-4", *out])
    assert whole.exit_code == 0, whole.output
    assert "stage 3  vort  learning_rate=0.02" in whole.output
    assert "stage 1" not in whole.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pilot", "--minutes", "0"], "--minutes must be positive, got 0"),
        (["pilot", "--share", "0.5"], "--share must lie in (0, 0.25], got 0.5"),
        (["pilot", "--rows", "dream"], "--rows must be of vort"),
        (["pilot", "--rates", "1e-3,fast"], "--rates must be numbers between 0 and 1, got 1e-3"),
        (["pilot", "--rates", "0"], "--rates must be numbers between 0 and 1, got 0"),
        (["pilot", "--rates", "1e-3", "--stages", "2"], "leave out --share and --stages"),
        (["pilot", "--rates", "1e-3", "--share", "0.1"], "leave out --share and --stages"),
        (["--collect", "nowhere"], "--collect must be a folder of vort tune, got nowhere"),
        (["--collect", str(Path(__file__).parent)], "no finished trial of vort tune in"),
        (["pilot", "--collect", "nowhere"], "--collect takes up all trials: leave out pilot"),
        ([], "experiment must be one of pilot, label_copy, books, books_deep, "),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["tune", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
