"""Every experiment: cells that can be built, rivals of equal size, summaries of what there is."""

from pathlib import Path
from typing import Any

import pytest

from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.ablations import ROWS
from vort.lab.experiments.cell import SIZES, Size
from vort.lab.experiments.models import MODELS, recall_config
from vort.lab.experiments.recall import PILOT_ROWS
from vort.layers import VortAttention
from vort.models import VortConfig
from vort.models.block import mlp_width

BOOKS = Path("somewhere")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_cells_have_names_of_their_own_and_settings_that_exist(name: str, size: Size) -> None:
    cells = EXPERIMENTS[name].cells(size, BOOKS)
    assert len({cell.id for cell in cells}) == len(cells)
    for cell in cells:
        VortConfig(**cell.config)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["pilot", "books"])
def test_models_of_a_table_have_equally_many_parameters(name: str, size: Size) -> None:
    sizes = {}
    configs = {cell.model: cell.config for cell in EXPERIMENTS[name].cells(size, BOOKS)}
    for model, given in configs.items():
        config = VortConfig(**given)
        attention = sum(x.numel() for x in VortAttention(config).parameters())
        embeddings = 2 * 300 * config.hidden_size
        sizes[model] = attention + 3 * config.hidden_size * mlp_width(config) + embeddings
    off = {name: abs(count / sizes["vort"] - 1) for name, count in sizes.items()}
    assert max(off.values()) < 0.01, off


@pytest.mark.parametrize("size", SIZES)
def test_gated_rivals_have_the_state_of_vort(size: Size) -> None:
    def state(name: str) -> int:
        config = VortConfig(**recall_config(size, MODELS[name].settings))
        return VortAttention(config).state_size()

    rivals = ["mixture_rates_gated", "mixture_rates_gain", "mixture_rates_free", "gla_gated"]
    rivals += ["mixture_even_gated", "uniform_power_law_gated", "vort_free"]
    for name in rivals:
        assert abs(state(name) / state("vort") - 1) < 0.05, name
    assert state("vort_half_features") == state("vort") / 2


def test_the_grid_at_the_size_of_the_paper_begins_with_what_matters() -> None:
    pilot, copy = (EXPERIMENTS[name].cells("paper", None) for name in ("pilot", "label_copy"))
    for cells in (pilot, copy):
        # Ten rows, three seeds; the first seed of all before the second of any.
        assert [cell.seed for cell in cells[:30]] == [0] * 10 + [1] * 10 + [2] * 10
        assert len({cell.model for cell in cells[:30]}) == 10
        assert cells[0].model == "vort"
    ten = {cell.model for cell in pilot[:30]}
    assert {cell.model for cell in copy[:30]} == ten
    by_beta = {
        beta: {(c.model, c.seed) for c in pilot if c.tags["beta"] == beta} for beta in (1, 1.5, 2)
    }
    closest = {model for model, seed in by_beta[1] if seed > 2}
    assert len(closest) == 4
    assert "vort" in closest
    assert closest <= ten
    further = {(row, seed) for row in closest for seed in (3, 4)}
    three = {(row, seed) for row in PILOT_ROWS["paper"] for seed in range(3)}
    assert by_beta[1] == three | further
    assert by_beta[1.5] == by_beta[2] == {(row, seed) for row in ten for seed in range(3)}


@pytest.mark.parametrize("size", SIZES)
def test_no_ablation_is_trained_that_the_pilot_has(size: Size) -> None:
    def settings(cell: Any) -> str:
        return str([sorted(x.items()) for x in (cell.task, cell.config, cell.training)])

    pilot = {settings(cell) for cell in EXPERIMENTS["pilot"].cells(size, None)}
    own = [settings(cell) for cell in EXPERIMENTS["ablations"].cells(size, None)]
    assert not pilot & set(own)
    assert len(own) == len(set(own))


def test_results_under_several_conditions_are_not_mixed() -> None:
    cells = EXPERIMENTS["pilot"].cells("paper", None)
    records = [fake(cell, 0.9 if cell.tags["beta"] == 1 else 0.1) for cell in cells]
    summary = EXPERIMENTS["pilot"].summarise(records, "paper")
    heads = [sheet.title.rpartition(", ")[2] for sheet in summary.sheets]
    assert heads == ["beta 1.0", "beta 1.5", "beta 2.0"]
    assert [len(sheet.rows) for sheet in summary.sheets] == [len(PILOT_ROWS["paper"]), 10, 10]
    shown = {row[2].partition(" ")[0] for row in summary.sheets[0].rows}
    assert shown == {"90.0"}


def test_seeds_that_were_added_after_a_look_are_said_to_be() -> None:
    cells = EXPERIMENTS["pilot"].cells("paper", None)
    for most, said in ((2, 0), (4, 1)):
        records = [fake(cell, 0.5) for cell in cells if cell.seed <= most]
        notes = EXPERIMENTS["pilot"].summarise(records, "paper").notes
        assert sum("were added when three" in note for note in notes) == said


def test_a_picture_of_many_rows_shows_those_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    from vort.lab.report.figures import results

    drawn: list[str] = []
    monkeypatch.setattr(results, "draw_by_lag", lambda _, curves, title: drawn.extend(curves))
    cells = EXPERIMENTS["pilot"].cells("paper", None)
    summary = EXPERIMENTS["pilot"].summarise([fake(cell, 0.5) for cell in cells], "paper")
    summary.figures[0].draw(Path("nowhere.png"))
    ten = [MODELS[cell.model].label for cell in cells[:10]]
    attention, no_decay = "full attention", MODELS["linear_gated"].label
    assert drawn == [*ten, "Mixture-5", "Exponential", no_decay, attention]


def test_a_table_says_what_rows_have_that_the_paper_has_not_and_whose_rates_they_take() -> None:
    cells = EXPERIMENTS["pilot"].cells("laptop", None)
    records = [{**fake(cell, 0.5), "searched": cell.search or False} for cell in cells]
    notes = " ".join(EXPERIMENTS["pilot"].summarise(records, "laptop").notes)
    assert f"{MODELS['vort'].label}: an order for each token, read weights" in notes
    assert f"{MODELS['mixture_rates_gain'].label} at those of Mixture-5" in notes
    # Of the paper's own rows there is nothing to say.
    silent = {row for row in PILOT_ROWS["paper"] if not MODELS[row].has}
    own = {"power_law", "mixture", "exponential"}
    assert silent == own | {f"{row}_favor" for row in own}


def test_the_literal_reading_is_the_paper_to_the_letter() -> None:
    assert EXPERIMENTS["literal"].cells("laptop", None) == []
    cells = EXPERIMENTS["literal"].cells("paper", None)
    assert {cell.seed for cell in cells} == {0}
    for cell in cells:
        assert cell.task["queries"] == "dense"
        assert cell.training["learning_rate"] == 3e-4
        assert cell.search == ""
        given = {name: cell.config[name] for name in ("feature_map", "write_gate", "read_weights")}
        assert given == {"feature_map": "favor", "write_gate": False, "read_weights": False}
        assert not cell.config["qk_norm"]
        assert not cell.config["output_norm"]
    records = [fake(cell, 0.5) for cell in cells]
    assert "literal reading" in EXPERIMENTS["literal"].summarise(records, "paper").notes[-1]


def test_books_at_paper_scale_need_a_folder() -> None:
    assert EXPERIMENTS["books"].cells("paper", None) == []
    assert EXPERIMENTS["books"].summarise([], "paper").notes


def fake(cell: Any, long: float) -> dict[str, Any]:
    """A record as a cell of a recall table leaves it."""
    names = ("near", "middle", "far")
    scores = {key: {"accuracy": long, "bits": 1.0, "count": 10} for key in (*names, "all")}
    lags = [{"low": 1, "high": 10, "accuracy": long, "bits": 1.0, "count": 10}]
    layer = {
        kind: {"count": 5, "mean": mean, "deviation": 0.1, "heads": [mean], "histogram": [1.0] * 40}
        for kind, mean in (("first", 0.9), ("again", 0.5), ("filler", 0.2))
    }
    return {
        "cell": cell.coordinates(),
        "test": scores,
        "lags": lags,
        "orders": {"bins": 40, "layers": [layer]},
        "state_numbers": 10,
        "parameters": 20,
        "steps": 3,
        "training": {"learning_rate": 1e-3},
        "fingerprint": cell.fingerprint,
        "model": {"num_scales": 8},
    }


@pytest.mark.parametrize("name", ["pilot", "label_copy"])
@pytest.mark.parametrize(("ours", "expected"), [(0.9, "holds"), (0.4, "does not hold")])
def test_our_own_claim_needs_a_lead_over_every_rival(
    name: str, ours: float, expected: str, tmp_path: Path
) -> None:
    experiment = EXPERIMENTS[name]
    cells = experiment.cells("laptop", None)
    records = [
        fake(cell, (ours if cell.model == "vort" else 0.5) + 0.001 * cell.seed) for cell in cells
    ]
    summary = experiment.summarise(records, "laptop")
    claim = next(c for c in summary.verdicts if c.where == "ours")
    assert claim.verdict == expected
    for figure in summary.figures:
        figure.draw(tmp_path / figure.file)
        assert (tmp_path / figure.file).read_bytes().startswith(b"\x89PNG")
    assert summary.to_dict("vort")["sheets"][0]["rows"]


def test_free_writes_are_claimed_by_themselves_and_under_every_condition() -> None:
    cells = EXPERIMENTS["pilot"].cells("paper", None)
    # VORT leads at beta 1.5 alone, with free writes everywhere.
    level = {"vort_free": 0.9, "mixture_rates_free": 0.8}

    def accuracy(cell: Any) -> float:
        ahead = cell.model == "vort" and cell.tags["beta"] == 1.5
        return (0.95 if ahead else level.get(cell.model, 0.5)) + 0.001 * cell.seed

    summary = EXPERIMENTS["pilot"].summarise([fake(c, accuracy(c)) for c in cells], "paper")
    claims = {c.states: c.verdict for c in summary.verdicts if "same gates" in c.states}
    who = "is better at long lags than every rival with as much state and the same gates"
    for beta, holds in (("", False), (", beta 1.5", True), (", beta 2.0", False)):
        found = claims[f"VORT (ours) {who}{beta}"]
        assert found == ("holds" if holds else "does not hold")
        assert claims[f"VORT, free writes {who}{beta}"] == "holds"
    assert len(claims) == 6


def test_nothing_is_claimed_of_a_rival_that_was_trained_for_less() -> None:
    cells = EXPERIMENTS["pilot"].cells("laptop", None)
    records = [fake(cell, 0.5) for cell in cells if cell.model in ("vort", "mixture")]
    for record in records:
        record["steps"] = 3 if record["cell"]["model"] == "mixture" else 30
    summary = EXPERIMENTS["pilot"].summarise(records, "laptop")
    assert not summary.verdicts
    assert len(summary.sheets[0].rows) == 2


def test_orders_are_summarised_from_the_other_tables(tmp_path: Path) -> None:
    cells = EXPERIMENTS["pilot"].cells("laptop", None)
    records = [fake(cell, 0.5) for cell in cells if cell.model == "vort"]
    summary = EXPERIMENTS["orders"].summarise(records, "laptop")
    assert [claim.verdict for claim in summary.verdicts] == ["reproduced"]
    summary.figures[0].draw(tmp_path / "orders.png")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_summary_of_nothing_is_empty_and_no_error(name: str) -> None:
    if not EXPERIMENTS[name].direct:
        summary = EXPERIMENTS[name].summarise([], "laptop")
        assert not any(sheet.rows for sheet in summary.sheets)


@pytest.mark.parametrize("name", ["pilot", "label_copy"])
def test_a_changed_row_stands_beside_the_others_and_nothing_is_claimed_of_it(name: str) -> None:
    experiment = EXPERIMENTS[name]
    cells = experiment.cells("laptop", None)
    changed = experiment.changed(cells[0], {"training.learning_rate": 0.5})
    records = [fake(cell, 0.5) for cell in cells]
    before = experiment.summarise(records, "laptop")
    after = experiment.summarise([*records, fake(changed, 0.9)], "laptop")
    assert after.verdicts == before.verdicts
    assert after.sheets[0].rows[:-1] == before.sheets[0].rows
    row = after.sheets[0].rows[-1]
    assert row[0] == "VORT (ours) [training.learning_rate=0.5]"
    assert row[-2:] == ["", ""]


@pytest.mark.parametrize("size", ["laptop", "paper"])
def test_ablations_say_which_cells_of_the_pilot_they_show(size: Any) -> None:
    pilot, ablations = EXPERIMENTS["pilot"], EXPERIMENTS["ablations"]
    cells = pilot.cells(size, None)
    changed = pilot.changed(cells[0], {"model.num_scales": 4})
    records = [fake(cell, 0.5) for cell in (*cells, changed, *ablations.cells(size, None))]
    summary = ablations.summarise(records, size).to_dict("vort")
    seeds = (0,) if size == "laptop" else (0, 1, 2)
    expected = {
        cell.fingerprint
        for cell in cells
        if cell.model in ROWS and cell.seed in seeds and cell.tags["beta"] == 1.0
    }
    assert len(summary["borrowed"]) == len(expected) >= 4
    assert set(summary["borrowed"]) == expected


def test_changed_rows_of_ablations_orders_and_complexity_are_told_apart() -> None:
    pilot, ablations = EXPERIMENTS["pilot"], EXPERIMENTS["ablations"]
    cell = next(c for c in ablations.cells("laptop", None) if c.model == "vort_no_gate")
    vort = pilot.cells("laptop", None)[0]
    changes = {"model.num_scales": 4}
    records = [fake(cell, 0.5), fake(vort, 0.6)]
    changed = ablations.changed(cell, changes), pilot.changed(vort, changes)
    records += [fake(changed[0], 0.7), fake(changed[1], 0.8)]
    labels = [row[0] for row in ablations.summarise(records, "laptop").sheets[0].rows]
    assert labels == [
        "VORT (ours)",
        "VORT (ours) [model.num_scales=4]",
        "no write gate",
        "no write gate [model.num_scales=4]",
    ]
    orders = EXPERIMENTS["orders"].summarise([records[1], records[3]], "laptop")
    assert len(orders.verdicts) == 1
    assert orders.sheets[0].rows[3][0] == "Zipf retrieval [model.num_scales=4]"
    complexity = EXPERIMENTS["complexity"]
    layer = complexity.cells("laptop", None)[0]
    costs = [
        {"cell": c.coordinates(), "length": 1024, "times": {"forward_backward": t}, "peak_bytes": 0}
        for c, t in ((layer, 1.0), (complexity.changed(layer, changes), 2.0))
    ]
    sheet = complexity.summarise(costs, "laptop").sheets[0]
    assert "VORT [model.num_scales=4] (ms)" in sheet.headings


def test_a_table_of_default_rates_says_that_they_were_not_searched() -> None:
    records = []
    for cell in EXPERIMENTS["books"].cells("laptop", None):
        assert not cell.search
        record = {**fake(cell, 0.5), "searched": cell.search or False}
        records.append({**record, "training": dict(cell.training)})
    notes = " ".join(EXPERIMENTS["books"].summarise(records, "laptop").notes)
    assert "Learning rate: 0.005 for all, not searched." in notes
    for record in records:
        del record["searched"]  # as older results are
    assert "not searched" not in str(EXPERIMENTS["books"].summarise(records, "laptop").notes)


@pytest.mark.parametrize(
    ("file", "has_books"),
    [("one.txt", True), ("train/one", True), ("scan/simple.txt", False), ("page.html", False)],
)
def test_a_folder_of_other_things_is_no_folder_of_books(
    file: str, has_books: bool, tmp_path: Path
) -> None:
    """Else every cell fails by itself, or learns commands of SCAN for prose."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("It was the best of times.")
    assert bool(EXPERIMENTS["books"].cells("paper", tmp_path)) == has_books
