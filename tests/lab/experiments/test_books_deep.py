"""Tables books-deep: rows of equal size, cells that run and go on, claims from pairs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.lab.experiments.tiny import small_books
from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.books_deep import LINEAR, ROWS
from vort.lab.experiments.cell import Cell, RunFolder
from vort.lab.experiments.models import model_config
from vort.lab.experiments.reading import BOUNDS, class_names
from vort.lab.experiments.run import AFTER, run_cells
from vort.lab.experiments.search import RATES, SEED, row_searches
from vort.lab.tasks import make_task
from vort.models import VortForCausalLM

DEEP, DEEPER = EXPERIMENTS["books_deep"], EXPERIMENTS["books_deeper"]
BOOKS = Path("somewhere")


@pytest.mark.parametrize("name", ["books_deep", "books_deeper"])
def test_rows_have_equally_many_parameters_within_a_hundredth(name: str) -> None:
    task, sizes = make_task("books"), {}
    cells = {cell.model: cell for cell in EXPERIMENTS[name].cells("paper", BOOKS)}
    for cell in cells.values():
        with torch.device("meta"):
            model = VortForCausalLM(model_config(task, cell.config))
        sizes[cell.model] = sum(x.numel() for x in model.parameters())
    asked = {"vort", *LINEAR, "softmax", "hybrid_vort", "hybrid_gla"} - {"gated_delta"}
    assert asked <= set(sizes) <= set(ROWS)
    assert name != "books_deep" or tuple(sizes) == ROWS
    assert max(sizes.values()) / min(sizes.values()) < 1.01, sizes


def test_rows_are_what_they_are_called() -> None:
    cells = {cell.model: cell for cell in DEEP.cells("paper", BOOKS)}
    for row, cell in cells.items():
        assert cell.config["output_gate"], row
        assert cell.config["conv_size"] == 4
        scales = 8 if row == "vort_s8" else 12
        assert cell.config["num_scales"] == scales, row
        assert cell.config.get("write_gate", True)
        assert cell.config.get("read_weights", True)
        assert cell.task["length"] == 2048
    assert cells["exponential_learned_gated"].config.get("learn_rates", True)
    assert cells["mixture_rates_gated"].config["rates_start"] == "basis"
    assert cells["uniform_power_law_gated"].config["order_per_head"]
    # What VORT begins with, all have that read by weight; one row shows what it brings.
    for row in ("vort", "vort_s8", "mixture_rates_gated", "uniform_power_law_gated", "hybrid_vort"):
        assert cells[row].config["read_start"] == "spread"
    changed = {k: v for k, v in cells["vort"].config.items() if k != "read_start"}
    assert cells["vort_even"].config == changed
    for row in ("hybrid_vort", "hybrid_gla"):
        assert cells[row].config["layer_memories"][3] == "softmax"
        assert cells[row].config["layer_memories"][:3] == [row.partition("_")[2]] * 3


def test_three_seeds_at_256_and_one_at_512_and_none_without_books() -> None:
    assert [cell.seed for cell in DEEP.cells("paper", BOOKS)] == [
        seed for seed in range(3) for _ in ROWS
    ]
    assert {cell.seed for cell in DEEPER.cells("paper", BOOKS)} == {0}
    assert DEEPER.cells("laptop", None) == []
    for experiment in (DEEP, DEEPER):
        assert experiment.cells("paper", None) == []
        assert "--data" in experiment.summarise([], "paper").notes[0]


def test_rates_are_the_rows_own_or_its_kins_and_half_as_large_in_the_wider_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {
        "books_deep/vort": {"learning_rate": 4e-3},
        "books_deep/mixture_rates_gated": {"learning_rate": 2e-3, "horizon": 614},
        "books_deeper/gla": {"learning_rate": 7e-4},
    }
    monkeypatch.setattr(
        "vort.lab.experiments.search.searched", lambda search, size: known.get(search)
    )
    deep, deeper = ({cell.model: cell for cell in e.cells("paper", BOOKS)} for e in (DEEP, DEEPER))

    def rates(cells: dict[str, Cell], *rows: str) -> list[Any]:
        return [(cells[row].training["learning_rate"], cells[row].search) for row in rows]

    kin = (4e-3, "books_deep/vort")
    assert rates(deep, "vort", "vort_s8", "hybrid_vort", "gla") == [kin, kin, kin, (3e-3, "")]
    assert deep["mixture_rates_gated"].config["horizon"] == 614
    assert deep["vort"].config["horizon"] == 8192
    own = (7e-4, "books_deeper/gla")
    found = rates(deeper, "vort", "hybrid_vort", "gla", "hybrid_gla", "none")
    assert found == [(2e-3, ""), (2e-3, ""), own, own, (1.5e-3, "")]


def test_all_rows_enter_the_search_with_one_budget() -> None:
    searches = row_searches(DEEP, "paper", data=BOOKS)
    assert [search.row for search in searches] == list(ROWS)
    for search in searches:
        first = search.next({})
        # Rates alone: a horizon that is best at 2,048 says nothing of 131,072.
        assert len(first) == len(RATES)
        for cell in first:
            assert (cell.seed, cell.after, cell.training["steps"]) == (SEED, {}, 62)
            assert cell.training["test_sequences"] == 0


def small(cell: Cell, source: Path) -> Cell:
    config = {"hidden_size": 16, "num_attention_heads": 2}
    config |= {"horizon": 100} if cell.model == "vort" else {}
    after = {"reading": {"lengths": [32, 200], "bounds": [16, 64], "most": {"32": 2}}}
    return replace(small_books(cell, source, config, test_sequences=2), after=after)


def test_every_row_runs_and_is_summed_up(tmp_path: Path, shelf: Path) -> None:
    cells = [small(cell, shelf) for cell in DEEP.cells("paper", BOOKS)[: len(ROWS)]]
    folder = RunFolder(tmp_path / "run")
    assert [outcome.error for outcome in run_cells(cells, folder)] == [""] * len(ROWS)
    records = [folder.read(cell) for cell in cells]
    summary = DEEP.summarise([r for r in records if r is not None], "paper")
    titles = [sheet.title for sheet in summary.sheets]
    assert titles == [
        "Bits per character by position, read as trained",
        "Bits per character by position, trained at 32, read to 200",
        "Bits more than VORT (ours), the same windows of 32",
        "Bits more than VORT (ours), the same windows of 200",
    ]
    bits = {row[0]: row for row in summary.sheets[1].rows}
    assert len(bits) == len(ROWS) + 1
    assert "VORT (ours), horizon 200" in bits
    assert summary.sheets[1].headings[1:3] == ["parameters", "state"]
    assert {claim.verdict for claim in summary.verdicts} == {"undecided"}  # one seed
    # Rivals, full attention far out, the level at two horizons, and fewer windows against three.
    assert len(summary.verdicts) == len(LINEAR) + 1 + 2 + 3
    for figure in summary.figures:
        figure.draw(tmp_path / figure.file)
        assert (tmp_path / figure.file).read_bytes().startswith(b"\x89PNG")


def test_a_cell_that_was_stopped_while_it_read_does_not_train_again(
    tmp_path: Path,
    shelf: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = small(DEEP.cells("paper", BOOKS)[ROWS.index("mamba2")], shelf)
    whole, stopped = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "stopped")
    assert [outcome.error for outcome in run_cells([cell], whole)] == [""]

    def stop(*args: Any, **options: Any) -> None:
        raise RuntimeError("stopped")

    with monkeypatch.context() as patch:
        patch.setitem(AFTER, "reading", stop)
        (outcome,) = run_cells([cell], stopped)
        assert "stopped" in outcome.error

    def train(*args: Any, **options: Any) -> None:
        raise AssertionError("it trains again")

    monkeypatch.setattr("torch.optim.AdamW.step", train)
    assert [outcome.error for outcome in run_cells([cell], stopped)] == [""]
    first, second = whole.read(cell), stopped.read(cell)
    assert first is not None
    assert second is not None
    assert first["reading"] == second["reading"]


def test_a_record_at_paper_size_is_small() -> None:
    # Ten books of 471,000 characters at most, VORT read twice where windows pass its horizon.
    lines = 0
    for length, twice in ((2048, 1), (32768, 2), (131072, 2)):
        windows = min(471_000 // length, 24 if length == 2048 else 1000)
        line = json.dumps(f"9 {471_000} " + " ".join(["1.2345"] * len(class_names(length))))
        lines += 10 * windows * twice * (len(line) + 8)
    assert lines < 40_000
    cell = DEEP.cells("paper", BOOKS)[0]
    assert cell.after["reading"]["lengths"] == (2048, 32768, 131072)
    assert cell.after["reading"]["most"] == {"2048": 24}


def fake(cell: Cell, more: float) -> dict[str, Any]:
    """A record with so many bits more than VORT in every window."""
    generator = np.random.default_rng(5)
    found = []
    for length, horizons in ((32768, (None, 32768)), (131072, (None, 131072))):
        count = len(class_names(length))
        hard = {(book, length * n): generator.normal(2, 0.3) for book in range(10) for n in (0, 1)}
        noise = {place: 0.003 * generator.normal(size=count) for place in hard}
        windows = [
            " ".join([str(b), str(s), *(f"{hard[b, s] + x + more:.4f}" for x in noise[b, s])])
            for b, s in hard
        ]
        if more:  # no two models find the same windows hard
            windows = [w.rsplit(" ", 1)[0] + f" {float(w.split()[-1]) + 1e-4:.4f}" for w in windows]
        found += [
            {"length": length, "horizon": horizon, "windows": windows}
            for horizon in (horizons if cell.model == "vort" else horizons[:1])
        ]
    return {
        "cell": cell.coordinates(),
        "reading": {"bounds": list(BOUNDS), "readings": found},
        "task": {"length": 2048},
        "test": {"<256": {"bits": 2.0}, "all": {"bits": 2.0}},
        "parameters": 10,
        "state_numbers": 5,
        "steps": 1000,
        "training": {"learning_rate": 3e-3},
    }


@pytest.mark.parametrize(("more", "expected"), [(0.01, "holds"), (-0.01, "does not hold")])
def test_claims_follow_from_pairs(more: float, expected: str) -> None:
    extra = {"vort": 0.0, "softmax": 0.08, "vort_first_window": -0.02}
    records = [
        fake(cell, extra.get(cell.model, more) + 1e-3 * cell.seed * (cell.model != "vort"))
        for cell in DEEP.cells("paper", BOOKS)
    ]
    claims = DEEP.summarise(records, "paper").verdicts
    lead = [claim for claim in claims if "in every class" in claim.states]
    few = [claim for claim in lead if claim.states.startswith("VORT, a window in every fourth")]
    assert len(lead) == len(LINEAR) + len(few)
    assert {claim.verdict for claim in lead if claim not in few} == {expected}
    # Held against rivals that have as few windows, and against VORT with all of them.
    assert [claim.verdict for claim in few] == ["holds"] * 3
    assert "than VORT (ours)" in few[0].states
    assert all("a window in every fourth layer in every class" in x.states for x in few[1:])
    (far,) = (claim for claim in claims if "by more than .05" in claim.states)
    assert far.verdict == "holds"
    assert "full attention" in far.states
    level = [claim for claim in claims if "at most .01" in claim.states]
    assert [claim.verdict for claim in level] == ["holds", "holds"]
    assert "as trained" in level[0].states
    assert "its horizon set to 131,072" in level[1].states
    assert "up to 131,072 than at those up to 8192" in level[0].states


def test_the_order_of_rows_in_wider_models_stands_beside_that_in_narrower_ones() -> None:
    more = {"vort": 0.0, "gla": 0.02, "none": 0.03}
    wider = {"vort": 0.0, "gla": 0.03, "none": 0.02}
    records = [
        {**fake(cell, bits[cell.model]), "experiment": experiment.name}
        for experiment, bits in ((DEEP, more), (DEEPER, wider))
        for cell in experiment.cells("paper", BOOKS)
        if cell.model in bits
    ]
    last = DEEP.summarise(records, "paper").sheets[-1]
    assert last.title == "Order of the rows, bits over all positions"
    places = [(row[0], row[2], row[4]) for row in last.rows]
    assert places == [("VORT (ours)", "1", "1"), ("GLA", "2", "3"), ("no memory", "3", "2")]
    # What is of one size alone has no order to compare, and its tables stay its own.
    alone = DEEP.summarise([r for r in records if r["experiment"] == "books_deep"], "paper")
    assert "Order" not in alone.sheets[-1].title
    assert [sheet.title for sheet in alone.sheets] == [
        sheet.title for sheet in DEEP.summarise(records, "paper").sheets[:-1]
    ]
