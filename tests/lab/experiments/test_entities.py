"""The entity indicator on text: fed to one row alone, never ahead of time, judged over seeds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.cell import RunFolder
from vort.lab.experiments.models import build_model
from vort.lab.experiments.run import run_cells
from vort.lab.tasks import make_task
from vort.lab.training.data import compact
from vort.lab.training.scorer import Scorer

ENTITIES = EXPERIMENTS["entities"]
TEXT = "Then old Mary said to Tom that nobody knew. So they went to Paris with Mary and sang. "


def books(folder: Path) -> Path:
    for split in ("train", "test"):
        (folder / split).mkdir()
        for number in range(3):
            # Copies are dropped.
            (folder / split / f"{number}.txt").write_text(f"{split} {number}: " + TEXT * 20)
    return folder


def small(cell: Any) -> Any:
    task = {**cell.task, "length": 128, "bounds": (32,), "validation_files": 1}
    config = {**cell.config, "hidden_size": 16, "sliding_window": 8, "horizon": 100}
    training = {**cell.training, "steps": 2, "evaluation_sequences": 2, "test_sequences": 2}
    return replace(cell, task=task, config=config, training={**training, "workers": 0})


def test_two_rows_differ_in_the_indicator_alone_and_have_three_seeds(tmp_path: Path) -> None:
    assert ENTITIES.cells("paper", None) == []
    data = books(tmp_path)
    for size in ("laptop", "paper"):
        cells = ENTITIES.cells(size, data)
        assert [(c.model, c.seed) for c in cells] == [
            (model, seed) for seed in range(3) for model in ("vort", "vort_entity")
        ]
        for without, told in zip(cells[::2], cells[1::2], strict=True):
            assert without.task == told.task
            assert without.training == told.training
            assert told.config == {**without.config, "use_entity": True}


@torch.no_grad()
def test_only_the_row_that_is_told_hears_of_names(tmp_path: Path) -> None:
    heard = {}
    for cell in ENTITIES.cells("paper", books(tmp_path))[:2]:
        given = small(cell)
        task = make_task(**given.task)
        model = build_model(task, given.config, seed=0).eval()
        batch = compact(task.batch("train", [0, 1]))
        assert batch["entity_mask"].sum() > 4
        deaf = {**batch, "entity_mask": torch.zeros_like(batch["entity_mask"])}
        scorer = Scorer(model, task.num_classes)
        heard[cell.model] = not torch.equal(scorer(batch)["logits"], scorer(deaf)["logits"])
    assert heard == {"vort": False, "vort_entity": True}


def test_cells_run_and_are_summed_up(tmp_path: Path) -> None:
    cells = [small(cell) for cell in ENTITIES.cells("paper", books(tmp_path))[:4]]
    folder = RunFolder(tmp_path / "run")
    assert not [outcome.error for outcome in run_cells(cells, folder) if outcome.error]
    records = [folder.read(cell) for cell in cells]
    summary = ENTITIES.summarise(records, "paper")
    assert [row[0] for row in summary.sheets[0].rows] == ["VORT (ours)", "VORT, told of entities"]
    assert summary.sheets[1].rows[0][1] != "–"
    (claim,) = summary.verdicts
    assert "2 seeds" in claim.measured


def test_the_claim_needs_an_interval_above_zero() -> None:
    def record(model: str, seed: int, bits: float) -> dict[str, Any]:
        scores = {name: {"bits": bits, "accuracy": 0.5, "count": 9} for name in ("<64", "all")}
        layer = {
            name: {"count": count, "mean": mean}
            for name, count, mean in (("marked", 2, 0.9), ("rest", 6, 0.3), ("entity", 2, 0.1))
        }
        return {
            "cell": {"task": "books", "model": model, "seed": seed},
            "test": scores,
            "orders": {"layers": [layer]},
            "state_numbers": 10,
            "parameters": 20,
            "steps": 3,
            "training": {"learning_rate": 1e-3},
        }

    def verdict(gains: list[float]) -> str:
        records = [record("vort", seed, 2.0) for seed in range(len(gains))]
        records += [record("vort_entity", seed, 2.0 - gain) for seed, gain in enumerate(gains)]
        summary = ENTITIES.summarise(records, "paper")
        assert summary.sheets[1].rows[0][1:] == ["0.900 ± 0.000", "0.250 ± 0.000", "0.650 ± 0.000"]
        return summary.verdicts[0].verdict

    assert verdict([0.10, 0.11, 0.09]) == "holds"
    assert verdict([0.10, -0.11, 0.09]) != "holds"
    assert verdict([-0.10, -0.11, -0.09]) != "holds"
