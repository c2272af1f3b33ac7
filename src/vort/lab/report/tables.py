"""Tables: the same rows on the terminal and in Markdown, and those of a page."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from vort.lab.verdicts import VERDICTS, Tone

__all__ = ["Entry", "Grid", "Sheet", "grid"]

_COLOURS: dict[Tone, str] = {"good": "green", "fair": "yellow", "open": "cyan", "bad": "red"}


@dataclass(frozen=True)
class Sheet:
    """A table with a title: headings, then rows of text."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_rich(self) -> Table:
        """For the terminal."""
        # No frame: eighty columns are soon full.
        table = Table(
            title=self.title,
            title_justify="left",
            title_style="bold",
            box=SIMPLE_HEAD,
            padding=0,
            pad_edge=False,
            show_edge=False,
        )
        for index, heading in enumerate(self.headings):
            # Figures stay on one line in a narrow terminal; prose wraps.
            widest = max((len(row[index]) for row in self.rows), default=0)
            verdicts = any(_style(row[index]) for row in self.rows)
            least = min(widest, 14 if verdicts else 12)
            table.add_column(heading, overflow="fold", min_width=least)
        for row in self.rows:
            table.add_row(*(Text(cell, style=_style(cell)) for cell in row))
        return table

    def to_markdown(self) -> str:
        """For a report; pipes in cells are escaped."""
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        body = "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )
        return f"## {self.title}\n\n{body}\n"


def _style(cell: str) -> str:
    """The colour of a verdict, an erratum behind it or not; none for other cells."""
    tone = VERDICTS.get(cell.partition(" (")[0])
    return "" if tone is None else _COLOURS[tone]


class Entry(NamedTuple):
    """A cell of a table: text, the kind of a chip, half an interval, whether it is the best."""

    text: Any
    chip: str = ""
    half: str = ""
    best: bool = False


@dataclass(frozen=True)
class Grid:
    """A table for the page.

    Attributes:
        headings: one for each column.
        rows: entries, the first of which names the row.
        figures: columns that hold figures, which stand to the right.
        kind: its class, if it has one.
    """

    headings: Sequence[Any]
    rows: Sequence[Sequence[Entry]]
    figures: frozenset[int]
    kind: str = ""


def grid(headings: Sequence[Any], rows: Sequence[Sequence[Any]], kind: str = "") -> Grid:
    """A table of entries, or of values that become entries."""
    entries = [[x if isinstance(x, Entry) else Entry(x) for x in row] for row in rows]
    columns = {
        index: [row[index] for row in entries if index < len(row) and row[index].text]
        for index in range(1, len(headings))
    }
    figures = {index for index, column in columns.items() if column and all(map(_figure, column))}
    return Grid(headings, entries, frozenset(figures), kind)


_FIGURE = re.compile(r"^[+\-−±~≈<>≤≥]?\s*\.?\d[\s+\-−±.,\d%eE()\[\]/x×–*]*$")


def _figure(entry: Entry) -> bool:
    if isinstance(entry.text, (int, float)):
        return not isinstance(entry.text, bool)
    return bool(_FIGURE.match(f"{entry.text}{entry.half}".strip()))
