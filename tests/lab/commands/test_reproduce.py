"""`vort reproduce` loses no result in silence, keeps to its minutes and takes over other runs."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vort.cli import app
from vort.lab.commands.reproduce import Pictures, Plan
from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.cell import RunFolder
from vort.lab.experiments.recall import recall_table

runner = CliRunner()


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, unrendered: None) -> str:
    sizes = {"length": 32, "pairs": 3, "keys": 4, "bounds": (4, 16)}
    counts = {"validation_sequences": 4, "test_sequences": 4, "train_sequences": None}
    small = recall_table(
        "small",
        "Small",
        "A test.",
        heading="Small",
        task={"laptop": {"name": "zipf_retrieval", **sizes, **counts}},
        models={"laptop": ("vort", "mixture")},
        seeds=(0,),
    )
    monkeypatch.setitem(EXPERIMENTS, "small", small)
    training = {"steps": 4, "batch_size": 2, "evaluation_sequences": 4}
    monkeypatch.setattr("vort.lab.experiments.recall.RECALL_TRAINING", {"laptop": training})
    return "small"


def reproduce(table: str, out: Path, *more: str) -> str:
    arguments = ["reproduce", "--only", table, "--workers", "1", "--out", str(out), *more]
    result = runner.invoke(app, arguments)
    return f"{result.exit_code} {' '.join(result.output.split())}"


def test_committed_results_are_replaced_with_a_reason_only(table: str, tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    out = tmp_path / "results"
    first = reproduce(table, out)
    assert first.startswith("0 ")  # a first run needs none
    # Where no bar can be drawn there are lines.
    assert re.search(r"1 of \d+ cells, \d+ s: small-laptop-", first)
    assert "summarising small" in first
    assert reproduce(table, out, "--restart").startswith("0 ")  # nobody keeps it
    git("init", "-q")
    git("add", ".")
    refused = reproduce(table, out, "--restart")
    assert refused.startswith("2 ")
    assert "--reason must say why committed results are replaced: small-laptop-vort" in refused
    again = reproduce(table, out)
    assert again.startswith("0 ")  # nothing to be done
    assert "1 of " not in again
    assert reproduce(table, out, "--restart", "--reason", "a bug").startswith("0 ")
    history = sorted((out / "small" / "history").glob("*-vort-*.json"))
    reasons = [json.loads(path.read_text())["replaced"]["reason"] for path in history]
    assert reasons == ["", "a bug"]
    summary = json.loads((out / "small" / "summary.json").read_text())
    assert summary["sheets"][-1]["title"] == "Results that were replaced"
    assert {row[-1] for row in summary["sheets"][-1]["rows"]} == {"no reason was given", "a bug"}


def test_cells_of_another_run_are_taken_over_and_summarised(table: str, tmp_path: Path) -> None:
    assert reproduce(table, tmp_path / "there").startswith("0 ")
    said = reproduce(table, tmp_path / "here", "--collect", str(tmp_path / "there"))
    assert said.startswith("0 2 cells taken from")
    one, other = (
        json.loads((tmp_path / name / "small" / "summary.json").read_text())
        for name in ("here", "there")
    )
    assert one["sheets"] == other["sheets"]
    assert one["verdicts"] == other["verdicts"]
    wrong = reproduce(table, tmp_path / "here", "--collect", str(tmp_path))
    assert "--collect must be a folder that vort reproduce --scale laptop wrote" in wrong


@pytest.mark.parametrize("option", [["--no-run"], ["--collect", "there"]])
def test_cells_are_not_asked_for_again_where_none_is_done(
    table: str, tmp_path: Path, option: list[str]
) -> None:
    said = reproduce(table, tmp_path, "--restart", *option)
    assert said.startswith("2 ")
    assert f"--restart does cells again, and {option[0]} does none" in said


def test_no_cell_is_begun_that_would_not_be_over(table: str, tmp_path: Path) -> None:
    assert reproduce(table, tmp_path, "--cells", "*-vort-*").startswith("0 ")
    (path,) = (tmp_path / "small" / "cells").glob("*.json")
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "seconds": 1000.0}))
    said = reproduce(table, tmp_path, "--minutes", "10")
    assert said.startswith("0 ")
    assert "1 cells were not begun for want of time; the same command goes on" in said
    assert len(list((tmp_path / "small" / "cells").glob("*.json"))) == 1
    assert "want of time" not in reproduce(table, tmp_path, "--minutes", "60")
    assert "--minutes must be positive" in reproduce(table, tmp_path, "--minutes", "-1")


def test_a_cell_of_other_settings_than_planned_is_named(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reproduce(table, tmp_path).startswith("0 ")
    longer = {"steps": 5, "batch_size": 2, "evaluation_sequences": 4}
    monkeypatch.setattr("vort.lab.experiments.recall.RECALL_TRAINING", {"laptop": longer})
    assert "‡ made with other settings than are planned now" in reproduce(
        table, tmp_path, "--no-run"
    )


@pytest.mark.slow
def test_pictures_drawn_by_other_processes_are_those_drawn_here(tmp_path: Path) -> None:
    kernel, plan = EXPERIMENTS["kernel"], Plan("laptop", None, 1.0)
    figure = next(f for f in kernel.summarise([], "laptop").figures if "growth" in f.file)
    found = []
    for workers in (1, 2):
        folder = RunFolder(tmp_path / str(workers))
        with Pictures.drawn(plan, folder, workers) as pictures:
            pictures.of_experiment(kernel, figure)
            pictures.of_paper("kernels-soe", folder.figures / "kernels-soe.png")
        places = (folder.part("kernel") / figure.file, folder.figures / "kernels-soe.png")
        found.append([place.read_bytes() for place in places])
    assert found[0] == found[1]
