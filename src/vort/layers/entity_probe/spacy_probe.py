"""Names by a spaCy pipeline, for those who have one."""

from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

from vort.layers.entity_probe.protocol import Span

NAME_LABELS = frozenset({"PERSON", "PER", "GPE", "LOC", "FAC", "ORG"})


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
