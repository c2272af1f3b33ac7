"""Plasticity as a part of the reproduction: a cell, a table of differences, claims, a figure."""

from dataclasses import replace
from pathlib import Path

from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.cell import RunFolder
from vort.lab.experiments.run import run_cell

PLASTICITY = EXPERIMENTS["plasticity"]


def test_a_cell_ends_as_table_claims_and_figure(tmp_path: Path) -> None:
    (cell,) = PLASTICITY.cells("laptop", None)
    short = replace(
        cell,
        task={**cell.task, "length": 32},
        training={**cell.training, "steps": 1, "seeds": [0, 1], "iterations": 2},
    )
    run_cell(short, RunFolder(tmp_path))
    record = RunFolder(tmp_path).read(short)
    assert record is not None
    summary = PLASTICITY.summarise([record], "laptop")
    (sheet,) = summary.sheets
    assert [row[0] for row in sheet.rows] == [
        "trained with L_ret",
        "trained without",
        "free orders, refined",
    ]
    assert all("±" in cell for row in sheet.rows for cell in row[1:3])
    assert [claim.where for claim in summary.verdicts][-1] == "theorem plasticity"
    summary.figures[0].draw(tmp_path / "plasticity.png")
    assert (tmp_path / "plasticity.png").read_bytes().startswith(b"\x89PNG")


def test_the_paper_scale_has_no_cell_and_says_so() -> None:
    assert PLASTICITY.cells("paper", None) == []
    assert PLASTICITY.summarise([], "paper").notes
