"""What a linear probe sees of a capitalised word: hashed shape, context and document features."""

from collections import Counter
from collections.abc import Iterator
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from vort.layers.entity_probe.words import HONORIFICS, Words

_LEFT = "<"
_RIGHT = ">"
_MAX_AFFIX = 4


def feature_ids(
    words: Words, buckets: int, *, causal: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Hashed features of every capitalised word, end to end, and where each word's begin.

    Args:
        words: the text.
        buckets: size of the hash table.
        causal: look at the word and what precedes it alone.

    Returns:
        ids in `[0, buckets)`, all candidates one after the other, and the offset of each
        candidate's first (one per entry of `words.capitalised`).
    """
    ids: list[int] = []
    offsets: list[int] = []
    describe = _causal_features if causal else _full_features
    for features in describe(words):
        offsets.append(len(ids))
        ids.extend(crc32(feature.encode()) % buckets for feature in features)
    return np.array(ids, dtype=np.int64), np.array(offsets, dtype=np.int64)


def _causal_features(words: Words) -> Iterator[list[str]]:
    history = _History()
    done = 0
    for index in words.capitalised:
        history.extend(words, done, index)
        done = index
        yield _left_features(words, index, history.summary(words.lowered[index]))


def _full_features(words: Words) -> Iterator[list[str]]:
    document = _History()
    document.extend(words, 0, len(words))
    for index in words.capitalised:
        lowered = words.lowered[index]
        summary = document.summary(lowered, but=_evidence(words, index))
        features = _left_features(words, index, summary)
        features += _right_features(words, index, summary)
        yield features


class _History:
    """How often each word has been seen lower-cased, capitalised inside a sentence, titled."""

    def __init__(self) -> None:
        self.small: Counter[str] = Counter()
        self.large: Counter[str] = Counter()
        self.titled: Counter[str] = Counter()

    def extend(self, words: Words, start: int, end: int) -> None:
        for index in range(start, end):
            lowered = words.lowered[index]
            if words.surfaces[index][0].islower():
                self.small[lowered] += 1
                continue
            inside, titled = _evidence(words, index)
            self.large[lowered] += inside
            self.titled[lowered] += titled

    def summary(self, lowered: str, but: tuple[bool, bool] = (False, False)) -> str:
        """Evidence about a word as one short string; `but` is its own share in the counts."""
        small = self.small[lowered]
        large = self.large[lowered] - but[0]
        titled = self.titled[lowered] - but[1]
        return f"{_few(small)}{_few(large)}{min(titled, 1)}"


def _evidence(words: Words, index: int) -> tuple[bool, bool]:
    """Whether the capital cannot be the sentence's, and whether a title precedes the word."""
    inside = not words.opens_sentence(index) and not words.opens_quote(index)
    return inside, index > 0 and words.lowered[index - 1] in HONORIFICS


def _few(count: int) -> int:
    return count if count < 2 else 2 if count < 4 else 3


def _left_features(words: Words, index: int, summary: str) -> list[str]:
    surface, lowered = words.surfaces[index], words.lowered[index]
    gap = "".join(words.gap(index).split())[-3:]
    place = _place(words, index)
    before = _neighbour(words, index - 1)
    before_2 = _neighbour(words, index - 2)
    shape = _shape(surface)
    return [
        "bias",
        f"w={lowered}",
        f"w,place={lowered},{place}",
        f"place={place}",
        f"shape={shape},{place}",
        f"gap={gap}",
        f"length={min(len(surface), 10)},{place}",
        *(f"prefix={lowered[:n]}" for n in range(2, _MAX_AFFIX)),
        *(f"suffix={lowered[-n:]}" for n in range(1, _MAX_AFFIX + 1)),
        f"seen={summary},{place}",
        f"seen={summary}",
        f"before={before}",
        f"before,gap={before},{gap}",
        f"before_2={before_2},{before}",
        f"before_shape={_shape_at(words, index - 1)},{gap},{place}",
        f"titled={before in HONORIFICS and words.follows_directly(index)},{place}",
        f"is_title={lowered in HONORIFICS},{place}",
    ]


def _right_features(words: Words, index: int, summary: str) -> list[str]:
    lowered = words.lowered[index]
    place = _place(words, index)
    gap = "".join(words.gap(index + 1).split())[:2]
    after = _neighbour(words, index + 1)
    after_shape = _shape_at(words, index + 1)
    owns = words.possessive[index]
    before = _neighbour(words, index - 1)
    return [
        f"after={after}",
        f"after,place={after},{place}",
        f"after,gap={after},{gap}",
        f"after_2={after},{_neighbour(words, index + 2)}",
        f"after_gap={gap},{place}",
        f"after_shape={after_shape},{gap},{place}",
        f"between={before},{after}",
        f"owns={owns},{place}",
        f"title,after={lowered in HONORIFICS},{after_shape},{gap}",
        f"seen,after_shape={summary},{after_shape},{gap}",
        f"w,after_shape={lowered},{after_shape},{gap}",
    ]


def _place(words: Words, index: int) -> str:
    return f"{int(words.opens_sentence(index))}{int(words.opens_quote(index))}"


def _neighbour(words: Words, index: int) -> str:
    if index < 0:
        return _LEFT
    return words.lowered[index] if index < len(words) else _RIGHT


def _shape_at(words: Words, index: int) -> str:
    if index < 0:
        return _LEFT
    return _shape(words.surfaces[index]) if index < len(words) else _RIGHT


def _shape(surface: str) -> str:
    if surface.isupper():
        return "X" if len(surface) == 1 else "XX"
    if surface[0].isupper():
        return "X-x" if "-" in surface else "XxX" if surface[1:].lower() != surface[1:] else "Xx"
    return "x"
