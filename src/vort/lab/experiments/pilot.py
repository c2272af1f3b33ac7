"""Table pilot: retrieval at lags that follow a power law (section Synthetic Pilot Experiment)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vort.lab.experiments.cell import Cell, Scale
from vort.lab.experiments.experiment import Experiment, Summary
from vort.lab.experiments.looks import looks_at
from vort.lab.experiments.models import SLOW
from vort.lab.experiments.recall import recall_cell, recall_summary
from vort.lab.experiments.scores import PaperTable
from vort.lab.experiments.sizes import RECALL_TRAINING, recall_config

__all__ = ["PILOT", "TASK"]

PAPER = PaperTable(
    label="pilot",
    score="accuracy",
    columns=("<=100", "100-1000", ">1000"),
    rows={
        "Power-Law (ours)": (91.3, 87.6, 79.4),
        "Exponential": (90.8, 81.2, 52.3),
        "Mixture-5": (91.0, 83.7, 61.8),
    },
    tolerance=2.0,
)

TASK: dict[Scale, dict[str, Any]] = {
    "laptop": {
        "name": "zipf_retrieval",
        "length": 1000,
        "pairs": 32,
        "keys": 64,
        "bounds": (10, 100),
        "train_sequences": None,
        "validation_sequences": 100,
        "test_sequences": 100,
    },
    "paper": {"name": "zipf_retrieval", "length": 10_000},
}

_MODELS: dict[Scale, tuple[str, ...]] = {
    "laptop": (
        *("vort", "vort_paper", "uniform_power_law", "power_law", "mixture", "exponential"),
        *("softmax", "power_law_favor", "mixture_favor", "exponential_favor"),
    ),
    "paper": (
        *("vort", "power_law", "mixture", "exponential", "uniform_power_law", "softmax"),
        *("power_law_favor", "mixture_favor", "exponential_favor", *SLOW),
    ),
}
_BETAS: dict[Scale, tuple[float, ...]] = {"laptop": (1.0,), "paper": (1.0, 1.5, 2.0)}
_SEEDS: dict[Scale, tuple[int, ...]] = {"laptop": (0, 1, 2), "paper": (0, 1, 2)}
# Beside the comparison, and so with one seed where minutes count.
_ONCE: dict[Scale, tuple[str, ...]] = {
    "laptop": (
        "softmax",
        "power_law_favor",
        "mixture_favor",
        "exponential_favor",
    ),
    "paper": (),
}


def state_of(scale: Scale, settings: Mapping[str, Any]) -> int:
    """Numbers that a layer of the recall tables keeps while decoding."""
    from vort.layers import VortAttention
    from vort.models import VortConfig

    return VortAttention(VortConfig(**recall_config(scale, dict(settings)))).state_size()


def cells(scale: Scale, data: Path | None = None) -> list[Cell]:
    """All cells, the first seed of every model before the second of any."""
    found = []
    for seed in _SEEDS[scale]:
        for beta in _BETAS[scale]:
            for model in _MODELS[scale]:
                if seed != _SEEDS[scale][0] and model in _ONCE[scale]:
                    continue
                after = looks_at(model, seed, scale)
                if model == "softmax":
                    after["h2o"] = {"state_numbers": state_of(scale, {}), "sequences": 100}
                task = {**TASK[scale], "beta": beta}
                found.append(
                    recall_cell(
                        "pilot",
                        scale,
                        model,
                        seed,
                        task,
                        RECALL_TRAINING[scale],
                        after=after,
                        tags={"beta": beta},
                    )
                )
    return found


def summarise(records: Sequence[Mapping[str, Any]], scale: Scale) -> Summary:
    """Table, verdicts and accuracy by lag."""
    return recall_summary("Zipf retrieval: accuracy (%) by lag", records, PAPER, scale)


PILOT = Experiment(
    "pilot",
    "Zipf retrieval (table pilot)",
    "Labels planted with keys at lags d drawn from d^-beta; a later query shows the key alone. "
    "64 pairs in 10,000 positions (32 in 1,000 at laptop size), keys without replacement, 16 "
    "labels. All models share projections, norms, feature map and MLP, and have equally many "
    "parameters; rows marked FAVOR+ use the paper's feature map, the others a learned one.",
    cells,
    summarise,
)
