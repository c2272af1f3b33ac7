"""Probes: what finds names in a text, by rule, by a linear classifier, by spaCy."""

import json
from collections import Counter
from collections.abc import Callable, Collection
from functools import lru_cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from vort.layers.entity_probe.features import feature_ids
from vort.layers.entity_probe.words import HONORIFICS, Words, join_neighbours

__all__ = ["EntityProbe", "LinearProbe", "RuleProbe", "SpacyProbe", "Span", "save_probes"]

Span = tuple[int, int]

FORMAT = "vort-linear-probe-1"
_SHIPPED = "linear_probe.safetensors"
_TABLES = {False: "full", True: "causal"}
NAME_LABELS = frozenset({"PERSON", "PER", "GPE", "LOC", "FAC", "ORG"})

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


@runtime_checkable
class EntityProbe(Protocol):
    """Anything that finds the names of entities in a text.

    A probe may also carry `causal: bool`: True promises that whether a word is reported depends
    on that word and on what precedes it alone, word by word. Language models need that promise
    (see `entity_indicator`); a probe without it counts as looking ahead.

    >>> class Shouts:
    ...     def probe(self, text: str) -> list[tuple[int, int]]:
    ...         return [(0, len(text))] if text.isupper() else []
    >>> isinstance(Shouts(), EntityProbe)
    True
    """

    def probe(self, text: str) -> list[Span]:
        """Character spans `(start, end)` of entity names, in order, not overlapping."""
        ...


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


class LinearProbe:
    """A shallow probe: logistic regression over shape, context and document features of a word.

    Capitalised words are the candidates. Features are hashed into one table, so the file holds
    no words. `tools/train_entity_probe.py` trains it on LitBank's proper names; `metadata` says
    how, and what it scores on novels it never saw.

    Args:
        weights: `[buckets]`, one weight per hash bucket.
        threshold: log-odds above which a word is a name.
        causal: the weights are for features of the word and what precedes it alone.
        metadata: where the weights come from.

    >>> text = "They saw Anne and Captain Wentworth in Bath."
    >>> [text[a:b] for a, b in LinearProbe.pretrained().probe(text)]
    ['Anne', 'Captain Wentworth', 'Bath']
    """

    def __init__(
        self,
        weights: NDArray[np.float32],
        threshold: float = 0.0,
        *,
        causal: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        if weights.ndim != 1 or not len(weights):
            raise ValueError(f"weights must have shape [buckets], got {list(weights.shape)}")
        self.weights = weights
        self.threshold = threshold
        self.causal = causal
        self.metadata = metadata or {}

    @classmethod
    def pretrained(cls, *, causal: bool = False) -> "LinearProbe":
        """The probe that comes with vort."""
        return shipped_probe(causal)

    @classmethod
    def load(cls, path: str | Path, *, causal: bool = False) -> "LinearProbe":
        """One of the two probes in a file written by `save_probes`."""
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as missing:
            raise ImportError("LinearProbe needs safetensors: pip install 'vort[hf]'") from missing
        try:
            with safe_open(str(path), framework="numpy") as stored:
                metadata = stored.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError(
                        f"{path} is not a probe of this version: its format must be {FORMAT!r}, "
                        f"got {metadata.get('format')!r}"
                    )
                weights = stored.get_tensor(_TABLES[causal])
        except SafetensorError as problem:
            raise ValueError(f"{path} is damaged or no safetensors file: {problem}") from problem
        about = json.loads(metadata["about"])
        threshold = float(about["threshold"][_TABLES[causal]])
        return cls(weights.astype(np.float32), threshold, causal=causal, metadata=about)

    def log_odds(self, words: Words) -> NDArray[np.float32]:
        """Log-odds of being a name, one per capitalised word of `words`."""
        if not words.capitalised:
            return np.zeros(0, dtype=np.float32)
        ids, offsets = feature_ids(words, len(self.weights), causal=self.causal)
        odds: NDArray[np.float32] = np.add.reduceat(self.weights[ids], offsets)
        return odds

    def probe(self, text: str) -> list[Span]:
        """Character spans of the names in `text`; word by word when causal."""
        words = Words.of(text)
        chosen = np.flatnonzero(self.log_odds(words) > self.threshold)
        names = [words.capitalised[i] for i in chosen]
        return [words.spans[i] for i in names] if self.causal else join_neighbours(words, names)


def save_probes(path: str | Path, full: LinearProbe, causal: LinearProbe, about: Any) -> None:
    """Write both probes to one safetensors file, weights in half precision."""
    from safetensors.numpy import save_file

    thresholds = {"full": full.threshold, "causal": causal.threshold}
    metadata = {"format": FORMAT, "about": json.dumps(about | {"threshold": thresholds})}
    tables = {_TABLES[p.causal]: p.weights.astype(np.float16) for p in (full, causal)}
    save_file(tables, str(path), metadata=metadata)


@lru_cache
def shipped_probe(causal: bool) -> LinearProbe:
    """The probe that comes with vort, read once."""
    with resources.as_file(resources.files(__package__) / _SHIPPED) as path:
        return LinearProbe.load(path, causal=causal)


class SpacyProbe:
    """A probe around a spaCy pipeline. It looks ahead, so it serves `causal=False` alone.

    Args:
        pipeline: a loaded pipeline, or the name of one to load (`"en_core_web_sm"`).
        labels: entity labels that count as names.
    """

    causal = False

    def __init__(
        self,
        pipeline: str | Callable[[str], Any],
        labels: Collection[str] = NAME_LABELS,
    ) -> None:
        self.pipeline = _load(pipeline) if isinstance(pipeline, str) else pipeline
        self.labels = frozenset(labels)

    def probe(self, text: str) -> list[Span]:
        """Character spans of the entities with one of `labels`."""
        return [
            (entity.start_char, entity.end_char)
            for entity in self.pipeline(text).ents
            if entity.label_ in self.labels
        ]


def _load(name: str) -> Callable[[str], Any]:
    try:
        spacy = import_module("spacy")
    except ImportError as missing:
        raise ImportError(
            f"SpacyProbe({name!r}) needs spaCy and that pipeline: pip install spacy; "
            "LinearProbe and RuleProbe need neither"
        ) from missing
    pipeline: Callable[[str], Any] = spacy.load(name)
    return pipeline


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
