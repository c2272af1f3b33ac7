"""The work of a cell: build, train, score, measure; from its settings to a record for JSON."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from vort.lab.experiments.cell import Cell, write_cell

__all__ = ["MEASURES", "build_model", "run_cell"]

Work = Callable[[Cell, Path], dict[str, Any]]


def run_cell(cell: Cell, folder: Path) -> Path:
    """Do a cell's work and write its result; an interrupted one goes on from its last checkpoint.

    folder: of the run.
    """
    from vort.lab.report.folder import provenance

    began = perf_counter()
    result = _kind(cell.measure)(cell, folder)
    result["seconds"] = round(perf_counter() - began, 2)
    result["made_by"] = provenance()
    return write_cell(cell, folder, result)


def build_model(cell: Cell, task: Any) -> Any:
    """The model of a cell for a task, its weights drawn from the cell's seed.

    Tokens made of parts are embedded as sums of parts, and the head has one row for each class:
    rows for tokens that are never an answer would be parameters that nothing trains.
    """
    import torch
    from torch import nn

    from vort.lab.experiments.fla_kernels import import_with_few_configurations
    from vort.lab.tasks import embed_parts
    from vort.models import VortConfig, VortForCausalLM

    if cell.config.get("memory") == "gla":
        import_with_few_configurations()
    settings = {"vocab_size": task.vocab_size, **dict.fromkeys(_SPECIAL), **cell.config}
    torch.manual_seed(cell.seed)
    model: Any = VortForCausalLM(VortConfig(**settings))
    if task.parts is not None:
        embed_parts(model, task)
    if task.num_classes < task.vocab_size:
        head = nn.Linear(model.config.hidden_size, task.num_classes, bias=False)
        nn.init.normal_(head.weight, std=model.config.initializer_range)
        model.set_output_embeddings(head)
    return model


_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id")


def _train(cell: Cell, folder: Path) -> dict[str, Any]:
    """Train and score: the usual cell."""
    from vort.lab.experiments.measures import AFTER
    from vort.lab.tasks import make_task
    from vort.lab.training import TrainingConfig, train

    settings = dict(cell.task)
    task = make_task(settings.pop("name"), **settings)
    model = build_model(cell, task)
    config = TrainingConfig(**cell.training, seed=cell.seed, progress=False)
    scratch = folder / cell.experiment / "checkpoints" / f"{cell.id}-{cell.fingerprint}"
    # The test split is scored below, by finer classes of lag.
    base = replace(config, test_sequences=0)
    found = train(model, task, base, directory=scratch, resume=True)
    result = {
        "parameters": sum(x.numel() for x in model.parameters()),
        **_state(model, task.length),
        "task": _described(task),
        "validation": found.validation,
        "history": found.history,
        "steps": found.steps,
        "tokens_per_second": round(found.tokens_per_second),
    }
    if config.test_sequences != 0:
        result |= _score(model, task, config)
    for name, options in cell.after.items():
        result[name] = AFTER[name](model, task, config, **options)
    shutil.rmtree(scratch, ignore_errors=True)
    return result


def _score(model: Any, task: Any, config: Any) -> dict[str, Any]:
    """Test metrics by the task's buckets, and by finer classes of lag where lags are bounded."""
    from vort.lab.experiments.measures import by_lag, precision_of
    from vort.lab.training import evaluate

    if task.score == "accuracy":
        return by_lag(model, task, config)
    size = config.evaluation_batch_size or config.batch_size
    count = config.test_sequences
    with precision_of(config):
        return {"test": evaluate(model, task, "test", sequences=count, batch_size=size)}


def _state(model: Any, length: int) -> dict[str, int]:
    """What decoding keeps for one sequence of this length."""
    numbers = sum(block.self_attn.state_size(length) for block in model.model.layers)
    return {"state_numbers": numbers, "state_bytes": 4 * numbers}


def _described(task: Any) -> dict[str, Any]:
    """Settings of the task, and a hash of its texts where it has texts; no path of this machine."""
    found: dict[str, Any] = task.describe()
    source = found.get("source")
    if isinstance(source, str) and ("/" in source or "\\" in source):
        found["source"] = Path(source).name
    if hasattr(task, "digest"):
        found["digest"] = task.digest
    return found


def _kind(name: str) -> Work:
    if name not in MEASURES:
        raise ValueError(f"measure must be one of {', '.join(MEASURES)}, got {name!r}")
    return MEASURES[name]


def _cost(cell: Cell, folder: Path) -> dict[str, Any]:
    from vort.lab.experiments.measures import cost_of_layer

    return cost_of_layer(dict(cell.config), dict(cell.training))


def _plasticity(cell: Cell, folder: Path) -> dict[str, Any]:
    from vort.lab.experiments.plasticity_table import measure

    return measure(cell)


MEASURES: dict[str, Work] = {
    "train": _train,
    "cost": _cost,
    "plasticity": _plasticity,
}
