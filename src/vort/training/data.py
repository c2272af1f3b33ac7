"""Which sequences a step sees, and how they reach the device."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vort.tasks import IGNORED, Batch, Split, Task

__all__ = ["compact", "load", "piece_indices", "step_indices"]


def step_indices(step: int, batch_size: int, size: int | None, seed: int) -> list[int]:
    """Indices of the sequences of a step: a function of nothing else, so a run can resume anywhere.

    A split of `size` sequences is gone through in a new order each epoch; an endless one in order.

    >>> step_indices(3, 2, None, seed=0)
    [6, 7]
    """
    numbers = range(step * batch_size, (step + 1) * batch_size)
    if size is None:
        return list(numbers)
    return [int(_order(size, seed, number // size)[number % size]) for number in numbers]


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, epoch)).permutation(size)


def piece_indices(
    indices: Sequence[int], pieces: int, processes: int, rank: int
) -> Iterator[list[int]]:
    """The share of a process in a batch, in as many pieces as it is accumulated from."""
    share = len(indices) // (pieces * processes)
    for piece in range(pieces):
        first = (piece * processes + rank) * share
        yield list(indices[first : first + share])


def compact(batch: Batch) -> dict[str, Tensor]:
    """Tokens, and of labels only what is asked: flat `positions`, `targets` and `buckets` `[N]`.

    Positions are found here, on the CPU: finding them on a GPU would make it wait.
    """
    labels = batch["labels"].flatten()
    positions = (labels != IGNORED).nonzero().squeeze(1)
    found = {
        "input_ids": batch["input_ids"],
        "positions": positions,
        "targets": labels[positions],
        "buckets": batch["buckets"].flatten()[positions].long(),
    }
    if "entity_mask" in batch:
        found["entity_mask"] = batch["entity_mask"]
    return found


class _Batches(Dataset[dict[str, Tensor]]):
    """Batches of a task by number."""

    def __init__(self, task: Task, split: Split, groups: Sequence[list[int]]) -> None:
        self.task, self.split, self.groups = task, split, groups

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return compact(self.task.batch(self.split, self.groups[number]))


def load(
    task: Task,
    split: Split,
    groups: Sequence[list[int]],
    device: torch.device,
    workers: int = 0,
) -> Iterator[dict[str, Tensor]]:
    """Compact batches on the device, one for each group of indices."""
    options: dict[str, Any] = {"multiprocessing_context": "fork"} if workers else {}
    loader = DataLoader(
        _Batches(task, split, groups),
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        # Of its own, lest making a loader advance the numbers that dropout sees.
        generator=torch.Generator(),
        **options,
    )
    for batch in loader:
        yield {name: x.to(device, non_blocking=True) for name, x in batch.items()}
