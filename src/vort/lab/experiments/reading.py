"""Reading on, far beyond the trained length: bits by class of position, kept window by window.

A record keeps every window's bits, so that two models are compared on the same windows. Their
difference is taken window by window and seed by seed, averaged over the windows of a book and over
seeds; the interval is Student's t over books, and another one over seeds stands beside it. Books
say how far other texts would move a difference, seeds how far other weights would.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from vort.lab.experiments.experiment import Record
from vort.lab.experiments.measures import precision_of
from vort.lab.tasks.books import Books
from vort.lab.tasks.task import Split
from vort.lab.training.metrics import Interval, interval
from vort.memories import VortMemory

__all__ = ["BOUNDS", "Difference", "Reading", "class_names", "differences", "read_on", "readings"]

Bits = NDArray[np.float64]
BOUNDS = (256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
# Characters that are read at a time, unless a single window has more: full attention to windows of
# 131,072 has no room for two.
_TOGETHER = 65536


def class_names(length: int, bounds: Sequence[int] = BOUNDS) -> tuple[str, ...]:
    """Classes of position in windows of a length, each called by where it ends.

    >>> class_names(4096, (256, 1024, 8192))
    ('<256', '-1024', '-4096')
    """
    ends = [*(bound for bound in bounds if bound < length), length]
    return (f"<{ends[0]}", *(f"-{end}" for end in ends[1:]))


def _widths(length: int, bounds: Sequence[int]) -> Bits:
    """Positions in each class."""
    ends = [0, *(bound for bound in bounds if bound < length), length]
    return np.array([high - low for low, high in pairwise(ends)], dtype=np.float64)


@torch.no_grad()
def read_on(
    model: Any,
    task: Books,
    config: Any,
    *,
    lengths: Sequence[int],
    bounds: Sequence[int] = BOUNDS,
    most: Mapping[str, int] | None = None,
    documents: int | None = None,
    split: Split = "test",
) -> dict[str, Any]:
    """Bits of windows of several lengths, by class of position; weights are left as they are.

    A model with a horizon reads windows that are longer a second time, its kernels calibrated for
    their length.

    Args:
        model: trained, of any memory.
        task: the texts that it was trained on.
        config: of its training.
        lengths: of windows; each lies in one document.
        bounds: ends of the classes of position.
        most: windows of each document, by length; all that fit by default.
        documents: how many of the split, from its start; None: all.
        split: whose documents are read.

    Returns:
        "bounds", and "readings": of each "length", "horizon" (None: as trained) and "windows", a
        text each: document, start, and the bits of every class.
    """
    trained = int(model.config.horizon)
    recalibrates = any(isinstance(memory, VortMemory) for memory in model.model.memories)
    found = []
    for length in lengths:
        places = task.within_documents(split, length, (most or {}).get(str(length)))
        places = [place for place in places if documents is None or place[0] < documents]
        horizons = [None, length] if recalibrates and length > trained else [None]
        for horizon in horizons:
            if horizon is not None:
                model.model.set_horizon(horizon)
            try:
                bits = _bits(model, task, split, places, length, config, bounds)
            finally:
                if horizon is not None:
                    model.model.set_horizon(trained)
            lines = [
                " ".join([str(document), str(start), *(f"{x:.4f}" for x in row)])
                for (document, start), row in zip(places, bits, strict=True)
            ]
            found.append({"length": length, "horizon": horizon, "windows": lines})
    return {"bounds": list(bounds), "readings": found}


def _bits(
    model: Any,
    task: Books,
    split: Split,
    places: Sequence[tuple[int, int]],
    length: int,
    config: Any,
    bounds: Sequence[int],
) -> list[list[float]]:
    """Of each window, the bits of every class."""
    device = next(model.parameters()).device
    model.eval()
    widths = [int(width) for width in _widths(length, bounds)]
    rows = max(1, _TOGETHER // length)
    found: list[list[float]] = []
    for first in range(0, len(places), rows):
        batch = task.batch_at(split, places[first : first + rows], length)
        ids, labels = batch["input_ids"].to(device), batch["labels"].to(device)
        with precision_of(config):
            logits = model(ids, use_cache=False).logits[..., : task.num_classes]
        nats = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), reduction="none"
        )
        parts = nats.double().view(ids.shape).split(widths, 1)
        found += torch.stack([part.mean(1) / log(2) for part in parts], 1).tolist()
    return found


class Reading(NamedTuple):
    """One reading of a model, as a record has it.

    Attributes:
        length: of the windows.
        horizon: that the kernels were calibrated for; None: as trained.
        classes: names, "all" last.
        windows: bits of every class, by document and start.
    """

    length: int
    horizon: int | None
    classes: tuple[str, ...]
    windows: Mapping[tuple[int, int], Bits]

    def by_book(self) -> dict[int, Bits]:
        """Bits of every class, the mean over a book's windows."""
        found: dict[int, list[Bits]] = {}
        for (book, _), bits in self.windows.items():
            found.setdefault(book, []).append(bits)
        return {book: np.mean(rows, 0) for book, rows in found.items()}

    def mean(self) -> dict[str, float]:
        """Bits of every class, books counting alike."""
        values = np.mean(list(self.by_book().values()), 0)
        return dict(zip(self.classes, values.tolist(), strict=True))


def readings(record: Record) -> dict[tuple[int, int | None], Reading]:
    """The readings of a record by length and horizon; none where it has none."""
    kept = record.get("reading")
    if kept is None:
        return {}
    found = {}
    for each in kept["readings"]:
        length, horizon = each["length"], each["horizon"]
        widths = _widths(length, kept["bounds"])
        windows = {}
        for line in each["windows"]:
            document, start, *bits = line.split()
            row = np.array(bits, dtype=np.float64)
            windows[int(document), int(start)] = np.append(row, row @ widths / widths.sum())
        if windows:
            names = (*class_names(length, kept["bounds"]), "all")
            found[length, horizon] = Reading(length, horizon, names, windows)
    return found


class Difference(NamedTuple):
    """How many bits a rival needs more than ours in a class, with what is known of its error.

    Attributes:
        books: interval over books; its count is theirs.
        seeds: interval over seeds; NaN for one.
    """

    books: Interval
    seeds: Interval

    @property
    def judged(self) -> Interval:
        """What a verdict takes: the wider of the two, of seeds, which are what it counts."""
        halves = [self.books.half, *([self.seeds.half] if self.seeds.count > 1 else [])]
        return Interval(self.books.mean, max(halves), self.seeds.count)

    def shifted(self, by: float) -> "Difference":
        """The same less a number of bits."""
        return Difference(*(Interval(x.mean - by, x.half, x.count) for x in self))


def differences(ours: Mapping[int, Reading], rival: Mapping[int, Reading]) -> dict[str, Difference]:
    """Of each class the bits that a rival needs more, over the seeds and windows that both have.

    Args:
        ours: readings of one length, by seed.
        rival: the same.
    """
    seeds = sorted(ours.keys() & rival.keys())
    if not seeds:
        return {}
    names = ours[seeds[0]].classes
    # [seeds, books, classes]
    table = []
    for seed in seeds:
        a, b = ours[seed], rival[seed]
        if a.windows.keys() != b.windows.keys() or a.classes != b.classes:
            raise ValueError(f"windows must be the same for both models, seed {seed} has others")
        less = {place: b.windows[place] - bits for place, bits in a.windows.items()}
        books = Reading(a.length, None, names, less).by_book()
        table.append([books[book] for book in sorted(books)])
    return _over_books_and_seeds(np.array(table), names)


def between_classes(ours: Mapping[int, Reading], later: str, earlier: str) -> Difference:
    """How many bits a class takes more than another one of the same windows."""
    table = []
    for reading in ours.values():
        one, other = reading.classes.index(later), reading.classes.index(earlier)
        books = reading.by_book()
        table.append([books[book][[one]] - books[book][[other]] for book in sorted(books)])
    return _over_books_and_seeds(np.array(table), (later,))[later]


def _over_books_and_seeds(table: Bits, names: Sequence[str]) -> dict[str, Difference]:
    """table `[seeds, books, classes]`."""
    return {
        name: Difference(
            interval(table[:, :, column].mean(0).tolist()),
            interval(table[:, :, column].mean(1).tolist()),
        )
        for column, name in enumerate(names)
    }
