"""Several processes that talk to each other by gloo, and what each of them returns."""

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.forks import SERVER

PATIENCE = 300


def run(ranks: int, job: Callable[..., Any], *given: Any, ends: bool = True) -> list[Any]:
    """What `job(rank, *given)` returns on each of so many ranks, in a group of their own.

    ends: whether all are expected to live on; else None stands for what one that was killed says.
    """
    with tempfile.TemporaryDirectory() as folder:
        answers, workers = [], []
        for rank in range(ranks):
            mine, theirs = SERVER.Pipe(duplex=False)
            file = str(Path(folder) / "meeting")
            work = (theirs, rank, ranks, file, job, given, ends)
            worker = SERVER.Process(target=_work, args=work)
            worker.start()
            theirs.close()
            answers.append(mine)
            workers.append(worker)
        try:
            return [_answer(rank, end, ends) for rank, end in enumerate(answers)]
        finally:
            for worker in workers:
                worker.join(1)
                worker.kill()


def _answer(rank: int, end: Connection, ends: bool) -> Any:
    if not end.poll(PATIENCE):
        raise TimeoutError(f"rank {rank} said nothing for {PATIENCE} seconds")
    try:
        problem, found = end.recv()
    except EOFError:
        if ends:
            raise
        return None
    if problem:
        raise RuntimeError(f"rank {rank}:\n{problem}")
    return found


def _work(
    end: Connection,
    rank: int,
    ranks: int,
    file: str,
    job: Callable[..., Any],
    given: Any,
    ends: bool,
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
        found = job(rank, *given)
        if ends:
            dist.barrier()
        end.send(("", found))
    except BaseException:
        end.send((traceback.format_exc(), None))
    end.close()
    os._exit(0)  # what a library would still do at its end may wait for ranks that are gone
