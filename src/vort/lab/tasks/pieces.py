"""Texts put together out of pieces that are tokens already, and the vocabularies to do it in.

A text of 131,072 tokens costs a tokenizer a fifth of a second, and cannot be made to have exactly
that many. Here sentences, keys and numbers are tokens before a sequence is made; a sequence is a
matter of taking rows of an array, and is cut where it has the length that is asked for. Pieces
begin with a space or follow a line's end, where tokenizers split words in any case.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from vort.lab.tasks.task import Integers

__all__ = [
    "ByteCoder",
    "Coder",
    "HuggingFaceCoder",
    "Pool",
    "WordCoder",
    "made_words",
    "weave",
    "word_lists",
]

_CONSONANTS, _VOWELS = "bdfghjklmnprstvwz", "aeiou"


class Pool:
    """Many pieces by number, each some tokens; `flat` holds them all.

    >>> pool = Pool.of([np.array([1, 2]), np.array([3])])
    >>> pool.take([1, 0, 1]).joined().tolist()
    [3, 1, 2, 3]
    """

    def __init__(self, flat: Integers, starts: Integers, lengths: Integers) -> None:
        self.flat, self.starts, self.lengths = flat, starts, lengths

    @classmethod
    def of(cls, pieces: Sequence[Integers]) -> "Pool":
        """These pieces in their order."""
        lengths = np.fromiter(map(len, pieces), np.int64, len(pieces))
        flat = np.concatenate([*pieces, np.empty(0, np.int64)]).astype(np.int64)
        return cls(flat, np.cumsum(lengths) - lengths, lengths)

    @classmethod
    def rows(cls, matrix: Integers) -> "Pool":
        """A piece for each row of `[N, L]`."""
        count, width = matrix.shape
        return cls(matrix.ravel(), np.arange(count) * width, np.full(count, width))

    @classmethod
    def same(cls, piece: Integers, count: int) -> "Pool":
        """One piece, `count` times."""
        return cls(piece, np.zeros(count, np.int64), np.full(count, len(piece)))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> Integers:
        start = self.starts[number]
        return self.flat[start : start + self.lengths[number]]

    def take(self, numbers: Integers | Sequence[int]) -> "Pool":
        """The pieces with these numbers."""
        return Pool(self.flat, self.starts[numbers], self.lengths[numbers])

    def joined(self) -> Integers:
        """All pieces end to end."""
        lengths = self.lengths
        if not len(lengths):
            return np.empty(0, np.int64)
        if (lengths == lengths[0]).all():
            return self.flat[self.starts[:, None] + np.arange(lengths[0])].ravel()
        shift = np.repeat(self.starts - (np.cumsum(lengths) - lengths), lengths)
        return self.flat[shift + np.arange(len(shift))]


def weave(*columns: Pool) -> Pool:
    """A pool of lines, each made of one piece of every column."""
    flats = np.concatenate([column.flat for column in columns])
    before = np.cumsum([0, *(len(column.flat) for column in columns[:-1])])
    starts = np.stack([c.starts + b for c, b in zip(columns, before, strict=True)], 1)
    lengths = np.stack([column.lengths for column in columns], 1)
    flat = Pool(flats, starts.ravel(), lengths.ravel()).joined()
    whole = lengths.sum(1)
    return Pool(flat, np.cumsum(whole) - whole, whole)


class Coder(ABC):
    """Texts to tokens, a piece at a time, and back."""

    size: int
    # Tokens that stand before every text.
    begin: Integers = np.empty(0, np.int64)
    # Tokens between a text and the answer to it: a chat's.
    end: Integers = np.empty(0, np.int64)

    @abstractmethod
    def encode(self, text: str) -> Integers:
        """Tokens of a piece."""

    def encode_all(self, texts: Iterable[str]) -> Pool:
        """Tokens of many pieces."""
        return Pool.of([self.encode(text) for text in texts])

    @abstractmethod
    def decode(self, tokens: Integers) -> str:
        """The text of tokens."""


class ByteCoder(Coder):
    """Bytes of UTF-8."""

    size = 256

    def encode(self, text: str) -> Integers:
        """Its bytes."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def decode(self, tokens: Integers) -> str:
        """Their text."""
        return bytes(tokens.astype(np.uint8)).decode(errors="replace")


class WordCoder(Coder):
    """Numbers from 000 on, then `words` made words, then what given texts are made of.

    A token is a word with the space before it, a number of three digits, or a character. What is
    asked for, numbers and words, comes first, so that labels are the first tokens.

    >>> coder = WordCoder(4, ["The sky is blue."])
    >>> coder.decode(coder.encode("The sky is 042 blue."))
    'The sky is 042 blue.'
    """

    NUMBERS = 1000  # of three digits
    KEPT = 1 << 10  # pieces whose tokens are remembered

    def __init__(self, words: int, texts: Iterable[str], values: int = NUMBERS) -> None:
        if not 1 <= values <= self.NUMBERS:
            raise ValueError(f"values must lie in [1, {self.NUMBERS}], got {values}")
        self.words, self.values = words, values
        names = [f" {number:03}" for number in range(values)]
        names += [f" {word}" for word in made_words(words)]
        names += sorted({token for text in texts for token in self._split(text)} - {*names})
        self.names = np.array(names, dtype=object)
        self.numbers = {name: number for number, name in enumerate(names)}
        self.size = len(names)
        self._encoded: dict[str, Integers] = {}

    @staticmethod
    def _split(text: str) -> list[str]:
        return re.findall(r" ?\d{3}| ?[^\W\d_]+| ?\.\.\.|.|\n", text)

    def encode(self, text: str) -> Integers:
        """Its words; a word that is not in the vocabulary is an error."""
        # Every sample says the same few things.
        if text in self._encoded:
            return self._encoded[text]
        try:
            found = np.array([self.numbers[token] for token in self._split(text)], np.int64)
        except KeyError as unknown:
            raise ValueError(f"the vocabulary of words has no {unknown}: use bytes") from unknown
        found.flags.writeable = False
        if len(self._encoded) < self.KEPT:
            self._encoded[text] = found
        return found

    def decode(self, tokens: Integers) -> str:
        """Their text."""
        return "".join(self.names[tokens])


class HuggingFaceCoder(Coder):
    """Tokens of a Hugging Face tokenizer, with what it puts before a text.

    Args:
        tokenizer: any.
        chat: put its chat template around a text, as one turn of the user's.
    """

    def __init__(self, tokenizer: Any, chat: bool = False) -> None:
        self.tokenizer = tokenizer
        self.size = len(tokenizer)
        whole, plain = tokenizer("a")["input_ids"], self._plain("a")
        if not plain:
            raise ValueError("tokenizer must give tokens, it has none for 'a': is it complete?")
        before = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
        self.begin = np.array(whole[:before], np.int64)
        if chat:
            self.begin, self.end = (np.array(self._plain(part), np.int64) for part in self._turn())
        # What a piece is read after: some tokenizers put a space before a text of its own.
        self._marks = {mark: self._plain(mark) for mark in ("\n", "a")}

    def _turn(self) -> tuple[str, str]:
        """What its chat template has before a text of the user's, and then before the answer."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ValueError("the tokenizer has no chat template")
        text = "a text of the user's"
        turn = [{"role": "user", "content": text}]
        whole: str = self.tokenizer.apply_chat_template(
            turn, tokenize=False, add_generation_prompt=True
        )
        before, found, after = whole.partition(text)
        if not found:
            raise ValueError("the tokenizer's chat template leaves out what a user says")
        return before, after

    def _plain(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def encode(self, text: str) -> Integers:
        """Tokens as they are in the middle of a text."""
        return self.encode_all([text])[0]

    def encode_all(self, texts: Iterable[str]) -> Pool:
        """Tokens of many pieces, all at once: tokenizers are faster that way."""
        listed = list(texts)
        if not listed:
            return Pool.of([])
        # A line's end stands apart from all but another.
        marks = ["a" if text.startswith("\n") else "\n" for text in listed]
        marked = [mark + text for mark, text in zip(marks, listed, strict=True)]
        found = self.tokenizer(marked, add_special_tokens=False)["input_ids"]
        pieces = []
        for mark, text, ids in zip(marks, listed, found, strict=True):
            before = self._marks[mark]
            apart = ids[: len(before)] == before
            pieces.append(np.array(ids[len(before) :] if apart else self._plain(text), np.int64))
        return Pool.of(pieces)

    def decode(self, tokens: Integers) -> str:
        """Their text, special tokens left out."""
        text: str = self.tokenizer.decode(
            tokens.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


@lru_cache(maxsize=8)
def made_words(count: int) -> tuple[str, ...]:
    """Words of three syllables that no language has, all of one length: none is in another.

    >>> made_words(3)
    ('bababa', 'kihase', 'sumeli')
    """
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    base = len(syllables)
    most = base**3
    if not 0 <= count <= most:
        raise ValueError(f"words must lie in [0, {most}], got {count}")
    # Steps that share no factor with the number of words visit each of them once.
    places = (np.arange(count) * 232_961) % most
    return tuple(
        syllables[place // base**2] + syllables[place // base % base] + syllables[place % base]
        for place in places.tolist()
    )


@lru_cache(maxsize=1)
def word_lists() -> tuple[str, dict[str, tuple[str, ...]]]:
    """Adjectives, nouns and verbs of the package wonderwords, or made ones; and which they are."""
    try:
        from importlib.metadata import version

        from wonderwords import RandomWord  # type: ignore[import-not-found, import-untyped, unused-ignore]

        source = RandomWord()
        kinds = ("adjective", "noun", "verb")
        found = {
            kind: tuple(sorted(set(source.filter(include_categories=[kind], regex="[A-Za-z-]+"))))
            for kind in kinds
        }
        return f"wonderwords {version('wonderwords')}", found
    except ImportError:
        words = made_words(8192)
        parts = {"adjective": words[:1024], "noun": words[1024:7168], "verb": words[7168:]}
        return "made words", parts
