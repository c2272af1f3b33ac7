"""Plasticity as a part of the reproduction: a cell, a table of differences, claims, a figure."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.cell import RunFolder
from vort.lab.experiments.plasticity import claims, run
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


def test_a_record_is_ready_for_json_and_judged_claim_by_claim() -> None:
    record = run((0, 1), steps=1, length=32, iterations=2)
    again = json.loads(json.dumps(record, allow_nan=False))
    for group in ("with", "without", "refined"):
        assert [each["seed"] for each in again[group]["runs"]] == [0, 1]
        assert all(0.05 <= x <= 1 for x in again[group]["runs"][0]["orders"][0].values())
        assert [found["count"] for found in again[group]["difference"]] == [2, 2]
    assert all(d["holds"] for each in again["refined"]["runs"] for d in each["descents"])
    assert len(again["with"]["runs"][0]["losses"]) >= 1
    where = [claim.where for claim in claims(again)]
    assert where == [
        "figure diffusion-plasticity (b)",
        "section plasticity",
        "theorem plasticity",
    ]
    assert [claim.verdict for claim in claims(again)][:2] == ["undecided"] * 2  # two seeds
    for name, mean in (("with", 0.8), ("refined", 0.8)):
        for found in again[name]["difference"]:
            found |= {"mean": mean, "half": 0.1, "low": mean - 0.1, "high": mean + 0.1, "count": 3}
    sure = [claim.verdict for claim in claims(again)]
    assert sure[:2] == ["reproduced once corrected", "reproduced"]
    again["with"]["difference"][0] |= {"half": 0.9, "low": -0.1, "high": 1.7}
    assert claims(again)[1].verdict == "undecided"
    again["settings"]["seeds"] = [0]
    with pytest.raises(ValueError, match="at least 2 seeds to be judged, got 1"):
        claims(again)
