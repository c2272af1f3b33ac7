"""Entity label copy (table copy): a label at the first mention, asked for at every later one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vort.lab.tasks.parts import KeyTask, KeyVocabulary
from vort.lab.tasks.task import Batch, Row, Split, uniform_below

__all__ = ["LabelCopy"]


@dataclass(frozen=True, kw_only=True)
class LabelCopy(KeyTask):
    """Entities mentioned at uniform positions; only the first mention shows the entity's label.

    All mentions of a sequence are distinct positions drawn uniformly at once; an entity's earliest
    one shows (name, label), the others the name. Batches hold the true `entity_mask`.

    Args (and those of `KeyTask`):
        entities: E, entities in a sequence.
        mentions: mentions of each entity after the first.
        names: size of the pool that names are drawn from, without replacement.

    >>> task = LabelCopy(length=500, entities=4, mentions=3)
    >>> int((task.batch("train", [0])["labels"] >= 0).sum())
    12
    """

    name: ClassVar[str] = "label_copy"
    length: int = 8000
    bounds: tuple[int, ...] = (200, 2000)
    entities: int = 20
    mentions: int = 10
    names: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.entities <= self.names:
            raise ValueError(f"entities must lie in [1, names = {self.names}], got {self.entities}")
        needed = self.entities * (self.mentions + 1)
        if self.mentions < 1 or needed > self.length:
            most = self.length // self.entities - 1
            raise ValueError(
                f"mentions must lie in [1, length / entities - 1 = {most}], got {self.mentions}"
            )

    @property
    def vocabulary(self) -> KeyVocabulary:
        """Which token shows what; keys are names."""
        return KeyVocabulary(self.names, self.labels, self.fillers)

    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        """The sequences with these indices, and which of their tokens are mentions."""
        batch = super().batch(split, indices)
        batch["entity_mask"] = self.vocabulary.shows_key(batch["input_ids"]).long()
        return batch

    def draw(self, rng: np.random.Generator) -> Row:
        """One sequence."""
        words, shape = self.vocabulary, (self.entities, self.mentions + 1)
        names = rng.permutation(self.names)[: self.entities]
        labels = rng.integers(self.labels, size=self.entities)
        positions = rng.choice(self.length, shape[0] * shape[1], replace=False).reshape(shape)
        positions.sort(axis=1)
        first, later = positions[:, 0], positions[:, 1:]
        tokens = words.filler(uniform_below(rng, self.fillers, self.length))
        tokens[first] = words.anchor(names, labels)
        tokens[later] = words.query(names)[:, None]
        return Row(
            tokens,
            later.ravel(),
            labels.repeat(self.mentions),
            first.repeat(self.mentions),
        )
