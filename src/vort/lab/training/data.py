"""Which sequences a step sees, and how they reach the device."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vort.lab.tasks import IGNORED, Batch, Split, Task

__all__ = [
    "HeldSplit",
    "Pieces",
    "UnequalError",
    "compact",
    "fill_up",
    "held_batches",
    "keep_batches",
    "load",
    "step_indices",
]

# Tokens of a training split that a GPU keeps.
ON_DEVICE = 10**8


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


@dataclass(frozen=True)
class Pieces(Sequence[list[int]]):
    """Indices of the pieces that fall to a process, from step `first` to step `total`.

    A step has `accumulation` pieces of `batch_size / (accumulation * processes)` sequences.
    """

    first: int
    total: int
    batch_size: int
    size: int | None
    seed: int
    accumulation: int = 1
    processes: int = 1
    rank: int = 0

    def __len__(self) -> int:
        return (self.total - self.first) * self.accumulation

    def __getitem__(self, number: int) -> list[int]:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        step, piece = divmod(number, self.accumulation)
        indices = step_indices(self.first + step, self.batch_size, self.size, self.seed)
        share = self.batch_size // (self.accumulation * self.processes)
        begin = (piece * self.processes + self.rank) * share
        return indices[begin : begin + share]


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
    if "position_ids" in batch:
        found["position_ids"] = batch["position_ids"]
    return found


def fill_up(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A compact batch whose N is a power of two, or all positions: few shapes where N varies.

    What it is filled up with are positions that nobody asks for, and no targets.

    >>> batch = compact({"input_ids": torch.zeros(1, 9), "buckets": torch.zeros(1, 9),
    ...                  "labels": torch.tensor([[IGNORED, 5, 6, IGNORED, 7, *[IGNORED] * 4]])})
    >>> fill_up(batch)["positions"], fill_up(batch)["targets"].tolist()
    (tensor([1, 2, 4, 0]), [5, 6, 7, -100])
    """
    positions, count = batch["positions"], batch["input_ids"].numel()
    more = min(1 << max(len(positions) - 1, 0).bit_length(), count) - len(positions)
    if not more:
        return batch
    free = torch.ones(count, dtype=torch.bool)
    free[positions] = False
    fillers = {
        "positions": free.nonzero().squeeze(1)[:more],
        "targets": torch.full((more,), IGNORED),
        "buckets": torch.full((more,), -1),
    }
    return batch | {name: torch.cat([batch[name], x]) for name, x in fillers.items()}


class _Kept:
    """Batches that were drawn before, the last of them, in so many bytes; see `keep_batches`."""

    def __init__(self) -> None:
        self.room = 0
        self.held: OrderedDict[Hashable, dict[str, Tensor]] = OrderedDict()
        self.size = 0

    def batch(self, task: Task, split: Split, indices: Sequence[int]) -> dict[str, Tensor]:
        """The batch of these sequences, compact, which nobody may change."""
        if not self.room or type(task).__hash__ is None:
            return compact(task.batch(split, indices))
        key = (task, split, tuple(indices))
        found = self.held.pop(key, None)
        if found is None:
            found = compact(task.batch(split, indices))
            self.size += _bytes(found)
        self.held[key] = found
        while self.size > self.room:
            self.size -= _bytes(self.held.popitem(last=False)[1])
        return found


_kept = _Kept()


def keep_batches(room: int) -> None:
    """Have this process keep batches that it draws, in so many bytes at most; 0: none.

    For whoever trains one model after another on the same sequences.
    """
    _kept.room, _kept.held, _kept.size = room, OrderedDict(), 0


def _bytes(batch: dict[str, Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in batch.values())


class UnequalError(Exception):
    """A sequence asks at more or fewer positions than others: rows of one length do not hold it."""


class HeldSplit:
    """A split's sequences, compact, on the device: each is drawn once, and batches are made there.

    A model as small as those of the recall tables takes less time for a step than processes take
    to hand over a batch of long sequences.
    """

    def __init__(self, task: Task, split: Split, device: torch.device) -> None:
        size = task.size(split)
        if size is None:
            raise ValueError(f"split must end to be held, and {split!r} of {task.name} does not")
        self.task, self.split, self.size, self.device = task, split, size, device
        self.known = np.zeros(size, dtype=bool)
        self.held: dict[str, Tensor] = {}

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """What `compact` makes of these sequences; `UnequalError` where rows do not hold them."""
        self._draw([index for index in dict.fromkeys(indices) if not self.known[index]])
        rows = torch.tensor(indices).to(self.device, non_blocking=True)
        found = {name: x[rows].long() for name, x in self.held.items()}
        starts = torch.arange(len(indices), device=self.device)[:, None] * self.task.length
        found["positions"] += starts
        for name in ("positions", "targets", "buckets"):
            found[name] = found[name].flatten()
        return found

    def _draw(self, indices: list[int]) -> None:
        if not indices:
            return
        new = compact(self.task.batch(self.split, indices))
        count, length = new["input_ids"].shape
        row = new["positions"] // length
        each = torch.bincount(row, minlength=count)
        wanted = self.held["targets"].shape[1] if self.held else int(each[0])
        if not wanted or (each != wanted).any():
            raise UnequalError
        new["positions"] = new["positions"] - row * length
        new = {name: x.view(count, -1) for name, x in new.items()}
        if not self.held:
            self.held = {name: self._room(name, x) for name, x in new.items()}
        where = torch.tensor(indices, device=self.device)
        for name, x in new.items():
            self.held[name][where] = x.to(self.held[name].dtype).to(self.device)
        self.known[indices] = True

    def _room(self, name: str, like: Tensor) -> Tensor:
        """In the narrowest type that holds all there may be."""
        small = name == "entity_mask" or (name == "input_ids" and self.task.vocab_size < 1 << 15)
        dtype = torch.int16 if small else torch.int32
        return torch.zeros(self.size, like.shape[1], dtype=dtype, device=self.device)


def held_batches(
    task: Task, split: Split, groups: Sequence[list[int]], device: torch.device
) -> Iterator[dict[str, Tensor]]:
    """Batches of a split that is held, up to the first that it does not hold."""
    held = HeldSplit(task, split, device)
    with suppress(UnequalError):
        for group in groups:
            yield held.batch(group)


class _Batches(Dataset[dict[str, Tensor]]):
    """Batches of a task by number."""

    def __init__(self, task: Task, split: Split, groups: Sequence[list[int]], filled: bool) -> None:
        self.task, self.split, self.groups, self.filled = task, split, groups, filled

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        found = _kept.batch(self.task, self.split, self.groups[number])
        return fill_up(found) if self.filled else found


def load(
    task: Task,
    split: Split,
    groups: Sequence[list[int]],
    device: torch.device,
    workers: int = 0,
    filled: bool = False,
) -> Iterator[dict[str, Tensor]]:
    """Compact batches on the device, one for each group of indices; `filled`: see `fill_up`.

    On a GPU a training split that is gone through many times is kept there.
    """
    done, size = 0, task.size(split)
    again = split == "train" and size is not None and size * task.length <= ON_DEVICE
    if again and device.type == "cuda":
        # All of one shape as they are.
        for batch in held_batches(task, split, groups, device):
            yield batch
            done += 1
    if done:
        groups = [groups[number] for number in range(done, len(groups))]
        if not groups:
            return
    loader = DataLoader(
        _Batches(task, split, groups, filled),
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        # Of its own, lest making a loader advance the numbers that dropout sees.
        generator=torch.Generator(),
    )
    for batch in loader:
        yield {name: x.to(device, non_blocking=True) for name, x in batch.items()}
