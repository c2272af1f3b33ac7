"""What training and evaluation ask of a task, and what generated tasks share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vort.lab.tasks.streams import Split, check_split, stream

__all__ = ["IGNORED", "Batch", "GeneratedTask", "Row", "Task", "bucket_names"]

# What cross-entropy leaves out, by PyTorch's convention.
IGNORED = -100
Integers = NDArray[np.int64]


class Batch(TypedDict):
    """Sequences `[B, T]` and what is asked of them.

    Attributes:
        input_ids: tokens, int64.
        labels: what to predict *at* each position (nothing is shifted); -100 where nothing is.
        buckets: index into the task's `bucket_names` at labelled positions, -1 elsewhere; int8.
        sources: position that holds the answer, where there is one; -1 elsewhere; int32.
        entity_mask: 1 at tokens that name an entity; only in tasks that have entities.
    """

    input_ids: Tensor
    labels: Tensor
    buckets: Tensor
    sources: Tensor
    entity_mask: NotRequired[Tensor]


class Task(ABC):
    """Sequences with questions, in three splits that share nothing.

    Attributes:
        name: by which `make_task` finds it.
        score: the figure its table shows: "accuracy" (higher is better) or "bits" (lower is).
        length: T, positions of a sequence.
        vocab_size: tokens are 0 .. vocab_size - 1.
        num_classes: labels are 0 .. num_classes - 1, always the first tokens of the vocabulary.
        bucket_names: the classes of lag or position that results are split by.
        parts: `[vocab_size, P]` for tokens made of P parts (see `PartsEmbedding`), or None.
    """

    name: ClassVar[str]
    score: ClassVar[Literal["accuracy", "bits"]] = "accuracy"
    length: int
    parts: Tensor | None = None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens."""

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return self.vocab_size

    @property
    @abstractmethod
    def bucket_names(self) -> tuple[str, ...]:
        """Names of the buckets, in order."""

    @abstractmethod
    def size(self, split: Split) -> int | None:
        """Sequences in a split; None: endless."""

    @abstractmethod
    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        """The sequences with these indices: the same ones in whatever company they are asked for.

        Labels are those of `Batch`; indices run from 0 to `size(split)`.
        """

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Name and every setting, ready for JSON: what a result must be filed under."""

    def check_indices(self, split: Split, indices: Sequence[int]) -> None:
        """Raise unless all indices lie in the split."""
        check_split(split)
        size = self.size(split)
        for index in indices:
            if index < 0 or (size is not None and index >= size):
                limit = "" if size is None else f" and < {size}"
                raise IndexError(f"indices of split {split!r} must be >= 0{limit}, got {index}")


class Row(NamedTuple):
    """One generated sequence: all tokens, then positions, labels and sources of its queries."""

    tokens: Integers
    queries: Integers
    labels: Integers
    sources: Integers


@dataclass(frozen=True, kw_only=True)
class GeneratedTask(Task):
    """A task whose sequences are drawn; results are split by the lag from source to query.

    Args:
        length: T, positions of a sequence.
        seed: one seed, one set of sequences.
        train_sequences: sequences in the training split; None: never the same twice.
        validation_sequences: sequences in the validation split.
        test_sequences: sequences in the test split.
        bounds: upper ends, included, of all lag buckets but the last.
    """

    length: int
    seed: int = 0
    train_sequences: int | None = 5000
    validation_sequences: int = 500
    test_sequences: int = 1000
    bounds: tuple[int, ...] = (100, 1000)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", tuple(self.bounds))
        for name in ("length", "train_sequences", "validation_sequences", "test_sequences"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if list(self.bounds) != sorted(set(self.bounds)) or min(self.bounds, default=1) < 1:
            raise ValueError(f"bounds must be positive and increasing, got {self.bounds}")

    @abstractmethod
    def draw(self, rng: np.random.Generator) -> Row:
        """One sequence made from the numbers of `rng`."""

    @property
    def bucket_names(self) -> tuple[str, ...]:
        """Classes of lag, e.g. "<=100", "100-1000", ">1000"."""
        return bucket_names(self.bounds)

    def size(self, split: Split) -> int | None:
        """Sequences in a split, as set; see `Task.size`."""
        check_split(split)
        found: int | None = getattr(self, f"{split}_sequences")
        return found

    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        """The sequences with these indices; see `Task.batch`."""
        self.check_indices(split, indices)
        shape = (len(indices), self.length)
        tokens = np.empty(shape, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        # Small types: at 10,000 positions, fresh memory costs more than what is drawn.
        sources = np.full(shape, -1, dtype=np.int32)
        buckets = np.full(shape, -1, dtype=np.int8)
        for b, index in enumerate(indices):
            row = self.draw(stream(self.seed, self.name, split, index))
            tokens[b] = row.tokens
            labels[b, row.queries] = row.labels
            sources[b, row.queries] = row.sources
            buckets[b, row.queries] = np.searchsorted(self.bounds, row.queries - row.sources)
        return {
            "input_ids": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "buckets": torch.from_numpy(buckets),
            "sources": torch.from_numpy(sources),
        }

    def describe(self) -> dict[str, Any]:
        """Name and every setting; see `Task.describe`."""
        settings = asdict(self)
        return {"task": self.name, **settings, "bounds": list(self.bounds)}


def bucket_names(bounds: Sequence[int]) -> tuple[str, ...]:
    """Names of the classes between bounds that belong to the class below them.

    >>> bucket_names((100, 1000))
    ('<=100', '100-1000', '>1000')
    """
    if not bounds:
        return ("all",)
    between = [f"{low}-{high}" for low, high in pairwise(bounds)]
    return (f"<={bounds[0]}", *between, f">{bounds[-1]}")
