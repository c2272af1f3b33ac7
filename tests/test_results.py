"""Figures of docs/results.md, docs/findings.md and README follow from committed cells, by digit."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tools.make_results_page import page

from tools import make_gpu_check_table as gpu_checks
from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.cell import SIZES, RunFolder, Size
from vort.lab.experiments.search import read_lines
from vort.lab.experiments.summary import summarise

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
KEPT = [
    (size, name)
    for size in SIZES
    for name in EXPERIMENTS
    if (RESULTS / size / name / "summary.json").exists()
]
# Whatever made them, these are what a reader sees.
SHOWN = ("title", "about", "scale", "command", "sheets", "verdicts", "notes", "trained_on")


def kept(size: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / size / name / "summary.json").read_text())
    return found


@pytest.mark.parametrize(("size", "name"), KEPT)
def test_tables_and_verdicts_follow_from_committed_cells(size: Size, name: str) -> None:
    experiment, folder = EXPERIMENTS[name], RunFolder(RESULTS / size)
    sources = [part for part in (name, *experiment.uses) if kept_cells(size, part)]
    if not sources and not experiment.direct:
        pytest.skip(f"results/{size}/{name} has no committed cells to make its tables from")
    made = json.loads(json.dumps(summarise(experiment, folder, size).to_dict()))
    committed = kept(size, name)
    for key in SHOWN:
        # What a measurement of its own took, it took then: its machine is told, not its time.
        if key in committed and not (experiment.direct and key == "trained_on"):
            assert made.get(key) == committed[key], key


def kept_cells(size: str, name: str) -> list[Path]:
    return sorted((RESULTS / size / name / "cells").glob("*.json"))


def test_the_page_is_that_of_the_committed_summaries() -> None:
    assert (ROOT / "docs" / "results.md").read_text() == page(RESULTS)


def test_the_table_of_checks_on_a_gpu_is_that_of_its_files() -> None:
    assert gpu_checks.PAGE.read_text() == gpu_checks.page()
    written = {path.stem for path in (RESULTS / "bench").glob("gpu_check*.json")}
    assert written == set(gpu_checks.FILES)


def readme() -> str:
    return (ROOT / "README.md").read_text().split("\n## Results\n")[1].split("\n## ")[0]


def findings() -> str:
    return (ROOT / "docs" / "findings.md").read_text()


def everything() -> str:
    """All that the summaries show, as one text."""
    return "\n".join(json.dumps(kept(*place), ensure_ascii=False) for place in KEPT)


@pytest.mark.parametrize("told", [readme, findings])
def test_tables_in_words_are_rows_of_the_results(told: Callable[[], str]) -> None:
    known = {
        tuple(row[1:])
        for place in KEPT
        for sheet in kept(*place)["sheets"]
        for row in sheet["rows"]
    }
    lines = [line for line in told().splitlines() if line.startswith("|")]
    assert len(lines) > 2
    checked = 0
    for line in lines:
        cells = [cell.strip().replace("*", "") for cell in line.strip("|").split("|")]
        if not re.fullmatch(r"[\d,]+", cells[1]):
            continue  # a heading
        scores = [cell for cell in cells[1:] if cell]
        checked += 1
        assert any(_stands_in(scores, row) for row in known), line
    assert checked > 2


def _stands_in(scores: list[str], row: tuple[str, ...]) -> bool:
    """Whether a row of the results has these figures, in this order and from its state on."""
    return [cell for cell in row if cell][: len(scores)] == scores


def test_bits_of_the_findings_are_those_of_the_search() -> None:
    """A quarter of a run, seeds 100 and 101: of S = 1, then of VORT."""
    words = findings().partition("After a quarter of a run")[2].partition("chance")[0]
    trials = [x for x in read_lines() if x["size"] == "paper" and x["experiment"] == "pilot"]
    wanted = [
        min(
            float(x["score"])
            for x in trials
            if (x["row"], x["seed"], x.get("share")) == (row, seed, 0.25)
            and (x.get("stage") == 2 or seed == 101)
        )
        for row in ("vort_one_scale", "vort")
        for seed in (100, 101)
    ]
    assert re.findall(r"\d\.\d+", words) == [f"{bits:.3g}" for bits in wanted]


def test_orders_of_the_findings_are_those_of_the_cells() -> None:
    """The least and the greatest mean over seeds, of labels and of fillers."""
    words = findings().partition("the orders VORT learns are ")[2].partition("by seed")[0]
    cells = [
        json.loads(path.read_text())
        for path in (RESULTS / "paper/pilot/cells").glob("pilot-paper-vort-beta1.0-seed*.json")
    ]
    wanted = []
    for kind in ("first", "filler"):
        means = [cell["orders"]["layers"][0][kind]["mean"] for cell in cells]
        wanted += [f"{value:.2f}"[1:] for value in (min(means), max(means))]
    assert re.findall(r"\.\d\d", words) == wanted


@pytest.mark.parametrize("told", [readme, findings])
def test_intervals_in_words_are_those_of_the_results(told: Callable[[], str]) -> None:
    found = re.findall(r"-?[\d.]+ ± \d[\d.]*\d", told())
    assert found
    shown = everything()
    assert [interval for interval in found if interval not in shown] == []


@pytest.mark.parametrize("told", [readme, findings])
def test_figures_in_words_stand_in_the_results(told: Callable[[], str]) -> None:
    """All with a point; of those that no table shows, the search's have a test above."""
    words = re.sub(r"After a quarter of a run.*?chance", "", told(), flags=re.DOTALL)
    found = set(re.findall(r"(?<![\d.])\d+\.\d+(?![\d.e])", words))
    known = everything() + " ".join(four_needles_by_seed())
    assert len(found) > 50
    assert [x for x in found if not re.search(rf"(?<![\d.]){re.escape(x)}(?!\d)", known)] == []


def four_needles_by_seed() -> list[str]:
    """Of VORT at the shortest length, texts that are right as a whole."""
    paths = (RESULTS / "paper/needles/cells").glob("needles-paper-vort-seed*.json")
    maps = [json.loads(path.read_text())["needles"]["all"]["4096"] for path in paths]
    return [f"{100 * found['whole'] / found['sequences']:.1f}" for found in maps]


def test_no_cell_is_lost_from_a_table_without_a_trace() -> None:
    """Every committed cell is planned by its experiment, or was made with other settings."""
    for size in SIZES:
        for name, experiment in EXPERIMENTS.items():
            planned = {cell.id for cell in experiment.cells(size, Path("books"))}
            for path in kept_cells(size, name):
                assert path.stem in planned or "-set" in path.stem, path.stem
