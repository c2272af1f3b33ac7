"""Precision, recall and F1 of a probe, token by token."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vort.layers.entity_probe.indicator import entity_indicator
from vort.layers.entity_probe.litbank import Novel
from vort.layers.entity_probe.protocol import EntityProbe


@dataclass(frozen=True)
class Score:
    """Counts of tokens, and what follows from them.

    >>> Score(found=8, spurious=2, missed=2).f1
    0.8
    """

    found: int
    spurious: int
    missed: int

    @property
    def precision(self) -> float:
        """Share of the marked tokens that belong to names."""
        return self.found / max(self.found + self.spurious, 1)

    @property
    def recall(self) -> float:
        """Share of the names' tokens that are marked."""
        return self.found / max(self.found + self.missed, 1)

    @property
    def f1(self) -> float:
        """Harmonic mean of precision and recall."""
        return 2 * self.found / max(2 * self.found + self.spurious + self.missed, 1)


def score_probe(
    probe: EntityProbe, novels: Iterable[Novel], *, whole_mentions: bool = False
) -> Score:
    """The score of a probe over the tokens of all `novels` together.

    Args:
        probe: what to judge.
        novels: passages with gold names.
        whole_mentions: count every token of a PROP mention, "the" and "of" included, instead of
            its capitalised tokens.
    """
    found = spurious = missed = 0
    for novel in novels:
        marked = entity_indicator(novel.text, novel.spans, probe).numpy() > 0
        gold = np.array(novel.in_name if whole_mentions else novel.names)
        found += int((marked & gold).sum())
        spurious += int((marked & ~gold).sum())
        missed += int((~marked & gold).sum())
    return Score(found, spurious, missed)
