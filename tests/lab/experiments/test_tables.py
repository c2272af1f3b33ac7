"""Every experiment: cells that can be built, rivals of equal size, summaries of what there is."""

from pathlib import Path
from typing import Any

import pytest

from vort.lab.experiments.cell import SCALES, Scale
from vort.lab.experiments.registry import EXPERIMENTS
from vort.lab.experiments.tuned import trials_for
from vort.lab.experiments.tuning import SEED, best_of, search_cells
from vort.layers import VortAttention
from vort.models import VortConfig
from vort.models.modeling_vort import mlp_width

BOOKS = Path("somewhere")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_cells_have_names_of_their_own_and_settings_that_exist(name: str, scale: Scale) -> None:
    cells = EXPERIMENTS[name].cells(scale, BOOKS)
    assert len({cell.id for cell in cells}) == len(cells)
    for cell in cells:
        VortConfig(**cell.config)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["pilot", "books"])
def test_models_of_a_table_have_equally_many_parameters(name: str, scale: Scale) -> None:
    sizes = {}
    for cell in EXPERIMENTS[name].cells(scale, BOOKS):
        config = VortConfig(**cell.config)
        attention = sum(x.numel() for x in VortAttention(config).parameters())
        embeddings = 2 * 300 * config.hidden_size
        sizes[cell.model] = attention + 3 * config.hidden_size * mlp_width(config) + embeddings
    assert max(sizes.values()) / min(sizes.values()) < 1.02, sizes


@pytest.mark.parametrize("scale", SCALES)
def test_every_model_gets_the_same_number_of_trials_of_the_same_length(scale: Scale) -> None:
    cells = search_cells("pilot", scale, share=0.1)
    by_model: dict[str, list[Any]] = {}
    for cell in cells:
        by_model.setdefault(cell.model, []).append(cell)
    assert len({len(members) for members in by_model.values()}) == 1
    assert len({cell.training["steps"] for cell in cells}) == 1
    assert {cell.seed for cell in cells} == {SEED}
    assert {cell.training["test_sequences"] for cell in cells} == {0}
    rates = {cell.config["exponential_rate"] for cell in by_model["exponential"]}
    assert len(rates) >= 3


def test_the_best_trial_wins_on_validation_bits(tmp_path: Path) -> None:
    from vort.lab.experiments.cell import write_cell

    cells = search_cells("pilot", "laptop", ["vort"])
    for number, cell in enumerate(cells[:-1]):  # the last one broke down
        bits = {"all": {"bits": abs(number - 2.0)}}
        write_cell(cell, tmp_path, {"validation": bits, "steps": 3})
    found = best_of(cells, tmp_path)["vort"]
    assert found["best"] == trials_for("pilot", "laptop", "vort", 1000)[2]
    assert found["trials"][-1]["bits"] is None
    assert not found["at_edge"]


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
    summary = EXPERIMENTS[name].summarise([], "laptop")
    assert not any(sheet.rows for sheet in summary.sheets)
