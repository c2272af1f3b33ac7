"""The same rows on the terminal and in a Markdown report."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


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
    return _STYLES.get(cell.partition(" (")[0], "")


_STYLES = {
    "reproduced": "green",
    "reproduced in part": "yellow",
    "reproduced once corrected": "yellow",
    "not reproduced": "red",
    "exceeded": "green",
    "holds": "green",
    "does not hold": "red",
}
