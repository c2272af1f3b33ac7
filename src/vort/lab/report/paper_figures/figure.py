"""A figure of the paper: what it needs of a run, how it is drawn, what it says of itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Found", "Need", "PaperFigure"]

# Records of cells by the name of their experiment.
Found = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Need:
    """A measure that VORT's cell of an experiment must have kept."""

    experiment: str
    key: str

    def __str__(self) -> str:
        """As people say it.

        >>> print(Need("pilot", "strip"), "and", Need("plasticity", "plasticity"))
        strip of pilot and plasticity
        """
        return self.key if self.key == self.experiment else f"{self.key} of {self.experiment}"


@dataclass(frozen=True)
class PaperFigure:
    """One figure, made anew.

    Attributes:
        name: the paper's label, and the name of its files.
        draw: makes the picture at a path, from the records that the needs name.
        caption: what is shown, panel by panel.
        needs: all of these must be there.
        any_of: at least one of these, where there are any.
        seed: of random numbers drawn for the picture itself, if there are any.
    """

    name: str
    draw: Callable[[Path, Found], None]
    caption: str
    needs: tuple[Need, ...] = field(default=())
    any_of: tuple[Need, ...] = field(default=())
    seed: int | None = None

    def missing(self, found: Found) -> tuple[Need, ...]:
        """What must be measured before this can be drawn; empty if nothing."""
        lacking = tuple(need for need in self.needs if need.experiment not in found)
        if self.any_of and not any(need.experiment in found for need in self.any_of):
            lacking += self.any_of
        return lacking
