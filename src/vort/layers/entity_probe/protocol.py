"""What a probe is."""

from typing import Protocol, runtime_checkable

Span = tuple[int, int]


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
