"""Long texts, facts hidden in them, and what is asked at the end: what such tasks share."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vort.lab.tasks.books import Books
from vort.lab.tasks.corpus import Document, load_corpus
from vort.lab.tasks.pieces import (
    ByteCoder,
    Coder,
    Pool,
    WordCoder,
    made_words,
    weave,
    word_lists,
)
from vort.lab.tasks.task import IGNORED, Batch, GeneratedTask, Integers, Row, Split, stream
from vort.names import check_choice

__all__ = [
    "NOISE",
    "Answer",
    "Haystack",
    "HaystackTask",
    "Kit",
    "Lines",
    "MadeSentences",
    "Sample",
    "Sentences",
    "answers_right",
    "book_sentences",
    "hide",
]

# RULER's text that says nothing.
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_ADJECTIVES = (
    "old young tall small quiet loud warm cold bright dark heavy light slow quick round flat "
    "clean dusty brave shy kind proud busy idle sharp blunt early late green brown narrow wide"
)
_NOUNS = (
    "baker sailor teacher farmer doctor painter miller singer hunter weaver river mountain bridge "
    "garden window kitchen harbour village market forest meadow tower cellar orchard barn ladder "
    "lantern basket blanket kettle letter wagon horse sparrow rabbit badger heron beetle salmon "
    "goat candle hammer mirror pillow saddle shovel whistle button thimble carpet drum flute"
)
_VERBS = (
    "finds carries follows watches paints repairs forgets remembers admires borrows draws hides "
    "measures cleans crosses leaves visits counts sells buys describes lifts moves misses praises "
    "guards passes greets keeps opens closes touches"
)
# Texts of a haystack of books that are read, in multiples of the longest that is asked for.
_SHELF = 4


class Answer(NamedTuple):
    """Tokens asked for, where the prompt has them, and what is shown before they are asked for."""

    tokens: Integers
    source: int
    given: Integers = np.empty(0, np.int64)


@dataclass(frozen=True)
class Sample:
    """A prompt, what a good continuation says, and the answers as a model is trained on them.

    Attributes:
        prompt: tokens up to the place where the answer begins.
        expected: strings that a continuation should hold.
        answers: the same as tokens, in the order in which training shows them.
        depths: how deep each answer lies in the haystack, from 0 to 1; () where it does not.
        bucket: that of all its answers, where it is neither their lag nor their depth.
    """

    prompt: Integers
    expected: tuple[str, ...]
    answers: tuple[Answer, ...] = ()
    depths: tuple[float, ...] = ()
    bucket: int | None = None


class Haystack(ABC):
    """Text without an end."""

    @abstractmethod
    def cut(self, rng: np.random.Generator, count: int) -> tuple[Integers, Integers]:
        """`count` tokens that end with a sentence, and places, in order, where one may be put in.

        The first sentence is cut where that many tokens begin.
        """

    @property
    def digest(self) -> str:
        """A short hash of what it is made of."""
        return type(self).__name__


def _cut(lines: Pool, count: int) -> tuple[Integers, Integers]:
    """The last `count` tokens of lines, and where lines begin or end there."""
    tokens = lines.joined()
    begins = lines.starts if len(tokens) == len(lines.flat) else _begins(lines.lengths)
    missing = len(tokens) - count
    return tokens[missing:], np.append(begins[begins >= missing] - missing, count)


def _begins(lengths: Integers) -> Integers:
    return np.cumsum(lengths) - lengths


class Lines(Haystack):
    """The same line again and again."""

    def __init__(self, line: Integers) -> None:
        self.line = line

    def cut(self, rng: np.random.Generator, count: int) -> tuple[Integers, Integers]:
        """See `Haystack.cut`."""
        number = -(-count // len(self.line))
        begins = np.arange(number + 1) * len(self.line) - (number * len(self.line) - count)
        return np.tile(self.line, number)[len(self.line) * number - count :], begins[begins >= 0]


class MadeSentences(Haystack):
    """Plain English sentences of a subject, a verb and an object, all words drawn."""

    TEXTS: ClassVar[tuple[str, ...]] = (
        " The the a .",
        f" {_ADJECTIVES} {_NOUNS} {_VERBS}",
    )

    def __init__(self, coder: Coder) -> None:
        self.the, self.a = coder.encode(" The"), coder.encode_all([" the", " a"])
        kinds = (_ADJECTIVES, _NOUNS, _VERBS)
        self.pools = [coder.encode_all([f" {word}" for word in kind.split()]) for kind in kinds]
        self.stop = coder.encode(".")
        shortest = sum(int(self.pools[kind].lengths.min()) for kind in (0, 1, 2, 0, 1))
        self.shortest = len(self.the) + int(self.a.lengths.min()) + len(self.stop) + shortest
        pools = (*self.pools, self.a)
        self.even = self.shortest == 8 and all((pool.lengths == 1).all() for pool in pools)

    def cut(self, rng: np.random.Generator, count: int) -> tuple[Integers, Integers]:
        """See `Haystack.cut`."""
        number = count // self.shortest + 1
        if self.even:
            return self._cut_even(rng, count, number)

        def drawn(pool: Pool) -> Pool:
            return pool.take(rng.integers(len(pool), size=number))

        adjectives, nouns, verbs = self.pools
        subject = (Pool.same(self.the, number), drawn(adjectives), drawn(nouns), drawn(verbs))
        object_ = (drawn(self.a), drawn(adjectives), drawn(nouns), Pool.same(self.stop, number))
        return _cut(weave(*subject, *object_), count)

    def _cut_even(
        self, rng: np.random.Generator, count: int, number: int
    ) -> tuple[Integers, Integers]:
        """The same, where every word is a token: a table of them, several times as fast."""
        table = np.empty((number, 8), np.int64)
        table[:, 0], table[:, 7] = self.the[0], self.stop[0]
        adjectives, nouns, verbs = self.pools
        drawn = (adjectives, nouns, verbs, self.a, adjectives, nouns)
        for column, pool in enumerate(drawn, 1):
            table[:, column] = pool.flat[pool.starts[rng.integers(len(pool), size=number)]]
        missing = 8 * number - count
        begins = np.arange(0, 8 * number, 8)
        return table.ravel()[missing:], np.append(begins[begins >= missing] - missing, count)


class Sentences(Haystack):
    """Sentences of real texts, in a row from a random one on, round and round."""

    def __init__(self, sentences: Pool) -> None:
        self.tokens, self.begins = sentences.joined(), _begins(sentences.lengths)
        if not len(self.tokens):
            raise ValueError("the haystack's texts have no sentence in them")

    @cached_property
    def digest(self) -> str:
        """A short hash of all sentences."""
        return sha256(self.tokens.tobytes() + self.begins.tobytes()).hexdigest()[:16]

    def cut(self, rng: np.random.Generator, count: int) -> tuple[Integers, Integers]:
        """See `Haystack.cut`."""
        total = len(self.tokens)
        end = int(self.begins[rng.integers(len(self.begins))])
        places = np.arange(end - count, end) % total
        turns = range((end - count) // total, end // total + 1)
        begins = np.concatenate([self.begins + turn * total for turn in turns]) - (end - count)
        inside = begins[(begins >= 0) & (begins < count)]
        return self.tokens[places], np.append(inside, count)


def book_sentences(documents: Sequence[Document], coder: Coder, most: int) -> Sentences:
    """The sentences of texts, up to about `most` characters, each with the space before it.

    Those with long numbers are left out: an answer must not be there by chance.
    """
    texts, size = [], 0
    for document in documents:
        if size >= most:
            break
        text = " ".join(bytes(document.text[: most - size]).decode(errors="replace").split())
        size += len(text)
        found = re.split(r"(?<=[.!?]) (?=[^a-z])", text)
        texts += [f" {one}" for one in found if one and not re.search(r"\d{6}", one)]
    return Sentences(coder.encode_all(texts))


@lru_cache(maxsize=8)
def _shelf(source: str, split: Split, coder: type[Coder], most: int) -> Sentences:
    return book_sentences(load_corpus(source)[split], coder(), most)


def hide(
    hay: tuple[Integers, Integers],
    needles: Sequence[Integers],
    depths: Sequence[float],
) -> tuple[Integers, list[int]]:
    """A haystack with needles at the sentence ends nearest to depths, and where they begin."""
    tokens, places = hay
    wanted = np.asarray(depths) * len(tokens)
    above = np.clip(np.searchsorted(places, wanted), 0, len(places) - 1)
    below = np.maximum(above - 1, 0)
    near = np.where(wanted - places[below] < places[above] - wanted, places[below], places[above])
    order = np.argsort(near, kind="stable")
    parts, begins, last, length = [], [0] * len(needles), 0, 0
    for number in order.tolist():
        place = int(near[number])
        parts += [tokens[last:place], needles[number]]
        begins[number] = length + place - last
        length += place - last + len(needles[number])
        last = place
    return np.concatenate([*parts, tokens[last:]]), begins


class Kit:
    """Keys, numbers and other small things in the tokens of a vocabulary, drawn many at a time.

    Keys are two words with a hyphen, and one word where words are tokens. Numbers have seven
    digits; where words are tokens they are `value_tokens` tokens of three.

    Args:
        coder: the vocabulary.
        value_tokens: tokens of a number, where words are tokens.
        real_words: take the words of wonderwords where it is installed.
        few_keys: where words are tokens, only so many of them are keys or names; None: all.
        few_numbers: where words are tokens, numbers are made of only so many; None: of all.
    """

    # What a tokenizer has to encode beforehand, since doing so for each sample takes too long.
    POOLED = 1 << 13

    def __init__(
        self,
        coder: Coder,
        value_tokens: int = 1,
        *,
        real_words: bool = False,
        few_keys: int | None = None,
        few_numbers: int | None = None,
    ) -> None:
        if value_tokens < 1:
            raise ValueError(f"value_tokens must be at least 1, got {value_tokens}")
        self.coder, self.value_tokens = coder, value_tokens
        self.few_keys = few_keys
        self.numbers = coder.values if isinstance(coder, WordCoder) else 0
        self.numbers = self.numbers if few_numbers is None else min(few_numbers, self.numbers)
        self.source, self.lists = word_lists() if real_words else ("made words", {})
        self._counting = Pool.of([])

    @cached_property
    def words(self) -> Pool:
        """Words of all kinds, with a space before each."""
        if isinstance(self.coder, WordCoder):
            first = self.coder.values
            return Pool.rows(np.arange(first, first + self.coder.words)[:, None])
        own = {word for kind in self.lists.values() for word in kind}
        # Long lists of common words need more than there are in a list of English ones.
        extra = [word for word in made_words(1 << 15) if word not in own]
        return self.coder.encode_all([f" {word}" for word in [*sorted(own), *extra][: 1 << 15]])

    @cached_property
    def _halves(self) -> tuple[Pool, Pool]:
        first = self.lists.get("adjective", made_words(1024))
        second = self.lists.get("noun", made_words(7168)[1024:])
        return (
            self.coder.encode_all([f" {word}" for word in first]),
            self.coder.encode_all([f"-{word}" for word in second]),
        )

    def keys(self, rng: np.random.Generator, count: int, asked: int | None = None) -> Pool:
        """Keys with a space before each; of the first `asked` (or all), each is there once."""
        unique = count if asked is None else asked
        if isinstance(self.coder, WordCoder):
            most = min(x for x in (self.few_keys, len(self.words)) if x is not None)
            of = "words" if most == len(self.words) else "few_keys"
            return self.words.take(_with_unique(rng, most, count, unique, of))
        first, second = self._halves
        drawn = _with_unique(rng, len(first) * len(second), count, unique)
        return weave(first.take(drawn // len(second)), second.take(drawn % len(second)))

    def values(self, rng: np.random.Generator, kind: str, count: int, asked: int) -> Pool:
        """Numbers or uuids with a space before each; of the first `asked`, each is there once."""
        if kind == "uuids":
            return self.uuids(rng, count, asked, keys=False)
        if isinstance(self.coder, WordCoder):
            width = self.value_tokens
            drawn = _with_unique(rng, self.numbers**width, count, asked)
            digits = self.numbers ** np.arange(width - 1, -1, -1)
            return Pool.rows(drawn[:, None] // digits % self.numbers)
        if isinstance(self.coder, ByteCoder):
            drawn = 10**6 + _with_unique(rng, 9 * 10**6, count, asked)
            digits = 48 + drawn[:, None] // 10 ** np.arange(6, -1, -1) % 10
            return Pool.rows(np.concatenate([np.full((count, 1), 32), digits], 1))
        return self._numbers.take(_with_unique(rng, len(self._numbers), count, asked))

    @cached_property
    def _numbers(self) -> Pool:
        drawn = np.random.default_rng(0).choice(9 * 10**6, self.POOLED, replace=False)
        return self.coder.encode_all([f" {10**6 + number}" for number in drawn.tolist()])

    @cached_property
    def _encoded_uuids(self) -> tuple[Pool, Pool]:
        rows = _uuid_characters(np.random.default_rng(0), self.POOLED).astype(np.uint8)
        texts = [bytes(row).decode() for row in rows]
        half = self.POOLED // 2
        return self.coder.encode_all(texts[:half]), self.coder.encode_all(texts[half:])

    def uuids(self, rng: np.random.Generator, count: int, asked: int, *, keys: bool) -> Pool:
        """Uuids with a space before each, of the first `asked` each there once; keys are others."""
        if isinstance(self.coder, WordCoder):
            # No two of 10^12 are drawn the same in a million sequences, but the law is a law.
            drawn = _with_unique(rng, self.numbers**4, count, asked)
            digits = self.numbers ** np.arange(3, -1, -1)
            return Pool.rows(drawn[:, None] // digits % self.numbers)
        if isinstance(self.coder, ByteCoder):
            return Pool.rows(_uuid_characters(rng, count))
        pool = self._encoded_uuids[keys]
        return pool.take(_with_unique(rng, len(pool), count, asked))

    def shortest(self, kind: str) -> int:
        """Tokens that keys ("words"), "numbers" or "uuids" have at least."""
        if isinstance(self.coder, WordCoder):
            return {"words": 1, "numbers": self.value_tokens, "uuids": 4}[kind]
        if kind == "words":
            return sum(int(half.lengths.min()) for half in self._halves)
        if isinstance(self.coder, ByteCoder):
            return {"numbers": 8, "uuids": 37}[kind]
        pools = self._encoded_uuids if kind == "uuids" else (self._numbers,)
        return min(int(pool.lengths.min()) for pool in pools)

    def counting(self, count: int) -> Pool:
        """The pieces " 1.", " 2.", ... up to `count`."""
        if len(self._counting) < count:
            last = 1 << count.bit_length()
            self._counting = self.coder.encode_all([self.counted(i) for i in range(1, last + 1)])
        return self._counting.take(np.arange(count))

    def counted(self, number: int) -> str:
        """A number of a list, e.g. " 12."; of three digits or six where words are tokens."""
        if not isinstance(self.coder, WordCoder):
            return f" {number}."
        high = f" {number // 1000:03}" if number >= 1000 else ""
        return f"{high} {number % 1000:03}."

    def names(self, rng: np.random.Generator, count: int, letters: int) -> Pool:
        """Different names of capital letters with a space before each; where words are, words."""
        if isinstance(self.coder, WordCoder):
            return self.keys(rng, count)
        return self.coder.encode_all([f" {name.upper()}" for name in _letters(rng, count, letters)])

    def codes(self, rng: np.random.Generator, count: int) -> Pool:
        """Different words of six random letters, each with a space before it."""
        if isinstance(self.coder, WordCoder):
            return self.keys(rng, count)
        return self.coder.encode_all([f" {name}" for name in _letters(rng, count, 6)])

    def amount(self, rng: np.random.Generator) -> Integers:
        """A number of five digits with a space before it."""
        if isinstance(self.coder, WordCoder):
            return self.values(rng, "numbers", 1, 1)[0]
        return self.coder.encode(f" {rng.integers(10_000, 100_000)}")

    def text(self, piece: Integers) -> str:
        """What a piece says, without the space before it."""
        return self.coder.decode(piece).strip()


def _with_unique(
    rng: np.random.Generator, most: int, count: int, unique: int, of: str = "value_tokens"
) -> Integers:
    """Numbers below `most`, of which the first `unique` occur once."""
    if unique > most or (count > unique and unique >= most):
        raise ValueError(f"{of} must allow for more than {unique} different ones, got {most}")
    first = rng.choice(most, unique, replace=False)
    rest = rng.integers(most - unique, size=count - unique) if count > unique else first[:0]
    for taken in np.sort(first).tolist():
        rest += rest >= taken
    return np.concatenate([first, rest])


def _letters(rng: np.random.Generator, count: int, letters: int) -> list[str]:
    """Different strings of so many small letters."""
    most = 26**letters
    drawn = rng.choice(most, count, replace=False)[:, None] // 26 ** np.arange(letters) % 26
    return ["".join(map(chr, row)) for row in (97 + drawn).tolist()]


def _uuid_characters(rng: np.random.Generator, count: int) -> Integers:
    """`[N, 37]` characters of uuids of version 4, a space before each."""
    digits = rng.integers(16, size=(count, 32))
    digits[:, 12] = 4
    digits[:, 16] = 8 + digits[:, 16] % 4
    letters = np.where(digits < 10, 48 + digits, 87 + digits)
    dash = np.full((count, 1), 45)
    groups = np.split(letters, [8, 12, 16, 20], axis=1)
    parts = [part for group in groups for part in (dash, group)]
    return np.concatenate([np.full((count, 1), 32), *parts[1:]], axis=1)


@dataclass(frozen=True, kw_only=True)
class HaystackTask(GeneratedTask):
    """Samples as sequences to train on: the prompt, then the answers, which are asked for.

    A sequence ends with the last token of an answer; labels are at the tokens before each of its
    tokens. With `mixed`, a training sequence is made of samples of one of these lengths, as many
    as fit; the other splits have one sample each, of all the length there is.

    Args (and those of `GeneratedTask`):
        tokens: "bytes", or "words" (of a small vocabulary of its own).
        words: made words in the vocabulary of words.
        value_tokens: tokens of a number in the vocabulary of words; three digits each.
        mixed: lengths of samples in training; they must divide `length`. (): that alone.
        apart: so many training sequences in a row, a batch, are made of samples of one length, and
            each sample is a row of its own: none is read after another, whose facts were best
            forgotten. None: samples stand end to end.
        short_first: the first so many training sequences have samples of the shortest of `mixed`:
            what is asked is learned there, and how far it lies after that.
        source: a folder of books to hide facts in, for bytes; None: generated sentences.
    """

    length: int = 1024
    train_sequences: int | None = None
    tokens: Literal["bytes", "words"] = "words"
    words: int = 1024
    value_tokens: int = 1
    mixed: tuple[int, ...] = ()
    apart: int | None = None
    short_first: int = 0
    source: str | None = None
    bounds: tuple[int, ...] = (1024, 4096, 16384, 65536)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mixed", tuple(self.mixed))
        check_choice("tokens", self.tokens, ("bytes", "words"))
        if self.words < 64:
            raise ValueError(f"words must be at least 64, got {self.words}")
        if self.source is not None and self.tokens == "words":
            raise ValueError("source must be absent with tokens='words': books are of more words")
        for each in self.mixed:
            if each < 1 or self.length % each:
                raise ValueError(f"mixed must divide length = {self.length}, got {each}")
        if self.apart is not None and self.apart < 1:
            raise ValueError(f"apart must be at least 1, or None, got {self.apart}")
        if self.short_first < 0 or self.short_first % (self.apart or 1):
            raise ValueError(
                f"short_first must be a multiple of apart = {self.apart}, got {self.short_first}"
            )

    @abstractmethod
    def sample(
        self, rng: np.random.Generator, length: int, split: Split, index: int | None = None
    ) -> Sample:
        """One sample whose prompt and answers have exactly `length` tokens together."""

    def bucket(self, depth: float) -> int | None:
        """The bucket of an answer at a depth; None: by its lag."""
        return None

    @property
    @abstractmethod
    def coder(self) -> Coder:
        """The vocabulary."""

    @property
    def vocab_size(self) -> int:
        """Bytes, or numbers, words and what templates are made of."""
        return self.coder.size

    @property
    def num_classes(self) -> int:
        """All bytes, or numbers and words."""
        found = self.coder
        return found.values + found.words if isinstance(found, WordCoder) else found.size

    def shelf(self, split: Split, longest: int) -> Haystack | None:
        """Sentences of a split's books, if there are books."""
        if self.source is None:
            return None
        # A test of long sequences reads more than training; what is read does not change with it.
        return _shelf(self.source, split, ByteCoder, max(_SHELF * longest, 1 << 20))

    def describe(self) -> dict[str, Any]:
        """Every setting; books are known by what they say, not by a path."""
        if self.source is None:
            return super().describe()
        digest = Books(source=self.source).digest
        return {**super().describe(), "source": Path(self.source).name, "digest": digest}

    def draw(self, rng: np.random.Generator) -> Row:
        """One sequence of one sample."""
        return self._joined([self.sample(rng, self.length, "train")])

    def row(self, split: Split, index: int) -> Row:
        """The sequence with an index."""
        rng = stream(self.seed, self.name, split, index)
        if split != "train" or not self.mixed:
            return self._joined([self.sample(rng, self.length, split, index)])
        length = self._sample_length(rng, index)
        count = self.length // length
        return self._joined([self.sample(rng, length, split) for _ in range(count)])

    def _sample_length(self, rng: np.random.Generator, index: int) -> int:
        """Of a training sequence's samples: drawn for it alone, or for all that are in a batch."""
        if self.apart is not None:
            rng = stream(self.seed, f"{self.name} lengths", "train", index // self.apart)
        if index < self.short_first:
            return min(self.mixed)
        return self.mixed[int(rng.integers(len(self.mixed)))]

    def batch(self, split: Split, indices: Sequence[int]) -> Batch:
        """The sequences with these indices; see `Task.batch`. Samples `apart` are rows."""
        found = super().batch(split, indices)
        if split != "train" or self.apart is None or not self.mixed:
            return found
        lengths = {self._sample_length(np.random.default_rng(), index) for index in indices}
        if len(lengths) > 1:
            raise ValueError(
                f"apart must be the size of a batch, or a multiple of it, got {self.apart} for "
                f"sequences {min(indices)} to {max(indices)}"
            )
        rows = (-1, lengths.pop())
        sources = found["sources"].view(*rows)
        return {
            "input_ids": found["input_ids"].view(*rows),
            "labels": found["labels"].view(*rows),
            "buckets": found["buckets"].view(*rows),
            "sources": torch.where(sources >= 0, sources % rows[1], sources),
        }

    def _joined(self, samples: Sequence[Sample]) -> Row:
        tokens, queries, labels, sources, buckets, begin = [], [], [], [], [], 0
        for sample in samples:
            place = len(sample.prompt)
            tokens.append(sample.prompt)
            depths = sample.depths or (0.0,) * len(sample.answers)
            for answer, depth in zip(sample.answers, depths, strict=True):
                place += len(answer.given)
                count = np.arange(len(answer.tokens))
                tokens += [answer.given, answer.tokens]
                queries.append(begin + place - 1 + count)
                labels.append(answer.tokens)
                sources.append(begin + answer.source + count)
                bucket = self.bucket(depth) if sample.bucket is None else sample.bucket
                buckets.append(np.full(len(count), -1 if bucket is None else bucket))
                place += len(count)
            begin += place
        own = np.concatenate(buckets)
        return Row(
            np.concatenate(tokens),
            np.concatenate(queries),
            np.concatenate(labels),
            np.concatenate(sources),
            None if (own < 0).any() else own,
        )


def answers_right(batch: Batch, predicted: Tensor) -> Tensor:
    """`[answers, 3]`: row, bucket, and whether all tokens of an answer are predicted; int64.

    predicted: `[B, T]` tokens, at every position the likeliest to come next. Given the answer so
    far, all of them are right exactly if a model that writes by itself writes this answer.
    """
    asked = batch["labels"] != IGNORED
    begins = asked.clone()
    begins[:, 1:] &= ~asked[:, :-1]
    # An answer right after another begins where what is read jumps.
    read = batch["sources"]
    jumps = (read[:, 1:] != read[:, :-1] + 1) & (read[:, 1:] >= 0)
    begins[:, 1:] |= asked[:, 1:] & asked[:, :-1] & jumps
    rows, places = asked.nonzero(as_tuple=True)
    number = begins[rows, places].long().cumsum(0) - 1
    right = (predicted[rows, places] == batch["labels"][rows, places]).long()
    count = int(number[-1]) + 1 if len(number) else 0
    whole = torch.ones(count, dtype=torch.long, device=right.device)
    whole.scatter_reduce_(0, number, right, "amin")
    first = begins[rows, places]
    return torch.stack([rows[first], batch["buckets"][rows, places][first].long(), whole], 1)
