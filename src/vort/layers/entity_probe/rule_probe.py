"""Names by rule: capitals, place in the sentence, titles. No data, no weights."""

from collections import Counter

from vort.layers.entity_probe.protocol import Span
from vort.layers.entity_probe.words import HONORIFICS, Words, join_neighbours

# Capitalised for reasons of their own: pronouns, openers of sentences and verse, days and months.
_NO_NAMES = """
i i'm i'll i've i'd a an the this that these those my your his her its our their he she it we
you they me him us them who what which whose when where why how there here and but or nor so
yet for if as at by in of on to with from into upon then than now not no yes oh ah o well all
some any each every one two is are was were be been am do did does has have had will would
shall should may might must can could let though although because while after before until
since perhaps never only even such chapter book volume part letter preface monday tuesday
wednesday thursday friday saturday sunday january february march april may june july august
september october november december christmas easter
"""
_NEVER = frozenset(_NO_NAMES.split())


class RuleProbe:
    """A probe that needs no data: a capital inside a sentence is a name.

    At the start of a sentence or quotation the capital says nothing, and a word counts as a name
    if it belongs to a title ("Mrs. Dalloway"), or the text also shows it capitalised inside a
    sentence and never in lower case. Words in capitals throughout are headings, not names.

    Args:
        causal: decide from the word and what precedes it alone; see `entity_indicator`.

    >>> text = "Then old Mr. Darcy spoke. Darcy bowed."
    >>> [text[a:b] for a, b in RuleProbe().probe(text)]
    ['Mr. Darcy', 'Darcy']
    """

    def __init__(self, *, causal: bool = False) -> None:
        self.causal = causal

    def probe(self, text: str) -> list[Span]:
        """Character spans of the names in `text`; word by word when causal."""
        words = Words.of(text)
        names = _causal_names(words) if self.causal else _names(words)
        return [words.spans[i] for i in names] if self.causal else join_neighbours(words, names)


def _names(words: Words) -> list[int]:
    shown, small = Counter[str](), _small(words)
    inside = {i for i in words.capitalised if _is_inside(words, i)}
    shown.update(words.lowered[i] for i in inside)
    names = []
    for i in words.capitalised:
        lowered = words.lowered[i]
        if _is_excluded(words, i):
            continue
        if lowered in HONORIFICS:
            if _is_capitalised(words, i + 1) and words.follows_directly(i + 1):
                names.append(i)
        elif i in inside or _is_titled(words, i) or (shown[lowered] and lowered not in small):
            names.append(i)
    return names


def _causal_names(words: Words) -> list[int]:
    shown: set[str] = set()
    small: set[str] = set()
    names = []
    for i, lowered in enumerate(words.lowered):
        if not words.surfaces[i][0].isupper():
            small.add(lowered)
            continue
        if _is_excluded(words, i) or lowered in HONORIFICS:
            continue
        inside = _is_inside(words, i)
        if inside or _is_titled(words, i) or (lowered in shown and lowered not in small):
            names.append(i)
        if inside:
            shown.add(lowered)
    return names


def _small(words: Words) -> set[str]:
    return {words.lowered[i] for i, word in enumerate(words.surfaces) if word[0].islower()}


def _is_excluded(words: Words, index: int) -> bool:
    surface = words.surfaces[index]
    return words.lowered[index] in _NEVER or (len(surface) > 1 and surface.isupper())


def _is_inside(words: Words, index: int) -> bool:
    return not (words.opens_sentence(index) or words.opens_quote(index))


def _is_titled(words: Words, index: int) -> bool:
    before = words.lowered[index - 1] if index else ""
    return before in HONORIFICS and words.follows_directly(index)


def _is_capitalised(words: Words, index: int) -> bool:
    return index < len(words) and words.surfaces[index][0].isupper()
