"""Tasks whose examples are in a user's files: what they share."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

from vort.lab.tasks.task import IGNORED, SPLITS, Batch, Integers, Split, Task, check_split

__all__ = ["Example", "StoredTask", "hold_out"]

# One of so many training examples validates where files have no split for it.
HELD_OUT = 20


class Example(NamedTuple):
    """Words of a sequence, which of them are asked for, and the number of its bucket."""

    words: tuple[str, ...]
    asked: tuple[int, ...]
    bucket: int = 0


@dataclass(frozen=True, kw_only=True)
class StoredTask(Task):
    """Sequences of words, one an example; labels are at the word before each that is asked for.

    The vocabulary is all words of all splits, those that are asked for first. Every example begins
    with a mark. Sequences are filled up at their end.

    Args:
        source: folder of the files.
        length: T; examples that are longer are an error.
        packed: training sequences hold as many examples as fit, in a random order; batches then
            have the `position_ids` by which a model keeps them apart.
        seed: of that order.
    """

    source: str = ""
    length: int = 64
    packed: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "source", str(self.source))
        if not self.source:
            raise ValueError(f"source must be the folder of {self.name}'s files: source=FOLDER")
        if self.length < 2:
            raise ValueError(f"length must be at least 2, got {self.length}")

    @abstractmethod
    def read(self) -> dict[Split, list[Example]]:
        """The examples of all splits."""

    @cached_property
    def examples(self) -> dict[Split, list[Example]]:
        """The examples of all splits, read when first asked for."""
        found = self.read()
        for split in SPLITS:
            if not found[split]:
                raise ValueError(f"{self.source} has no examples for the split {split!r}")
        longest = 1 + max(len(one.words) for examples in found.values() for one in examples)
        if longest > self.length:
            raise ValueError(
                f"length must be at least {longest}, that of the longest example of {self.name}, "
                f"got {self.length}"
            )
        return found

    @cached_property
    def _vocabulary(self) -> tuple[list[str], int]:
        """All words, and how many of them, the first ones, are asked for."""
        every: set[str] = set()
        asked: set[str] = set()
        for examples in self.examples.values():
            for one in examples:
                every.update(one.words)
                asked.update(one.words[place] for place in one.asked)
        return [*sorted(asked), *sorted(every - asked), "<begin>", "<pad>"], len(asked)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self._vocabulary[0])}

    @property
    def vocab_size(self) -> int:
        """Words, the mark of a beginning, and one that fills sequences up."""
        return len(self._vocabulary[0])

    @property
    def num_classes(self) -> int:
        """Words that are asked for."""
        return self._vocabulary[1]

    @property
    def bucket_names(self) -> tuple[str, ...]:
        """One bucket, unless a task has more."""
        return ("all",)

    @cached_property
    def _rows(self) -> dict[Split, list[list[Example]]]:
        """The examples of each sequence."""
        rows = {split: [[one] for one in found] for split, found in self.examples.items()}
        if self.packed:
            rows["train"] = self._pack(self.examples["train"])
        return rows

    def _pack(self, examples: Sequence[Example]) -> list[list[Example]]:
        rows: list[list[Example]] = [[]]
        used = 0
        for number in np.random.default_rng(self.seed).permutation(len(examples)).tolist():
            one = examples[number]
            if used + 1 + len(one.words) > self.length:
                rows.append([])
                used = 0
            rows[-1].append(one)
            used += 1 + len(one.words)
        return rows

    def size(self, split: Split) -> int:
        """Sequences of a split."""
        check_split(split)
        return len(self._rows[split])

    def decode(self, tokens: Iterable[int]) -> list[str]:
        """The words of tokens."""
        return [self._vocabulary[0][token] for token in tokens]

    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        """The examples with these indices; see `Task.batch`."""
        self.check_indices(split, indices)
        shape = (len(indices), self.length)
        tokens = np.full(shape, self.vocab_size - 1, dtype=np.int64)
        labels = np.full(shape, IGNORED, dtype=np.int64)
        buckets = np.full(shape, -1, dtype=np.int8)
        # What fills a row up is read with its last example, by nobody.
        positions = np.tile(np.arange(self.length), (len(indices), 1))
        for b, index in enumerate(indices):
            end = 0
            for one in self._rows[split][index]:
                begin, end = end, end + 1 + len(one.words)
                positions[b, begin:] = np.arange(self.length - begin)
                tokens[b, begin:end] = self._encode(("<begin>", *one.words))
                places = begin + np.array(one.asked, dtype=np.int64)
                labels[b, places] = tokens[b, places + 1]
                buckets[b, places] = one.bucket
        batch: Batch = {
            "input_ids": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "buckets": torch.from_numpy(buckets),
            "sources": torch.full(shape, -1, dtype=torch.int32),
        }
        if self.packed and split == "train":
            batch["position_ids"] = torch.from_numpy(positions)
        return batch

    def _encode(self, words: Sequence[str]) -> Integers:
        return np.array([self._numbers[word] for word in words], dtype=np.int64)

    @cached_property
    def digest(self) -> str:
        """A short hash of all examples."""
        text = repr([self.examples[split] for split in SPLITS])
        return sha256(text.encode()).hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """Every setting; files are known by what they say, not by a path."""
        return {**super().describe(), "source": Path(self.source).name, "digest": self.digest}


def hold_out(examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """Examples to train on, and one in twenty to validate on, by what they say.

    What is there more than once is there to be learned, and trains.
    """
    texts = [" ".join(one.words) for one in examples]
    often = Counter(texts)
    held = [often[text] == 1 and crc32(text.encode()) % HELD_OUT == 0 for text in texts]
    train = [one for one, out in zip(examples, held, strict=True) if not out]
    return train, [one for one, out in zip(examples, held, strict=True) if out]
