"""Doing the cells that are missing, one after another or side by side: build, train, score."""

import gc
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from vort.lab.experiments import EXPERIMENTS
from vort.lab.experiments.cell import Cell, RunFolder
from vort.lab.experiments.long_context import (
    answers_by_bucket,
    merged_bits,
    merged_needles,
    needle_map,
    ruler_table,
)
from vort.lab.experiments.look import by_order, reads, strip
from vort.lab.experiments.measures import by_lag, heavy_hitters, orders_by_kind, precision_of
from vort.lab.experiments.models import build_model
from vort.lab.experiments.reading import read_on
from vort.lab.experiments.search import chosen_in
from vort.lab.processes import end_with_parent, keep_memory, processes
from vort.lab.report.provenance import provenance
from vort.lab.tasks import make_task
from vort.lab.training import TrainingConfig, evaluate, train
from vort.lab.training.data import keep_batches
from vort.pretrained import pretrained_names, pretrained_path

__all__ = [
    "AFTER",
    "Outcome",
    "Pace",
    "data_workers",
    "default_workers",
    "run_as_they_come",
    "run_cell",
    "run_cells",
]

# What a cell can ask for by name once its model is trained.
AFTER: dict[str, Callable[..., dict[str, Any]]] = {
    "orders": orders_by_kind,
    "h2o": heavy_hitters,
    "strip": strip,
    "reads": reads,
    "by_order": by_order,
    "exact": answers_by_bucket,
    "needles": needle_map,
    "h2o_needles": needle_map,
    "merged_needles": merged_needles,
    "merged_bits": merged_bits,
    "ruler": ruler_table,
    "reading": read_on,
}
# Those that decode token by token.
_BY_TOKEN = {"h2o", "h2o_needles"}
# A cell that trains on one of so many tokens that another does, or fewer, takes next to no time.
_NOTHING = 50
# Those that take minutes: they keep what they have in the folder of the cell's checkpoints.
_GO_ON = ("needles", "h2o_needles", "merged_needles", "merged_bits", "ruler")


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: `error` is empty if its result is in place.

    `broke_down`: the training did, and would again.
    """

    cell: Cell
    error: str = ""
    broke_down: bool = False


class Pace:
    """How long cells take, from those that were measured: what a budget of minutes is spent by.

    A cell is reckoned by its row's own speed and by what that took besides training; where its row
    is unknown, by the slowest that is known; where none is, it counts as no time at all.
    """

    def __init__(self) -> None:
        # Seconds of a step, and those before and after all steps, by experiment and row.
        self._known: dict[tuple[str, str], tuple[float, float]] = {}

    def learn(self, record: Mapping[str, Any]) -> None:
        """Take in what a finished cell took; one without a speed says nothing of others."""
        speed, seconds = record.get("tokens_per_second"), record.get("seconds")
        if not speed or seconds is None:
            return
        tokens = record["task"]["length"] * record["training"].get("batch_size", 32)
        self.note(
            (record["experiment"], record["cell"]["model"]),
            step=tokens / speed,
            rest=max(0.0, seconds - record["steps"] * tokens / speed),
        )

    def note(self, row: tuple[str, str], *, step: float, rest: float) -> None:
        """A row's seconds for a step, and those besides all steps."""
        self._known[row] = step, rest

    def seconds(self, cell: Cell) -> float:
        """What a cell will take, as far as can be said."""
        own = self._known.get((cell.experiment, cell.model))
        known = self._known.values() if own is None else [own]
        steps = cell.training.get("steps", 0)
        return max((step * steps + rest for step, rest in known), default=0.0)


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
    fits: Callable[[Cell], bool] = lambda cell: True,
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
        fits: asked before a cell is begun; one that does not fit is left for another time.
    """
    missing = [cell for cell in cells if restart or not folder.finished(cell)]
    alone = [cell for cell in missing if EXPERIMENTS[cell.experiment].alone]
    # Nobody is to wait at the end for one that takes long and that no other can share: long ones
    # come first, and those that are next to nothing last, where they fill what is left.
    most = max(map(_tokens, missing), default=0)
    together = sorted(
        (c for c in missing if c not in alone),
        key=lambda c: (not _is_long(c), _tokens(c) * _NOTHING < most),
    )
    for waiting, crew in ((together, min(workers, len(together))), (alone, 1)):

        def take(waiting: list[Cell] = waiting) -> Cell | None:
            while waiting:
                cell = waiting.pop(0)
                if fits(cell):
                    return cell
            return None

        yield from run_as_they_come(take, folder, workers=crew, started=started)


def _tokens(cell: Cell) -> int:
    """Tokens that a cell is trained on, as far as its settings say."""
    sizes = (cell.training.get("steps", 0), cell.training.get("batch_size", 32))
    return int(math.prod((*sizes, cell.task.get("length", 0))))


def _is_long(cell: Cell) -> bool:
    """Whether a cell decodes token by token, or measures in one piece instead of training."""
    by_token = bool(_BY_TOKEN & set(cell.after))
    return by_token or EXPERIMENTS[cell.experiment].measure is not None


def run_as_they_come(
    take: Callable[[], Cell | None],
    folder: RunFolder,
    *,
    workers: int = 1,
    started: Callable[[Cell], None] = lambda cell: None,
) -> Iterator[Outcome]:
    """Do cells that are not all known beforehand, yielding each as it ends.

    take: the next cell that can begin, or None where there is none at the moment. It is asked
        whenever a worker is free, after the caller has seen what ended before; the work is over
        when it has none and nobody works.
    """
    if workers > 1:
        yield from _side_by_side(take, folder, workers, started)
        return
    while (cell := take()) is not None:
        started(cell)
        yield _attempt(cell, folder)


def _side_by_side(
    take: Callable[[], Cell | None],
    folder: RunFolder,
    workers: int,
    started: Callable[[Cell], None],
) -> Iterator[Outcome]:
    """As many cells at a time as there are workers; one that dies takes only its cells along."""
    cores = max(1, (os.cpu_count() or 1) // workers)
    context, _ = processes()
    ready = take()
    while ready is not None:
        pool = ProcessPoolExecutor(workers, context, _prepare, (cores,))
        running: dict[Future[Outcome], Cell] = {}
        taken: list[Cell] = []
        try:
            while ready is not None or running:
                while ready is not None:
                    taken.append(ready)
                    started(ready)
                    running[pool.submit(_attempt, ready, folder)] = ready
                    ready = take() if len(running) < workers else None
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    outcome = future.result()
                    taken.remove(running.pop(future))
                    yield outcome
                ready = take()
        except BrokenProcessPool:
            # Whose process died is not told: all that were taken count as failed.
            yield from (Outcome(cell, "its process died (out of memory?)") for cell in taken)
            ready = take()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# Cores that a process has to itself; all of them, where it is the only one.
_cores = os.cpu_count() or 1


def _prepare(cores: int) -> None:
    global _cores
    _cores = cores
    end_with_parent()
    torch.set_num_threads(cores)
    keep_memory()
    keep_batches(_ROOM)
    # What cells are made of is loaded once and stays: Python need not look through it again and
    # again for what can go.
    for name in ("vort.models", "accelerate"):
        import_module(name)
    gc.freeze()


# Bytes for batches that the next row of a table is trained on too.
_ROOM = 64 << 20


def data_workers(asked: int) -> int:
    """Processes that draw sequences for a cell: as asked, but no more than it has cores beside it.

    What is drawn does not depend on it.
    """
    return max(0, min(asked, _cores - 1))


def _attempt(cell: Cell, folder: RunFolder) -> Outcome:
    try:
        run_cell(cell, folder)
    except FloatingPointError as error:
        return Outcome(cell, f"{type(error).__name__}: {error}", broke_down=True)
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
    """Train and score: the usual cell. A row that has the name of a published model only scores."""
    task = make_task(**cell.task)
    config = TrainingConfig(**cell.training, seed=cell.seed, progress=False)
    # On a GPU that several cells share, it is the host that they wait for.
    config = replace(config, workers=data_workers(config.workers), record_steps=True)
    scratch = folder.checkpoints(cell)
    result: dict[str, Any] = {"task": task.describe()}
    if cell.model in pretrained_names():
        model = _published(cell.model)
        config = replace(config, test_sequences=0)
    else:
        model = build_model(task, cell.config, cell.seed)
        # The test split is scored below, by finer classes of lag.
        base = replace(config, test_sequences=0)
        found = train(model, task, base, directory=scratch, resume=True)
        result |= {
            "searched": cell.search or False,
            "searched_in": chosen_in(cell.search, cell.size),
            "validation": found.validation,
            "history": found.history,
            "steps": found.steps,
            "tokens_per_second": round(found.tokens_per_second),
        }
    result["parameters"] = sum(x.numel() for x in model.parameters())
    result |= _state(model, task.length)
    if config.test_sequences != 0:
        result |= _score(model, task, config)
    for name, options in cell.after.items():
        more = {"folder": scratch} if name in _GO_ON else {}
        result[name] = AFTER[name](model, task, config, **options, **more)
    shutil.rmtree(scratch, ignore_errors=True)
    return result


def _published(name: str) -> Any:
    """A model that comes with the package, in float32."""
    from vort.models import VortForCausalLM

    model = VortForCausalLM.from_pretrained(pretrained_path(name), dtype=torch.float32)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


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
