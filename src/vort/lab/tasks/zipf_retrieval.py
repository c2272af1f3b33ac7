"""Zipf retrieval (table pilot): labels planted at lags that follow a power law."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from vort.lab.tasks.parts import KeyTask, KeyVocabulary
from vort.lab.tasks.task import Integers, Row, uniform_below

__all__ = ["ZipfRetrieval", "place_pairs"]


@dataclass(frozen=True, kw_only=True)
class ZipfRetrieval(KeyTask):
    """Anchors show a key and a label; later a query shows the key, and the label is asked for.

    Sparse: `pairs` keys, each with one anchor and one query at lag d, P(d) ~ d^-beta on
    1 .. length - 1; the anchor's position is uniform among those that fit. A pair that collides
    with another is placed anew at the lag it has, so that the law of lags holds exactly (but where
    pairs fill much of a short sequence: of lags near `length` two may not fit, and all is redrawn).

    Dense, the paper's literal reading within one token for each position: anchors at all even
    positions, each with a key of its own; a query at every odd position t, whose lag follows the
    same law on the odd lags up to t. An anchor may be asked for often or never.

    Args (and those of `KeyTask`):
        beta: exponent of the law of lags.
        pairs: Q, anchor/query pairs in a sparse sequence.
        keys: size of the pool that keys are drawn from, without replacement. Default: 256, or one
            for each anchor of a dense sequence.
        queries: "sparse" or "dense".

    >>> task = ZipfRetrieval(length=1000, pairs=16)
    >>> batch = task.batch("train", [0, 1])
    >>> batch["input_ids"].shape, int((batch["labels"] >= 0).sum())
    (torch.Size([2, 1000]), 32)
    """

    name: ClassVar[str] = "zipf_retrieval"
    length: int = 10_000
    beta: float = 1.0
    pairs: int = 64
    keys: int | None = None
    queries: Literal["sparse", "dense"] = "sparse"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.queries not in ("sparse", "dense"):
            raise ValueError(f'queries must be "sparse" or "dense", got {self.queries!r}')
        if not np.isfinite(self.beta):
            raise ValueError(f"beta must be finite, got {self.beta}")
        if self.queries == "sparse" and not 1 <= self.pairs <= self.length // 4:
            raise ValueError(
                f"pairs must lie in [1, length / 4 = {self.length // 4}], got {self.pairs}: "
                "fuller sequences leave no room to place pairs at random"
            )
        if self.vocabulary.keys < self.anchors:
            raise ValueError(
                f"keys must be at least {self.anchors}, one for each anchor, got {self.keys}"
            )

    @property
    def anchors(self) -> int:
        """Anchors in a sequence."""
        return self.pairs if self.queries == "sparse" else self.length // 2

    @property
    def vocabulary(self) -> KeyVocabulary:
        """Which token shows what."""
        default = 256 if self.queries == "sparse" else self.anchors
        return KeyVocabulary(self.keys or default, self.labels, self.fillers)

    def draw(self, rng: np.random.Generator) -> Row:
        """One sequence."""
        draw = self._draw_sparse if self.queries == "sparse" else self._draw_dense
        return draw(rng)

    def _draw_sparse(self, rng: np.random.Generator) -> Row:
        words = self.vocabulary
        keys = rng.permutation(words.keys)[: self.pairs]
        labels = rng.integers(self.labels, size=self.pairs)
        cumulative = _cumulative(self.length - 1, self.beta, 1)
        anchors, lags = place_pairs(rng, cumulative, self.pairs)
        tokens = words.filler(uniform_below(rng, self.fillers, self.length))
        tokens[anchors] = words.anchor(keys, labels)
        tokens[anchors + lags] = words.query(keys)
        return Row(tokens, anchors + lags, labels, anchors)

    def _draw_dense(self, rng: np.random.Generator) -> Row:
        words, count = self.vocabulary, self.anchors
        keys = rng.permutation(words.keys)[:count]
        labels = rng.integers(self.labels, size=count)
        queries = np.arange(count) * 2 + 1
        cumulative = _cumulative(2 * count - 1, self.beta, 2)
        # Query number j may reach back over the first j + 1 odd lags.
        steps = np.searchsorted(cumulative, rng.random(count) * cumulative, side="right")
        asked = np.arange(count) - np.minimum(steps, np.arange(count))
        tokens = words.filler(uniform_below(rng, self.fillers, self.length))
        tokens[queries - 1] = words.anchor(keys, labels)
        tokens[queries] = words.query(keys[asked])
        return Row(tokens, queries, labels[asked], asked * 2)


def place_pairs(
    rng: np.random.Generator, cumulative: NDArray[np.float64], pairs: int
) -> tuple[Integers, Integers]:
    """Anchor positions and lags of pairs that share no position.

    cumulative: `[n - 1]` unnormalised distribution function of lags 1 .. n - 1; sequences have n
    positions.
    """
    length = len(cumulative) + 1
    while True:
        draws = rng.random(pairs) * cumulative[-1]
        lags = np.minimum(np.searchsorted(cumulative, draws, side="right") + 1, length - 1)
        anchors = _positions(rng, length - lags)
        for _ in range(100):
            crowded = _collides(anchors, lags)
            if not crowded.any():
                return anchors, lags
            anchors[crowded] = _positions(rng, length - lags[crowded])
        # Lags near n fit in so few places that they may not fit together at all.


def _positions(rng: np.random.Generator, room: Integers) -> Integers:
    return (rng.random(len(room)) * room).astype(np.int64)


def _collides(anchors: Integers, lags: Integers) -> NDArray[np.bool_]:
    """Whether a pair needs a position that a pair before it has."""
    taken = np.stack([anchors, anchors + lags], axis=1).ravel()
    order = np.argsort(taken, kind="stable")
    again = np.zeros(len(taken), dtype=np.bool_)
    again[order[1:]] = taken[order[1:]] == taken[order[:-1]]
    first, second = again.reshape(-1, 2).T
    return first | second


@lru_cache(maxsize=32)
def _cumulative(last: int, beta: float, step: int) -> NDArray[np.float64]:
    """Sums of d^-beta over d = 1, 1 + step, .. up to each; shared, so nobody may write to it."""
    sums: NDArray[np.float64] = np.cumsum(np.arange(1, last + 1, step, dtype=np.float64) ** -beta)
    sums.flags.writeable = False
    return sums
