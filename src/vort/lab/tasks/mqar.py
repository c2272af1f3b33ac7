"""Multi-query associative recall: key-value pairs first, then their keys, one after another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from vort.lab.tasks.task import (
    Batch,
    GeneratedTask,
    Integers,
    Row,
    Split,
    stream,
    uniform_below,
)

__all__ = ["MQAR"]


@dataclass(frozen=True, kw_only=True)
class MQAR(GeneratedTask):
    """k v k v ... and then each key once more, among random tokens; its value is asked for there.

    Values are the first half of the vocabulary and keys the second, both drawn without replacement,
    so a key stands for one value. Tokens between the queries are values: no key shows up that is
    not asked for. Queries take slots after the pairs, without replacement and independently of the
    pair they ask for: all slots alike (uniform), or slot g with weight g^(power - 1), so that most
    follow soon and a few late (power law), as in zoology's generator.

    Args (and those of `GeneratedTask`):
        pairs: key-value pairs, each asked for once.
        gaps: "uniform" or "power_law".
        power: exponent plus one of the law of gaps, in (0, 1]; 1 is uniform.
        vocabulary: number of tokens, half values, half keys.
        mixed: lengths and numbers of pairs, such as ((64, 4), (256, 64)), one of which a sequence
            has: in training any, in other splits each in turn, and results are by them. What
            follows a shorter one means nothing. (): `length` and `pairs` alone.
        apart: so many training sequences in a row, a batch, have the same of these, and end with
            it. None: each its own, all of the same length.

    >>> task = MQAR(length=64, pairs=8)
    >>> int((task.batch("train", [0])["labels"] >= 0).sum())
    8
    """

    name: ClassVar[str] = "mqar"
    length: int = 256
    bounds: tuple[int, ...] = (64, 256)
    pairs: int = 32
    gaps: Literal["uniform", "power_law"] = "power_law"
    power: float = 0.01
    vocabulary: int = 8192
    mixed: tuple[tuple[int, int], ...] = ()
    apart: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gaps not in ("uniform", "power_law"):
            raise ValueError(f'gaps must be "uniform" or "power_law", got {self.gaps!r}')
        if not 0 < self.power <= 1:
            raise ValueError(f"power must lie in (0, 1], got {self.power}")
        if self.apart is not None and self.apart < 1:
            raise ValueError(f"apart must be at least 1, or None, got {self.apart}")
        object.__setattr__(self, "mixed", tuple((int(a), int(b)) for a, b in self.mixed))
        for length, pairs in self.mixed or ((self.length, self.pairs),):
            most = min(length // 3, self.vocabulary // 2)
            if length > self.length or not 1 <= pairs <= most:
                raise ValueError(
                    f"pairs must lie in [1, {most}] (a third of length, half of vocabulary) and "
                    f"lengths be at most {self.length}, got {pairs} in {length}"
                )

    @property
    def vocab_size(self) -> int:
        """Values, then keys."""
        return self.vocabulary

    @property
    def num_classes(self) -> int:
        """Number of values."""
        return self.vocabulary // 2

    @property
    def bucket_names(self) -> tuple[str, ...]:
        """Classes of lag, or what is mixed."""
        named = tuple(f"{pairs} in {length:,}" for length, pairs in self.mixed)
        return named or super().bucket_names

    def row(self, split: Split, index: int) -> Row:
        """The sequence with an index."""
        rng = stream(self.seed, self.name, split, index)
        if not self.mixed:
            return self.draw(rng)
        which = self._which(rng, split, index)
        found = self._drawn(rng, *self.mixed[which])
        return found._replace(buckets=np.full(len(found.queries), which))

    def _which(self, rng: np.random.Generator, split: Split, index: int) -> int:
        """The one of `mixed` that a sequence has."""
        # Drawn whether it counts or not: what is drawn after it is then always the same.
        drawn = int(rng.integers(len(self.mixed)))
        if split != "train":
            return index % len(self.mixed)
        if self.apart is None:
            return drawn
        batch = stream(self.seed, f"{self.name} lengths", "train", index // self.apart)
        return int(batch.integers(len(self.mixed)))

    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        """The sequences with these indices; see `Task.batch`. Those `apart` end together."""
        found = super().batch(split, indices)
        if split != "train" or self.apart is None or not self.mixed:
            return found
        unused = np.random.default_rng(0)
        lengths = {self.mixed[self._which(unused, split, index)][0] for index in indices}
        end = max(lengths)
        return {
            "input_ids": found["input_ids"][:, :end],
            "labels": found["labels"][:, :end],
            "buckets": found["buckets"][:, :end],
            "sources": found["sources"][:, :end],
        }

    def draw(self, rng: np.random.Generator) -> Row:
        """One sequence."""
        return self._drawn(rng, self.length, self.pairs)

    def _drawn(self, rng: np.random.Generator, length: int, count: int) -> Row:
        half = self.num_classes
        keys = half + rng.choice(self.vocabulary - half, count, replace=False)
        values = rng.choice(half, count, replace=False)
        tokens = uniform_below(rng, half, self.length)
        tokens[0 : 2 * count : 2] = keys
        tokens[1 : 2 * count : 2] = values
        queries = 2 * count + self._slots(rng, length - 2 * count, count)
        tokens[queries] = keys
        return Row(tokens, queries, values, np.arange(count) * 2 + 1)

    def _slots(self, rng: np.random.Generator, room: int, count: int) -> Integers:
        """Distinct slots in [0, room), in random order."""
        if self.gaps == "uniform":
            return rng.choice(room, count, replace=False)
        # A race of exponential clocks is drawing without replacement in proportion to the weights.
        weights = np.arange(1, room + 1, dtype=np.float64) ** (self.power - 1)
        arrivals = rng.exponential(size=room) / weights
        first = np.argpartition(arrivals, count - 1)[:count]
        # Sorted: the order that a partition leaves them in is another one on other processors.
        return rng.permutation(np.sort(first))
