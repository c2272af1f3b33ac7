"""Figure alpha-hist: routers that are told who is an entity stand apart from those that are not."""

from pathlib import Path
from typing import Any

import pytest

from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.models import build_model
from vort.lab.tasks import make_task

LABEL_COPY = EXPERIMENTS["label_copy"].cells("laptop", None)[0]
ABLATIONS = {cell.model: cell for cell in EXPERIMENTS["ablations"].cells("laptop", None)}
INPUTS = ("vort_with_inputs", "vort_no_entropy", "vort_no_entity", "vort_no_inputs")


def record(cell: Any, first: float, filler: float = 0.2) -> dict[str, Any]:
    layer = {
        kind: {"count": 5, "mean": mean, "histogram": [mean] * 40}
        for kind, mean in (("first", first), ("again", 0.5), ("filler", filler))
    }
    return {"cell": cell.coordinates(), "orders": {"bins": 40, "layers": [layer]}}


def test_orders_are_kept_of_every_choice_of_the_routers_inputs_and_of_no_other_ablation() -> None:
    assert {name for name, cell in ABLATIONS.items() if "orders" in cell.after} == set(INPUTS)


def test_the_two_panels_differ_in_the_entity_indicator_alone() -> None:
    told, not_told = (dict(ABLATIONS[name].config) for name in ("vort_with_inputs", INPUTS[2]))
    assert (told.pop("use_entity"), not_told.pop("use_entity")) == (True, False)
    assert told == not_told
    assert ABLATIONS["vort_with_inputs"].task == ABLATIONS["vort_no_entity"].task
    task = make_task(**ABLATIONS["vort_with_inputs"].task)
    sizes = [
        build_model(task, ABLATIONS[name].config, 0).model.layers[0].self_attn.memory.router.order
        for name in ("vort_with_inputs", "vort_no_entity")
    ]
    assert sizes[0].in_features == sizes[1].in_features + 1


def test_told_and_not_told_have_rows_and_panels_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    panels: dict[str, Any] = {}
    monkeypatch.setattr(
        "vort.lab.report.figures.results.draw_orders",
        lambda path, tasks, kinds: panels.update(tasks),
    )
    means = (0.91, 0.92, 0.93, 0.94)
    records = [record(LABEL_COPY, 0.9)]
    records += [record(ABLATIONS[name], mean) for name, mean in zip(INPUTS, means, strict=True)]
    summary = EXPERIMENTS["orders"].summarise(records, "laptop")
    shown = {row[0]: row[2] for row in summary.sheets[0].rows if row[1].endswith("first mention")}
    assert shown == {
        "label copy": "0.900",
        "label copy, fed entity and entropy": "0.910",
        "label copy, fed entity alone": "0.920",
        "label copy, fed entropy alone": "0.930",
        "label copy, fed neither": "0.940",
    }
    # Claimed of what the tables show and of the paper's own inputs.
    assert len(summary.verdicts) == 2
    summary.figures[0].draw(Path("unused.png"))
    assert {name: x["layers"][0]["first"]["mean"] for name, x in panels.items()} == {
        "label copy": 0.9,
        "label copy, fed entity and entropy": 0.91,
        "label copy, fed entropy alone": 0.93,
    }


def test_four_panels_are_drawn_on_two_rows(tmp_path: Path) -> None:
    from vort.lab.report.figures.results import draw_orders

    orders = record(LABEL_COPY, 0.9)["orders"]
    draw_orders(tmp_path / "x.png", {f"task {n}": orders for n in range(4)}, {})
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
