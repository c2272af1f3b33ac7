"""Table copy: an entity's label, shown at its first mention, asked for at every later one."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vort.lab.experiments.cell import Cell, Scale
from vort.lab.experiments.experiment import Experiment, Summary
from vort.lab.experiments.looks import looks_at
from vort.lab.experiments.recall import recall_cell, recall_summary
from vort.lab.experiments.scores import PaperTable
from vort.lab.experiments.sizes import RECALL_TRAINING

__all__ = ["LABEL_COPY", "TASK"]

PAPER = PaperTable(
    label="copy",
    score="accuracy",
    columns=("<=200", "200-2000", ">2000"),
    rows={
        "Power-Law (ours)": (93.1, 89.4, 82.7),
        "Exponential": (92.6, 83.1, 58.4),
        "Mixture-5": (92.9, 85.8, 65.2),
    },
    tolerance=2.0,
)

TASK: dict[Scale, dict[str, Any]] = {
    "laptop": {
        "name": "label_copy",
        "length": 800,
        "entities": 6,
        "mentions": 20,
        "names": 16,
        "bounds": (20, 200),
        "train_sequences": None,
        "validation_sequences": 100,
        "test_sequences": 100,
    },
    "paper": {"name": "label_copy", "length": 8000},
}
_MODELS: dict[Scale, tuple[str, ...]] = {
    "laptop": ("vort", "power_law", "mixture", "exponential"),
    "paper": (
        *("vort", "power_law", "mixture", "exponential", "vort_paper"),
        *("power_law_favor", "mixture_favor", "exponential_favor"),
    ),
}
_SEEDS: dict[Scale, tuple[int, ...]] = {"laptop": (0, 1, 2), "paper": (0, 1, 2)}


def cells(scale: Scale, data: Path | None = None) -> list[Cell]:
    """All cells, the first seed of every model before the second of any."""
    return [
        recall_cell(
            "label_copy",
            scale,
            model,
            seed,
            TASK[scale],
            RECALL_TRAINING[scale],
            after=looks_at(model, seed, scale),
        )
        for seed in _SEEDS[scale]
        for model in _MODELS[scale]
    ]


def summarise(records: Sequence[Mapping[str, Any]], scale: Scale) -> Summary:
    """Table, verdicts and accuracy by distance."""
    return recall_summary("Label copy: accuracy (%) by distance", records, PAPER, scale)


LABEL_COPY = Experiment(
    "label_copy",
    "Entity label copy (table copy)",
    "20 entities in 8,000 positions (6 in 800 at laptop size); all mentions of a sequence are "
    "distinct positions drawn uniformly, the earliest of an entity shows its label, 10 (20) later "
    "ones ask for it.",
    cells,
    summarise,
)
