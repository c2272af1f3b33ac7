"""Doing the cells that are missing, one after another or side by side."""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from vort.lab.experiments.cell import Cell, finished

__all__ = ["Outcome", "default_workers", "run_cells"]


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: `error` is empty if its result is in place."""

    cell: Cell
    error: str = ""


def default_workers() -> int:
    """One for each core, up to four; one where a GPU does the work and cells would share it."""
    import torch

    if torch.cuda.is_available():
        return 1
    return max(1, min(4, os.cpu_count() or 1))


def run_cells(
    cells: Sequence[Cell],
    folder: Path,
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
    missing = [cell for cell in cells if restart or not finished(cell, folder)]
    if workers <= 1 or len(missing) <= 1:
        for cell in missing:
            started(cell)
            yield _attempt(cell, folder)
        return
    yield from _side_by_side([c for c in missing if not c.alone], folder, workers, started)
    for cell in missing:
        if cell.alone:
            started(cell)
            yield _attempt(cell, folder)


def _side_by_side(
    cells: Sequence[Cell], folder: Path, workers: int, started: Callable[[Cell], None]
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
    import torch

    torch.set_num_threads(threads)


def _attempt(cell: Cell, folder: Path) -> Outcome:
    from vort.lab.experiments.work import run_cell

    try:
        run_cell(cell, folder)
    except Exception as error:
        return Outcome(cell, f"{type(error).__name__}: {error}")
    return Outcome(cell)
