"""A learning rate for each model, found with the same budget for all."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vort.lab.tasks import Task
from vort.lab.training.config import TrainingConfig
from vort.lab.training.loop import train
from vort.lab.training.metrics import Metrics

__all__ = ["RATES", "SearchResult", "Trial", "learning_rate_search"]

# A factor of about three apart, around the paper's 3e-4.
RATES = (1e-4, 3e-4, 1e-3, 3e-3)


@dataclass(frozen=True)
class Trial:
    """One learning rate: bits for each validation label (infinite if training broke down)."""

    learning_rate: float
    bits: float
    validation: Metrics


@dataclass(frozen=True)
class SearchResult:
    """The rate that came out best, and all that was tried.

    Attributes:
        best: the learning rate of the fewest bits on the validation split.
        at_edge: whether it is the lowest or highest tried, so that a better one may lie beyond.
        trials: one for each rate.
        steps: optimiser steps of each trial.
        tokens: tokens trained on, over all trials: the budget to state beside a result.
    """

    best: float
    at_edge: bool
    trials: tuple[Trial, ...]
    steps: int
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; a trial that broke down has bits None."""
        found = asdict(self)
        for trial in found["trials"]:
            trial["bits"] = trial["bits"] if trial["bits"] < float("inf") else None
        found["trials"] = list(found["trials"])
        return found


def learning_rate_search(
    build: Callable[[], nn.Module],
    task: Task,
    config: TrainingConfig,
    *,
    rates: Sequence[float] = RATES,
    steps: int | None = None,
    directory: str | Path | None = None,
    resume: bool = False,
) -> SearchResult:
    """Train a fresh model with each rate and compare them on validation data.

    Every model gets the same rates, steps and sequences, hence the same budget. The test split is
    not looked at. Schedules are those of whole runs of `steps` steps.

    Args:
        build: makes a model; it is called with the seed of the config set, so that all trials start
            from the same weights.
        task: as in `train`.
        config: as in `train`; its learning rate is not used.
        rates: what to try, each once.
        steps: optimiser steps of a trial; None: as many as the config says.
        directory: where trials keep checkpoints, in a folder each; None: nowhere.
        resume: go on where an interrupted search stopped.
    """
    if not rates or sorted(set(rates)) != sorted(rates):
        raise ValueError(f"rates must be at least one, all different, got {tuple(rates)}")
    base = replace(config, test_sequences=0)
    if steps is not None:
        base = replace(base, steps=steps, epochs=None)
    trials, taken = [], 0
    for rate in rates:
        folder = None if directory is None else Path(directory) / f"rate-{rate:g}"
        torch.manual_seed(config.seed)
        model = build()
        try:
            settings = replace(base, learning_rate=rate)
            found = train(model, task, settings, directory=folder, resume=resume)
        except FloatingPointError:
            trials.append(Trial(rate, float("inf"), {}))
        else:
            taken = found.steps
            trials.append(Trial(rate, found.validation["all"]["bits"], found.validation))
    best = min(trials, key=lambda trial: trial.bits)
    if best.bits == float("inf"):
        raise FloatingPointError(f"training broke down with every one of the rates {tuple(rates)}")
    tokens = len(trials) * taken * config.batch_size * task.length
    at_edge = len(rates) > 1 and best.learning_rate in (min(rates), max(rates))
    return SearchResult(best.learning_rate, at_edge, tuple(trials), taken, tokens)
