"""Ideas on validation books: what is predicted, what is run, what comes of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.make_results_page import ideas_page

from tests.lab.experiments.tiny import books, small_books
from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.books_research import BASELINE, IDEAS, WORTH, ideas_sheet, outcome
from vort.lab.experiments.cell import Cell, RunFolder
from vort.lab.experiments.models import model_config
from vort.lab.experiments.run import run_cells
from vort.lab.tasks import make_task
from vort.lab.tasks.books import Books
from vort.lab.training.metrics import Interval
from vort.models import VortForCausalLM

RESEARCH, DEEP = EXPERIMENTS["books_research"], EXPERIMENTS["books_deep"]
BOOKS = Path("somewhere")
NAMES = [BASELINE, *(idea.name for idea in IDEAS)]


def test_the_baseline_is_a_row_of_the_table_and_every_idea_changes_something_known() -> None:
    cells = RESEARCH.cells("paper", BOOKS)
    assert [(cell.seed, cell.model) for cell in cells] == [(s, n) for s in (0, 1) for n in NAMES]
    whole = next(cell for cell in DEEP.cells("paper", BOOKS) if cell.model == "vort_even")
    assert cells[0].config == whole.config
    assert "read_start" not in whole.config
    configs = [json.dumps(cell.config, sort_keys=True) for cell in cells[: len(NAMES)]]
    assert len(set(configs)) == len(NAMES)
    for cell in cells:
        assert cell.training["steps"] * cell.training["batch_size"] * cell.task["length"] == (
            450 * 32 * 2048
        )
        # One for all, whatever a later search finds: else ideas old and new do not compare.
        assert cell.training["learning_rate"] == 3e-3


def test_no_test_book_is_read() -> None:
    for cell in RESEARCH.cells("paper", BOOKS):
        assert cell.training["test_sequences"] == 0
        assert cell.after["reading"]["split"] == "validation"


def test_none_is_run_at_laptop_size_or_without_books() -> None:
    assert RESEARCH.cells("laptop", BOOKS) == []
    assert RESEARCH.cells("paper", None) == []
    assert not RESEARCH.summarise([], "laptop").sheets


def test_ideas_have_equally_many_parameters_and_those_at_equal_state_have_it() -> None:
    task, sizes, states = make_task("books"), {}, {}
    for cell in RESEARCH.cells("paper", BOOKS)[: len(NAMES)]:
        with torch.device("meta"):
            model = VortForCausalLM(model_config(task, cell.config))
        sizes[cell.model] = sum(x.numel() for x in model.parameters())
        states[cell.model] = sum(b.self_attn.state_size() for b in model.model.layers)
    assert max(sizes.values()) / min(sizes.values()) < 1.01, sizes
    assert states["more_features"] == states["more_scales"] == states["vort"]
    assert states["fewer_low_scales"] < 0.82 * states["vort"]


def small(cell: Cell, source: Path) -> Cell:
    # Bases that come with the package: others take seconds to fit.
    scales = min(12, cell.config["num_scales"])
    config: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "num_scales": scales}
    if cell.model == "layer_horizons":
        config["layer_settings"] = [{"horizon": 1024}, {"horizon": 2048}, {}, {}]
    return small_books(cell, source, config)


@pytest.fixture
def read_short(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Books of the tests are short: windows of 200."""
    from vort.lab.experiments import books_research

    short = {"lengths": (200,), "bounds": (16, 64), "split": "validation"}
    monkeypatch.setattr(books_research, "_READING", short)
    return short


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([BASELINE, "learned_rates", "half_windows", "order_of_values"], id="some"),
        pytest.param(NAMES, id="all", marks=pytest.mark.slow),
    ],
)
def test_ideas_run_and_are_judged(
    names: list[str],
    tmp_path: Path,
    read_short: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shelf, folder = books(tmp_path / "books"), RunFolder(tmp_path / "run")
    read: list[str] = []
    plain = Books.batch_at
    monkeypatch.setattr(
        Books,
        "batch_at",
        lambda self, split, *rest: read.append(split) or plain(self, split, *rest),
    )
    planned = {cell.model: cell for cell in RESEARCH.cells("paper", BOOKS)}
    cells = [small(planned[name], shelf) for name in names]
    assert [outcome.error for outcome in run_cells(cells, folder)] == [""] * len(names)
    assert set(read) == {"validation"}
    records = [folder.read(cell) or {} for cell in cells]
    assert not any("test" in record for record in records)
    # A second seed that says the same.
    again = [{**r, "cell": {**r["cell"], "seed": 1}} for r in records]
    summary = RESEARCH.summarise([*records, *again], "paper")
    ideas, differences, bits = summary.sheets
    assert [row[0] for row in ideas.rows] == [idea.label for idea in IDEAS]
    run = [row for row, idea in zip(ideas.rows, IDEAS, strict=True) if idea.name in names]
    assert {row[-1] for row in run} <= {"kept", "dropped", "open", "compared"}
    assert all(row[2] for row in run)
    assert {row[-1] for row in ideas.rows if row not in run} <= {"not yet run"}
    assert len(differences.rows) == len(names) - 1
    assert len(bits.rows) == len(names)
    assert differences.headings[1:] == ["<16", "-64", "-200", "all"]
    with_one = RESEARCH.summarise(records, "paper").sheets[0]
    assert {row[-1] for row in with_one.rows} <= {"open", "compared", "not yet run"}


@pytest.mark.parametrize(
    ("mean", "half", "seeds", "saves", "expected"),
    [
        (-0.005, 0.002, [-0.004, -0.006], False, "kept"),
        (-0.005, 0.002, [0.001, -0.011], False, "open"),
        (-0.005, 0.006, [-0.004, -0.006], False, "open"),
        (0.0, 0.001, [0.001, -0.001], False, "dropped"),
        (0.02, 0.004, [0.02, 0.02], False, "dropped"),
        (0.0, 0.001, [0.001, -0.001], True, "kept"),
        (0.004, 0.001, [0.004, 0.004], True, "dropped"),
        (0.002, 0.003, [0.002, 0.002], True, "open"),
        (-0.005, 0.002, [-0.005], False, "open"),
    ],
)
def test_an_idea_is_kept_or_dropped_by_the_rule(
    mean: float, half: float, seeds: list[float], saves: bool, expected: str
) -> None:
    assert WORTH == 0.002  # as the rule says in words
    assert outcome(Interval(mean, half, 10), seeds, saves) == expected


def test_before_they_are_run_ideas_say_so() -> None:
    sheet = ideas_sheet([])
    assert {row[-1] for row in sheet.rows} == {"not yet run"}
    for idea in IDEAS:
        assert idea.prediction.endswith(".")


def test_the_page_of_ideas_is_that_of_what_is_kept() -> None:
    root = Path(__file__).parents[3]
    assert (root / "docs" / "experiments.md").read_text() == ideas_page(root / "results")
