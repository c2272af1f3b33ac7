"""What training and evaluation ask of a task, and what generated tasks share.

Sequences are drawn from random numbers by name: a seed, a task, a split and an index always give
the same ones. Philox is a counter-based generator: its key says which stream, its counter where in
it. The key holds seed, task and split, the top word of the counter the index of the sequence. So
sequences need no state, any worker can make any of them, and no two share a number: each has 2^192
counts of its own, and streams of different splits have different keys.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, NotRequired, TypedDict, get_args
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vort.names import check_choice, refuse_unknown, typed

__all__ = [
    "IGNORED",
    "SPLITS",
    "TASKS",
    "Batch",
    "GeneratedTask",
    "Row",
    "Split",
    "Task",
    "bucket_names",
    "check_split",
    "make_task",
    "stream",
    "uniform_below",
]

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)

# What cross-entropy leaves out, by PyTorch's convention.
IGNORED = -100
# A training split of up to so many sequences, and tokens, is kept once it was drawn: 100 MB.
KEPT, KEPT_TOKENS = 1 << 13, 5 * 10**7
Integers = NDArray[np.int64]
# Every task there is by name: a class that has a name is one.
TASKS: dict[str, type["Task"]] = {}


class Batch(TypedDict):
    """Sequences `[B, T]` and what is asked of them.

    Attributes:
        input_ids: tokens, int64.
        labels: what to predict *at* each position (nothing is shifted); -100 where nothing is.
        buckets: index into the task's `bucket_names` at labelled positions, -1 elsewhere; int8.
        sources: position that holds the answer, where there is one; -1 elsewhere; int32.
        entity_mask: 1 at tokens that name an entity; only in tasks that have entities.
        position_ids: places counted anew from each sequence packed into a row, none of which may
            see another; only where rows hold several. int64.
    """

    input_ids: Tensor
    labels: Tensor
    buckets: Tensor
    sources: Tensor
    entity_mask: NotRequired[Tensor]
    position_ids: NotRequired[Tensor]


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
        text: whether tokens are the bytes of a text.
    """

    name: ClassVar[str]
    score: ClassVar[Literal["accuracy", "bits"]] = "accuracy"
    text: ClassVar[bool] = False
    length: int
    parts: Tensor | None = None

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        name = cls.__dict__.get("name")
        if name is not None:
            if TASKS.get(name, cls).__qualname__ != cls.__qualname__:
                raise ValueError(f"name must be of one task only, got {name!r} twice")
            TASKS[name] = cls

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

    def kinds(self, batch: Batch) -> dict[str, Tensor]:
        """Which positions `[B, T]` are of which kind; every position is of one.

        By default what later queries ask for ("first"), the queries ("again"), and "filler".
        """
        again = batch["sources"] >= 0
        rows, queries = again.nonzero(as_tuple=True)
        first = torch.zeros_like(again)
        first[rows, batch["sources"][rows, queries].long()] = True
        first &= ~again
        return {"first": first, "again": again, "filler": ~first & ~again}

    def describe(self) -> dict[str, Any]:
        """Name and every setting, ready for JSON: what a result must be filed under."""
        settings = asdict(self)  # type: ignore[call-overload]
        lists = {key: list(value) for key, value in settings.items() if isinstance(value, tuple)}
        return {"task": self.name, **settings, **lists}

    def check_indices(self, split: Split, indices: Sequence[int]) -> None:
        """Raise unless all indices lie in the split."""
        check_split(split)
        size = self.size(split)
        for index in indices:
            if index < 0 or (size is not None and index >= size):
                limit = "" if size is None else f" and < {size}"
                raise IndexError(f"indices of split {split!r} must be >= 0{limit}, got {index}")


def make_task(name: str, **settings: Any) -> Task:
    """The task called `name`, one of `TASKS`, with these settings; unknown ones are an error."""
    check_choice("task", name, TASKS)
    kind = TASKS[name]
    refuse_unknown(f"task {name!r}", settings, [field.name for field in fields(kind)])  # type: ignore[arg-type]
    return kind(**typed(kind, settings))


class Row(NamedTuple):
    """One generated sequence: all tokens, then positions, labels and sources of its queries.

    Their buckets too, where these are no classes of lag.
    """

    tokens: Integers
    queries: Integers
    labels: Integers
    sources: Integers
    buckets: Integers | None = None


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

    def row(self, split: Split, index: int) -> Row:
        """The sequence with an index."""
        return self.draw(stream(self.seed, self.name, split, index))

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
        size = self.size(split) if split == "train" else None
        again = size is not None and size <= KEPT and size * self.length <= KEPT_TOKENS
        for b, index in enumerate(indices):
            row = _kept_row(self, split, index) if again else self.row(split, index)
            tokens[b] = row.tokens
            labels[b, row.queries] = row.labels
            sources[b, row.queries] = row.sources
            lags = np.searchsorted(self.bounds, row.queries - row.sources)
            buckets[b, row.queries] = lags if row.buckets is None else row.buckets
        return {
            "input_ids": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "buckets": torch.from_numpy(buckets),
            "sources": torch.from_numpy(sources),
        }


@lru_cache(maxsize=KEPT)
def _kept_row(task: GeneratedTask, split: Split, index: int) -> Row:
    """A sequence of a split that is gone through many times: drawing takes longer than copying."""
    row = task.row(split, index)
    narrow = np.int16 if task.vocab_size <= np.iinfo(np.int16).max else np.int32
    return row._replace(tokens=row.tokens.astype(narrow))


def bucket_names(bounds: Sequence[int]) -> tuple[str, ...]:
    """Names of the classes between bounds that belong to the class below them.

    >>> bucket_names((100, 1000))
    ('<=100', '100-1000', '>1000')
    """
    if not bounds:
        return ("all",)
    between = [f"{low}-{high}" for low, high in pairwise(bounds)]
    return (f"<={bounds[0]}", *between, f">{bounds[-1]}")


def check_split(split: str) -> None:
    """Raise unless `split` is one of `SPLITS`."""
    check_choice("split", split, SPLITS)


def stream(seed: int, task: str, split: Split, index: int) -> np.random.Generator:
    """The generator of one sequence.

    >>> stream(0, "demo", "train", 7).integers(100) == stream(0, "demo", "train", 7).integers(100)
    np.True_
    """
    check_split(split)
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must lie in [0, 2^64), got {seed}")
    which = crc32(task.encode()) << 8 | SPLITS.index(split)
    key = np.array([seed, which], dtype=np.uint64)
    counter = np.array([0, 0, 0, index], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def uniform_below(rng: np.random.Generator, bound: int, size: int) -> Integers:
    """`size` integers in [0, bound), uniform to within bound / 2^32, five times faster than numpy.

    Fillers are most of a sequence and so most of its cost.
    """
    raw: NDArray[np.uint64] = np.asarray(rng.bit_generator.random_raw((size + 1) // 2))
    words = raw.view(np.uint32)[:size].astype(np.uint64)
    return (words * np.uint64(bound) >> np.uint64(32)).astype(np.int64)
