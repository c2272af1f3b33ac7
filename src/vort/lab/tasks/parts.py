"""Tokens that show several things at once: a key with a label, and how a model takes them in."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vort.lab.tasks.task import Batch, GeneratedTask, Task

__all__ = ["KeyTask", "KeyVocabulary", "PartsEmbedding", "embed_parts", "sources_by_key"]

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


@dataclass(frozen=True, kw_only=True)
class KeyTask(GeneratedTask):
    """A generated task with the tokens of a `KeyVocabulary`, whose labels are asked for.

    Args (and those of `GeneratedTask`):
        labels: number of classes.
        fillers: tokens that mean nothing.
    """

    labels: int = 16
    fillers: int = 64

    @property
    @abstractmethod
    def vocabulary(self) -> KeyVocabulary:
        """Which token shows what."""

    @property
    def vocab_size(self) -> int:
        """Labels, (key, label) pairs, keys and fillers."""
        return self.vocabulary.size

    @property
    def num_classes(self) -> int:
        """Number of labels."""
        return self.labels

    @property
    def parts(self) -> Tensor:  # type: ignore[override]
        """Key and label of each token, for `PartsEmbedding`."""
        return self.vocabulary.parts()

    def kinds(self, batch: Batch) -> dict[str, Tensor]:
        """Anchors or first mentions, queries or later mentions, and fillers."""
        asked = batch["labels"] >= 0
        shows = self.vocabulary.shows_key(batch["input_ids"])
        return {"first": shows & ~asked, "again": shows & asked, "filler": ~shows}


def sources_by_key(vocabulary: KeyVocabulary) -> Callable[[Tensor], Tensor]:
    """A function from tokens `[B, T]` to i*(t) `[B, T]`: where the key asked for had its label.

    It finds what `batch["sources"]` of `ZipfRetrieval` and `LabelCopy` says, on whatever device
    the tokens are: -1 at positions that ask for nothing, or for a key not shown before. Each key
    stands with a label at most once in a sequence.

    >>> from vort.lab.tasks import LabelCopy
    >>> task = LabelCopy(length=64, entities=2, mentions=2)
    >>> batch = task.batch("train", [0])
    >>> found = sources_by_key(task.vocabulary)(batch["input_ids"])
    >>> torch.equal(found, batch["sources"].long())
    True
    """
    labels, keys = vocabulary.labels, vocabulary.keys
    first_pair, first_query = labels, int(vocabulary.query(0))

    def find(tokens: Tensor) -> Tensor:
        position = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        shows = (tokens >= first_pair) & (tokens < first_query)
        asks = (tokens >= first_query) & (tokens < first_query + keys)
        key = torch.where(shows, (tokens - first_pair) // labels, keys)
        # One column too many takes what is no anchor.
        table = position.new_full((len(tokens), keys + 1), -1).scatter(1, key, position)
        asked = torch.where(asks, tokens - first_query, keys)
        found = table.gather(1, asked)
        return torch.where(asks & (found < position), found, -1)

    return find


class PartsEmbedding(nn.Module):
    """The sum of the embeddings of a token's parts, in the place of an `nn.Embedding`.

    A token that shows (key, label) then has a vector of the key plus a vector of the label. With a
    free vector for each of the 256 x 16 pairs, every pair would have to be learned by itself: the
    tasks would measure how long that takes, not what a memory keeps.

    Args:
        parts: `[vocab_size, P]` part numbers of every token.
        hidden_size: size of a vector.
        std: standard deviation of initial vectors.

    >>> embedding = PartsEmbedding(torch.tensor([[0, 1], [0, 2]]), hidden_size=4)
    >>> embedding(torch.tensor([[0, 1, 1]])).shape
    torch.Size([1, 3, 4])
    """

    parts: Tensor

    def __init__(self, parts: Tensor, hidden_size: int, std: float = 0.02) -> None:
        super().__init__()
        self.register_buffer("parts", parts, persistent=False)
        self.vectors = nn.Embedding(int(parts.max()) + 1, hidden_size)
        nn.init.normal_(self.vectors.weight, std=std)

    @property
    def weight(self) -> Tensor:
        """`[vocab_size, hidden_size]`: the vectors of all tokens."""
        found: Tensor = self.vectors(self.parts).sum(1)
        return found

    def forward(self, input_ids: Tensor) -> Tensor:
        """`[..., hidden_size]` for tokens `[...]`."""
        # Summing once for the vocabulary is cheaper than for every position of a batch.
        return nn.functional.embedding(input_ids, self.weight)


def embed_parts(model: Any, task: Task) -> None:
    """Give a Hugging Face model the input embedding of a task whose tokens have parts; in place.

    Output embeddings tied to the old input embedding keep it as a matrix of their own.
    """
    if task.parts is None:
        raise ValueError(f"task {task.name!r} has no parts: its tokens are what they show")
    old = model.get_input_embeddings()
    std = getattr(model.config, "initializer_range", 0.02)
    new = PartsEmbedding(task.parts, old.embedding_dim, std)
    model.set_input_embeddings(new.to(old.weight.device, old.weight.dtype))
    model.config.tie_word_embeddings = False
