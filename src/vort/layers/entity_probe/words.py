"""Text split into words, each with what precedes it: the view that every built-in probe shares."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

# A possessive 's is consumed with its word but is no part of it: the name in "Lincoln's" is
# "Lincoln". Inner apostrophes and hyphens stay: "O'Brien", "Saint-Antoine".
_WORD = re.compile(r"([^\W\d_]+(?:['’\-](?!s\b)[^\W\d_]+)*)(['’]s\b)?")
_PARAGRAPH = re.compile(r"\n\s*\n")
_SENTENCE_END = frozenset(".!?")
_OPENING = frozenset("\"'“‘«([_*")

# Titles written before a name. A full stop after one of them does not end the sentence.
_TITLES = """
mr mrs ms miss messrs mistress master madam madame mme mademoiselle mlle monsieur m sir lady
lord dame dr doctor prof professor rev reverend st saint captain capt colonel col major maj
general gen lieutenant lieut lt sergeant sergt sgt corporal admiral commodore count countess
baron baroness duke duchess prince princess king queen emperor empress earl marquis marquise
viscount sultan judge justice president senator governor mayor bishop archbishop cardinal pope
father brother sister mother uncle aunt cousin squire don donna signor signora señor señora
herr frau esq
"""
HONORIFICS = frozenset(_TITLES.split())


@dataclass(frozen=True)
class Words:
    """The words of a text in order, with character spans and sentence starts.

    Attributes:
        text: the text itself.
        spans: `(start, end)` of every word, possessive endings left out.
        possessive: whether 's follows the word.

    >>> words = Words.of("He saw Lincoln's Inn. Then rain.")
    >>> [words.text[a:b] for a, b in words.spans]
    ['He', 'saw', 'Lincoln', 'Inn', 'Then', 'rain']
    >>> [i for i in range(6) if words.opens_sentence(i)]
    [0, 4]
    """

    text: str
    spans: list[tuple[int, int]]
    possessive: list[bool]

    @classmethod
    def of(cls, text: str) -> "Words":
        """Split `text`; digits, underscores and punctuation belong to no word."""
        found = list(_WORD.finditer(text))
        return cls(text, [m.span(1) for m in found], [m.group(2) is not None for m in found])

    def __len__(self) -> int:
        return len(self.spans)

    @cached_property
    def surfaces(self) -> list[str]:
        """The words as written."""
        return [self.text[start:end] for start, end in self.spans]

    @cached_property
    def lowered(self) -> list[str]:
        """The words in lower case."""
        return [surface.lower() for surface in self.surfaces]

    @cached_property
    def capitalised(self) -> list[int]:
        """Indices of the words that begin with a capital: the only candidates for a name."""
        return [i for i, surface in enumerate(self.surfaces) if surface[0].isupper()]

    def gap(self, index: int) -> str:
        """Characters between word `index - 1` and word `index`; at the ends, all there are."""
        before = self.spans[index - 1][1] + 2 * self.possessive[index - 1] if index > 0 else 0
        return self.text[before : self.spans[index][0] if index < len(self) else len(self.text)]

    def opens_sentence(self, index: int) -> bool:
        """Whether word `index` begins a sentence, judged by what stands before it alone."""
        if index == 0:
            return True
        gap = self.gap(index)
        if _PARAGRAPH.search(gap):
            return True
        if _SENTENCE_END.isdisjoint(gap):
            return False
        previous = self.surfaces[index - 1]
        abbreviates = gap.startswith(".") and gap.strip() == "."
        is_initial = len(previous) == 1 and previous.isupper() and previous != "I"
        return not (abbreviates and (is_initial or self.lowered[index - 1] in HONORIFICS))

    def opens_quote(self, index: int) -> bool:
        """Whether a quotation mark or bracket stands directly before word `index`."""
        start = self.spans[index][0]
        return start > 0 and self.text[start - 1] in _OPENING

    def follows_directly(self, index: int) -> bool:
        """Whether only white space (after an honorific, also a full stop) precedes the word."""
        if index == 0:
            return False
        gap = self.gap(index).strip()
        return not gap or (gap == "." and self.lowered[index - 1] in HONORIFICS)


def join_neighbours(words: Words, chosen: Iterable[int]) -> list[tuple[int, int]]:
    """Spans of the chosen words, in which words of one name ("New York") make one span."""
    spans: list[tuple[int, int]] = []
    last = -2
    for index in chosen:
        start, end = words.spans[index]
        if index == last + 1 and words.follows_directly(index) and not words.possessive[last]:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
        last = index
    return spans


def settled_at(text: str, end: int) -> int | None:
    """The character at which it is certain that a word ends at `end`; None if text stops before.

    An apostrophe or hyphen may go on ("O'Brien") or not ("Lincoln's", "Lincoln -"), so the
    characters after it decide.
    """
    position = end
    if text[position : position + 1] in ("'", "’", "-"):
        position += 1
        if text[position : position + 1] == "s":
            position += 1
    return position if position < len(text) else None
