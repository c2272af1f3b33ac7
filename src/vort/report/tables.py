"""The same rows on the terminal and in a Markdown report."""

from collections.abc import Sequence
from dataclasses import dataclass

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
        table = Table(
            title=self.title, title_justify="left", title_style="bold", padding=(0, 0, 0, 1)
        )
        for index, heading in enumerate(self.headings):
            # Figures stay on one line in a narrow terminal; prose wraps.
            widest = max((len(row[index]) for row in self.rows), default=0)
            verdicts = any(row[index] in _STYLES for row in self.rows)
            least = widest if verdicts else min(widest, 12)
            table.add_column(heading, overflow="fold", min_width=least)
        for row in self.rows:
            table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
        return table

    def to_markdown(self) -> str:
        """For a report; pipes in cells are escaped."""
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        body = "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )
        return f"## {self.title}\n\n{body}\n"


_STYLES = {
    "reproduced": "green",
    "reproduced once corrected": "yellow",
    "not reproduced": "red",
    "exceeded": "green",
    "holds": "green",
    "does not hold": "red",
}
