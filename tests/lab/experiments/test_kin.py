"""What was searched reaches the cells: a row's own settings, or its kin's learning rate."""

import pytest

from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.models import MODELS
from vort.lab.experiments.recall import PILOT_TASK, recall_cell
from vort.lab.experiments.search import searched

# Memories that are another's with one thing changed; all others are their own family.
FAMILY = {"linear": "exponential", "gla_scales": "gla", "exact_power_law": "uniform_power_law"}
KIN = {name: row.kin for name, row in MODELS.items() if row.kin}


@pytest.mark.parametrize("name", KIN)
def test_kin_have_the_same_kind_of_memory(name: str) -> None:
    memory, kins = (MODELS[x].settings.get("memory", "vort") for x in (name, KIN[name]))
    assert FAMILY.get(memory, memory) == kins
    # A row that has a kin of its own may be one where it was searched itself: on books, say.
    own = [searched(f"{table.name}/{KIN[name]}", "paper") for table in EXPERIMENTS.values()]
    assert not MODELS[KIN[name]].kin or any(own), "a kin was searched itself"


@pytest.mark.parametrize("name", KIN)
def test_a_row_without_a_search_of_its_own_trains_at_its_kins_rate(name: str) -> None:
    task = {**PILOT_TASK["laptop"], "beta": 1.0}
    cell = recall_cell("ablations", "laptop", name, 0, task, table="pilot")
    own, kins = (searched(f"pilot/{row}", "laptop") for row in (name, KIN[name]))
    expected = own or kins
    assert cell.search == ("" if expected is None else f"pilot/{name if own else KIN[name]}")
    if expected is not None:
        assert cell.training["learning_rate"] == expected["learning_rate"]


def test_the_exponential_has_the_decay_that_was_searched_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"learning_rate": 0.007, "exponential_rate": 0.123}
    monkeypatch.setattr(
        "vort.lab.experiments.search.searched",
        lambda search, size: dict(found) if search == "pilot/exponential" else None,
    )
    task = {**PILOT_TASK["laptop"], "beta": 1.0}
    cell = recall_cell("pilot", "laptop", "exponential", 0, task)
    assert cell.config["exponential_rate"] == 0.123
    assert cell.training["learning_rate"] == 0.007
    # A rate that is not fixed, and rows of other memories, have nothing of it.
    for name in ("mixture", "vort"):
        config = recall_cell("pilot", "laptop", name, 0, task).config
        assert config.get("exponential_rate") != 0.123
