"""Ground truth from the tokens themselves, for tasks that show a key with its label once."""

from collections.abc import Callable

import torch
from torch import Tensor

from vort.tasks.vocabulary import KeyVocabulary

__all__ = ["sources_by_key"]


def sources_by_key(vocabulary: KeyVocabulary) -> Callable[[Tensor], Tensor]:
    """A function from tokens `[B, T]` to i*(t) `[B, T]`: where the key asked for had its label.

    It finds what `batch["sources"]` of `ZipfRetrieval` and `LabelCopy` says, on whatever device
    the tokens are: -1 at positions that ask for nothing, or for a key not shown before. Each key
    stands with a label at most once in a sequence.

    >>> from vort.tasks import LabelCopy
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
