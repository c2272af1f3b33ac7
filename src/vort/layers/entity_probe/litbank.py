"""LitBank's proper names as running text with marked words, split by novel."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Split = Literal["train", "validation", "test"]

SPLIT_SEED = 0
VALIDATION_NOVELS = 15
TEST_NOVELS = 20

_NO_SPACE_BEFORE = re.compile(r"[,.;:!?)\]’”…]|['’](s|S|d|ll|m|re|ve)$|n['’]t$")
_NO_SPACE_AFTER = frozenset("([“‘")


@dataclass(frozen=True)
class Novel:
    """A passage as a reader would see it, with LitBank's tokens located in it.

    Attributes:
        name: file name in LitBank without its ending.
        text: running text; LitBank's spaces around punctuation are taken out again, because the
            probe meets text as it is printed.
        spans: `(start, end)` characters of every LitBank token.
        in_name: whether the token lies inside a mention marked PROP.
    """

    name: str
    text: str
    spans: list[tuple[int, int]]
    in_name: list[bool]

    @property
    def names(self) -> list[bool]:
        """The gold standard: capitalised tokens of proper names.

        LitBank's PROP mentions hold whole phrases ("the late Mr. Elliot"); what names the entity
        in them is capitalised, the rest ("the", "of", "late", "'s") marks no entity by itself.
        """
        return [
            inside and self.text[start].isupper()
            for (start, _), inside in zip(self.spans, self.in_name, strict=True)
        ]


def read_litbank(data: str | Path) -> list[Novel]:
    """All novels in a folder that holds LitBank's `coref/*.ann` and `coref/*.txt`, by name."""
    folder = Path(data)
    if not (folder / "coref").is_dir() and (folder / "litbank").is_dir():
        folder = folder / "litbank"
    files = sorted((folder / "coref").glob("*.ann"))
    if not files:
        raise FileNotFoundError(f"data must hold LitBank's coref/*.ann, found none in {data}")
    return [_read_novel(path) for path in files]


def split_novels(novels: list[Novel], seed: int = SPLIT_SEED) -> dict[Split, list[Novel]]:
    """Novels by split: drawn by `seed` from the sorted names, the same wherever it runs."""
    if len(novels) <= TEST_NOVELS + VALIDATION_NOVELS:
        raise ValueError(
            f"novels must number more than {TEST_NOVELS + VALIDATION_NOVELS}, got {len(novels)}"
        )
    shuffled = sorted(novels, key=lambda novel: novel.name)
    random.Random(seed).shuffle(shuffled)
    held_out = TEST_NOVELS + VALIDATION_NOVELS
    return {
        "test": shuffled[:TEST_NOVELS],
        "validation": shuffled[TEST_NOVELS:held_out],
        "train": shuffled[held_out:],
    }


def _read_novel(annotation: Path) -> Novel:
    lines = annotation.with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    sentences = [line.split(" ") for line in lines]
    inside = [[False] * len(sentence) for sentence in sentences]
    for sentence, first, last in _proper_mentions(annotation):
        inside[sentence][first : last + 1] = [True] * (last + 1 - first)
    text, spans = _running_text(sentences)
    name = annotation.stem.removesuffix("_brat")
    return Novel(name, text, spans, [flag for line in inside for flag in line])


def _proper_mentions(annotation: Path) -> Iterator[tuple[int, int, int]]:
    """(sentence, first token, last token) of the mentions marked PROP; none crosses sentences.

    A line reads MENTION, id, sentence, token, sentence, token (both inclusive), text, type, kind.
    """
    for line in annotation.read_text(encoding="utf-8").splitlines():
        fields = line.split("\t")
        if fields[0] == "MENTION" and fields[-1] == "PROP":
            yield int(fields[2]), int(fields[3]), int(fields[5])


def _running_text(sentences: list[list[str]]) -> tuple[str, list[tuple[int, int]]]:
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    glue, quoting = True, False
    for sentence in sentences:
        for position, token in enumerate(sentence):
            opens = token == '"' and (position == 0 or not quoting)
            closes = (token == '"' and not opens) or _attaches_left(token, pieces)
            if not glue and not closes:
                pieces.append(" ")
                length += 1
            spans.append((length, length + len(token)))
            pieces.append(token)
            length += len(token)
            glue = opens or token in _NO_SPACE_AFTER
            if token == '"':
                quoting = opens
    return "".join(pieces), spans


def _attaches_left(token: str, pieces: list[str]) -> bool:
    if token == "'":  # a plural possessive ("the lawyers' clerks") or an opening quotation mark
        return bool(pieces) and pieces[-1].endswith("s")
    return _NO_SPACE_BEFORE.match(token) is not None
