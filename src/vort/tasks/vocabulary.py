"""Tokens of tasks that show a key with a label once and ask for the label later."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["KeyVocabulary"]

Index = TypeVar("Index", int, NDArray[np.int64])


@dataclass(frozen=True)
class KeyVocabulary:
    """A row of token ids: labels, then (key, label) pairs, then keys alone, then fillers.

    Labels come first, so that a classifier needs only the first `labels` outputs of a model; no
    sequence shows them.

    >>> words = KeyVocabulary(keys=3, labels=2, fillers=4)
    >>> words.size, words.anchor(2, 1), words.query(0), words.filler(3)
    (15, 7, 8, 14)
    """

    keys: int
    labels: int
    fillers: int

    def __post_init__(self) -> None:
        for name in ("keys", "labels", "fillers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.filler(self.fillers)

    def anchor(self, key: Index, label: Index) -> Index:
        """The token that shows a key with its label."""
        return self.labels + key * self.labels + label

    def query(self, key: Index) -> Index:
        """The token that shows a key alone."""
        return self.labels * (self.keys + 1) + key

    def filler(self, number: Index) -> Index:
        """A token that means nothing."""
        return self.labels * (self.keys + 1) + self.keys + number

    def shows_key(self, tokens: Tensor) -> Tensor:
        """True at tokens with a key, alone or with a label."""
        return (tokens >= self.labels) & (tokens < self.filler(0))

    def parts(self) -> Tensor:
        """`[size, 2]`: the two parts that each token shows, numbered over all kinds of part.

        Parts are the labels, "no label", the keys and the fillers: an anchor is a key and a label,
        a query the same key and no label.
        """
        labels, keys, fillers = self.labels, torch.arange(self.keys), torch.arange(self.fillers)
        blank = labels
        of_key, of_filler = keys + labels + 1, fillers + self.keys + labels + 1
        every_label = torch.arange(labels)
        first = [torch.full((labels,), blank), of_key.repeat_interleave(labels), of_key, of_filler]
        second = [every_label, every_label.repeat(self.keys), torch.full((self.keys,), blank)]
        second.append(torch.full((self.fillers,), blank))
        return torch.stack([torch.cat(first), torch.cat(second)], dim=1)
