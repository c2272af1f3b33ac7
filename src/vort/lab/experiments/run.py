"""Doing the cells that are missing, one after another or side by side: build, train, score."""

import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.cell import Cell, RunFolder
from vort.lab.experiments.look import by_order, reads, strip
from vort.lab.experiments.measures import by_lag, heavy_hitters, orders_by_kind, precision_of
from vort.lab.experiments.models import build_model
from vort.lab.report.folder import provenance
from vort.lab.tasks import make_task
from vort.lab.training import TrainingConfig, evaluate, train

__all__ = ["AFTER", "Outcome", "default_workers", "run_cell", "run_cells"]

# What a cell can ask for by name once its model is trained.
AFTER: dict[str, Callable[..., dict[str, Any]]] = {
    "orders": orders_by_kind,
    "h2o": heavy_hitters,
    "strip": strip,
    "reads": reads,
    "by_order": by_order,
}


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: `error` is empty if its result is in place."""

    cell: Cell
    error: str = ""


def default_workers() -> int:
    """One for each core, up to four; one where a GPU does the work and cells would share it."""
    if torch.cuda.is_available():
        return 1
    return max(1, min(4, os.cpu_count() or 1))


def run_cells(
    cells: Sequence[Cell],
    folder: RunFolder,
    *,
    workers: int = 1,
    restart: bool = False,
    started: Callable[[Cell], None] = lambda cell: None,
) -> Iterator[Outcome]:
    """Do the cells without a result, yielding each as it ends.

    A cell that fails is reported and does not stop the others. Killing this at any moment loses no
    finished cell: the next call does only what is missing.

    Args:
        cells: what the tables need.
        folder: of the run.
        workers: processes that work side by side; 1: all happens in this one.
        restart: do cells again that have a result.
        started: told of each cell when its work begins (is queued, with several workers).
    """
    missing = [cell for cell in cells if restart or not folder.finished(cell)]
    if workers <= 1 or len(missing) <= 1:
        for cell in missing:
            started(cell)
            yield _attempt(cell, folder)
        return
    alone = [cell for cell in missing if EXPERIMENTS[cell.experiment].alone]
    together = [cell for cell in missing if cell not in alone]
    yield from _side_by_side(together, folder, workers, started)
    for cell in alone:
        started(cell)
        yield _attempt(cell, folder)


def _side_by_side(
    cells: Sequence[Cell], folder: RunFolder, workers: int, started: Callable[[Cell], None]
) -> Iterator[Outcome]:
    """As many cells at a time as there are workers; a worker that dies takes only its cells along.

    Processes are started afresh, not forked: torch's threads do not survive a fork.
    """
    threads = max(1, (os.cpu_count() or 1) // workers)
    waiting = list(cells)
    while waiting:
        pool = ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), _prepare, (threads,)
        )
        running: dict[Future[Outcome], Cell] = {}
        try:
            while waiting or running:
                while waiting and len(running) < workers:
                    cell = waiting.pop(0)
                    started(cell)
                    running[pool.submit(_attempt, cell, folder)] = cell
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    cell = running.pop(future)
                    yield future.result()
        except BrokenProcessPool:
            # Whose process died is not told: all that were running count as failed.
            lost = [cell, *running.values()]
            yield from (Outcome(c, "its process died (out of memory?)") for c in lost)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _prepare(threads: int) -> None:
    torch.set_num_threads(threads)


def _attempt(cell: Cell, folder: RunFolder) -> Outcome:
    try:
        run_cell(cell, folder)
    except Exception as error:
        return Outcome(cell, f"{type(error).__name__}: {error}")
    return Outcome(cell)


def run_cell(cell: Cell, folder: RunFolder) -> Path:
    """Do a cell's work and write its result; an interrupted one goes on from its last checkpoint.

    folder: of the run.
    """
    began = perf_counter()
    measure = EXPERIMENTS[cell.experiment].measure
    result = _train(cell, folder) if measure is None else measure(cell)
    result["seconds"] = round(perf_counter() - began, 2)
    result["made_by"] = provenance()
    return folder.write(cell, result)


def _train(cell: Cell, folder: RunFolder) -> dict[str, Any]:
    """Train and score: the usual cell."""
    task = make_task(**cell.task)
    model = build_model(task, cell.config, cell.seed)
    config = TrainingConfig(**cell.training, seed=cell.seed, progress=False)
    scratch = folder.checkpoints(cell)
    # The test split is scored below, by finer classes of lag.
    base = replace(config, test_sequences=0)
    found = train(model, task, base, directory=scratch, resume=True)
    result = {
        "searched": cell.search or False,
        "parameters": sum(x.numel() for x in model.parameters()),
        **_state(model, task.length),
        "task": task.describe(),
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
